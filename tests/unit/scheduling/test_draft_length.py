"""How many drafts: a simulated proposer and target, whose acceptance and times are known, against every fixed K."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest

from compspec.batch import Batch, StepOutput
from compspec.request import FinishReason, Request
from compspec.scheduling.draft_length import DraftLengths
from tests.unit.fakes import entry, make_request, prefill

K = 7


@dataclass(frozen=True)
class Text:
    """What drafts of a request are worth: the chance that there are any, and of each to follow and to be accepted."""

    accepted: tuple[float, ...]
    any: float = 1.0
    more: float = 1.0

    def step(self, asked: int, rng: Random) -> tuple[int, int]:
        num_drafts = int(asked > 0 and rng.random() < self.any)
        while 0 < num_drafts < asked and rng.random() < self.more:
            num_drafts += 1
        num_accepted = 0
        while num_accepted < num_drafts and rng.random() < self.accepted[num_accepted]:
            num_accepted += 1
        return num_drafts, num_accepted


@dataclass(frozen=True)
class Machine:
    """Seconds: of a step by its width, of each sampled row, and of the proposer, per call and per draft."""

    widths: tuple[int, int]
    wide_s: float
    row_s: float = 0.00005
    call_s: float = 0.00005
    draft_s: float = 0.0
    narrow_s: float = 0.010

    def bucket_of(self, num_requests: int, num_rows: int) -> tuple[int, int]:
        return next(size for size in (1, 4, 8) if size >= num_requests), self.widths[num_rows > self.widths[0]]


class Run:
    """Steps of some requests, at a fixed K or as `lengths` says; times are noisy, their sum is not."""

    def __init__(self, machine: Machine, k: int = K, seed: int = 0) -> None:
        self.machine = machine
        self.k = k
        self.rng = Random(seed)
        self.num_tokens = 0
        self.seconds = 0.0
        self.lengths: DraftLengths | None = None
        self.slow: Callable[[int], float] = lambda step: 1.0
        self.num_steps = 0

    def steps(self, num_steps: int, texts: Sequence[Text], requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """What was asked for in each step."""
        history = []
        for _ in range(num_steps):
            entries = (entry(request, slot, max_drafts=self.k) for slot, request in enumerate(requests))
            batch = Batch(scheduled=tuple(entries), is_prefill=False)
            if self.lengths is not None:
                batch = self.lengths.limit(batch)
            asked = tuple(each.max_draft_tokens for each in batch.scheduled)
            drawn = [text.step(most, self.rng) for text, most in zip(texts, asked, strict=True)]
            drafts, accepted = tuple(count for count, _ in drawn), tuple(count for _, count in drawn)
            machine = self.machine
            _, width = machine.bucket_of(len(requests), 1 + max(drafts))
            rest_s = machine.narrow_s if width == machine.widths[0] else machine.wide_s
            rest_s += machine.row_s * sum(drafts)
            propose_s = machine.call_s * (max(asked) > 0) + machine.draft_s * max(asked)
            noise = max(0.5, self.rng.gauss(1, 0.05)) * self.slow(self.num_steps)
            if self.lengths is not None:
                output = StepOutput(
                    token_ids=((0,),) * len(requests),
                    num_draft_tokens=drafts,
                    num_accepted_tokens=accepted,
                    errors=(None,) * len(requests),
                )
                self.lengths.observe(batch, output, propose_s=propose_s * noise, step_s=(propose_s + rest_s) * noise)
            self.num_tokens += len(requests) + sum(accepted)
            self.seconds += propose_s + rest_s
            self.num_steps += 1
            history.append(asked)
        return history

    @property
    def speed(self) -> float:
        return self.num_tokens / self.seconds


def adaptive(machine: Machine, seed: int = 0) -> Run:
    run = Run(machine, seed=seed)
    run.lengths = DraftLengths(K, machine.bucket_of)
    return run


def new(*names: str) -> list[Request]:
    return [make_request(request_id=name, max_tokens=9) for name in names]


def speed(machine: Machine, texts: Sequence[Text], k: int | None, num_steps: int = 400, seed: int = 0) -> float:
    run = adaptive(machine, seed) if k is None else Run(machine, k, seed)
    run.steps(num_steps, texts, new(*map(str, range(len(texts)))))
    return run.speed


NOTHING = Text((0.0,) * K)
PROSE = Text((0.3, 0.5, 0.6, 0.6, 0.6, 0.6, 0.6), any=0.4)
SUFFIX = Text((0.6,) + (0.8,) * 6, any=0.7, more=0.6)
SOME = Text((0.5,) * K)
MUCH = Text((0.8,) * K)
COPY = Text((0.97,) * K)

LOOKUP = Machine((2, 8), 0.012)
DEAR_WIDTH = Machine((2, 8), 0.020)
FAST = Machine((1, 8), 0.012)
DOUBLE = Machine((1, 8), 0.020)
DRAFT_MODEL = Machine((2, 8), 0.012, draft_s=0.0015)
DEAR_MODEL = Machine((1, 8), 0.013, draft_s=0.010)
DEAR_ROWS = Machine((2, 8), 0.013, row_s=0.0003)
MACHINES = {
    "lookup": LOOKUP,
    "dear width": DEAR_WIDTH,
    "fast": FAST,
    "double": DOUBLE,
    "draft model": DRAFT_MODEL,
    "dear model": DEAR_MODEL,
    "dear rows": DEAR_ROWS,
}


@pytest.mark.parametrize("text", [PROSE, SUFFIX, SOME, MUCH, COPY])
@pytest.mark.parametrize("machine", MACHINES)
def test_it_is_as_fast_as_the_best_fixed_choice(machine: str, text: Text) -> None:
    best = max(speed(MACHINES[machine], [text], k, num_steps=2000) for k in (0, 1, 3, 5, 7))
    found = [speed(MACHINES[machine], [text], None, num_steps=500, seed=seed) for seed in range(4)]
    # Learning costs a little; where two choices are nearly equal it may sit on the wrong one.
    assert sum(found) / 4 > 0.94 * best


@pytest.mark.parametrize("num_requests", [1, 4])
@pytest.mark.parametrize("machine", MACHINES)
def test_where_nothing_is_accepted_it_costs_two_percent_at_most(machine: str, num_requests: int) -> None:
    texts = [NOTHING] * num_requests
    plain = speed(MACHINES[machine], texts, 0)
    assert min(speed(MACHINES[machine], texts, None, num_steps=600, seed=seed) for seed in range(3)) > 0.98 * plain


@pytest.mark.parametrize("machine", [LOOKUP, FAST, DOUBLE, DRAFT_MODEL])
def test_it_comes_back_when_the_text_becomes_one_that_can_be_guessed(machine: Machine) -> None:
    run, requests = adaptive(machine), new("a")
    assert sum(count > 1 for (count,) in run.steps(300, [NOTHING], requests)[-50:]) <= 3
    # One draft in the plain step's shape is so cheap that it is on and off in turn.
    assert machine is LOOKUP or requests[0].stats.speculation_off_because is not None
    found = run.steps(200, [COPY], requests)
    # A probe at twice the price can be paid every 140 steps; the cheaper, the sooner.
    assert all(asked == (K,) for asked in found[-40 if machine is DOUBLE else -100 :])
    assert requests[0].stats.speculation_off_because is None


def test_positions_that_failed_once_are_tried_again_where_those_before_them_succeed() -> None:
    run, requests = adaptive(DEAR_WIDTH), new("a")
    first_alone = Text((0.9,) + (0.0,) * 6)
    assert sum(count > 1 for (count,) in run.steps(400, [first_alone], requests)) < 60
    assert run.speed > 0.94 * speed(DEAR_WIDTH, [first_alone], 1)
    assert set(run.steps(100, [COPY], requests)[-20:]) == {(K,)}


def test_it_stops_soon_when_drafts_begin_to_fail() -> None:
    run, requests = adaptive(DOUBLE), new("a")
    assert run.steps(100, [COPY], requests)[-1] == (K,)
    assert sum(asked > 0 for (asked,) in run.steps(100, [NOTHING], requests)) < 14


def test_a_new_request_starts_from_what_the_others_have_seen() -> None:
    run = adaptive(DOUBLE)
    run.steps(200, [NOTHING], new("a"))
    assert sum(asked > 0 for (asked,) in run.steps(60, [NOTHING], new("b"))) <= 1


def test_each_request_of_a_batch_gets_its_own_length() -> None:
    run, requests = adaptive(DEAR_ROWS), new("a", "b", "c", "d")
    asked = run.steps(250, [COPY, COPY, NOTHING, NOTHING], requests)[-50:]
    assert all(copy == K for step in asked for copy in step[:2])
    assert sum(rest for step in asked for rest in step[2:]) < 50
    assert requests[0].stats.speculation_off_because is None
    assert requests[2].stats.speculation_off_because is not None
    best = max(speed(DEAR_ROWS, [COPY, COPY, NOTHING, NOTHING], k) for k in (0, 1, 3, 5, 7))
    assert run.speed > best


def test_a_draft_that_costs_nothing_is_always_made() -> None:
    free = Machine((2, 8), 0.020, row_s=0.0, call_s=0.0)
    run, requests = adaptive(free), new("a")
    asked = run.steps(900, [NOTHING], requests)
    assert set(asked[-200:]) == {(1,)}
    assert requests[0].stats.speculation_off_because is None


@pytest.mark.parametrize(("text", "is_on"), [(NOTHING, False), (MUCH, True)])
def test_single_slow_steps_change_nothing(text: Text, is_on: bool) -> None:
    run, requests = adaptive(FAST), new("a")
    run.steps(100, [text], requests)
    run.slow = lambda step: 20.0 if step % 10 == 0 else 1.0
    asked = run.steps(200, [text], requests)
    assert sum(count > 0 for (count,) in asked) > 190 if is_on else sum(count > 0 for (count,) in asked) < 20


def test_the_first_steps_may_be_slow() -> None:
    for slow_step in (0, 3):
        run, requests = adaptive(FAST), new("a")
        run.slow = lambda step, first=slow_step: 20.0 if first <= step < first + 2 else 1.0  # type: ignore[misc]
        run.steps(60, [MUCH], requests)
        assert set(run.steps(20, [MUCH], requests)) == {(K,)}


def test_a_load_that_stays_is_learned() -> None:
    run, requests = adaptive(FAST), new("a")
    run.steps(150, [NOTHING], requests)
    run.slow = lambda step: 2.0
    assert sum(count > 0 for (count,) in run.steps(200, [NOTHING], requests)) < 25


def test_a_shape_that_becomes_dear_is_given_up() -> None:
    run, requests = adaptive(FAST), new("a")
    assert all(count > 3 for (count,) in run.steps(200, [SOME], requests)[-20:])
    run.machine = replace(FAST, wide_s=0.060)
    assert sum(count > 0 for (count,) in run.steps(200, [SOME], requests)) < 25


def test_a_probe_that_succeeds_pays_for_the_next() -> None:
    """Where one success does not decide, as a draft model's first draft that half of the time is right."""
    is_on = []
    for seed in range(3):
        run, requests = adaptive(DRAFT_MODEL, seed), new("a")
        run.steps(300, [NOTHING], requests)
        run.steps(120, [SOME], requests)
        is_on.append(requests[0].stats.speculation_off_because is None)
    assert sum(is_on) >= 2


