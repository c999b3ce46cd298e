"""Pure functions on logits. Each makes, for every row, exactly what the parameters of its request ask.

Legend: R requests, Q query rows, K drafts, V vocabulary. Per-request parameters are [R] float32 or int64.
"""

import torch
from torch import Tensor


def _penalised(
    logits: Tensor, in_prompt: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """The three penalties, elementwise; `counts` are occurrences in the output so far."""
    seen = in_prompt | (counts > 0)
    factor = torch.where(seen, repetition, torch.ones_like(repetition))
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - frequency * counts
    return logits - presence * (counts > 0)


def apply_penalties(
    logits: Tensor,
    *,
    prompt_mask: Tensor,
    output_counts: Tensor,
    draft_token_ids: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Penalises row j for the prompt and `outputs + drafts[:j]`.

    All rows of a request share its counts, so the bulk is one broadcast; only the K drafted tokens differ
    from row to row, and they are recomputed from the raw logits. Memory beyond the logits is O(R * (V + Q * K)).

    Args:
        logits: [R, Q, V] float32; not changed.
        prompt_mask: [R, V] bool, the prompt's tokens.
        output_counts: [R, V] int32, occurrences in the committed output.
        draft_token_ids: [R, K] int64, -1 where absent.
        repetition, presence, frequency: [R] float32.

    Returns:
        [R, Q, V] float32.
    """
    num_requests, num_rows, _ = logits.shape
    per_row = (repetition[:, None, None], presence[:, None, None], frequency[:, None, None])
    out = _penalised(logits, prompt_mask[:, None], output_counts[:, None], *per_row)
    num_drafts = draft_token_ids.shape[1]
    if num_drafts == 0 or num_rows == 1:
        return out
    # An absent draft stands in as token 0: its entry is recomputed with the count that is right for token 0.
    token_ids = draft_token_ids.clamp(min=0)
    index = token_ids[:, None, :].expand(num_requests, num_rows, num_drafts)
    same = token_ids[:, :, None] == draft_token_ids[:, None, :]  # [R, K, K]: is draft k2 the token of draft k1?
    row = torch.arange(num_rows, device=logits.device)
    before = torch.arange(num_drafts, device=logits.device)[None, :] < row[:, None]  # [Q, K]: draft k2 precedes row
    in_window = (same[:, None] & before[None, :, None]).sum(-1)  # [R, Q, K]
    counts = output_counts.gather(1, token_ids)[:, None] + in_window
    in_prompt = prompt_mask.gather(1, token_ids)[:, None]
    return out.scatter(2, index, _penalised(logits.gather(2, index), in_prompt, counts, *per_row))


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divides [R, Q, V] by [R]; greedy requests (temperature 0) are left as they are."""
    return logits / torch.where(temperature == 0, torch.ones_like(temperature), temperature)[:, None, None]


def apply_top_k(logits: Tensor, top_k: Tensor, max_top_k: int) -> Tensor:
    """Keeps the k largest logits of each row, ties at the k-th place included.

    Args:
        logits: [R, Q, V].
        top_k: [R] int64, 0 for all.
        max_top_k: the largest value in `top_k`.
    """
    max_top_k = min(max_top_k, logits.shape[-1])
    if max_top_k == 0:
        return logits
    largest = logits.topk(max_top_k, dim=-1).values
    at = (top_k.clamp(1, max_top_k) - 1)[:, None, None].expand(*logits.shape[:2], 1)
    floor = largest.gather(-1, at)
    drop = (logits < floor) & (top_k > 0)[:, None, None]
    return logits.masked_fill(drop, float("-inf"))


def apply_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the fewest most likely tokens whose probability reaches `top_p`; of equal tokens the lowest id first.

    Args:
        logits: [R, Q, V] float32.
        top_p: [R] float32 in (0, 1]; 1 for all.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    mass = ordered.softmax(-1).cumsum(-1)
    reached = (mass >= top_p[:, None, None]) & (top_p < 1.0)[:, None, None]
    drop_ordered = torch.zeros_like(reached)
    drop_ordered[..., 1:] = reached[..., :-1]
    drop = torch.zeros_like(drop_ordered).scatter(-1, order, drop_ordered)
    return logits.masked_fill(drop, float("-inf"))


def apply_min_p(logits: Tensor, log_min_p: Tensor) -> Tensor:
    """Drops tokens whose probability is below min_p times the largest: a margin between logits.

    Args:
        logits: [R, Q, V].
        log_min_p: [R] float32, log(min_p); -inf for none.
    """
    floor = logits.amax(-1, keepdim=True) + log_min_p[:, None, None]
    return logits.masked_fill(logits < floor, float("-inf"))
