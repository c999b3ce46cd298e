"""How many drafts each request gets in a step: as many as give most tokens per second, or none.

A step's forward has a static shape, so its cost jumps where drafts need a wider one; the proposer and the sampled rows
add a little for each draft. Both are measured, and so is how far drafts get.

Legend: R requests in the batch, K most drafts per request, j a draft's position, from 1.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import pairwise

from compspec.batch import Batch, StepOutput
from compspec.request import Request

REQUEST_MEMORY = 32
"""Steps after which a request's measurements count for 1/e."""
ENGINE_MEMORY = 512
"""The same for the sum over all requests, which a new request starts from."""
IDLE_FADE = 1.01
"""How much less old measurements count for each step without drafts: the text has moved on."""
SURPRISE = 0.0003
"""Chance of a run of equal outcomes below which a request's text has changed, and what was measured counts little."""
SURPRISE_FADE = 30.0
"""How much less."""
PRIOR_SHARE = 0.8
"""Taken for the share of drafts that are accepted before any was verified: high, so that they are tried."""
PRIOR_STEPS = 3.0
"""How many measured steps what was expected beforehand counts for."""
MAX_LOSS = 0.007
"""Share of the time that may go into drafts which are not expected to pay."""
FREE = 0.01
"""Drafts that cost less than this share of a plain step are always made."""
MAX_CREDIT = 2.0
"""Plain steps whose time may be spent on probes at once, once drafts have won that much."""
MAX_DEBT = 1.0
"""Plain steps that drafts have lost and that are waited for before the next probe; more is forgotten: it comes back."""
NUM_SAMPLES = 15
"""Newest times of a shape that are looked at: a few long ones among them change nothing."""
MAX_AGE = 256
"""Steps after which a time is dropped where newer ones are there, and taken again where a plain step's is missing."""
ROW_PRIOR = (0.008, 30.0)
"""Share of a step that one sampled row costs, and its weight in squared rows, before that is measured."""


class _Chain:
    """Of the steps that got to position j - 1 and could go on, the share that got to j. Old steps fade."""

    def __init__(self, size: int, memory: float) -> None:
        self._trials = [0.0] * size
        self._hits = [0.0] * size
        self._growth = 1 + 1 / memory
        self._unit = 1.0  # what the newest step counts for: it grows, so that nothing else has to shrink

    def add(self, reached: int, most: int, fade: float = 1.0) -> None:
        """A step that got to position `reached` and could have got to `most`."""
        self._unit *= self._growth * fade
        if self._unit > 1e100:
            self._trials = [count / self._unit for count in self._trials]
            self._hits = [count / self._unit for count in self._hits]
            self._unit = 1.0
        for position in range(min(reached + 1, most)):
            self._trials[position] += self._unit
            if position < reached:
                self._hits[position] += self._unit

    def shares(self, prior: Sequence[float], follow: bool) -> list[float]:
        """By position; with `follow` one that was not tried is expected to do no worse than the one before it."""
        shares: list[float] = []
        share = 0.0
        for trials, hits, expected in zip(self._trials, self._hits, prior, strict=True):
            if follow and share > expected:
                expected = share
            # What many steps have shown stands alone: else drafts that always fail would look like one in ten.
            weight = PRIOR_STEPS * self._unit / (1 + trials / (4 * self._unit))
            share = (hits + weight * expected) / (trials + weight)
            shares.append(share)
        return shares


class _Acceptance:
    """How many drafts the proposer makes of those asked for, and how many of them are accepted."""

    def __init__(self, size: int, memory: float) -> None:
        self._lengths = _Chain(size, memory)
        self._accepted = _Chain(size, memory)

    def add(self, asked: int, drafted: int, accepted: int, fade: float = 1.0) -> None:
        self._lengths.add(drafted, asked, fade)
        # Steps without drafts say nothing of drafts; one that drafted less than asked ends like a rejection.
        if drafted:
            self._accepted.add(accepted, asked, fade)

    def shares(self, lengths: Sequence[float], accepted: Sequence[float]) -> tuple[list[float], list[float]]:
        return self._lengths.shares(lengths, False), self._accepted.shares(accepted, True)


