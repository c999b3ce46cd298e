"""The scheduler, driven by a fake model: lengths, stops, blocks, order, turns, preemption and shared beginnings.

The fake model keeps what a KV cache would hold, and finds fault with any row that would read something else than its
own request's tokens, computed in the shapes of a run alone.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from random import Random
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from compspec.batch import SCRATCH_BLOCK, Batch, ScheduledRequest, StepOutput
from compspec.errors import CapacityError
from compspec.request import FinishReason, Logprob, Request, TokenDelta, TokenLogprobs
from compspec.scheduling.block_pool import BlockPool
from compspec.scheduling.prefix_cache import PrefixCache
from compspec.scheduling.scheduler import Scheduler
from tests.unit.fakes import make_request, step_output

EOS = 2
TEXT = 11
"""The token that completes a stop text, where a request has one."""
VOCAB = 30
FAILED = "the model broke"


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 4,
    chunk: int = 8,
    k: int = 3,
    *,
    query_len: int | None = None,
    caching: str | None = None,
    **more: Any,
) -> Scheduler:
    pool = BlockPool(num_blocks, block_size)
    cache = None if caching is None else PrefixCache(pool, chunk if caching == "exact" else None)
    return Scheduler(
        pool,
        prefix_cache=cache,
        max_num_seqs=max_num_seqs,
        prefill_chunk=chunk,
        query_len=query_len or k + 1,
        max_draft_tokens=k,
        eos_token_ids=frozenset({EOS}),
        **more,
    )


class Told:
    """An end check that remembers what it was told."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def __call__(self, token_id: int) -> str | None:
        self.token_ids.append(token_id)
        return "text" if token_id == TEXT else None


def expected_end(
    request: Request, tokens: list[int], error_at: int | None
) -> tuple[list[int], FinishReason, int | str | None]:
    """The whole output, by definition: up to and with the first end, before a failure, at most max_tokens."""
    params = request.params
    for index, token in enumerate(tokens[: request.max_tokens]):
        if index == error_at:
            return tokens[:index], FinishReason.ERROR, None
        if token in params.stop_token_ids:
            return tokens[: index + 1], FinishReason.STOP, token
        if request.end_check is not None and token == TEXT:
            return tokens[: index + 1], FinishReason.STOP, "text"
        if token == EOS and not params.ignore_eos:
            return tokens[: index + 1], FinishReason.STOP, None
    return tokens[: request.max_tokens], FinishReason.LENGTH, None


def reported(token_ids: Sequence[int], first: int) -> list[TokenLogprobs]:
    """Log-probabilities that can be told apart: those of output token i are -i."""
    return [{token: Logprob(-float(index), 1)} for index, token in enumerate(token_ids, first)]


