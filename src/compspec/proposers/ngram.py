"""Prompt lookup: what followed the last time the text stood here. No model, no state.

Source: Saxena, "Prompt Lookup Decoding", 2023.
"""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from compspec.batch import Batch, DraftTokens
from compspec.proposers.proposer import Options as BaseOptions
from compspec.proposers.proposer import Proposer


class Options(BaseOptions):
    """The longest and the shortest run of last tokens that is looked for."""

    prompt_lookup_max: int = Field(3, ge=1, le=64)
    prompt_lookup_min: int = Field(1, ge=1, le=64)

    @model_validator(mode="after")
    def _ordered(self) -> "Options":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} is more than prompt_lookup_max {self.prompt_lookup_max}"
            )
        return self


class NgramProposer(Proposer):
    """The longest match of the last tokens wins; of equally long ones, the most recent."""

    def __init__(self, options: Options, num_draft_tokens: int) -> None:
        self._longest = options.prompt_lookup_max
        self._shortest = options.prompt_lookup_min
        self._num_draft_tokens = num_draft_tokens

    def propose(self, batch: Batch) -> DraftTokens:
        """Drafts for every request of a decode step, from its own tokens."""
        drafts = [
            lookup(entry.request.token_ids, self._longest, self._shortest, entry.max_draft_tokens)
            for entry in batch.scheduled
        ]
        return DraftTokens.from_lists(drafts, self._num_draft_tokens)


def lookup(token_ids: NDArray[np.int32], longest: int, shortest: int, count: int) -> list[int]:
    """Continues a text from an earlier place that ends as the text does.

    Args:
        token_ids: [n] the text.
        longest, shortest: how many last tokens must agree, at the most and at the least.
        count: how many tokens to return at the most.

    Returns:
        `count` tokens, or none where nothing matches. A match so recent that the text ends before `count`
        tokens follow is continued with the period it implies, as LZ77 copies an overlapping run.
    """
    length = len(token_ids)
    if count <= 0 or length < shortest + 1:
        return []
    # Ends of candidate matches, each filtered token by token; the last token of the text has no continuation.
    ends = np.flatnonzero(token_ids[:-1] == token_ids[-1])
    matched = 1
    while len(ends) and matched < longest:
        longer = ends[ends >= matched]
        longer = longer[token_ids[longer - matched] == token_ids[length - 1 - matched]]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    if not len(ends) or matched < shortest:
        return []
    start = int(ends[-1]) + 1
    follows: list[int] = token_ids[start : start + count].tolist()
    while len(follows) < count:
        follows.append(follows[len(follows) - (length - start)])
    return follows


def make(options: Options, num_draft_tokens: int) -> NgramProposer:
    """See `compspec.proposers.proposer.Proposer`."""
    return NgramProposer(options, num_draft_tokens)
