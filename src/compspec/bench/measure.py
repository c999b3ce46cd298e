"""Runs the prompts through engines, in turns, and records what came when."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from compspec.bench.prompts import BenchPrompt
from compspec.bench.records import RequestRecord, RunRecord, StepRecord, StepTimes
from compspec.bench.sides import Side
from compspec.detokenizer import Detokenizer, OutputText
from compspec.errors import CapacityError, CompspecError, RequestError, UnsupportedError
from compspec.llm import LLM
from compspec.request import FinishReason, Request, TokenDelta
from compspec.sampling.params import SamplingParams
from compspec.stats import SpecStats

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A prompt with all of its sampling parameters."""

    prompt: BenchPrompt
    params: SamplingParams


def run(llm: LLM, jobs: Sequence[Job], *, concurrent: int | None) -> RunRecord:
    """Generates for all prompts on an engine that has forgotten what earlier runs left.

    Args:
        concurrent: so many requests at a time; None: all are submitted at once.

    Raises:
        CompspecError: one of its kinds; a request that is refused or fails is named.
    """
    engine, stats = llm.engine, llm.stats
    engine.reset()  # of what the last run left, this one would profit
    num_eager = stats.num_eager_steps
    waiting, running = deque(jobs), dict[str, _Running]()
    finished: dict[str, RequestRecord] = {}
    decode, prefill_s = _Parts(), 0.0
    began = ended = time.perf_counter()
    while waiting or running:
        while waiting and (concurrent is None or len(running) < concurrent):
            job = waiting.popleft()
            request = _submit(llm, job)
            running[request.request_id] = _Running(job)
        before = _Parts.of(stats)
        deltas = engine.step()
        now = time.perf_counter()
        spent = _Parts.of(stats) - before
        if spent.num_prefill_steps:
            prefill_s += spent.step_s  # one prompt at a time: it is that of the next request to get its first token
        else:
            decode += spent
            decode.rest_s += now - ended - spent.step_s
        for delta in deltas:
            one = running[delta.request.request_id]
            if not one.steps:
                one.prefill_s, prefill_s = prefill_s, 0.0
            one.take(delta, now)
            if delta.finish_reason is not None:
                del running[delta.request.request_id]
                finished[one.job.prompt.id] = one.record(delta.request)
        ended = now
    return RunRecord(
        requests=tuple(finished[job.prompt.id] for job in jobs),
        wall_s=ended - began,
        decode=decode.frozen(),
        num_eager_steps=stats.num_eager_steps - num_eager,
    )


def run_rounds(
    sides: Sequence[Side],
    engines: Sequence[LLM],
    jobs: Sequence[Sequence[Job]],
    *,
    rounds: int,
    warm_up: bool,
    concurrent: int | None,
    tell: Tell,
) -> dict[str, list[RunRecord]]:
    """Runs all sides in turns, every other round in the opposite order, so that a slow spell meets all of them.

    Args:
        engines, jobs: by `Side.setup`.
        warm_up: run every side once before.
        tell: told what begins.

    Returns:
        Records by the side's label, one per round.

    Raises:
        CompspecError: as `run`, with the side's name.
    """
    records: dict[str, list[RunRecord]] = {side.label: [] for side in sides}
    for index in range(-1 if warm_up else 0, rounds):
        for side in sides[:: 1 if index % 2 == 0 else -1]:
            tell(f"{f'round {index + 1} of {rounds}' if index >= 0 else 'warm-up'}: {side.label}")
            asked = jobs[side.setup] if side.speculative else [_plain(job) for job in jobs[side.setup]]
            try:
                record = run(engines[side.setup], asked, concurrent=concurrent)
            except CompspecError as error:
                raise type(error)(f"'{side.label}': {error}") from None
            if index >= 0:
                records[side.label].append(record)
    return records


