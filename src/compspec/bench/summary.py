"""From records to numbers: medians over rounds, by category, and where outputs differ. Pure functions."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from compspec.bench.records import RequestRecord, RunRecord, StepTimes

ALL = "all"
"""The name of the category that every request is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A number over the rounds."""

    median: float
    min: float
    max: float

    @staticmethod
    def of(values: Iterable[float | None]) -> "Spread | None":
        """Of the rounds that have the number; None if none has."""
        found = [value for value in values if value is not None]
        return Spread(median=statistics.median(found), min=min(found), max=max(found)) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What is said of one side and one category. None: there was nothing to measure.

    Attributes:
        num_requests, num_output_tokens: of one round.
        decode_tokens_per_s: tokens after each output's first step, by the time after it, both summed over requests.
        speed_up: that of the reference, round by round.
        time_to_first_token_s: from submission, the median of the requests.
        inter_token_p50_s, inter_token_p99_s: between two steps that gave a request tokens. Tokens that come together
            count as one arrival, as in vLLM's benchmark of its server.
        acceptance_length: tokens per decode step and request.
        prefill_tokens_per_s: prompt tokens that were computed, by the time of the prompt's steps alone.
        throughput_tokens_per_s: output tokens by the whole time, prompts included; of all requests together alone.
    """

    num_requests: int
    num_output_tokens: int
    decode_tokens_per_s: Spread | None
    speed_up: Spread | None
    time_to_first_token_s: Spread | None
    inter_token_p50_s: Spread | None
    inter_token_p99_s: Spread | None
    acceptance_length: Spread | None
    prefill_tokens_per_s: Spread | None
    throughput_tokens_per_s: Spread | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An output that is not that of the reference.

    Attributes:
        round: the first one in which it differs, from 0.
        position: of the first token that differs, from 0; that of the end of the shorter output, if it is the beginning
            of the other.
        token_id, reference_token_id: what stands there; None beyond an end.
    """

    prompt_id: str
    round: int
    position: int
    token_id: int | None
    reference_token_id: int | None


def metrics(runs: Sequence[RunRecord], references: Sequence[RunRecord], category: str) -> Metrics:
    """Sums up one side in one category.

    Args:
        runs: one per round.
        references: those of the side that it is compared with.
        category: or `ALL`.
    """
    rounds = [_of_category(run, category) for run in runs]
    speeds = [decode_speed(requests) for requests in rounds]
    others = [decode_speed(_of_category(run, category)) for run in references]
    gaps = [[gap for request in requests for gap in inter_token_gaps(request)] for requests in rounds]
    return Metrics(
        num_requests=len(rounds[0]),
        num_output_tokens=sum(len(request.token_ids) for request in rounds[0]),
        decode_tokens_per_s=Spread.of(speeds),
        speed_up=Spread.of(_ratio(one, other) for one, other in zip(speeds, others, strict=True)),
        time_to_first_token_s=Spread.of(_median([each.steps[0].at_s for each in requests]) for requests in rounds),
        inter_token_p50_s=Spread.of(percentile(each, 50) for each in gaps),
        inter_token_p99_s=Spread.of(percentile(each, 99) for each in gaps),
        acceptance_length=Spread.of(map(_acceptance_length, rounds)),
        prefill_tokens_per_s=Spread.of(map(_prefill_speed, rounds)),
        throughput_tokens_per_s=Spread.of(_throughput(run) for run in runs) if category == ALL else None,
    )


def decode_speed(requests: Sequence[RequestRecord]) -> float | None:
    """Tokens per second after each output's first step; None where nothing came after it."""
    tokens = sum(len(each.token_ids) - each.steps[0].num_tokens for each in requests)
    return _ratio(tokens, sum(each.steps[-1].at_s - each.steps[0].at_s for each in requests))


def inter_token_gaps(request: RequestRecord) -> list[float]:
    """Seconds between the arrivals of a request's tokens."""
    return [after.at_s - before.at_s for before, after in zip(request.steps, request.steps[1:], strict=False)]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """With linear interpolation between neighbours; None of nothing."""
    return float(np.percentile(values, percent)) if values else None


def acceptance_per_position(runs: Sequence[RunRecord]) -> tuple[list[int], list[int]]:
    """Drafts verified and drafts kept at each position of the window, over all rounds."""
    requests = [request for run in runs for request in run.requests]
    return (
        _sum_by_position([each.drafted_per_position for each in requests]),
        _sum_by_position([each.accepted_per_position for each in requests]),
    )


def step_times_ms(runs: Sequence[RunRecord]) -> dict[str, float] | None:
    """Milliseconds of a decode step by part, the median over rounds; None where there was no decode step."""
    times = [run.decode for run in runs if run.decode.num_steps]
    if not times:
        return None
    parts: dict[str, Callable[[StepTimes], float]] = {
        "propose": lambda step: step.propose_s,
        "forward": lambda step: step.forward_s,
        "sample": lambda step: step.sample_s,
        "rest": lambda step: step.rest_s,
    }
    return {
        name: statistics.median(part(each) / each.num_steps * 1e3 for each in times) for name, part in parts.items()
    }


def differences(runs: Sequence[RunRecord], references: Sequence[RunRecord]) -> list[Difference]:
    """The first difference of each prompt whose output is another one in any round, in the order of the prompts."""
    found: dict[str, Difference] = {}
    for index, (run, reference) in enumerate(zip(runs, references, strict=True)):
        for one, other in zip(run.requests, reference.requests, strict=True):
            if one.token_ids != other.token_ids and one.prompt_id not in found:
                found[one.prompt_id] = _difference(one, other, index)
    return [found[request.prompt_id] for request in runs[0].requests if request.prompt_id in found]


def _difference(one: RequestRecord, other: RequestRecord, index: int) -> Difference:
    a, b = one.token_ids, other.token_ids
    shorter = min(len(a), len(b))
    position = next((at for at in range(shorter) if a[at] != b[at]), shorter)
    return Difference(
        prompt_id=one.prompt_id,
        round=index,
        position=position,
        token_id=a[position] if position < len(a) else None,
        reference_token_id=b[position] if position < len(b) else None,
    )


def _of_category(run: RunRecord, category: str) -> list[RequestRecord]:
    return [request for request in run.requests if category in (ALL, request.category)]


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _acceptance_length(requests: Sequence[RequestRecord]) -> float | None:
    steps = [step for request in requests for step in request.steps[1:]]
    return _ratio(sum(step.num_tokens for step in steps), len(steps))


def _prefill_speed(requests: Sequence[RequestRecord]) -> float | None:
    return _ratio(sum(each.num_computed_tokens for each in requests), sum(each.prefill_s for each in requests))


def _throughput(run: RunRecord) -> float | None:
    return _ratio(sum(len(each.token_ids) for each in run.requests), run.wall_s)


def _sum_by_position(rows: Sequence[Sequence[int]]) -> list[int]:
    longest = max(map(len, rows), default=0)
    return [sum(row[position] for row in rows if position < len(row)) for position in range(longest)]