@dataclass
class FakeModel:
    """Keeps for each slot of the cache what its keys and values are a function of: all tokens up to there.

    Attributes:
        written: by (block, place): the number of these tokens, and the shape that they were computed in.
        finals: the numbers alone, in the cache of a second model that lags behind.
    """

    block_size: int
    written: dict[tuple[int, int], tuple[int, Any]] = field(default_factory=dict)
    finals: dict[tuple[int, int], int] = field(default_factory=dict)
    _numbers: dict[tuple[Any, int], int] = field(default_factory=dict)

    def number(self, before: Any, token: int) -> int:
        """Stands for `token` after everything that `before` stands for."""
        return self._numbers.setdefault((before, token), len(self._numbers))

    def numbers(self, salt: str | None, tokens: Sequence[int]) -> list[int]:
        found: list[int] = []
        for token in tokens:
            found.append(self.number(found[-1] if found else ("start", salt), token))
        return found

    def place(self, request: Request, position: int) -> tuple[int, int]:
        return request.block_ids[position // self.block_size], position % self.block_size


@dataclass
class Driver:
    """Runs a scheduler and checks at every step what must always hold."""

    scheduler: Scheduler
    max_num_seqs: int
    chunk: int
    k: int
    query_len: int
    caching: str | None
    rng: Random
    submitted: list[Request] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    texts: dict[str, list[int]] = field(default_factory=dict)
    error_at: dict[str, int | None] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.model = FakeModel(self.scheduler.pool.block_size)
        self.numbers: dict[str, list[int]] = {}
        self.computed: Counter[str] = Counter()  # tokens in the blocks of each request, as far as was seen
        self.prefilled: Counter[str] = Counter()
        self.preempted: Counter[str] = Counter()
        self.last_kind: bool | None = None
        self.last_had_both = False
        self.oldest: Request | None = None
        self.oldest_waited = 0

    def submit(self, request: Request, text: list[int]) -> None:
        """Adds a request; `text` is what it and its output say."""
        self.scheduler.add(request)
        self.submitted.append(request)
        self.outputs[request.request_id] = []
        self.texts[request.request_id] = text
        self.numbers[request.request_id] = self.model.numbers(request.params.cache_salt, text)

    def truth(self, request: Request) -> list[int]:
        return self.texts[request.request_id][request.num_prompt_tokens :]

    def step(self) -> list[TokenDelta]:
        scheduler = self.scheduler
        waited, ran = list(scheduler.waiting), list(scheduler.running)
        could_start = self._could_start()
        batch = scheduler.schedule()
        assert batch is not None
        started = [each for each in waited if each in scheduler.running or each in batch.preempted]
        assert started == waited[: len(started)], "not in their order"
        assert started or not could_start, "a request waits that could run"
        self._check_preempted(batch, ran + started)
        self._check_ownership()
        self._check_hits()
        self._check_turns(batch)
        for entry in batch.scheduled:
            self._check_entry(entry, batch.is_prefill)
            self._check_context(entry)
        output = self._run(batch)
        logprobs = [
            None if entry.request.logprobs is None else reported(tokens, entry.request.num_output_tokens)
            for entry, tokens in zip(batch.scheduled, output.token_ids, strict=True)
        ]
        deltas = scheduler.update(batch, output, logprobs)
        for entry, accepted in zip(batch.scheduled, output.num_accepted_tokens, strict=True):
            end = entry.num_computed_tokens + entry.num_new_tokens + accepted
            self.computed[entry.request.request_id] = end
            assert entry.request.num_computed_tokens == end
        assert [delta.request for delta in deltas] == [each.request for each in batch.scheduled if each.samples]
        for delta in deltas:
            self.outputs[delta.request.request_id] += delta.token_ids
            self._check_delta(delta)
        self._check_ownership()
        return deltas

    def abort(self, request: Request) -> None:
        self.scheduler.abort(request)
        assert request.finish_reason is not None
        assert request not in self.scheduler.running
        assert request not in self.scheduler.waiting
        self._check_ownership()  # its blocks and its slot are free at once

    def preempt(self, request: Request) -> None:
        was_running = request in self.scheduler.running
        assert self.scheduler.preempt(request) == was_running
        if was_running:
            self._count_preemption(request)
            self.oldest = None  # what it was promised begins anew
        self._check_ownership()

    def num_final_tokens(self, request: Request) -> int:
        """What the second model has computed: it lags behind by so many tokens as chance wants."""
        num_final = max(0, request.num_computed_tokens - self.rng.choice([0, 0, 1, 5, 100]))
        for position in range(min(num_final, request.num_tokens)):
            number = self.numbers[request.request_id][position]
            self.model.finals[self.model.place(request, position)] = number
        return num_final

    def _could_start(self) -> bool:
        """Whether the first that waits fits beside all that the others need for their next token, nothing shared."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        if not scheduler.waiting or len(scheduler.running) == self.max_num_seqs:
            return False
        known = [max(0, pool.blocks_for(each.num_tokens) - len(each.block_ids)) + 1 for each in scheduler.running]
        return pool.blocks_for(scheduler.waiting[0].num_tokens) + sum(known) <= pool.num_free

    def _count_preemption(self, request: Request) -> None:
        self.preempted[request.request_id] += 1
        self.computed[request.request_id] = 0
        self.counts["preempted"] += 1
        self.counts["preempted in its prompt"] += request.num_output_tokens == 0
        assert request.stats.num_preemptions == self.preempted[request.request_id]

    def _check_preempted(self, batch: Batch, ran: list[Request]) -> None:
        running = self.scheduler.running
        assert [each for each in ran if each not in running] == sorted(batch.preempted, key=ran.index)
        for request in batch.preempted:
            assert request.rank > running[-1].rank, "an older request gave way to a younger one"
            self._count_preemption(request)
        # The oldest goes on, whatever the others need: at every step, or at every other where it shares turns.
        oldest, before = running[0], self.oldest
        waited = oldest not in [entry.request for entry in batch.scheduled]
        self.oldest_waited = self.oldest_waited + 1 if waited and oldest is before else int(waited)
        self.oldest = oldest
        assert self.oldest_waited <= 1, "the oldest request does not go on"

    def _check_ownership(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.pool
        holders = Counter(block for request in scheduler.running for block in request.block_ids)
        assert SCRATCH_BLOCK not in holders
        assert [pool.num_holders(block) for block in range(pool.num_blocks)] == [
            holders[block] for block in range(pool.num_blocks)
        ]
        assert all(len(set(request.block_ids)) == len(request.block_ids) for request in scheduler.running)
        assert pool.num_free == pool.num_usable - len(holders), "a block leaked"
        slots = [request.slot for request in scheduler.running]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(self.max_num_seqs))
        for requests in (scheduler.running, scheduler.waiting):
            assert requests == sorted(requests, key=lambda request: request.rank)
        for request in scheduler.waiting:
            assert request.slot is None
            assert (request.block_ids, request.num_computed_tokens) == ([], 0)

    def _check_hits(self) -> None:
        """What a request did not compute itself is what it would have computed, in every model's cache."""
        for request in self.scheduler.running:
            name = request.request_id
            before, now = self.computed[name], request.num_computed_tokens
            if now == before:
                continue
            assert self.caching is not None and now > before
            unit = lcm(self.scheduler.pool.block_size, self.chunk if self.caching == "exact" else 1)
            assert before % unit == now % unit == 0, "not whole units"
            assert now <= (request.num_prompt_tokens if self.caching == "exact" else request.num_tokens)
            assert now < request.num_tokens, "nothing is left to sample from"
            for position in range(before, now):
                assert self.model.finals[self.model.place(request, position)] == self.numbers[name][position]
            self.computed[name] = now
            self.prefilled[name] += min(now, request.num_prompt_tokens) - min(before, request.num_prompt_tokens)
            self.counts[f"hit, {self.caching}"] += 1
            self.counts[f"hit in an output, {self.caching}"] += now > request.num_prompt_tokens
            self.counts["hit of a resumed request"] += self.preempted[name] > 0

    def _check_turns(self, batch: Batch) -> None:
        """Where prompts and decoding requests can both go on, they alternate."""
        pool = self.scheduler.pool
        prefilling = [request for request in self.scheduler.running if request.is_prefilling]
        decoding = [request for request in self.scheduler.running if not request.is_prefilling]
        if batch.is_prefill:
            assert [entry.request for entry in batch.scheduled] == prefilling[:1], "not the first prompt's turn"
        else:
            assert [entry.request for entry in batch.scheduled] == decoding
        both = bool(prefilling and decoding)
        if both and self.last_had_both and batch.is_prefill == self.last_kind:
            assert not batch.is_prefill, "a prompt ran twice while others waited to decode"
            first = prefilling[0]
            end = min(first.num_computed_tokens + self.chunk, first.num_prompt_tokens)
            self.counts["prompt without blocks"] += 1
            assert first is self.scheduler.running[-1], "a prompt waited for younger requests"
            assert pool.blocks_for(end) - len(first.block_ids) > pool.num_free, "a prompt waited though it could run"
        self.last_kind, self.last_had_both = batch.is_prefill, both

    def _check_entry(self, entry: ScheduledRequest, is_prefill: bool) -> None:
        request, pool = entry.request, self.scheduler.pool
        assert entry.slot == request.slot
        assert entry.num_computed_tokens == request.num_computed_tokens
        end = entry.num_computed_tokens + entry.num_new_tokens
        assert entry.num_new_tokens >= 1
        assert entry.samples == (end == request.num_tokens)
        assert end + entry.max_draft_tokens <= len(request.block_ids) * pool.block_size, "rows without a block"
        if is_prefill:
            if self.caching != "fast":
                assert entry.num_computed_tokens % self.chunk == 0
                assert end % self.chunk == 0 or end == request.num_prompt_tokens
            assert entry.num_new_tokens == min(self.chunk, request.num_prompt_tokens - entry.num_computed_tokens)
            assert entry.max_draft_tokens == 0
            self.counts["prompt of a resumed request"] += request.num_output_tokens > 0
            self.prefilled[request.request_id] += entry.num_new_tokens
            return
        behind = request.num_tokens - entry.num_computed_tokens
        assert entry.num_new_tokens == min(self.query_len, behind)
        self.counts["replayed"] += behind > 1
        self.counts["replayed in several steps"] += behind > self.query_len
        asked = self.k if request.params.speculative is None else int(request.params.speculative)
        most = min(self.k, asked, request.max_tokens - request.num_output_tokens - 1) if behind == 1 else 0
        if entry.max_draft_tokens < most:
            assert (end + entry.max_draft_tokens) % pool.block_size == 0, "drafts left out"
            others = [each for each in self.scheduler.running if each is not request]
            missing = [max(0, pool.blocks_for(each.num_tokens) - len(each.block_ids)) for each in others]
            assert pool.num_free <= sum(missing) + len(others), "drafts left out though nobody needs the blocks"
            self.counts["drafts without blocks"] += 1
        assert entry.max_draft_tokens <= most

    def _check_context(self, entry: ScheduledRequest) -> None:
        """Every row reads the keys and values of its own request's tokens; where bits count, in their own shapes."""
        request, numbers = entry.request, self.numbers[entry.request.request_id]
        for position in range(entry.num_computed_tokens):
            number, shape = self.model.written[self.model.place(request, position)]
            assert number == numbers[position], "a block holds other tokens"
            if self.caching != "fast":
                assert shape == self._shape(request, position), "tokens were computed in another shape"

    def _shape(self, request: Request, position: int) -> Any:
        """What a position is computed in when its request runs alone."""
        if position >= request.num_prompt_tokens:
            return "decode"
        start = position // self.chunk * self.chunk
        return start, min(self.chunk, request.num_prompt_tokens - start)

    def _run(self, batch: Batch) -> StepOutput:
        """The true tokens of each request, a random number of drafts accepted, up to where it fails."""
        token_ids, drafted, accepted, errors = [], [], [], []
        for entry in batch.scheduled:
            tokens: tuple[int, ...] = ()
            num_drafts = num_accepted = 0
            error = None
            if entry.samples:
                num_drafts = self.rng.randint(0, entry.max_draft_tokens)
                num_accepted = self.rng.randint(0, num_drafts)
                done, failure = entry.request.num_output_tokens, self.error_at.get(entry.request.request_id)
                end = done + num_accepted + 1
                if failure is not None and failure < end:
                    num_accepted, end, error = failure - done, failure, FAILED
                tokens = tuple(self.truth(entry.request)[done:end])
            shape = (entry.num_computed_tokens, entry.num_new_tokens) if batch.is_prefill else "decode"
            self._write(entry, shape, num_drafts, num_accepted)
            token_ids.append(tokens)
            drafted.append(num_drafts)
            accepted.append(num_accepted)
            errors.append(error)
        return StepOutput(
            token_ids=tuple(token_ids),
            num_draft_tokens=tuple(drafted),
            num_accepted_tokens=tuple(accepted),
            errors=tuple(errors),
        )

    def _write(self, entry: ScheduledRequest, shape: Any, num_drafts: int, num_accepted: int) -> None:
        """Stores a step's tokens and drafts; those that will not be accepted are wrong."""
        request, numbers = entry.request, self.numbers[entry.request.request_id]
        start, known = entry.num_computed_tokens, entry.num_computed_tokens + entry.num_new_tokens
        wrong = numbers[known + num_accepted - 1]
        for position in range(start, known + num_drafts):
            place = self.model.place(request, position)
            assert self.scheduler.pool.num_holders(place[0]) == 1, "wrote into a shared block"
            wrong = self.model.number(wrong, VOCAB)
            right = position < known + num_accepted
            self.model.written[place] = (numbers[position] if right else wrong, shape)
            self.model.finals.pop(place, None)

    def _check_delta(self, delta: TokenDelta) -> None:
        request = delta.request
        failed = delta.finish_reason is FinishReason.ERROR
        assert delta.token_ids or failed, "a step that samples gives at least one token, or fails"
        assert request.error == (FAILED if failed else None)
        assert request.output_token_ids == self.outputs[request.request_id]
        assert delta.finish_reason is request.finish_reason
        assert (request.finish_reason is not None) == (request not in self.scheduler.running)
        if request.finish_reason is None:
            assert request.num_computed_tokens == request.num_tokens - 1
        stats = request.stats
        assert stats.num_decode_tokens == max(0, request.num_output_tokens - 1)
        if isinstance(request.end_check, Told):
            by_id = request.finish_reason == FinishReason.STOP and not isinstance(request.stop_reason, str)
            told = request.output_token_ids[:-1] if by_id else request.output_token_ids
            assert request.end_check.token_ids == told, "told something else than the output"
        assert (delta.logprobs is None) == (request.logprobs is None)
        if request.logprobs is not None and delta.logprobs is not None:
            assert request.logprobs == reported(request.output_token_ids, 0)
            assert list(delta.logprobs) == request.logprobs[request.num_output_tokens - len(delta.token_ids) :]
        assert stats.num_steps == stats.num_decode_steps + 1
        assert stats.num_accepted_tokens <= stats.num_draft_tokens
        if request.request_id not in self.preempted:
            assert self.prefilled[request.request_id] == request.num_prompt_tokens


def samples(batch: Batch) -> bool:
    """Whether any request samples a token in this step."""
    return any(entry.samples for entry in batch.scheduled)


REQUESTS: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.integers(1, 20),
    "max_tokens": st.integers(1, 14),
    "text": st.integers(0, 2),
    "differs_at": st.sampled_from([0, 3, 8, 16, 99, 99]),
    "cache_salt": st.sampled_from([None, None, None, "salt"]),
    "priority": st.sampled_from([0, 0, 0, 1, -1]),
    "ignore_eos": st.booleans(),
    "stop_token_ids": st.sampled_from([(), (), (7,), (7, 8, 9, 10)]),
    "speculative": st.sampled_from([None, None, False, 1, 9]),
    "at": st.integers(0, 12),
    "abort_at": st.none() | st.none() | st.integers(0, 14),
    "error_at": st.none() | st.none() | st.integers(0, 14),
    "has_stop_text": st.booleans(),
    "logprobs": st.sampled_from([None, 0]),
}