def top2_margin(llm: LLM, job: Job, token_ids: Sequence[int], position: int) -> float | None:
    """How much more likely the model finds the likeliest token at a place of a greedy output than the second.

    Args:
        token_ids: the output without drafts.
        position: a place in it.

    Returns:
        The difference of their log-probabilities; None where it cannot be told: a sampled output, a place beyond the
        end, or an output that was another one when it was made again.
    """
    if not job.params.is_greedy or position >= len(token_ids):
        return None
    params = _plain(job).params.model_copy(update={"logprobs": 2})
    output = llm.generate([job.prompt.token_ids], params)[0]
    if output.token_ids[:position] != list(token_ids[:position]) or output.logprobs is None:
        return None
    if position >= len(output.logprobs):
        return None
    first, second = sorted((one.logprob for one in output.logprobs[position].values()), reverse=True)[:2]
    return first - second


def text_pieces(llm: LLM, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> list[str]:
    """The text that each output token completes; empty for a part of a character and for tokens without text."""
    if llm.tokenizer is None:
        return [f"{token} " for token in token_ids]
    detokenizer = Detokenizer(llm.tokenizer, prompt_token_ids)
    pieces = [detokenizer.push(token) for token in token_ids]
    if pieces:
        pieces[-1] += detokenizer.finish()
    return pieces


def _plain(job: Job) -> Job:
    return Job(prompt=job.prompt, params=job.params.model_copy(update={"speculative": False}))


def _submit(llm: LLM, job: Job) -> Request:
    """As `LLM.generate` does, so that the text that it would make is paid for here too."""
    end_check = None
    if llm.tokenizer is not None:
        detokenizer = Detokenizer(llm.tokenizer, job.prompt.token_ids)
        end_check = OutputText(detokenizer, job.params.stop, job.params.min_tokens).push
    try:
        return llm.engine.add_request(job.prompt.token_ids, llm.engine_params(job.params), end_check=end_check)
    except (RequestError, UnsupportedError, CapacityError) as error:
        raise type(error)(f"prompt '{job.prompt.id}': {error}") from None


class _Running:
    """A request that is not finished."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.prefill_s = 0.0
        self.steps: list[StepRecord] = []

    def take(self, delta: TokenDelta, now: float) -> None:
        """Adds what a step gave."""
        self.steps.append(
            StepRecord(
                at_s=now - delta.request.arrived_at,
                num_tokens=len(delta.token_ids),
                num_draft_tokens=delta.num_draft_tokens,
                num_accepted_tokens=delta.num_accepted_tokens,
            )
        )

    def record(self, request: Request) -> RequestRecord:
        """The finished request.

        Raises:
            RequestError: it failed.
        """
        prompt = self.job.prompt
        if request.finish_reason is FinishReason.ERROR:
            raise RequestError(f"prompt '{prompt.id}': {request.error}")
        assert request.finish_reason is not None
        return RequestRecord(
            prompt_id=prompt.id,
            category=prompt.category,
            token_ids=tuple(request.output_token_ids),
            finish_reason=str(request.finish_reason),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_prompt_tokens - request.stats.num_cached_tokens,
            prefill_s=self.prefill_s,
            steps=tuple(self.steps),
            drafted_per_position=tuple(request.stats.drafted_per_position),
            accepted_per_position=tuple(request.stats.accepted_per_position),
        )


@dataclass(slots=True, kw_only=True)
class _Parts:
    """The engine's counters, or how much they grew."""

    num_steps: int = 0
    num_prefill_steps: int = 0
    step_s: float = 0.0
    propose_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    rest_s: float = 0.0

    @staticmethod
    def of(stats: SpecStats) -> "_Parts":
        return _Parts(
            num_steps=stats.num_forwards,
            num_prefill_steps=stats.num_prefill_forwards,
            step_s=stats.step_s,
            propose_s=stats.propose_s,
            forward_s=stats.forward_s,
            sample_s=stats.sample_s,
        )

    def __add__(self, other: "_Parts") -> "_Parts":
        return _Parts(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def __sub__(self, other: "_Parts") -> "_Parts":
        return _Parts(**{each.name: getattr(self, each.name) - getattr(other, each.name) for each in fields(self)})

    def frozen(self) -> StepTimes:
        return StepTimes(**{each.name: getattr(self, each.name) for each in fields(StepTimes)})
