"""What is recorded of a run: when each token came and where it came from."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Origin(StrEnum):
    """Where an output token came from; the value is its letter in reports.

    Attributes:
        PREFILL: sampled at the end of the prompt.
        PLAIN: of a step without drafts.
        ACCEPTED: a draft that was kept.
        CORRECTION: the target's token in place of a draft that was rejected.
        BONUS: the target's token after drafts that were all kept.
    """

    PREFILL = "f"
    PLAIN = "p"
    ACCEPTED = "a"
    CORRECTION = "c"
    BONUS = "b"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one step gave one request.

    Attributes:
        at_s: when, in seconds since the request was submitted.
        num_tokens, num_draft_tokens, num_accepted_tokens: output tokens, drafts verified, drafts kept.
    """

    at_s: float
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One output.

    Attributes:
        num_prompt_tokens: of them `num_computed_tokens` were computed; the prefix cache had the others.
        prefill_s: seconds of the prompt's steps alone, whatever ran between them.
        steps: those that gave tokens; the first is the end of the prompt.
        drafted_per_position, accepted_per_position: drafts verified and kept, by position in the window.
    """

    prompt_id: str
    category: str
    token_ids: tuple[int, ...]
    finish_reason: str
    num_prompt_tokens: int
    num_computed_tokens: int
    prefill_s: float
    steps: tuple[StepRecord, ...]
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Where the time of decode steps went, seconds; prompts are left out.

    Attributes:
        num_steps: decode steps of the whole batch.
        propose_s: scheduling and drafting.
        forward_s: the model.
        sample_s: sampling, verification, and keeping the books.
        rest_s: between steps.
    """

    num_steps: int = 0
    propose_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    rest_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One pass over all prompts.

    Attributes:
        requests: in the order of the prompts.
        wall_s: from the first submission to the last token.
        num_eager_steps: forwards that ran without a compiled shape.
    """

    requests: tuple[RequestRecord, ...]
    wall_s: float
    decode: StepTimes
    num_eager_steps: int


def origins(steps: Sequence[StepRecord]) -> list[Origin]:
    """Where each token of an output came from, in order."""
    found: list[Origin] = []
    for index, step in enumerate(steps):
        if index == 0:
            last = Origin.PREFILL
        elif step.num_draft_tokens == 0:
            last = Origin.PLAIN
        else:
            last = Origin.BONUS if step.num_accepted_tokens == step.num_draft_tokens else Origin.CORRECTION
        found += [Origin.ACCEPTED] * step.num_accepted_tokens
        found += [last] * (step.num_tokens - step.num_accepted_tokens)
    return found