class _State:
    """What is known of one request."""

    def __init__(self, size: int) -> None:
        self.acceptance = _Acceptance(size, REQUEST_MEMORY)
        self.num_idle = 0
        self._was_hit = False
        self._run = 0
        self._chance = 1.0
        self.is_stale = True
        self.off_because: str | None = None
        self.drafted: list[float] = []  # by position: the chance that a draft is made there
        self.rows: list[float] = []  # by k: expected drafts, accepted drafts
        self.tokens: list[float] = []

    def add(self, asked: int, drafted: int, accepted: int) -> None:
        fade = IDLE_FADE**self.num_idle
        self.num_idle = 0
        if drafted and self.tokens:
            is_hit = accepted > 0
            share = self.tokens[1] / self.rows[1]
            if is_hit != self._was_hit:
                self._was_hit, self._run, self._chance = is_hit, 0, 1.0
            self._run += 1
            self._chance *= share if is_hit else 1 - share
            if self._chance < SURPRISE:
                # The run alone tells of the new text.
                self.acceptance.add(asked, drafted, accepted, fade * SURPRISE_FADE)
                for _ in range(self._run - 2):
                    self.acceptance.add(asked, drafted, accepted)
                fade = 1.0
                self._chance = 1.0
        self.acceptance.add(asked, drafted, accepted, fade)
        self.is_stale = True

    def refresh(self, prior: tuple[list[float], list[float]]) -> None:
        self.is_stale = False
        lengths, shares = self.acceptance.shares(*prior)
        made, kept, rows, tokens = 1.0, lengths[0], 0.0, 0.0
        self.drafted, self.rows, self.tokens = [], [0.0], [0.0]
        for length, share in zip(lengths, shares, strict=True):
            made *= length
            kept *= share
            rows += made
            tokens += kept
            self.drafted.append(made)
            self.rows.append(rows)
            self.tokens.append(tokens)


