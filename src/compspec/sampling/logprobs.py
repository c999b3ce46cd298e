"""Log-probabilities of the model itself, from the raw logits of the rows that became output."""

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from compspec.batch import Batch, Scores, StepOutput
from compspec.request import Logprob, TokenLogprobs
from compspec.sampling.metadata import SamplingMetadata, group_sizes
from compspec.transfer import upload


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
    found = iter(token_logprobs(scores.logits, metadata.logit_rows[rows].tolist(), token_ids, num_top))
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
    if not rows:
        return []
    most = max(num_top)
    # One static shape, so that a row's bits do not depend on how many are reported with it.
    size = group_sizes(logits.device)[0]
    missing = -len(rows) % size
    at = np.pad(np.array(rows, dtype=np.int64), (0, missing), mode="edge")
    chosen = np.pad(np.array(token_ids, dtype=np.int64), (0, missing), mode="edge")
    sent_rows, sent_chosen = upload([at, chosen], logits.device)
    groups = zip(sent_rows.view(-1, size), sent_chosen.view(-1, size), strict=True)
    read = torch.cat([_group(logits[part], tokens, most) for part, tokens in groups]).tolist()
    found: list[TokenLogprobs] = []
    for token, (logprob, rank, *top), count in zip(token_ids, read, num_top, strict=False):
        entry = {token: Logprob(logprob, int(rank))}
        for place in range(count):
            entry.setdefault(int(top[place]), Logprob(top[most + place], place + 1))
        found.append(entry)
    return found


def _group(logits: Tensor, chosen: Tensor, num_top: int) -> Tensor:
    """A group of rows as float64, which holds all of it exactly: own log-probability and rank, top ids, top values."""
    logits = logits.float()
    logprobs = logits.log_softmax(-1)
    keys = _order_keys(logits)
    own_key = keys.gather(-1, chosen[:, None])
    own_ranks = (keys > own_key).sum(-1, keepdim=True) + 1
    own_logprobs = logprobs.gather(-1, chosen[:, None])
    top = keys.topk(num_top, dim=-1).indices
    columns = (own_logprobs, own_ranks, top, logprobs.gather(-1, top))
    return torch.cat([column.double() for column in columns], dim=-1)


def _order_keys(logits: Tensor) -> Tensor:
    """Distinct int64 numbers in the order of the logits [G, V], of equal ones the lowest id largest.

    A plain top-k leaves the order of equal values open, and may choose it by the shape.
    """
    bits = logits.view(torch.int32).to(torch.int64)
    ordered = torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))
    return (ordered << 32) - torch.arange(logits.shape[-1], device=logits.device)