@st.composite
def mixes(draw: st.DrawFn) -> dict:
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    return {
        "num_blocks": draw(st.integers(3, 6 + 40 // block_size)),
        "block_size": block_size,
        "max_num_seqs": draw(st.integers(1, 4)),
        "chunk": draw(st.sampled_from([1, 3, 4, 8, 16])),
        "k": draw(st.integers(0, 5)),
        "more_rows": draw(st.sampled_from([0, 0, 2])),
        "caching": draw(st.sampled_from([None, "fast", "exact"])),
        "preempt": draw(st.sampled_from([0.0, 0.05, 0.3])),
        "requests": draw(st.lists(st.fixed_dictionaries(REQUESTS), min_size=1, max_size=7)),
        "seed": draw(st.integers(0, 2**32)),
    }


def text_of(spec: Mapping[str, Any], number: int, seed: int) -> list[int]:
    """Requests with the same text say the same up to where they differ, in prompt and output."""
    shared, own = Random(f"{spec['text']}-{seed}"), Random(f"own {number}-{seed}")
    pairs = [(shared.randrange(VOCAB), own.randrange(VOCAB)) for _ in range(60)]
    return [pair[position >= spec["differs_at"]] for position, pair in enumerate(pairs)]


def run_mix(mix: Mapping[str, Any]) -> Counter[str]:
    """Runs a mix of requests to the end and checks everything; returns how often what can happen did."""
    rng = Random(mix["seed"])
    query_len = mix["k"] + 1 + mix["more_rows"]
    scheduler = make_scheduler(
        mix["num_blocks"],
        mix["block_size"],
        mix["max_num_seqs"],
        mix["chunk"],
        mix["k"],
        query_len=query_len,
        caching=mix["caching"],
        num_final_tokens=lambda request: driver.num_final_tokens(request),
    )
    driver = Driver(scheduler, mix["max_num_seqs"], mix["chunk"], mix["k"], query_len, mix["caching"], rng)
    pending = deque(sorted(enumerate(mix["requests"]), key=lambda item: item[1]["at"]))
    aborts: list[tuple[int, Request]] = []
    aborted: set[str] = set()
    forced = 60
    step = 0
    while pending or scheduler.has_work:
        while pending and pending[0][1]["at"] <= step:
            number, spec = pending.popleft()
            text = text_of(spec, number, mix["seed"])
            names = ["max_tokens", "ignore_eos", "stop_token_ids", "speculative", "logprobs", "cache_salt", "priority"]
            request = make_request(
                text[: spec["prompt"]],
                request_id=f"{number}-{mix['seed']}",
                **{name: spec[name] for name in names},
            )
            request.end_check = Told() if spec["has_stop_text"] else None
            driver.error_at[request.request_id] = spec["error_at"]
            needed = scheduler.pool.blocks_for(spec["prompt"] + spec["max_tokens"])
            if needed > scheduler.pool.num_usable:
                with pytest.raises(CapacityError, match=r"cache\.num_blocks"):
                    driver.submit(request, text)
                continue
            driver.submit(request, text)
            if spec["abort_at"] is not None:
                aborts.append((spec["abort_at"], request))
        for when, request in aborts:
            if when == step and request.finish_reason is None:
                driver.abort(request)
                aborted.add(request.request_id)
        if driver.submitted and forced and rng.random() < mix["preempt"]:
            forced -= 1
            driver.preempt(rng.choice(driver.submitted))
        if scheduler.has_work:
            driver.step()
        else:
            assert scheduler.schedule() is None
        step += 1
        assert step < 2000, "a request never ended"
    assert scheduler.pool.num_free == scheduler.pool.num_usable
    for request in driver.submitted:
        tokens, reason, stop_reason = expected_end(request, driver.truth(request), driver.error_at[request.request_id])
        found = driver.outputs[request.request_id]
        if request.request_id in aborted:
            assert request.finish_reason is FinishReason.ABORT
            assert found == tokens[: len(found)]
        else:
            assert (found, request.finish_reason, request.stop_reason) == (tokens, reason, stop_reason)
    return driver.counts


@settings(max_examples=1000, deadline=None)
@given(mixes())
def test_any_mix_of_requests_ends_exactly_right_and_leaks_nothing(mix: dict) -> None:
    for name in sorted(run_mix(mix)):
        event(name)


def random_mix(seed: int) -> dict[str, Any]:
    """One of `mixes` in which requests meet: many, similar, in few blocks."""
    rng = Random(seed)
    requests = [
        {
            "prompt": rng.randint(1, 20),
            "max_tokens": rng.randint(6, 14),
            "text": rng.randint(0, 1),
            "differs_at": rng.choice([8, 16, 99]),
            "cache_salt": None,
            "priority": rng.choice([0, 0, 1]),
            "ignore_eos": True,
            "stop_token_ids": (),
            "speculative": rng.choice([None, False, 1]),
            "at": rng.randint(0, 12),
            "abort_at": None,
            "error_at": None,
            "has_stop_text": False,
            "logprobs": None,
        }
        for _ in range(7)
    ]
    return {
        "num_blocks": rng.randint(18, 28),
        "block_size": 2,
        "max_num_seqs": 4,
        "chunk": rng.choice([2, 4, 8]),
        "k": rng.randint(1, 3),
        "more_rows": 0,
        "caching": (None, "fast", "exact")[seed % 3],
        "preempt": 0.1 if seed % 2 else 0.0,
        "requests": requests,
        "seed": seed,
    }


def test_everything_that_a_mix_can_meet_does_happen() -> None:
    """Preemption in prompts and outputs, replay, shared prompts and outputs, drafts and prompts without blocks."""
    counts: Counter[str] = sum((run_mix(random_mix(seed)) for seed in range(60)), Counter())
    expected = {
        "preempted",
        "preempted in its prompt",
        "prompt of a resumed request",
        "replayed",
        "replayed in several steps",
        "hit, fast",
        "hit in an output, fast",
        "hit, exact",
        "hit of a resumed request",
        "drafts without blocks",
        "prompt without blocks",
    }
    assert {name for name, count in counts.items() if count} == expected


def test_without_forced_preemption_requests_are_preempted_where_blocks_are_few_and_never_where_they_are_not() -> None:
    few = [{**random_mix(seed), "preempt": 0.0} for seed in range(12)]
    assert sum(run_mix(mix)["preempted"] for mix in few) > 0
    assert sum(run_mix({**mix, "num_blocks": 200})["preempted"] for mix in few) == 0


def run_alone(
    scheduler: Scheduler,
    request: Request,
    output: list[int],
    error: str | None = None,
    logprobs: list[TokenLogprobs] | None = None,
) -> list[TokenDelta]:
    """Prefills, then gives the whole `output` in one step, all but its last token (or the error) accepted drafts."""
    scheduler.add(request)
    while True:
        batch = scheduler.schedule()
        assert batch is not None
        if not batch.is_prefill:
            break
        scheduler.update(batch, step_output([29] if samples(batch) else []))
    accepted = len(output) if error is not None else len(output) - 1
    step = StepOutput(
        token_ids=(tuple(output),), num_draft_tokens=(accepted,), num_accepted_tokens=(accepted,), errors=(error,)
    )
    return scheduler.update(batch, step, [logprobs])


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize(("stop", "stop_reason"), [(EOS, None), (7, 7), (TEXT, "text")])
def test_a_stop_at_any_place_of_the_window_ends_the_output_there(
    at: int, stop: int, stop_reason: int | str | None
) -> None:
    window = [20, 21, 22, 23]
    window[at] = stop
    request = make_request(range(3), stop_token_ids=(7,), logprobs=0)
    request.end_check = told = Told()
    (delta,) = run_alone(make_scheduler(), request, window, logprobs=reported(window, 1))
    assert list(delta.token_ids) == window[: at + 1]
    assert delta.finish_reason is FinishReason.STOP
    assert request.stop_reason == stop_reason
    assert request.output_token_ids == [29, *window[: at + 1]]
    by_text = isinstance(stop_reason, str)
    shown = request.output_token_ids if by_text else request.output_token_ids[:-1]
    assert told.token_ids == shown, "told of what comes after the end, or not of all before"
    assert delta.logprobs == tuple(reported(window[: at + 1], 1)) == tuple(request.logprobs)
    # What the cut dropped was not delivered, so it was not accepted; the stop itself may have been a draft.
    assert request.stats.num_accepted_tokens == delta.num_accepted_tokens == min(at + 1, 3)
    assert delta.num_draft_tokens == 3
    assert request.stats.num_decode_tokens == at + 1


def test_eos_is_a_token_like_any_other_where_it_is_ignored() -> None:
    request = make_request(range(3), ignore_eos=True)
    (delta,) = run_alone(make_scheduler(), request, [EOS, EOS])
    assert delta.finish_reason is None
    assert delta.token_ids == (EOS, EOS)


def test_a_stop_token_of_the_request_stops_though_eos_is_ignored() -> None:
    request = make_request(range(3), ignore_eos=True, stop_token_ids=(EOS,))
    (delta,) = run_alone(make_scheduler(), request, [EOS, EOS])
    assert delta.token_ids == (EOS,)


def test_the_last_allowed_token_being_a_stop_is_a_stop() -> None:
    (delta,) = run_alone(make_scheduler(), make_request(range(3), max_tokens=3), [20, EOS])
    assert delta.finish_reason is FinishReason.STOP


def test_tokens_beyond_the_limit_are_dropped_and_a_stop_among_them_is_none() -> None:
    request = make_request(range(3), max_tokens=3)
    (delta,) = run_alone(make_scheduler(), request, [20, 21, EOS])
    assert delta.token_ids == (20, 21)
    assert delta.finish_reason is FinishReason.LENGTH


def test_one_token_asked_for_comes_from_the_prefill_and_ends_the_request() -> None:
    scheduler = make_scheduler()
    request = make_request(range(3), max_tokens=1)
    scheduler.add(request)
    batch = scheduler.schedule()
    assert batch is not None and batch.is_prefill
    (delta,) = scheduler.update(batch, step_output([20]))
    assert delta.finish_reason is FinishReason.LENGTH
    assert not scheduler.has_work
    assert scheduler.pool.num_free == scheduler.pool.num_usable


@pytest.mark.parametrize(("length", "chunks"), [(1, [1]), (8, [8]), (9, [8, 1]), (17, [8, 8, 1]), (24, [8, 8, 8])])
def test_a_prompt_is_cut_by_its_length_alone(length: int, chunks: list[int]) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(range(length)))
    found = []
    while not (found and found[-1].samples):
        batch = scheduler.schedule()
        assert batch is not None and batch.is_prefill
        found += batch.scheduled
        scheduler.update(batch, step_output([20] if samples(batch) else []))
    assert [entry.num_new_tokens for entry in found] == chunks
    assert [entry.samples for entry in found] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize(("asked", "drafts"), [(None, 3), (False, 0), (1, 1), (2, 2), (9, 3)])
def test_a_request_gets_no_more_drafts_than_it_asks_for(asked: int | bool | None, drafts: int) -> None:
    scheduler = make_scheduler(k=3)
    scheduler.add(make_request(range(2), speculative=asked))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update(batch, step_output([20]))
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.scheduled[0].max_draft_tokens == drafts


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    with pytest.raises(CapacityError, match=r"needs 4 KV blocks for 5 prompt and up to 8 output tokens.* has 3"):
        scheduler.add(make_request(range(5), max_tokens=8))
    assert not scheduler.has_work
    scheduler.add(make_request(range(4), max_tokens=8))


def test_abort_is_harmless_when_repeated_and_after_the_end() -> None:
    scheduler = make_scheduler()
    request = make_request(range(3), max_tokens=1)
    scheduler.add(request)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update(batch, step_output([20]))
    scheduler.abort(request)
    assert request.finish_reason is FinishReason.LENGTH
    waiting = make_request(range(3))
    scheduler.add(waiting)
    scheduler.abort(waiting)
    scheduler.abort(waiting)
    assert waiting.finish_reason is FinishReason.ABORT
    assert not scheduler.has_work


@pytest.mark.parametrize("kept", [[], [20], [20, 21, 22]])
def test_an_error_ends_the_request_after_the_tokens_before_it(kept: list[int]) -> None:
    scheduler = make_scheduler()
    request = make_request(range(3), logprobs=0)
    (delta,) = run_alone(scheduler, request, kept, error=FAILED, logprobs=reported(kept, 1))
    assert delta.token_ids == tuple(kept)
    assert delta.finish_reason is request.finish_reason is FinishReason.ERROR
    assert (request.error, request.stop_reason) == (FAILED, None)
    assert request.output_token_ids == [29, *kept]
    assert request.logprobs == reported(kept, 1)
    assert (request.stats.num_decode_tokens, request.stats.num_accepted_tokens) == (len(kept), len(kept))
    assert not scheduler.has_work
    assert scheduler.pool.num_free == scheduler.pool.num_usable


def test_an_error_at_the_first_token_of_all_ends_the_request_with_none() -> None:
    scheduler = make_scheduler()
    request = make_request(range(3))
    scheduler.add(request)
    batch = scheduler.schedule()
    assert batch is not None
    step = StepOutput(token_ids=((),), num_draft_tokens=(0,), num_accepted_tokens=(0,), errors=(FAILED,))
    (delta,) = scheduler.update(batch, step)
    assert (delta.token_ids, delta.finish_reason, request.error) == ((), FinishReason.ERROR, FAILED)
    assert request.output_token_ids == []
    assert not scheduler.has_work


def decode_step_of(scheduler: Scheduler, count: int) -> Batch:
    """Gives every request token 20 until a decode step with so many of them is scheduled."""
    while True:
        batch = scheduler.schedule()
        assert batch is not None
        if not batch.is_prefill and len(batch.scheduled) == count:
            return batch
        scheduler.update(batch, step_output(*[[20]] * len(batch.scheduled)))


def test_an_error_ends_no_other_request() -> None:
    scheduler = make_scheduler()
    requests = [make_request(range(3), request_id=str(index)) for index in range(3)]
    for request in requests:
        scheduler.add(request)
    batch = decode_step_of(scheduler, 3)
    step = StepOutput(
        token_ids=((21,), (21,), (21, 22)),
        num_draft_tokens=(1, 1, 1),
        num_accepted_tokens=(0, 1, 1),
        errors=(None, FAILED, None),
    )
    deltas = scheduler.update(batch, step)
    assert [delta.finish_reason for delta in deltas] == [None, FinishReason.ERROR, None]
    assert [delta.token_ids for delta in deltas] == [(21,), (21,), (21, 22)]
    assert [request.error for request in requests] == [None, FAILED, None]
    assert scheduler.running == [requests[0], requests[2]]
    batch = scheduler.schedule()
    assert batch is not None
    assert [entry.request for entry in batch.scheduled] == [requests[0], requests[2]]


@pytest.mark.parametrize("stop", [EOS, 7, TEXT])
def test_a_stop_before_an_error_is_a_stop(stop: int) -> None:
    request = make_request(range(3), stop_token_ids=(7,))
    request.end_check = Told()
    (delta,) = run_alone(make_scheduler(), request, [20, stop], error=FAILED)
    assert delta.finish_reason is FinishReason.STOP
    assert request.error is None
    assert delta.token_ids == (20, stop)


def test_the_length_limit_before_an_error_is_the_length_limit() -> None:
    request = make_request(range(3), max_tokens=3)
    (delta,) = run_alone(make_scheduler(), request, [20, 21], error=FAILED)
    assert (delta.finish_reason, request.error) == (FinishReason.LENGTH, None)


def test_a_stop_token_that_would_complete_a_stop_text_is_the_reason_and_not_part_of_the_text() -> None:
    request = make_request(range(3), stop_token_ids=(TEXT,))
    request.end_check = told = Told()
    run_alone(make_scheduler(), request, [20, TEXT, 21])
    assert request.stop_reason == TEXT
    assert told.token_ids == [29, 20]


def test_an_end_token_ends_by_its_id_whatever_its_text() -> None:
    request = make_request(range(3))
    request.end_check = lambda token: "text" if token == EOS else None
    (delta,) = run_alone(make_scheduler(), request, [20, EOS, 21])
    assert (delta.finish_reason, request.stop_reason) == (FinishReason.STOP, None)


def test_an_end_check_that_raises_ends_its_request_alone() -> None:
    def raises(token: int) -> str | None:
        if token == 21:
            raise KeyError("two\nlines")
        return None

    scheduler, request = make_scheduler(), make_request(range(3))
    request.end_check = raises
    (delta,) = run_alone(scheduler, request, [20, 21, 22])
    assert (delta.finish_reason, delta.token_ids) == (FinishReason.ERROR, (20, 21))
    assert request.error is not None and "KeyError" in request.error and "\n" not in request.error
    assert scheduler.pool.num_free == scheduler.pool.num_usable


def test_a_request_that_is_aborted_while_its_step_runs_stays_aborted() -> None:
    """A stream that nobody holds any more is collected at any moment."""
    scheduler = make_scheduler()
    gone, stays = make_request(range(3), request_id="gone"), make_request(range(3), request_id="stays")
    for request in (gone, stays):
        scheduler.add(request)
    while (batch := scheduler.schedule()) is not None and len(batch.scheduled) < 2:
        scheduler.update(batch, step_output([29] if samples(batch) else []))
    assert batch is not None
    before = gone.output_token_ids
    scheduler.abort(gone)
    deltas = scheduler.update(batch, step_output([20], [21]))
    assert [delta.request for delta in deltas] == [stays]
    assert (gone.finish_reason, gone.output_token_ids) == (FinishReason.ABORT, before)
    assert stays.output_token_ids == [29, 21]


def test_the_end_check_is_not_told_of_tokens_beyond_the_limit() -> None:
    request = make_request(range(3), max_tokens=3)
    request.end_check = told = Told()
    (delta,) = run_alone(make_scheduler(), request, [20, 21, TEXT])
    assert (delta.finish_reason, request.stop_reason) == (FinishReason.LENGTH, None)
    assert told.token_ids == [29, 20, 21]


def test_the_last_allowed_token_completing_a_stop_text_is_a_stop() -> None:
    request = make_request(range(3), max_tokens=3)
    request.end_check = Told()
    (delta,) = run_alone(make_scheduler(), request, [20, TEXT])
    assert (delta.finish_reason, request.stop_reason) == (FinishReason.STOP, "text")


def test_an_aborted_request_keeps_its_output_and_its_end_check_is_told_no_more() -> None:
    scheduler = make_scheduler()
    request = make_request(range(3), logprobs=0)
    request.end_check = told = Told()
    (delta,) = run_alone(scheduler, request, [20, 21], logprobs=reported([20, 21], 1))
    assert delta.finish_reason is None
    scheduler.abort(request)
    assert (request.finish_reason, request.stop_reason, request.error) == (FinishReason.ABORT, None, None)
    assert request.output_token_ids == told.token_ids == [29, 20, 21]
    assert request.logprobs == reported([20, 21], 1)
    assert scheduler.schedule() is None
    assert scheduler.pool.num_free == scheduler.pool.num_usable


def test_an_aborted_request_leaves_the_others_where_they_are() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    first, second, third = (make_request(range(3), request_id=str(index)) for index in range(3))
    for request in (first, second, third):
        scheduler.add(request)
    decode_step_of(scheduler, 2)
    slot = second.slot
    scheduler.abort(first)
    assert (second.slot, second.finish_reason) == (slot, None)
    scheduler.schedule()
    assert scheduler.running == [second, third]


def advance(scheduler: Scheduler, *, accept: bool = False) -> Batch:
    """Runs a step that gives token 20 wherever it samples, after all drafts or none."""
    batch = scheduler.schedule()
    assert batch is not None
    drafts = tuple(entry.max_draft_tokens for entry in batch.scheduled)
    accepted = tuple(count if accept else 0 for count in drafts)
    token_ids = tuple(
        (20,) * (count + 1) if entry.samples else () for entry, count in zip(batch.scheduled, accepted, strict=True)
    )
    step = StepOutput(
        token_ids=token_ids,
        num_draft_tokens=drafts,
        num_accepted_tokens=accepted,
        errors=(None,) * len(token_ids),
    )
    scheduler.update(batch, step)
    return batch


def chunks_of(batch: Batch) -> list[tuple[str, int, int, int, bool]]:
    """Per entry: the request, tokens computed before, new tokens, drafts, and whether it samples."""
    return [
        (each.request.request_id, each.num_computed_tokens, each.num_new_tokens, each.max_draft_tokens, each.samples)
        for each in batch.scheduled
    ]


def add(scheduler: Scheduler, request_id: str, prompt: Sequence[int], **params: Any) -> Request:
    request = make_request(prompt, request_id=request_id, **params)
    scheduler.add(request)
    return request


def test_a_request_that_is_larger_than_what_is_free_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    first = add(scheduler, "first", range(16), max_tokens=8)
    large = add(scheduler, "large", range(16), max_tokens=8)
    small = add(scheduler, "small", range(1), max_tokens=1)
    scheduler.schedule()
    assert scheduler.running == [first]
    assert scheduler.waiting == [large, small]
    scheduler.abort(first)
    scheduler.schedule()
    assert scheduler.running == [large, small]


def test_a_request_starts_on_what_is_known_of_it_and_not_on_what_it_may_become() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=4)
    requests = [add(scheduler, str(number), range(4), max_tokens=24) for number in range(3)]
    scheduler.schedule()
    assert scheduler.running == requests


