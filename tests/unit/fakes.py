"""Requests, batches and metadata made by hand, for tests that need no model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compspec.batch import Batch, DraftTokens, ScheduledRequest, Scores, StepOutput
from compspec.request import Request
from compspec.sampling.metadata import (
    SamplingMetadata,
    group_rows,
    group_sizes,
    make_group,
    next_drafts,
    padded,
)
from compspec.sampling.params import SamplingParams


def make_request(
    prompt: Sequence[int] = (3, 4, 5),
    *,
    output: Sequence[int] = (),
    max_tokens: int = 16,
    seed: int = 0,
    request_id: str = "r",
    **params: Any,
) -> Request:
    """A request as it is after `output` was sampled."""
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    request = Request(request_id, list(prompt), sampling, seed=seed, max_tokens=max_tokens)
    request.append(list(output))
    if output:
        request.num_computed_tokens = request.num_tokens - 1
    return request


def entry(
    request: Request,
    slot: int,
    *,
    num_computed: int | None = None,
    num_new: int = 1,
    max_drafts: int = 8,
    samples: bool = True,
) -> ScheduledRequest:
    """A request's part of a step; a decode row by default."""
    return ScheduledRequest(
        request=request,
        slot=slot,
        num_computed_tokens=request.num_tokens - 1 if num_computed is None else num_computed,
        num_new_tokens=num_new,
        max_draft_tokens=max_drafts,
        samples=samples,
    )


def decode(*requests: Request) -> Batch:
    """A decode step; request i has slot i."""
    return Batch(scheduled=tuple(entry(request, slot) for slot, request in enumerate(requests)), is_prefill=False)


def prefill(request: Request, slot: int, num_computed: int, num_new: int) -> Batch:
    """One prompt chunk."""
    ends = num_computed + num_new == request.num_prompt_tokens
    part = entry(request, slot, num_computed=num_computed, num_new=num_new, max_drafts=0, samples=ends)
    return Batch(scheduled=(part,), is_prefill=True)


def draft(*lists: Sequence[int], k: int | None = None) -> DraftTokens:
    """[R, k] drafts."""
    return DraftTokens.from_lists([list(each) for each in lists], max(map(len, lists), default=0) if k is None else k)


def no_drafts(batch: Batch) -> DraftTokens:
    """[R, 0]."""
    return draft(*[[] for _ in batch.scheduled])


def step_output(*token_ids: Sequence[int]) -> StepOutput:
    """What a step gave each request, nothing of it drafted."""
    zeros = (0,) * len(token_ids)
    return StepOutput(
        token_ids=tuple(map(tuple, token_ids)),
        num_draft_tokens=zeros,
        num_accepted_tokens=zeros,
        errors=(None,) * len(token_ids),
    )


def scores(logits: Tensor) -> Scores:
    """Scores of a step from logits [R, Q, V], as the multi-query scorer hands them over."""
    num_requests, num_rows, _ = logits.shape
    return Scores(logits=logits.flatten(0, 1), first_row=tuple(range(0, num_requests * num_rows, num_rows)))


def make_metadata(num_rows: int, **changes: Any) -> SamplingMetadata:
    """Metadata of one request with `num_rows` rows that asks for nothing; `changes` replaces fields.

    Per-row fields take a number for all rows or a tensor; the groups follow from them.
    """
    per_row: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "log_min_p": float("-inf"), "top_k": 0}
    for name, default in per_row.items():
        value = changes.pop(name, default)
        dtype = torch.int64 if name == "top_k" else torch.float32
        per_row[name] = value if isinstance(value, Tensor) else torch.full((num_rows,), value, dtype=dtype)
    row_starts = np.array(changes.setdefault("row_starts", (0, num_rows)))
    request = np.repeat(np.arange(len(row_starts) - 1), np.diff(row_starts))
    depth = np.arange(num_rows) - row_starts[request]
    drafts = changes.pop("drafts", None) or draft(*[[0] * max(0, int(count) - 1) for count in np.diff(row_starts)])
    columns = {name: each.numpy() for name, each in per_row.items()}
    filters = [columns[name].tolist() for name in ("top_k", "top_p", "log_min_p")]
    groups = group_rows(columns["temperature"], columns["top_p"], group_sizes(torch.device("cpu")))
    fields: dict[str, Any] = {
        "logit_rows": np.arange(num_rows),
        "rows": torch.arange(num_rows),
        "request": torch.from_numpy(request),
        "depth": torch.from_numpy(depth),
        "next_draft": torch.from_numpy(next_drafts(drafts, request, depth)),
        "positions": torch.arange(num_rows),
        "window_starts": torch.zeros(num_rows, dtype=torch.int64),
        "seeds": torch.zeros(num_rows, dtype=torch.int64),
        "groups": tuple(make_group(torch.tensor(padded(rows, size)), rows, *filters) for rows, size in groups),
        **per_row,
        **changes,
    }
    return SamplingMetadata(**fields)


def bits(tensor: Tensor) -> Tensor:
    """The bits of a float32 tensor: unlike ==, they tell -0.0 from 0.0 and find NaN equal to itself."""
    return tensor.contiguous().view(torch.int32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two float32 tensors agree in every bit."""
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


def step_scores(drafts: DraftTokens, vocab_size: int = 1) -> Scores:
    """Scores of a decode step, for tests that look at the metadata alone."""
    return scores(torch.empty(len(drafts.token_ids), drafts.token_ids.shape[1] + 1, vocab_size))
