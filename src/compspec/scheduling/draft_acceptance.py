"""How far drafts get: how many a proposer makes of those it is asked for, and how many of them are accepted.

Legend: K most drafts per request, j a draft's position, from 1.
"""

from collections.abc import Sequence

REQUEST_MEMORY = 32
"""Steps after which a request's measurements count for 1/e."""
ENGINE_MEMORY = 512
"""The same for the sum over all requests, which a new request starts from."""
SURPRISE = 0.0003
"""Chance of a run of equal outcomes below which a request's text has changed, and what was measured counts little."""
SURPRISE_FADE = 30.0
"""How much less."""
PRIOR_SHARE = 0.8
"""Taken for the share of drafts that are accepted before any was verified: high, so that they are tried."""
PRIOR_STEPS = 3.0
"""How many measured steps what was expected beforehand counts for."""


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


class Acceptance:
    """How many drafts the proposer makes of those asked for, and how many of them are accepted."""

    def __init__(self, size: int, memory: float) -> None:
        self._lengths = _Chain(size, memory)
        self._accepted = _Chain(size, memory)

    def add(self, asked: int, drafted: int, accepted: int, fade: float = 1.0) -> None:
        """One step; with `fade` it counts that much more than those before it."""
        self._lengths.add(drafted, asked, fade)
        # Steps without drafts say nothing of drafts; one that drafted less than asked ends like a rejection.
        if drafted:
            self._accepted.add(accepted, asked, fade)

    def shares(self, lengths: Sequence[float], accepted: Sequence[float]) -> tuple[list[float], list[float]]:
        """By position, given the one before it: the chance that a draft is made, and that one is accepted.

        Args:
            lengths, accepted: the same as expected beforehand.
        """
        return self._lengths.shares(lengths, False), self._accepted.shares(accepted, True)


class RequestAcceptance:
    """What is known of one request.

    Attributes:
        num_idle: steps since drafts were last asked for.
        is_stale: whether `refresh` has something new to tell.
        is_probed: whether it drafts in this step to see whether it would pay.
        off_because: the reason that its statistics give, while it does not draft.
        drafted: by position, the chance that a draft is made there.
        rows, tokens: by how many drafts are asked for, 0 included: expected drafts, expected accepted ones.
    """

    def __init__(self, size: int) -> None:
        self.acceptance = Acceptance(size, REQUEST_MEMORY)
        self.num_idle = 0
        self._was_hit = False
        self._run = 0
        self._chance = 1.0
        self.is_stale = True
        self.is_probed = False
        self.off_because: str | None = None
        self.drafted: list[float] = []
        self.rows: list[float] = []
        self.tokens: list[float] = []

    def add(self, asked: int, drafted: int, accepted: int) -> None:
        """One step in which drafts were asked for."""
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
                self.acceptance.add(asked, drafted, accepted, SURPRISE_FADE)
                for _ in range(min(self._run, REQUEST_MEMORY) - 2):
                    self.acceptance.add(asked, drafted, accepted)
                self._run, self._chance = 0, 1.0
        self.acceptance.add(asked, drafted, accepted)
        self.is_stale = True

    def refresh(self, prior: tuple[list[float], list[float]]) -> None:
        """Works out what to expect, with the engine's shares as prior."""
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