@pytest.mark.parametrize(("num_usable", "starts"), [(9, True), (8, False)])
def test_a_request_waits_while_those_that_run_need_the_blocks_for_the_rest_of_their_prompts(
    num_usable: int, starts: bool
) -> None:
    """The first has taken 2 blocks for its first chunk, knows that it needs 6, and gets one to go on."""
    scheduler = make_scheduler(num_blocks=num_usable + 1, block_size=4, chunk=8)
    add(scheduler, "first", range(24), max_tokens=4)
    advance(scheduler)
    late = add(scheduler, "late", range(8), max_tokens=4)
    advance(scheduler)
    assert (late in scheduler.running) == starts


def test_what_a_request_holds_for_rejected_drafts_is_not_counted_for_the_others() -> None:
    """The first has blocks to spare, and the second still needs all the free ones for its prompt and to go on."""
    scheduler = make_scheduler(num_blocks=15, block_size=1, max_num_seqs=3, chunk=2)
    first = add(scheduler, "first", range(1), max_tokens=12)
    advance(scheduler)
    advance(scheduler)
    assert (first.num_tokens, len(first.block_ids), scheduler.pool.num_free) == (3, 5, 9)
    second = add(scheduler, "second", range(8), max_tokens=2)
    advance(scheduler)
    late = add(scheduler, "late", range(1), max_tokens=2)
    advance(scheduler)
    assert second in scheduler.running
    assert late in scheduler.waiting


