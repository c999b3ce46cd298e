"""Requests, batches and metadata made by hand, for tests that need no model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compspec.batch import Batch, DraftTokens, ScheduledRequest, StepOutput
from compspec.request import Request
from compspec.sampling.metadata import SamplingMetadata
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
    return StepOutput(token_ids=tuple(map(tuple, token_ids)), num_draft_tokens=zeros, num_accepted_tokens=zeros)


def make_metadata(num_requests: int, num_rows: int, **changes: Any) -> SamplingMetadata:
    """Metadata of requests that ask for nothing; `changes` replaces fields."""

    def full(value: float) -> Tensor:
        return torch.full((num_requests,), value)

    fields: dict[str, Any] = {
        "positions": torch.arange(num_rows).expand(num_requests, num_rows),
        "draft_token_ids": torch.empty(num_requests, 0, dtype=torch.int64),
        "seeds": torch.arange(num_requests),
        "temperature": full(0.0),
        "top_p": full(1.0),
        "log_min_p": full(float("-inf")),
        "repetition": full(1.0),
        "presence": full(0.0),
        "frequency": full(0.0),
        "top_k": torch.zeros(num_requests, dtype=torch.int64),
        "prompt_mask": None,
        "output_counts": None,
        "max_top_k": 0,
        "any_noise": False,
        "any_top_p": False,
        "any_min_p": False,
        **changes,
    }
    return SamplingMetadata(**fields)


def bits(tensor: Tensor) -> Tensor:
    """The bits of a float32 tensor: unlike ==, they tell -0.0 from 0.0 and find NaN equal to itself."""
    return tensor.contiguous().view(torch.int32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two float32 tensors agree in every bit."""
    return a.shape == b.shape and torch.equal(bits(a), bits(b))
