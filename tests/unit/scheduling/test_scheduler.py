"""The scheduler, driven by a fake model: lengths, stops, blocks, order, turns and aborts, for any mix of requests."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compspec.batch import SCRATCH_BLOCK, Batch, ScheduledRequest, StepOutput
from compspec.errors import CapacityError
from compspec.request import FinishReason, Logprob, Request, TokenDelta, TokenLogprobs
from compspec.scheduling.block_pool import BlockPool
from compspec.scheduling.scheduler import Scheduler
from tests.unit.fakes import make_request, step_output

EOS = 2
TEXT = 11
"""The token that completes a stop text, where a request has one."""
VOCAB = 30
FAILED = "the model broke"


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


class Told:
    """An end check that remembers what it was told."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def __call__(self, token_id: int) -> str | None:
        self.token_ids.append(token_id)
        return "text" if token_id == TEXT else None


def expected_end(request: Request, error_at: int | None) -> tuple[list[int], FinishReason, int | str | None]:
    """The whole output, by definition: up to and with the first end, before a failure, at most max_tokens."""
    params, tokens = request.params, truth(request)
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


def fake_step(batch: Batch, rng: Random, error_at: Mapping[str, int | None]) -> StepOutput:
    """The true tokens of each request, a random number of drafts accepted, up to where it fails."""
    token_ids, drafted, accepted, errors = [], [], [], []
    for entry in batch.scheduled:
        if not entry.samples:
            token_ids.append(())
            drafted.append(0)
            accepted.append(0)
            errors.append(None)
            continue
        drafted.append(rng.randint(0, entry.max_draft_tokens))
        accepted.append(rng.randint(0, drafted[-1]))
        done, failure = entry.request.num_output_tokens, error_at.get(entry.request.request_id)
        errors.append(None)
        end = done + accepted[-1] + 1
        if failure is not None and failure < end:
            accepted[-1], end = failure - done, failure
            errors[-1] = FAILED
        token_ids.append(tuple(truth(entry.request)[done:end]))
    return StepOutput(
        token_ids=tuple(token_ids),
        num_draft_tokens=tuple(drafted),
        num_accepted_tokens=tuple(accepted),
        errors=tuple(errors),
    )


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
    error_at: dict[str, int | None] = field(default_factory=dict)
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
        output = fake_step(batch, self.rng, self.error_at)
        logprobs = [
            None if entry.request.logprobs is None else reported(tokens, entry.request.num_output_tokens)
            for entry, tokens in zip(batch.scheduled, output.token_ids, strict=True)
        ]
        deltas = scheduler.update(batch, output, logprobs)
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


def samples(batch: Batch) -> bool:
    """Whether any request samples a token in this step."""
    return any(entry.samples for entry in batch.scheduled)


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
                        "error_at": st.none() | st.none() | st.integers(0, 14),
                        "has_stop_text": st.booleans(),
                        "logprobs": st.sampled_from([None, 0]),
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
                **{
                    name: spec[name]
                    for name in ("max_tokens", "ignore_eos", "stop_token_ids", "speculative", "logprobs")
                },
            )
            request.end_check = Told() if spec["has_stop_text"] else None
            driver.error_at[request.request_id] = spec["error_at"]
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
        tokens, reason, stop_reason = expected_end(request, driver.error_at[request.request_id])
        found = driver.outputs[request.request_id]
        if request.request_id in aborted:
            assert request.finish_reason is FinishReason.ABORT
            assert found == tokens[: len(found)]
        else:
            assert (found, request.finish_reason, request.stop_reason) == (tokens, reason, stop_reason)


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