def test_those_that_wait_start_in_order_of_priority_then_of_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for number, priority in enumerate([5, 0, 5, -3, 0]):
        add(scheduler, str(number), range(3), max_tokens=1, priority=priority)
    order = [advance(scheduler).scheduled[0].request.request_id for _ in range(5)]
    assert order == ["3", "1", "4", "0", "2"]


@pytest.mark.parametrize(("priorities", "gives_way"), [((0, 0), "1"), ((1, 0), "0"), ((0, -1), "0"), ((-1, 0), "1")])
def test_of_two_the_one_with_the_higher_rank_goes_on_whoever_came_first(
    priorities: tuple[int, int], gives_way: str
) -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=1, k=0)
    for number, priority in enumerate(priorities):
        add(scheduler, str(number), range(3), max_tokens=5, priority=priority)
    seen = []
    while scheduler.has_work:
        seen += [request.request_id for request in advance(scheduler).preempted]
    assert set(seen) == {gives_way}


def test_nobody_gives_way_to_a_guess() -> None:
    scheduler = make_scheduler(num_blocks=14, block_size=1, k=5)
    requests = [add(scheduler, str(number), range(3), max_tokens=6) for number in range(2)]
    batches = [advance(scheduler) for _ in range(5)]
    # A block for the other one to go on is left, as long as there is one.
    assert chunks_of(batches[3]) == [("0", 4, 1, 3, True), ("1", 3, 1, 0, True)]
    assert chunks_of(batches[4]) == [("0", 5, 1, 2, True), ("1", 4, 1, 0, True)]
    assert scheduler.running == requests
    assert not any(batch.preempted for batch in batches)


