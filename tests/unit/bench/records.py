"""Records of runs made by hand, and a report of them."""

from collections.abc import Sequence
from typing import Any

from compspec.bench.records import RequestRecord, RunRecord, StepRecord, StepTimes


def step(at_s: float, num_tokens: int = 1, drafts: int = 0, kept: int = 0) -> StepRecord:
    return StepRecord(at_s=at_s, num_tokens=num_tokens, num_draft_tokens=drafts, num_accepted_tokens=kept)


def request(
    prompt_id: str = "a",
    steps: Sequence[StepRecord] = (step(1.0), step(2.0)),
    *,
    category: str = "",
    token_ids: Sequence[int] | None = None,
    **changes: Any,
) -> RequestRecord:
    fields: dict[str, Any] = {
        "prompt_id": prompt_id,
        "category": category,
        "token_ids": tuple(token_ids if token_ids is not None else range(sum(each.num_tokens for each in steps))),
        "finish_reason": "length",
        "num_prompt_tokens": 10,
        "num_computed_tokens": 10,
        "prefill_s": 0.5,
        "steps": tuple(steps),
        "drafted_per_position": (),
        "accepted_per_position": (),
    }
    return RequestRecord(**{**fields, **changes})


def run(*requests: RequestRecord, wall_s: float = 10.0, decode: StepTimes | None = None) -> RunRecord:
    return RunRecord(requests=requests, wall_s=wall_s, decode=decode or StepTimes(), num_eager_steps=0)
