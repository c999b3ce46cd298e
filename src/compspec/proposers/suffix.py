"""Suffix decoding: what most often followed the longest match, in the request's own text or in earlier outputs.

A node of a suffix tree is the set of places where its string stands. Nothing here builds that tree: a walk down from
the root is a set of places that shrinks with every token, found in one array of tokens.

Source: Oliaro et al., "SuffixDecoding", arXiv 2411.04975. Own text and earlier outputs are two trees there as well.

Legend: P places, n tokens of a text, m tokens of a pattern.
"""

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from compspec.batch import Batch, DraftTokens, ScheduledRequest
from compspec.proposers.proposer import Options as BaseOptions
from compspec.proposers.proposer import Proposer
from compspec.request import FinishReason, Request

Tokens = NDArray[np.int32]

MARGIN = 64
"""So many -1 stand before the first token of a searched array, so that a window before any place is inside it."""

MAX_PLACES = 256
"""Of more places than this only the most recent are followed, so that a frequent token cannot make a lookup slow."""

NARROWING_TOKENS = 3
"""So many last tokens all places are compared by before the older ones are dropped."""


class Options(BaseOptions):
    """How sure a draft must be, and how much of earlier outputs is kept."""

    max_match: int = Field(32, ge=1, le=MARGIN, description="the longest run of last tokens that is looked for")
    min_match: int = Field(
        1,
        ge=1,
        le=MARGIN,
        description="a shorter match proposes nothing, and leaves it to the next proposer of a chain",
    )
    max_spec_factor: float = Field(4.0, gt=0, le=1024, description="most drafts per token of the match")
    min_token_prob: float = Field(
        0.1, ge=0, le=1, description="drafts end where their estimated probability falls below this"
    )
    max_store_tokens: int = Field(
        65536,
        ge=0,
        le=2**20,
        description="tokens of earlier outputs that all requests without a cache_salt draft from, 0 for none; every "
        "lookup reads them all, in up to 0.1 ms per 65536 tokens",
    )

    @model_validator(mode="after")
    def _ordered(self) -> "Options":
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} is more than max_match {self.max_match}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A guess of what follows.

    Attributes:
        token_ids: the drafts.
        score: the sum of their estimated probabilities, which is how many are expected to be accepted.
        matched: how many last tokens agree with the place that they come from.
    """

    token_ids: list[int]
    score: float
    matched: int


class OutputStore:
    """The most recent outputs. The oldest leaves first, whole.

    Attributes:
        tokens: [MARGIN + num_tokens] int32, the outputs, a -1 after each; replaced when an output enters.
    """

    def __init__(self, max_tokens: int) -> None:
        self.tokens: Tokens = np.full(MARGIN, -1, dtype=np.int32)
        self._max_tokens = max_tokens
        self._sizes: deque[int] = deque()

    @property
    def num_tokens(self) -> int:
        """Tokens in the store, one separator per output included; never more than `max_tokens`."""
        return len(self.tokens) - MARGIN

    def add(self, output: Tokens) -> None:
        """Copies an output; of one too long for the store the end."""
        output = output[max(0, len(output) + 1 - self._max_tokens) :]
        if not len(output):
            return
        size, dropped = len(output) + 1, 0
        while self.num_tokens - dropped + size > self._max_tokens:
            dropped += self._sizes.popleft()
        self._sizes.append(size)
        margin, kept = self.tokens[:MARGIN], self.tokens[MARGIN + dropped :]
        self.tokens = np.concatenate((margin, kept, output, [-1]), dtype=np.int32)


class SuffixProposer(Proposer):
    """Of the request's own text and the store the higher score wins, then the longer match, then its own text.

    Most scores are whole numbers, from a single place each, so ties are common; where a text comes a second time, the
    longer match tells the stored output from chance.
    """

    def __init__(self, options: Options, num_draft_tokens: int) -> None:
        self._options = options
        self._num_draft_tokens = num_draft_tokens
        self._store = OutputStore(options.max_store_tokens)

    def propose(self, batch: Batch) -> DraftTokens:
        """Drafts for every request of a decode step, from what its last tokens were followed by before."""
        return DraftTokens.from_lists([self._drafts(entry) for entry in batch.scheduled], self._num_draft_tokens)

    def _drafts(self, entry: ScheduledRequest) -> list[int]:
        count = entry.max_draft_tokens
        if count <= 0:
            return []
        text = entry.request.token_ids
        found = [continue_own(text, count, self._options)]
        # Without drafts from the store, how fast a request runs says nothing of what others wrote.
        if entry.request.params.cache_salt is None:
            found.append(continue_from(self._store.tokens, text, count, self._options))
        return max(found, key=lambda one: (one.score, one.matched)).token_ids

    def forget(self, request: Request) -> None:
        """Keeps the output of a request that is complete, unless it has a cache_salt."""
        complete = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if complete and request.params.cache_salt is None:
            self._store.add(request.token_ids[request.num_prompt_tokens :])

    def reset(self) -> None:
        """Empties the store."""
        self._store = OutputStore(self._options.max_store_tokens)


def continue_own(text: Tokens, count: int, options: Options) -> Continuation:
    """Continues a text from its own earlier places, as `continue_from` does.

    A place so recent that the text ends before `count` tokens follow it reads the drafts as text, and so goes on
    with the period it implies.
    """
    end = MARGIN + len(text)
    array = np.full(end + count, -1, dtype=np.int32)
    array[MARGIN:end] = text
    return _continue(array, text, array[end:], options)


def continue_from(array: Tokens, text: Tokens, count: int, options: Options) -> Continuation:
    """Continues a text from the places of other texts where the longest run of its last tokens stands.

    The most frequent next token is the draft, of equally frequent ones that of the most recent place; places that go
    on otherwise are left. A draft's estimated probability is the product of the shares of places that stayed.

    Args:
        array: [MARGIN + n] texts, a -1 after each, and MARGIN times -1 before the first.
        text: the text to continue.
        count: how many drafts to return at the most.
    """
    return _continue(array, text, np.empty(count, dtype=np.int32), options)


def _continue(array: Tokens, text: Tokens, drafts: Tokens, options: Options) -> Continuation:
    """Writes into `drafts`, which may be the end of `array`."""
    starts, matched = _longest_match(array, text[-options.max_match :])
    if matched < options.min_match:
        return Continuation(token_ids=[], score=0.0, matched=matched)
    probability, score, num_drafts = 1.0, 0.0, 0
    for depth in range(min(len(drafts), int(options.max_spec_factor * matched))):
        tokens = array[starts + depth]
        # What would have followed the end of an output is not known.
        known = tokens >= 0
        starts, tokens = starts[known], tokens[known]
        if not len(tokens):
            break
        # The counter prefers what it meets first.
        token, votes = Counter(tokens[::-1].tolist()).most_common(1)[0]
        probability *= votes / len(tokens)
        if probability < options.min_token_prob:
            break
        drafts[depth] = token
        score += probability
        num_drafts += 1
        starts = starts[tokens == token]
    return Continuation(token_ids=drafts[:num_drafts].tolist(), score=score, matched=matched)


def _longest_match(array: Tokens, pattern: Tokens) -> tuple[NDArray[np.int64], int]:
    """Finds where the longest end of a pattern stands with a known token after it.

    Args:
        array: [MARGIN + n] as of `continue_from`.
        pattern: [m], at most MARGIN.

    Returns:
        The places after it, in order [P], and how many tokens agree; none and 0 without a match.
    """
    found = (array[:-1] == pattern[-1]) & (array[1:] >= 0)
    # A long match far back should not be lost to short ones nearby.
    for back in range(1, min(NARROWING_TOKENS, len(pattern))):
        if np.count_nonzero(found) <= MAX_PLACES:
            break
        longer = found.copy()
        longer[back:] &= array[: -1 - back] == pattern[-1 - back]
        if not longer.any():
            break
        found = longer
    ends = np.flatnonzero(found)[-MAX_PLACES:]
    if not len(ends):
        return ends, 0
    agrees = array[ends[:, None] - np.arange(len(pattern))] == pattern[::-1]
    # The first that differs; the last token of the pattern never does, so 0 says that none does.
    lengths = agrees.argmin(axis=1)
    lengths[lengths == 0] = len(pattern)
    matched = int(lengths.max())
    return ends[lengths == matched] + 1, matched


def make(options: Options, num_draft_tokens: int) -> SuffixProposer:
    """See `compspec.proposers.proposer.Proposer`."""
    return SuffixProposer(options, num_draft_tokens)