def test_a_request_that_gave_way_replays_its_output_in_decode_steps_and_samples_after_its_newest_token() -> None:
    scheduler = make_scheduler(block_size=4, chunk=8, k=3, query_len=4)
    request = add(scheduler, "a", range(10), max_tokens=20)
    while request.num_output_tokens < 9:
        advance(scheduler, accept=True)
    before, steps = request.output_token_ids, request.stats.num_steps
    assert (len(before), scheduler.preempt(request)) == (9, True)
    assert scheduler.pool.num_free == scheduler.pool.num_usable
    found = [advance(scheduler) for _ in range(6)]
    assert [chunks_of(batch) for batch in found] == [
        [("a", 0, 8, 0, False)],
        [("a", 8, 2, 0, False)],
        [("a", 10, 4, 0, False)],
        [("a", 14, 4, 0, False)],
        [("a", 18, 1, 3, True)],
        [("a", 19, 1, 3, True)],
    ]
    assert [batch.is_prefill for batch in found] == [True, True, False, False, False, False]
    assert request.output_token_ids == [*before, 20, 20]
    assert request.stats.num_steps == steps + 2, "replaying is no step of the output"
    assert request.stats.num_preemptions == 1


def test_a_window_that_reaches_the_newest_token_samples_and_has_no_drafts() -> None:
    scheduler = make_scheduler(chunk=8, k=3, query_len=4)
    request = add(scheduler, "a", range(4), max_tokens=20)
    for _ in range(3):
        advance(scheduler)
    scheduler.preempt(request)
    advance(scheduler)
    assert chunks_of(advance(scheduler)) == [("a", 4, 3, 0, True)]
    assert chunks_of(advance(scheduler)) == [("a", 7, 1, 3, True)]


