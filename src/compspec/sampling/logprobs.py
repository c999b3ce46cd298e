"""Log-probabilities of the model itself, from the raw logits of the rows that became output."""

from collections.abc import Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from compspec.batch import Batch, Scores, StepOutput
from compspec.request import Logprob, TokenLogprobs
from compspec.sampling.metadata import GROUP_ROWS, SamplingMetadata


def step_logprobs(
    batch: Batch, scores: Scores, metadata: SamplingMetadata, output: StepOutput
) -> list[list[TokenLogprobs] | None]:
    """Reports each request's new tokens, where it asked for that."""
    asked = [entry.request.params.logprobs for entry in batch.scheduled]
    if all(count is None for count in asked):
        return [None] * len(asked)
    rows: list[int] = []
    token_ids: list[int] = []
    num_top: list[int] = []
    for index, (count, tokens) in enumerate(zip(asked, output.token_ids, strict=True)):
        if count is not None:
            rows += range(metadata.row_starts[index], metadata.row_starts[index] + len(tokens))
            token_ids += tokens
            num_top += [count] * len(tokens)
    found = iter(token_logprobs(scores.logits, metadata.rows[rows].tolist(), token_ids, num_top))
    return [
        None if count is None else list(islice(found, len(tokens)))
        for count, tokens in zip(asked, output.token_ids, strict=True)
    ]


def token_logprobs(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Reports rows: the token that stands there, and the most likely ones.

    Args:
        logits: [*, V], any floating type; raw.
        rows: N rows of `logits`.
        token_ids: N tokens.
        num_top: how many of the most likely tokens each row reports, beside its own.
    """
    found: list[TokenLogprobs] = []
    at = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    for first in range(0, len(rows), GROUP_ROWS):
        # One static shape, so that a row's bits do not depend on how many are reported with it.
        missing = max(0, first + GROUP_ROWS - len(rows))
        part = slice(first, first + GROUP_ROWS)
        found += _group(logits[F.pad(at[part], (0, missing))], F.pad(chosen[part], (0, missing)), num_top[part])
    return found


def _group(logits: Tensor, chosen: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Reports GROUP_ROWS rows, of which those with a `num_top` are real."""
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    keys = _order_keys(logits)
    own_key = keys.gather(-1, chosen[:, None])
    own_ranks = (keys > own_key).sum(-1) + 1
    own_logprobs = logprobs.gather(-1, chosen[:, None])[:, 0]
    top = keys.topk(max(num_top), dim=-1).indices
    columns = (chosen, own_logprobs, own_ranks, top, logprobs.gather(-1, top))
    found: list[TokenLogprobs] = []
    for token, logprob, rank, top_ids, top_logprobs, count in zip(
        *(c.tolist() for c in columns), num_top, strict=False
    ):
        entry = {token: Logprob(logprob, rank)}
        for place in range(count):
            entry.setdefault(top_ids[place], Logprob(top_logprobs[place], place + 1))
        found.append(entry)
    return found


def _order_keys(logits: Tensor) -> Tensor:
    """Distinct int64 numbers in the order of the logits [G, V], of equal ones the lowest id largest.

    A plain top-k leaves the order of equal values open, and may choose it by the shape.
    """
    bits = logits.view(torch.int32).to(torch.int64)
    ordered = torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))
    return (ordered << 32) - torch.arange(logits.shape[-1], device=logits.device)
