"""What a decode step costs, by its static shape, by its rows and by what is asked of the proposer."""

from collections import deque
from collections.abc import Hashable, Sequence
from itertools import pairwise

from compspec.scheduling.draft_acceptance import RequestAcceptance

NUM_SAMPLES = 15
"""Newest times of a shape that are looked at: a few long ones among them change nothing."""
MAX_AGE = 256
"""Steps after which a time is dropped where newer ones are there, and taken again where a plain step's is missing."""
ROW_PRIOR = (0.008, 30.0)
"""Share of a step that one sampled row costs, and its weight in squared rows, before that is measured."""


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


class StepCosts:
    """Seconds of steps.

    Attributes:
        steps: by shape, without the proposer and the rows of drafts.
        proposals: of the proposer, by the shape without drafts and the most drafts asked of it for any request.
        tables: the same for every number of drafts, 0 to K.
        row: of one more sampled row.
    """

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
        """One step.

        Args:
            now: counts steps.
            bucket, plain: the shape it ran in, and the one it would have run in without drafts.
            asked: the most drafts asked for.
            num_drafts: of all requests, as many as were made.
            propose_s, rest_s: seconds in the proposer, and in all else.
        """
        times = self.steps.setdefault(bucket, _Times())
        if times.is_known:
            expected = times.typical + self.row * num_drafts
            self._learn_row(bucket, num_drafts, min(max(rest_s, 0.8 * expected), 1.25 * expected))
        elif not self._sums:
            self.row = min(ROW_PRIOR[0] * rest_s, self.row or rest_s)  # the first may be slow
        times.add(now, max(rest_s - self.row * num_drafts, 1e-9))
        proposals = self.proposals.setdefault(plain, {})
        proposals.setdefault(asked, _Times()).add(now, propose_s)
        self.tables[plain] = self._table(proposals)

    def step(self, bucket: Hashable) -> float:
        """Seconds of a step in this shape; 0 where it is not known."""
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


class StepShape:
    """What a step of R requests costs by its drafts, as far as is known now."""

    def __init__(self, costs: StepCosts, buckets: Sequence[tuple[int, Hashable]]) -> None:
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

    def cost(self, lengths: Sequence[int], states: Sequence[RequestAcceptance]) -> float:
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
