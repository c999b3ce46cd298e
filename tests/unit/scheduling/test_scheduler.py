"""The scheduler, driven by a fake model: lengths, stops, blocks, order, turns and aborts, for any mix of requests."""

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compspec.batch import Batch, ScheduledRequest, StepOutput
from compspec.errors import CapacityError
from compspec.request import FinishReason, Request, TokenDelta
from compspec.scheduling.block_pool import SCRATCH_BLOCK, BlockPool
from compspec.scheduling.scheduler import Scheduler
from tests.unit.fakes import make_request, step_output

EOS = 2
VOCAB = 30


def make_scheduler(
    num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 4, chunk: int = 8, k: int = 3
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        prefill_chunk=chunk,
        max_draft_tokens=k,
        eos_token_ids=frozenset({EOS}),
    )


def truth(request: Request) -> list[int]:
    """What the fake model says after this prompt, at all length; some of it stops."""
    rng = Random(request.request_id)
    return [rng.randrange(VOCAB) for _ in range(request.max_tokens + 20)]


def expected_end(request: Request) -> tuple[list[int], FinishReason]:
    """The whole output, by definition: up to and with the first stop, at most max_tokens."""
    params, tokens = request.params, truth(request)
    for index, token in enumerate(tokens[: request.max_tokens]):
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            return tokens[: index + 1], FinishReason.STOP
    return tokens[: request.max_tokens], FinishReason.LENGTH


def fake_step(batch: Batch, rng: Random) -> StepOutput:
    """The true tokens of each request, a random number of drafts accepted."""
    token_ids, drafted, accepted = [], [], []
    for entry in batch.scheduled:
        if not entry.samples:
            token_ids.append(())
            drafted.append(0)
            accepted.append(0)
            continue
        drafted.append(rng.randint(0, entry.max_draft_tokens))
        accepted.append(rng.randint(0, drafted[-1]))
        done = entry.request.num_output_tokens
        token_ids.append(tuple(truth(entry.request)[done : done + accepted[-1] + 1]))
    return StepOutput(token_ids=tuple(token_ids), num_draft_tokens=tuple(drafted), num_accepted_tokens=tuple(accepted))