class _Times:
    """The typical one of the newest times of one thing."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=NUM_SAMPLES)
        self.typical = 0.0
        self.num_samples = 0
        self.newest = 0

    def add(self, time: int, value: float) -> None:
        self._samples.append((time, value))
        while len(self._samples) > 3 and self._samples[0][0] < time - MAX_AGE:
            self._samples.popleft()
        values = sorted(value for _, value in self._samples)
        self.num_samples = len(values)
        # Below the middle, because what goes wrong makes a step longer: of three, the first two may be slow.
        self.typical = values[(len(values) - 1) // 3]
        self.newest = time

    @property
    def is_known(self) -> bool:
        return self.num_samples >= 3


class _Costs:
    """Seconds of steps: by shape, by row, and of the proposer by the most drafts asked of it."""

    def __init__(self, size: int) -> None:
        self.steps: dict[Hashable, _Times] = {}
        self.proposals: dict[Hashable, dict[int, _Times]] = {}
        self.tables: dict[Hashable, list[float]] = {}
        self.row = 0.0
        self._size = size
        self._sums: dict[Hashable, list[float]] = {}

    def add(
        self, now: int, bucket: Hashable, plain: Hashable, asked: int, num_drafts: int, propose_s: float, rest_s: float
    ) -> None:
        times = self.steps.setdefault(bucket, _Times())
        if times.is_known:
            expected = times.typical + self.row * num_drafts
            self._learn_row(bucket, num_drafts, min(max(rest_s, 0.8 * expected), 1.25 * expected))
        elif not self.row:
            self.row = ROW_PRIOR[0] * rest_s
        times.add(now, rest_s - self.row * num_drafts)
        proposals = self.proposals.setdefault(plain, {})
        proposals.setdefault(asked, _Times()).add(now, propose_s)
        self.tables[plain] = self._table(proposals)

    def step(self, bucket: Hashable) -> float:
        """0 where it is not known."""
        times = self.steps.get(bucket)
        return times.typical if times is not None and times.is_known else 0.0

    def _learn_row(self, bucket: Hashable, num_drafts: int, value: float) -> None:
        # Regression within buckets, pooled over them.
        sums = self._sums.setdefault(bucket, [0.0] * 5)
        terms = (1, num_drafts, value, num_drafts * num_drafts, num_drafts * value)
        sums[:] = [0.99 * old + new for old, new in zip(sums, terms, strict=True)]
        typical = min(times.typical for times in self.steps.values() if times.is_known)
        covariance, variance = ROW_PRIOR[0] * typical * ROW_PRIOR[1], ROW_PRIOR[1]
        for count, drafts, values, squares, products in self._sums.values():
            covariance += products - drafts * values / count
            variance += squares - drafts * drafts / count
        self.row = max(0.0, covariance / variance)

    def _table(self, proposals: dict[int, _Times]) -> list[float]:
        """By k: linear between what is known, proportional beyond it."""
        points = {0: 0.0} | {asked: times.typical for asked, times in proposals.items() if times.is_known}
        table = []
        for low, high in pairwise(sorted(points)):
            slope = (points[high] - points[low]) / (high - low)
            table += [points[low] + slope * k for k in range(high - low)]
        last = max(points)
        slope = points[last] / last if last else 0.0
        return table + [points[last] + slope * k for k in range(self._size + 1 - last)]


class _Shape:
    """What a step of R requests costs by its drafts, as far as is known now."""

    def __init__(self, costs: _Costs, buckets: Sequence[tuple[int, Hashable]]) -> None:
        plain = buckets[0][1]
        self.proposals = costs.tables.get(plain, [])
        self.row = costs.row
        self.base = costs.step(plain)
        self.plain = self.base + self.proposals[0]
        self.jumps: list[tuple[int, float]] = []  # the first draft that needs a wider shape, and what that adds
        cost = self.base
        for first, bucket in buckets[1:]:
            # Not measured: as if it cost no more. Wider is never cheaper.
            wider = max(cost, costs.step(bucket))
            self.jumps.append((first, wider - cost))
            cost = wider

    def cost(self, lengths: Sequence[int], states: Sequence[_State]) -> float:
        """Expected, over how many drafts the proposer really makes."""
        longest = max(lengths)
        total = self.base + self.proposals[longest]
        for first, extra in self.jumps:
            if first > longest:
                break
            narrow = 1.0
            for length, state in zip(lengths, states, strict=True):
                if length >= first:
                    narrow *= 1 - state.drafted[first - 1]
            total += extra * (1 - narrow)
        return total + self.row * sum([state.rows[length] for length, state in zip(lengths, states, strict=True)])


class DraftLengths:
    """Chooses K per request and step; switches drafts off where they do not pay, and probes whether they do again.

    What probes may cost is earned first: a small share of each step, and what drafts have won lately. So all of them
    together stay within `MAX_LOSS` of plain decoding, and cheap probes come often.

    Args:
        max_draft_tokens: K.
        bucket_of: the static shape that a decode step of so many requests with up to so many rows runs in.
    """

    def __init__(self, max_draft_tokens: int, bucket_of: Callable[[int, int], Hashable]) -> None:
        self._size = max_draft_tokens
        self._bucket_of = bucket_of
        self._costs = _Costs(max_draft_tokens)
        self._acceptance = _Acceptance(max_draft_tokens, ENGINE_MEMORY)
        self._states: dict[str, _State] = {}
        self._num_steps = 0
        self._credit = 0.0
        self._wanted = 0.0
        self._off: set[str] = set()
        self._probe_loss: float | None = None
        self._rate = 0.0

    def limit(self, batch: Batch) -> Batch:
        """The same batch with the drafts of each request limited to what pays; marks requests that are off."""
        able = [entry for entry in batch.scheduled if entry.max_draft_tokens]
        if batch.is_prefill or not able:
            return batch
        size = len(batch.scheduled)
        limits = [min(entry.max_draft_tokens, self._size) for entry in able]
        states = [self._state(entry.request) for entry in able]
        buckets = self._buckets(size, max(entry.num_new_tokens for entry in batch.scheduled))
        self._off, self._probe_loss, self._wanted = set(), None, 0.0
        most = self._measurable(buckets)
        if most is not None:
            return _limited(batch, [min(limit, most) for limit in limits])
        prior = self._acceptance.shares([PRIOR_SHARE] * self._size, [PRIOR_SHARE] * self._size)
        for state in states:
            # What others saw since matters to those alone that see nothing themselves.
            if state.is_stale or state.num_idle % 16 == 15:
                state.refresh(prior)
        shape = _Shape(self._costs, buckets)
        lengths = self._best(shape, size, limits, states)
        is_off = [length == 0 for length in lengths]
        if any(is_off):
            tried, loss = self._cheapest(shape, limits, states, lengths)
            if loss <= FREE:
                lengths, is_off = tried, [False] * len(able)
            elif loss <= self._credit:
                lengths, self._probe_loss = tried, loss
            else:
                self._wanted = loss
        for entry, limit, state, off in zip(able, limits, states, is_off, strict=True):
            self._mark(entry.request, state, off, limit, shape)
            if off:
                self._off.add(entry.request.request_id)
        return _limited(batch, lengths)

    def observe(self, batch: Batch, output: StepOutput, *, propose_s: float, step_s: float) -> None:
        """Learns from a decode step.

        Args:
            batch: as `limit` returned it.
            step_s: seconds of the whole step, `propose_s` of them in the proposer.
        """
        if batch.is_prefill:
            return
        self._num_steps += 1
        costs, size, drafted = self._costs, len(batch.scheduled), output.num_draft_tokens
        longest = max(entry.num_new_tokens + count for entry, count in zip(batch.scheduled, drafted, strict=True))
        bucket = self._bucket_of(size, longest)
        plain = self._bucket_of(size, max(entry.num_new_tokens for entry in batch.scheduled))
        asked = min(max(entry.max_draft_tokens for entry in batch.scheduled), self._size)
        costs.add(self._num_steps, bucket, plain, asked, sum(drafted), propose_s, step_s - propose_s)
        self._account(batch, output, bucket, plain, asked)
        for entry, count, accepted in zip(batch.scheduled, drafted, output.num_accepted_tokens, strict=True):
            state = self._states.get(entry.request.request_id)
            if state is None:
                continue  # it may never draft, or was aborted while the step ran
            if entry.max_draft_tokens:
                state.add(entry.max_draft_tokens, count, accepted)
                self._acceptance.add(entry.max_draft_tokens, count, accepted)
            else:
                state.num_idle += 1

    def forget(self, request: Request) -> None:
        """Drops a request that has ended; one that only lost its blocks goes on with the same text later."""
        if request.finish_reason is not None:
            self._states.pop(request.request_id, None)

    def _measurable(self, buckets: Sequence[tuple[int, Hashable]]) -> int | None:
        """The most drafts of a step that measures what has to be known first; None where it is known."""
        plain = buckets[0][1]
        times = self._costs.steps.get(plain)
        if times is None or not times.is_known or self._num_steps - times.newest > MAX_AGE:
            # Steps with more drafts do not measure it, and all costs are compared to it.
            return buckets[1][0] - 1 if len(buckets) > 1 else self._size
        # A first step with all drafts could cost as much as many plain ones.
        proposals = self._costs.proposals.get(plain, {})
        return None if any(asked and times.is_known for asked, times in proposals.items()) else 1

    def _state(self, request: Request) -> _State:
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = _State(self._size)
        return state

    def _buckets(self, size: int, num_rows: int) -> list[tuple[int, Hashable]]:
        """The shapes by the number of drafts, each with the first number that needs it."""
        buckets: list[tuple[int, Hashable]] = []
        for length in range(self._size + 1):
            bucket = self._bucket_of(size, max(num_rows, 1 + length))
            if not buckets or buckets[-1][1] != bucket:
                buckets.append((length, bucket))
        return buckets

    def _account(self, batch: Batch, output: StepOutput, bucket: Hashable, plain: Hashable, asked: int) -> None:
        """What a step earned for probes; a step that has both kinds of requests tells of its probes alone."""
        costs, size, accepted = self._costs, len(batch.scheduled), output.num_accepted_tokens
        base = costs.step(plain) + costs.tables[plain][0]
        credit = self._credit + MAX_LOSS
        if self._probe_loss is not None:
            won = [n for e, n in zip(batch.scheduled, accepted, strict=True) if e.request.request_id in self._off]
            credit += sum(won) / size - self._probe_loss
        elif asked and base and not self._off:
            took = max(costs.step(bucket), costs.step(plain)) + costs.tables[plain][asked]
            took += costs.row * sum(output.num_draft_tokens)
            credit += sum(accepted) / size - (took - base) / base
        self._credit = max(-MAX_DEBT, min(credit, max(MAX_CREDIT, self._wanted)))

    def _best(self, shape: _Shape, size: int, limits: list[int], states: list[_State]) -> list[int]:
        row = shape.row * (self._rate or size / shape.plain)  # what a row costs, in tokens
        worthwhile = []
        for limit, state in zip(limits, states, strict=True):
            best, most, upto = 0, 0.0, [0]
            for length in range(1, limit + 1):
                value = state.tokens[length] - row * state.rows[length]
                if value > most:
                    best, most = length, value
                upto.append(best)
            worthwhile.append(upto + [best] * (self._size - limit))
        longest = max(limits)
        candidates: Sequence[int] = range(longest + 1)
        if shape.proposals[longest] - shape.proposals[0] < 0.01 * shape.plain:
            candidates = [0, *(first - 1 for first, _ in shape.jumps if first <= longest), longest]
        chosen, self._rate = [0] * len(limits), 0.0
        for candidate in candidates:
            lengths = [upto[candidate] for upto in worthwhile]
            tokens = size + sum([state.tokens[length] for length, state in zip(lengths, states, strict=True)])
            rate = tokens / shape.cost(lengths, states)
            if rate > self._rate:
                chosen, self._rate = lengths, rate
        return chosen

    def _cheapest(
        self, shape: _Shape, limits: list[int], states: list[_State], lengths: list[int]
    ) -> tuple[list[int], float]:
        """Lengths with drafts for those that get none, and their cost as a share of a plain step."""
        before = shape.cost(lengths, states)

        def trial(most: int) -> tuple[list[int], float]:
            tried = [length or min(most, limit) for length, limit in zip(lengths, limits, strict=True)]
            return tried, (shape.cost(tried, states) - before) / shape.plain

        one = trial(1)
        last = next((first - 1 for first, _ in shape.jumps if first > 1), self._size)
        more = trial(last)
        return more if more[1] <= 1.5 * one[1] + FREE else one

    def _mark(self, request: Request, state: _State, off: bool, limit: int, shape: _Shape) -> None:
        stats, is_probe = request.stats, self._probe_loss is not None
        if off:
            stats.num_probes += is_probe
            stats.num_undrafted_steps += not is_probe
            if state.off_because is None or is_probe:
                old = state.off_because
                state.off_because = (
                    f"it did not pay: about {state.tokens[limit]:.2f} of {limit} drafts accepted per step, and a step "
                    f"with them takes {shape.cost([limit], [state]) / shape.plain:.2f} times as long"
                )
                if stats.speculation_off_because == old:
                    stats.speculation_off_because = state.off_because
        elif state.off_because is not None:
            if stats.speculation_off_because == state.off_because:
                stats.speculation_off_because = None
            state.off_because = None


def _limited(batch: Batch, lengths: Sequence[int]) -> Batch:
    left = iter(lengths)
    return replace(
        batch,
        scheduled=tuple(
            replace(entry, max_draft_tokens=next(left)) if entry.max_draft_tokens else entry
            for entry in batch.scheduled
        ),
    )