def test_those_that_replay_and_those_that_draft_share_a_step() -> None:
    scheduler = make_scheduler(chunk=8, k=2, query_len=3)
    ahead, behind = add(scheduler, "ahead", range(4)), add(scheduler, "behind", range(4))
    while behind.num_output_tokens < 4:
        advance(scheduler)
    scheduler.preempt(behind)
    advance(scheduler)
    while behind.is_prefilling:
        advance(scheduler)
    count = ahead.num_tokens - 1
    assert chunks_of(advance(scheduler)) == [("ahead", count, 1, 2, True), ("behind", 4, 3, 0, False)]
    assert chunks_of(advance(scheduler)) == [("ahead", count + 1, 1, 2, True), ("behind", 7, 1, 2, True)]


def test_a_request_that_does_not_run_cannot_give_way() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    first, waits = add(scheduler, "0", range(3), max_tokens=1), add(scheduler, "1", range(3))
    advance(scheduler)
    assert [scheduler.preempt(request) for request in (first, waits)] == [False, False]
    assert first.finish_reason is FinishReason.LENGTH
    assert scheduler.waiting == [waits]
    assert first.stats.num_preemptions == waits.stats.num_preemptions == 0


def test_a_request_that_gave_way_is_the_first_to_resume() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    first, second, third = (add(scheduler, str(number), range(3)) for number in range(3))
    for _ in range(3):
        advance(scheduler)
    scheduler.preempt(first)
    assert scheduler.waiting == [first, third]
    advance(scheduler)
    assert scheduler.running == [first, second]