def test_the_plain_step_is_measured_again() -> None:
    run, requests = adaptive(FAST), new("a")
    run.steps(50, [COPY], requests)
    asked = run.steps(600, [COPY], requests)
    assert 1 <= sum(count == 0 for (count,) in asked) <= 4


def test_a_first_draft_step_does_not_ask_for_everything() -> None:
    asked = adaptive(DEAR_MODEL).steps(8, [COPY], new("a"))
    assert max(asked) == (1,)


def test_never_more_than_a_request_may_have() -> None:
    run, (first, second, third) = adaptive(LOOKUP), new("a", "b", "c")
    run.steps(50, [COPY] * 3, [first, second, third])
    entries = (entry(first, 0, max_drafts=2), entry(second, 1, max_drafts=0), entry(third, 2, max_drafts=7))
    batch = Batch(scheduled=tuple(entries), is_prefill=False)
    assert run.lengths is not None
    limited = run.lengths.limit(batch)
    assert limited == replace(batch, scheduled=limited.scheduled)
    assert [each.max_draft_tokens for each in limited.scheduled] == [2, 0, 7]
    without = Batch(scheduled=(entry(second, 1, max_drafts=0),), is_prefill=False)
    assert run.lengths.limit(without) is without


def test_prompts_are_left_alone() -> None:
    lengths = DraftLengths(K, LOOKUP.bucket_of)
    (request,) = new("a")
    batch = prefill(request, 0, 0, 3)
    batch = replace(batch, scheduled=(replace(batch.scheduled[0], max_draft_tokens=K),))
    assert lengths.limit(batch) is batch
    output = StepOutput(token_ids=((1,),), num_draft_tokens=(0,), num_accepted_tokens=(0,), errors=(None,))
    before = repr(vars(lengths))
    lengths.observe(batch, output, propose_s=0.0, step_s=9.0)
    assert repr(vars(lengths)) == before


