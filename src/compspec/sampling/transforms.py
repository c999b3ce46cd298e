"""Functions on logits. Each makes, for every row, exactly what the parameters of its request ask.

The first group edits single places of the M rows of a step, in place; the second filters groups of rows before
noise is added, and returns new tensors.

Legend: M rows, V vocabulary, G rows of a group, and as in `metadata.Penalties`: P requests, L rows, N tokens, K drafts.
"""

import numpy as np
import torch
from torch import Tensor

from compspec.sampling.metadata import Penalties


def apply_penalties_(logits: Tensor, penalties: Penalties) -> None:
    """Penalises each row for its prompt and `outputs + drafts[:j]`.

    Only tokens that occur somewhere are touched. All rows of a request share the counts of its output; the drafted
    tokens, whose counts differ from row to row, are computed again from the raw logits.

    Args:
        logits: [M, V] float32, contiguous.
    """
    flat = logits.view(-1)
    first = (penalties.rows * logits.shape[1])[:, None]
    per_row = [each[penalties.request][:, None] for each in _strengths(penalties)]
    index = (first + penalties.token_ids[penalties.request]).view(-1)
    num_drafts = penalties.draft_token_ids.shape[1]
    draft_ids = penalties.draft_token_ids[penalties.request]
    draft_index = (first + draft_ids.clamp(min=0)).view(-1)
    raw, raw_drafts = flat[index].view(len(first), -1), flat[draft_index].view(len(first), num_drafts)
    in_prompt, counts = penalties.in_prompt[penalties.request], penalties.counts[penalties.request]
    # Tokens that stand in several columns get the same value from each, so the order of writing is free.
    flat[index] = _penalised(raw, in_prompt, counts, *per_row).view(-1)
    if num_drafts == 0:
        return
    before = torch.arange(num_drafts, device=logits.device) < penalties.num_drafts_seen[:, None]  # [L, K]
    # [L, K]: how often the token of draft k is among the drafts that stand before the row.
    in_window = ((draft_ids[:, :, None].clamp(min=0) == draft_ids[:, None, :]) & before[:, None, :]).sum(-1)
    in_prompt = penalties.draft_in_prompt[penalties.request]
    counts = penalties.draft_counts[penalties.request] + in_window
    flat[draft_index] = _penalised(raw_drafts, in_prompt, counts, *per_row).view(-1)


def _strengths(penalties: Penalties) -> tuple[Tensor, Tensor, Tensor]:
    return penalties.repetition, penalties.presence, penalties.frequency


def _penalised(
    logits: Tensor, in_prompt: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """The three penalties, elementwise; `counts` are occurrences in the output so far."""
    seen = in_prompt | (counts > 0)
    factor = torch.where(seen, repetition, torch.ones_like(repetition))
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - frequency * counts
    return logits - presence * (counts > 0)


def add_bias_(logits: Tensor, index: Tensor, bias: Tensor) -> None:
    """Adds bias [B] at the places row * V + token of `index` [B] of logits [M, V]; no place occurs twice."""
    flat = logits.view(-1)
    flat[index] = flat[index] + bias


def ban_(logits: Tensor, index: Tensor) -> None:
    """Sets the places row * V + token of `index` [F] of logits [M, V] to -inf."""
    logits.view(-1).index_fill_(0, index, float("-inf"))


def allow_(logits: Tensor, token_ids: Tensor) -> None:
    """Sets all but `token_ids` of logits [rows, V] to -inf."""
    kept = logits[:, token_ids]
    logits.fill_(float("-inf"))
    logits[:, token_ids] = kept


def apply_top_k(logits: Tensor, top_k: Tensor, max_top_k: int) -> Tensor:
    """Keeps the k largest logits of each row, ties at the k-th place included.

    Args:
        logits: [G, V].
        top_k: [G] int64, 0 for all.
        max_top_k: the largest value in `top_k`.
    """
    max_top_k = min(max_top_k, logits.shape[-1])
    if max_top_k == 0:
        return logits
    largest = logits.topk(max_top_k, dim=-1).values
    floor = largest.gather(-1, (top_k.clamp(1, max_top_k) - 1)[:, None])
    drop = (logits < floor) & (top_k > 0)[:, None]
    return logits.masked_fill(drop, float("-inf"))


def apply_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the fewest most likely tokens whose probability reaches `top_p`; of equal tokens the lowest id first.

    Args:
        logits: [G, V] float32.
        top_p: [G] float32 in (0, 1]; 1 for all.
    """
    ordered, order = (_sort_on_host if logits.device.type == "cpu" else _sort)(logits)
    mass = ordered.softmax(-1).cumsum(-1)
    reached = (mass >= top_p[:, None]) & (top_p < 1.0)[:, None]
    drop_ordered = torch.zeros_like(reached)
    drop_ordered[..., 1:] = reached[..., :-1]
    drop = torch.zeros_like(drop_ordered).scatter(-1, order, drop_ordered)
    return logits.masked_fill(drop, float("-inf"))


def _sort(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The logits [G, V] of each row from the largest, of equal ones the lowest id first; and the ids."""
    return logits.sort(dim=-1, descending=True, stable=True)


def _sort_on_host(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `_sort`. NumPy sorts integers with vector instructions, in a tenth of the time of torch's stable sort."""
    bits = (logits + 0.0).view(torch.int32).numpy()  # -0.0 equals 0.0, and now its bits do
    descending = ~(bits ^ (bits >> 31 & 0x7FFFFFFF))  # integers in the opposite order of the floats
    keys = np.left_shift(descending, 32, dtype=np.int64)
    keys |= np.arange(logits.shape[-1])  # so no two are equal
    keys.sort(axis=-1)
    order = torch.from_numpy(keys & 0xFFFFFFFF)
    return logits.gather(-1, order), order


def apply_min_p(logits: Tensor, log_min_p: Tensor) -> Tensor:
    """Drops tokens whose probability is below min_p times the largest: a margin between logits.

    Args:
        logits: [G, V].
        log_min_p: [G] float32, log(min_p); -inf for none.
    """
    floor = logits.amax(-1, keepdim=True) + log_min_p[:, None]
    return logits.masked_fill(logits < floor, float("-inf"))