def test_what_a_step_gave_a_request_that_gave_way_meanwhile_is_sampled_anew() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", range(3))
    advance(scheduler)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.preempt(request)
    assert scheduler.update(batch, step_output([20])) == []
    assert (request.output_token_ids, request.num_computed_tokens) == ([20], 0)
    while request.num_output_tokens < 2:
        advance(scheduler)
    assert request.output_token_ids == [20, 20]


def test_a_prompt_that_gave_way_does_not_start_its_clock_again() -> None:
    scheduler = make_scheduler(chunk=2)
    request = add(scheduler, "a", range(5))
    advance(scheduler)
    admitted, queued = request.admitted_at, request.stats.queue_s
    scheduler.preempt(request)
    advance(scheduler)
    assert (request.admitted_at, request.stats.queue_s) == (admitted, queued)


@pytest.mark.parametrize(("caching", "found"), [("exact", 16), ("fast", 20), (None, 0)])
def test_the_second_of_two_equal_prompts_computes_only_what_was_not_there(caching: str | None, found: int) -> None:
    scheduler = make_scheduler(block_size=4, chunk=8, caching=caching)
    first = add(scheduler, "0", range(22), max_tokens=1)
    while scheduler.has_work:
        advance(scheduler)
    second = add(scheduler, "1", range(22), max_tokens=1)
    batch = advance(scheduler)
    assert chunks_of(batch)[0][:3] == ("1", found, min(8, 22 - found))
    assert (first.stats.num_cached_tokens, second.stats.num_cached_tokens) == (0, found)


def test_two_equal_prompts_at_once_share_what_the_first_has_computed() -> None:
    """The second finds each chunk that the first has just run, and needs no blocks for it."""
    scheduler = make_scheduler(num_blocks=9, block_size=4, chunk=8, k=0, caching="exact")
    first = add(scheduler, "0", range(20), max_tokens=1)
    while first.is_prefilling:
        advance(scheduler)
    assert scheduler.pool.num_free == 8
    first, second = (add(scheduler, name, range(20), max_tokens=9) for name in "12")
    batches = [advance(scheduler) for _ in range(3)]
    assert [chunks_of(batch)[0][:3] for batch in batches] == [("1", 16, 4), ("1", 20, 1), ("2", 16, 4)]
    assert first.block_ids[:4] == second.block_ids[:4]


def test_a_resumed_request_that_finds_its_whole_prompt_goes_straight_to_its_output() -> None:
    scheduler = make_scheduler(block_size=4, chunk=8, k=2, query_len=3, caching="exact")
    request = add(scheduler, "a", range(16))
    for _ in range(4):
        advance(scheduler)
    blocks = request.block_ids[:4]
    scheduler.preempt(request)
    assert chunks_of(advance(scheduler)) == [("a", 16, 3, 0, True)]
    assert request.block_ids[:4] == blocks
    assert request.stats.num_cached_tokens == 0, "what it lost and found again was not saved"


def test_a_request_that_shares_its_beginning_with_one_that_runs_needs_blocks_for_the_rest_alone() -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, chunk=8, k=0, caching="exact")
    first = add(scheduler, "0", range(17), max_tokens=3)
    while first.is_prefilling:
        advance(scheduler)
    assert scheduler.pool.num_free == 2
    second = add(scheduler, "1", range(17), max_tokens=3)
    advance(scheduler)
    assert second in scheduler.running


def test_free_blocks_that_a_request_finds_are_free_no_more_once_it_runs() -> None:
    """What nobody holds can be found without computing it, but it takes up room like any other block."""
    scheduler = make_scheduler(num_blocks=7, block_size=4, chunk=8, k=0, caching="exact")
    add(scheduler, "gone", range(17), max_tokens=1)
    while scheduler.has_work:
        advance(scheduler)
    add(scheduler, "first", range(50, 53), max_tokens=1)
    second = add(scheduler, "second", range(17), max_tokens=1)
    scheduler.schedule()
    assert second in scheduler.waiting, "it needs 5 blocks, the first 1 and one to go on: 7 of 6"


def test_a_prompt_that_gave_way_half_computed_finds_that_half() -> None:
    scheduler = make_scheduler(block_size=4, chunk=8, caching="exact")
    request = add(scheduler, "a", range(30))
    advance(scheduler)
    advance(scheduler)
    scheduler.preempt(request)
    assert chunks_of(advance(scheduler)) == [("a", 16, 8, 0, False)]
    assert request.stats.num_cached_tokens == 0


def test_what_a_resumed_request_had_to_compute_again_can_be_found_again() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=4, chunk=8, k=0, caching="exact")
    request = add(scheduler, "a", range(17), max_tokens=12)
    while request.is_prefilling:
        advance(scheduler)
    scheduler.preempt(request)
    pool = scheduler.pool
    pool.release(pool.allocate(pool.num_usable))  # what was in the blocks is lost
    while request.is_prefilling:
        advance(scheduler)
    second = add(scheduler, "b", range(17), max_tokens=1)
    scheduler.schedule()
    assert second.num_computed_tokens == 16


def test_only_what_every_model_has_computed_can_be_found() -> None:
    final = 8
    scheduler = make_scheduler(block_size=4, caching="fast", num_final_tokens=lambda request: final)
    add(scheduler, "0", range(22), max_tokens=1)
    while scheduler.has_work:
        advance(scheduler)
    second = add(scheduler, "1", range(22), max_tokens=1)
    scheduler.schedule()
    assert second.num_computed_tokens == 8


def test_rejected_drafts_are_never_found() -> None:
    """A prompt that goes on as the drafts said, and not as the output did, finds what both have in common."""
    scheduler = make_scheduler(block_size=1, k=3, caching="fast")
    add(scheduler, "0", range(3), max_tokens=3)
    while scheduler.has_work:
        advance(scheduler)
    for name, after, found in (("1", [20, 21, 21], 4), ("2", [20, 20, 20], 5)):
        other = add(scheduler, name, [0, 1, 2, *after], max_tokens=1)
        scheduler.schedule()
        assert other.num_computed_tokens == found
        scheduler.abort(other)


def test_a_list_of_blocks_is_never_changed_and_replaced_only_where_it_grows() -> None:
    """So whoever has written it into a block table need not look at it again."""
    scheduler, request = make_scheduler(block_size=4, k=2), make_request(range(3, 8), max_tokens=20)
    scheduler.add(request)
    seen: list[tuple[list[int], list[int]]] = []
    while (batch := scheduler.schedule()) is not None:
        if not seen or seen[-1][0] is not request.block_ids:
            seen.append((request.block_ids, list(request.block_ids)))
        scheduler.update(batch, step_output([9]))
    assert all(blocks == as_it_was for blocks, as_it_was in seen)
    sizes = [len(blocks) for blocks, _ in seen]
    assert sizes == sorted(set(sizes))
    assert len(sizes) > 3