@dataclass
class Driver:
    """Runs a scheduler and checks at every step what must always hold."""

    scheduler: Scheduler
    max_num_seqs: int
    chunk: int
    rng: Random
    submitted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    last_kind: bool | None = None
    last_had_both: bool = False

    def submit(self, request: Request) -> None:
        self.scheduler.add(request)
        self.submitted.append(request)
        self.outputs[request.request_id] = []

    def step(self) -> list[TokenDelta]:
        scheduler = self.scheduler
        batch = scheduler.schedule()
        assert batch is not None
        self._check_admission()
        self._check_ownership()
        self._check_turns(batch)
        for entry in batch.scheduled:
            self._check_entry(entry, batch.is_prefill)
        deltas = scheduler.update(batch, fake_step(batch, self.rng))
        for delta in deltas:
            self.outputs[delta.request.request_id] += delta.token_ids
            self._check_delta(delta)
        self._check_ownership()
        return deltas

    def abort(self, request: Request) -> None:
        pool = self.scheduler.pool
        free, held = pool.num_free, len(request.block_ids)
        self.scheduler.abort(request)
        assert pool.num_free == free + held, "abort did not free the blocks at once"
        assert request.finish_reason is not None
        assert request not in self.scheduler.running
        assert request not in self.scheduler.waiting
        self._check_ownership()

    def _check_admission(self) -> None:
        """First come, first served; and nobody waits who could run."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        self.admitted += [request for request in scheduler.running if request not in self.admitted]
        order = [request for request in self.submitted if request in self.admitted]
        assert self.admitted == order
        if scheduler.waiting and len(scheduler.running) < self.max_num_seqs:
            assert pool.blocks_for(scheduler.waiting[0].max_total_tokens) > pool.num_free

    def _check_ownership(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.pool
        held = [block for request in scheduler.running for block in request.block_ids]
        assert len(held) == len(set(held)), "two running requests share a block"
        assert SCRATCH_BLOCK not in held
        assert pool.num_free == pool.num_usable - len(held), "a block leaked"
        slots = [request.slot for request in scheduler.running]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(self.max_num_seqs))
        assert all(request.slot is None and not request.block_ids for request in scheduler.waiting)

    def _check_turns(self, batch: Batch) -> None:
        """Where prompts and decoding requests are both there, they alternate."""
        prefilling = [request for request in self.scheduler.running if request.is_prefilling]
        decoding = [request for request in self.scheduler.running if not request.is_prefilling]
        if batch.is_prefill:
            assert [entry.request for entry in batch.scheduled] == prefilling[:1], "not the first prompt's turn"
        else:
            assert [entry.request for entry in batch.scheduled] == decoding
        both = bool(prefilling and decoding)
        if both and self.last_had_both:
            assert batch.is_prefill != self.last_kind, "one kind ran twice while the other waited"
        self.last_kind, self.last_had_both = batch.is_prefill, both

    def _check_entry(self, entry: ScheduledRequest, is_prefill: bool) -> None:
        request, pool = entry.request, self.scheduler.pool
        assert entry.slot == request.slot
        assert entry.num_computed_tokens == request.num_computed_tokens
        rows = entry.num_new_tokens + entry.max_draft_tokens
        assert entry.num_computed_tokens + rows <= len(request.block_ids) * pool.block_size, "rows without a block"
        if is_prefill:
            end = entry.num_computed_tokens + entry.num_new_tokens
            assert entry.num_computed_tokens % self.chunk == 0
            assert 1 <= entry.num_new_tokens <= self.chunk
            assert end % self.chunk == 0 or end == request.num_prompt_tokens
            assert entry.samples == (end == request.num_prompt_tokens)
            assert entry.max_draft_tokens == 0
        else:
            assert entry.samples
            assert entry.num_computed_tokens == request.num_tokens - 1
            assert entry.num_new_tokens == 1
            assert 0 <= entry.max_draft_tokens < request.max_tokens - request.num_output_tokens

    def _check_delta(self, delta: TokenDelta) -> None:
        request = delta.request
        assert delta.token_ids, "a step that samples gives at least one token"
        assert request.output_token_ids == self.outputs[request.request_id]
        assert delta.finish_reason is request.finish_reason
        assert (request.finish_reason is not None) == (request not in self.scheduler.running)
        if request.finish_reason is None:
            assert request.num_computed_tokens == request.num_tokens - 1
        stats = request.stats
        assert stats.num_decode_tokens + 1 == request.num_output_tokens
        assert stats.num_steps == stats.num_decode_steps + 1
        assert stats.num_accepted_tokens <= stats.num_draft_tokens


@st.composite
def mixes(draw: st.DrawFn) -> dict:
    return {
        "num_blocks": draw(st.integers(3, 24)),
        "block_size": draw(st.sampled_from([1, 2, 4, 16])),
        "max_num_seqs": draw(st.integers(1, 4)),
        "chunk": draw(st.sampled_from([1, 3, 4, 16])),
        "k": draw(st.integers(0, 5)),
        "requests": draw(
            st.lists(
                st.fixed_dictionaries(
                    {
                        "prompt": st.integers(1, 20),
                        "max_tokens": st.integers(1, 14),
                        "ignore_eos": st.booleans(),
                        "stop_token_ids": st.sampled_from([(), (7,), (7, 8, 9, 10)]),
                        "speculative": st.sampled_from([None, False, 1, 9]),
                        "at": st.integers(0, 12),
                        "abort_at": st.none() | st.integers(0, 14),
                    }
                ),
                min_size=1,
                max_size=7,
            )
        ),
        "seed": draw(st.integers(0, 2**32)),
    }


@settings(max_examples=1000, deadline=None)
@given(mixes())
def test_any_mix_of_requests_ends_exactly_right_and_leaks_nothing(mix: dict) -> None:
    scheduler = make_scheduler(mix["num_blocks"], mix["block_size"], mix["max_num_seqs"], mix["chunk"], mix["k"])
    driver = Driver(scheduler, mix["max_num_seqs"], mix["chunk"], Random(mix["seed"]))
    pending = deque(sorted(enumerate(mix["requests"]), key=lambda item: item[1]["at"]))
    aborts: list[tuple[int, Request]] = []
    aborted: set[str] = set()
    step = 0
    while pending or scheduler.has_work:
        while pending and pending[0][1]["at"] <= step:
            number, spec = pending.popleft()
            request = make_request(
                range(spec["prompt"]),
                request_id=f"{number}-{mix['seed']}",
                **{name: spec[name] for name in ("max_tokens", "ignore_eos", "stop_token_ids", "speculative")},
            )
            needed = scheduler.pool.blocks_for(spec["prompt"] + spec["max_tokens"])
            if needed > scheduler.pool.num_usable:
                with pytest.raises(CapacityError, match=r"cache\.num_blocks"):
                    driver.submit(request)
                continue
            driver.submit(request)
            if spec["abort_at"] is not None:
                aborts.append((spec["abort_at"], request))
        for when, request in aborts:
            if when == step and request.finish_reason is None:
                driver.abort(request)
                aborted.add(request.request_id)
        if scheduler.has_work:
            driver.step()
        else:
            assert scheduler.schedule() is None
        step += 1
        assert step < 2000, "a request never ended"
    assert scheduler.pool.num_free == scheduler.pool.num_usable
    for request in driver.submitted:
        tokens, reason = expected_end(request)
        found = driver.outputs[request.request_id]
        if request.request_id in aborted:
            assert request.finish_reason is FinishReason.ABORT
            assert found == tokens[: len(found)]
        else:
            assert (found, request.finish_reason) == (tokens, reason)


def run_alone(scheduler: Scheduler, request: Request, output: list[int]) -> list[TokenDelta]:
    """Prefills, then gives the whole `output` in one step, all but the last of it as accepted drafts."""
    scheduler.add(request)
    while True:
        batch = scheduler.schedule()
        assert batch is not None
        if not batch.is_prefill:
            break
        scheduler.update(batch, step_output([29] if batch.samples else []))
    accepted = len(output) - 1
    return scheduler.update(
        batch,
        StepOutput(token_ids=(tuple(output),), num_draft_tokens=(accepted,), num_accepted_tokens=(accepted,)),
    )


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("stop", [EOS, 7])
def test_a_stop_at_any_place_of_the_window_ends_the_output_there(at: int, stop: int) -> None:
    window = [20, 21, 22, 23]
    window[at] = stop
    request = make_request(range(3), stop_token_ids=(7,))
    (delta,) = run_alone(make_scheduler(), request, window)
    assert list(delta.token_ids) == window[: at + 1]
    assert delta.finish_reason is FinishReason.STOP
    assert request.output_token_ids == [29, *window[: at + 1]]
    # What the cut dropped was not delivered, so it was not accepted; the stop itself may have been a draft.
    assert request.stats.num_accepted_tokens == min(at + 1, 3)
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
        scheduler.update(batch, step_output([20] if batch.samples else []))
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


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_blocks=9, block_size=4, max_num_seqs=4)
    first = make_request(range(8), max_tokens=8, request_id="first")
    large = make_request(range(8), max_tokens=24, request_id="large")
    small = make_request(range(1), max_tokens=1, request_id="small")
    for request in (first, large, small):
        scheduler.add(request)
    scheduler.schedule()
    assert scheduler.running == [first]
    scheduler.abort(first)
    scheduler.schedule()
    assert scheduler.running == [large]