def test_tokens_that_are_replayed_make_a_wide_step_anyway() -> None:
    machine = Machine((2, 8), 0.040)
    run, (first, second) = adaptive(machine), new("a", "b")
    run.steps(100, [MUCH] * 2, [first, second])
    assert run.steps(1, [MUCH] * 2, [first, second]) == [(1, 1)]
    assert run.lengths is not None
    replayed = entry(second, 1, num_computed=0, num_new=8, max_drafts=0)
    batch = Batch(scheduled=(entry(first, 0, max_drafts=K), replayed), is_prefill=False)
    for _ in range(8):
        limited = run.lengths.limit(batch)
        drafted = (limited.scheduled[0].max_draft_tokens, 0)
        output = StepOutput(
            token_ids=((1,), ()), num_draft_tokens=drafted, num_accepted_tokens=drafted, errors=(None, None)
        )
        run.lengths.observe(limited, output, propose_s=0.00005, step_s=0.040)
    assert run.lengths.limit(batch).scheduled[0].max_draft_tokens == K


def test_the_statistics_say_why_it_is_off_and_what_was_probed() -> None:
    run, requests = adaptive(FAST), new("a")
    asked = run.steps(300, [NOTHING], requests)
    stats = requests[0].stats
    assert stats.speculation_off_because is not None
    assert stats.speculation_off_because.startswith("it did not pay: about 0.")
    assert "of 7 drafts accepted per step" in stats.speculation_off_because
    ratio = float(stats.speculation_off_because.split(" times as long")[0].split()[-1])
    assert 1.1 < ratio < 1.4
    undrafted = sum(count == 0 for (count,) in asked)
    assert stats.num_undrafted_steps == undrafted - 3  # three measured the plain step
    assert 2 <= stats.num_probes < 20


def test_a_reason_of_somebody_else_stays() -> None:
    run, requests = adaptive(DOUBLE), new("a")
    requests[0].stats.speculation_off_because = "the draft model's context is full"
    run.steps(200, [NOTHING], requests)
    run.steps(400, [COPY], requests)
    assert requests[0].stats.speculation_off_because == "the draft model's context is full"


def test_what_is_known_of_a_request_goes_when_it_ends_and_stays_when_it_is_preempted() -> None:
    run, (request,) = adaptive(DOUBLE), new("a")
    run.steps(100, [NOTHING], [request])
    assert run.lengths is not None
    run.lengths.forget(request)
    assert "a" in run.lengths._states
    request.finish_reason = FinishReason.ABORT
    run.lengths.forget(request)
    assert not run.lengths._states
    # Aborted while its last step ran.
    batch = Batch(scheduled=(entry(request, 0, max_drafts=K),), is_prefill=False)
    output = StepOutput(token_ids=((1,),), num_draft_tokens=(7,), num_accepted_tokens=(0,), errors=(None,))
    run.lengths.observe(batch, output, propose_s=0.0, step_s=0.02)
    assert not run.lengths._states
