"""How many drafts each request gets in a step: as many as give most tokens per second, or none.

A step's forward has a static shape, so its cost jumps where drafts need a wider one; the proposer and the sampled rows
add a little for each draft. Both are measured, and so is how far drafts get.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from compspec.batch import Batch, StepOutput
from compspec.request import Request
from compspec.scheduling.draft_acceptance import (
    ENGINE_MEMORY,
    PRIOR_SHARE,
    Acceptance,
    RequestAcceptance,
)
from compspec.scheduling.step_costs import MAX_AGE, StepCosts, StepShape

MAX_LOSS = 0.007
"""Share of the time that may go into drafts which are not expected to pay."""
FREE = 0.01
"""Drafts that cost less than this share of a plain step are always made."""
MAX_CREDIT = 1.0
"""Plain steps whose time is saved up for probes, where the next one does not take more."""


class DraftLengths:
    """Chooses K per request and step; switches drafts off where they do not pay, and probes whether they do again.

    What probes may cost is saved up first, a small share of each step, and one that succeeds pays for the next. So they
    stay within `MAX_LOSS` of the time however dear they are, and come often where they are cheap.

    Args:
        max_draft_tokens: K.
        bucket_of: the static shape that a decode step of so many requests with up to so many rows runs in.
    """

    def __init__(self, max_draft_tokens: int, bucket_of: Callable[[int, int], Hashable]) -> None:
        self._size = max_draft_tokens
        self._bucket_of = bucket_of
        self._costs = StepCosts(max_draft_tokens)
        self._acceptance = Acceptance(max_draft_tokens, ENGINE_MEMORY)
        self._states: dict[str, RequestAcceptance] = {}
        self._num_steps = 0
        self._credit = 0.0
        self._wanted = 0.0
        self._rate = 0.0

    def limit(self, batch: Batch) -> Batch:
        """The same batch with the drafts of each request limited to what pays; marks requests that are off."""
        self._wanted = 0.0
        able = [entry for entry in batch.scheduled if entry.max_draft_tokens]
        if batch.is_prefill or not able:
            return batch
        size = len(batch.scheduled)
        limits = [min(entry.max_draft_tokens, self._size) for entry in able]
        states = [self._state(entry.request) for entry in able]
        buckets = self._buckets(size, max(entry.num_new_tokens for entry in batch.scheduled))
        most = self._measurable(buckets)
        if most is not None:
            return _limited(batch, [min(limit, most) for limit in limits])
        prior = self._acceptance.shares([PRIOR_SHARE] * self._size, [PRIOR_SHARE] * self._size)
        for state in states:
            # What others saw since matters to those alone that see nothing themselves.
            if state.is_stale or state.num_idle % 16 == 15:
                state.refresh(prior)
        shape = StepShape(self._costs, buckets)
        lengths = self._best(shape, size, limits, states)
        is_off = [length == 0 for length in lengths]
        is_probe = False
        if any(is_off):
            tried, loss = self._cheapest(shape, limits, states, lengths)
            if loss <= FREE:
                lengths, is_off = tried, [False] * len(able)
            elif loss <= self._credit:
                lengths, is_probe = tried, True
                self._credit -= loss
            else:
                self._wanted = loss
        for entry, limit, state, off in zip(able, limits, states, is_off, strict=True):
            state.is_probed = off and is_probe
            self._mark(entry.request, state, off, limit, shape)
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
        if self._credit < max(MAX_CREDIT, self._wanted):
            self._credit += MAX_LOSS
        for entry, count, accepted in zip(batch.scheduled, drafted, output.num_accepted_tokens, strict=True):
            state = self._states.get(entry.request.request_id)
            if state is None:
                continue  # it may never draft, or was aborted while the step ran
            if state.is_probed:
                # One that succeeds pays for the next at once.
                self._credit = max(self._credit, min(self._credit + accepted / size, MAX_CREDIT))
                state.is_probed = False
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

    def _state(self, request: Request) -> RequestAcceptance:
        state = self._states.get(request.request_id)
        if state is None:
            state = self._states[request.request_id] = RequestAcceptance(self._size)
        return state

    def _buckets(self, size: int, num_rows: int) -> list[tuple[int, Hashable]]:
        """The shapes by the number of drafts, each with the first number that needs it."""
        buckets: list[tuple[int, Hashable]] = []
        for length in range(self._size + 1):
            bucket = self._bucket_of(size, max(num_rows, 1 + length))
            if not buckets or buckets[-1][1] != bucket:
                buckets.append((length, bucket))
        return buckets

    def _best(self, shape: StepShape, size: int, limits: list[int], states: list[RequestAcceptance]) -> list[int]:
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
        self, shape: StepShape, limits: list[int], states: list[RequestAcceptance], lengths: list[int]
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

    def _mark(self, request: Request, state: RequestAcceptance, off: bool, limit: int, shape: StepShape) -> None:
        stats = request.stats
        if off:
            stats.num_probes += state.is_probed
            stats.num_undrafted_steps += not state.is_probed
            if state.off_because is None or state.is_probed:
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
