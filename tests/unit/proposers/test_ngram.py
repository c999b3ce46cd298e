"""Prompt lookup: the longest match wins, then the most recent, and an overlap goes on with its period."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from compspec.batch import Batch
from compspec.proposers.ngram import NgramProposer, Options, lookup, make
from compspec.proposers.proposer import check_drafts
from tests.unit.fakes import entry, make_request


def look(text: list[int], longest: int, shortest: int, count: int) -> list[int]:
    return lookup(np.array(text, dtype=np.int32), longest, shortest, count)


TABLE = [
    pytest.param([1, 2, 3, 9, 1, 2], 3, 1, 2, [3, 9], id="what followed the same two tokens"),
    pytest.param([1, 2, 5, 7, 2, 6, 1, 2], 3, 1, 1, [5], id="a longer match wins over a more recent one"),
    pytest.param([1, 2, 5, 1, 2, 6, 1, 2], 3, 1, 1, [6], id="of equal length the most recent wins"),
    pytest.param([4, 1, 2, 5, 3, 1, 2, 6, 4, 1, 2], 2, 1, 1, [6], id="no longer than prompt_lookup_max"),
    pytest.param([4, 1, 2, 5, 3, 1, 2, 6, 4, 1, 2], 3, 1, 1, [5], id="as long as prompt_lookup_max"),
    pytest.param([1, 2, 3, 2], 3, 2, 2, [], id="a match shorter than prompt_lookup_min does not count"),
    pytest.param([1, 2, 3, 1, 2], 3, 2, 2, [3, 1], id="a match of prompt_lookup_min counts"),
    pytest.param([1, 2, 3, 4], 3, 1, 2, [], id="nothing repeats"),
    pytest.param([5], 3, 1, 2, [], id="one token"),
    pytest.param([5, 5], 3, 1, 3, [5, 5, 5], id="a run goes on"),
    pytest.param([1, 2, 1, 2], 3, 1, 5, [1, 2, 1, 2, 1], id="an overlap goes on with its period"),
    pytest.param([7, 1, 2, 3, 1, 2], 2, 1, 6, [3, 1, 2, 3, 1, 2], id="a period of three"),
    pytest.param([1, 2, 3, 9, 1, 2], 3, 1, 0, [], id="nothing asked for"),
    pytest.param([1, 2, 9, 8, 1, 2], 64, 1, 1, [9], id="prompt_lookup_max beyond the text"),
]


@pytest.mark.parametrize(("text", "longest", "shortest", "count", "drafts"), TABLE)
def test_lookup(text: list[int], longest: int, shortest: int, count: int, drafts: list[int]) -> None:
    assert look(text, longest, shortest, count) == drafts


def by_brute_force(text: list[int], longest: int, shortest: int, count: int) -> list[int]:
    """The definition: try every length and every place."""
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                continued = list(text)
                while len(continued) < len(text) + count:
                    continued.append(continued[end + len(continued) - len(text)])
                return continued[len(text) :]
    return []


@settings(max_examples=500, deadline=None)
@given(
    st.integers(1, 4).flatmap(lambda top: st.lists(st.integers(0, top), min_size=1, max_size=40)),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 9),
)
def test_lookup_equals_brute_force(text: list[int], a: int, b: int, count: int) -> None:
    longest, shortest = max(a, b), min(a, b)
    assert look(text, longest, shortest, count) == by_brute_force(text, longest, shortest, count)


def test_lookup_leaves_the_text_alone_and_returns_python_integers() -> None:
    text = np.array([1, 2, 1, 2, 1], dtype=np.int32)
    drafts = lookup(text, 3, 1, 4)
    assert text.tolist() == [1, 2, 1, 2, 1]
    assert all(type(token) is int for token in drafts)


def test_each_request_is_continued_from_its_own_prompt_and_output() -> None:
    requests = [make_request([1, 2, 3], output=[1]), make_request([4, 5, 6]), make_request([7, 8], output=[7])]
    parts = [entry(request, slot, max_drafts=3) for slot, request in enumerate(requests)]
    batch = Batch(scheduled=tuple(parts), is_prefill=False)
    drafts = make(Options(), 3).propose(batch)
    assert drafts.token_ids.tolist() == [[2, 3, 1], [-1, -1, -1], [8, 7, 8]]
    assert drafts.num_draft_tokens.tolist() == [3, 0, 3]


@pytest.mark.parametrize("allowed", range(5))
def test_no_more_drafts_than_the_scheduler_allows(allowed: int) -> None:
    request = make_request([1, 1, 1])
    batch = Batch(scheduled=(entry(request, 0, max_drafts=allowed),), is_prefill=False)
    drafts = NgramProposer(Options(), 4).propose(batch)
    assert drafts.num_draft_tokens.tolist() == [allowed]
    check_drafts(batch, drafts, 128)


def test_the_shortest_may_not_be_longer_than_the_longest() -> None:
    with pytest.raises(ValidationError, match="prompt_lookup_min 4 is more than prompt_lookup_max 3"):
        Options(prompt_lookup_min=4)
    assert Options(prompt_lookup_min=3).prompt_lookup_max == 3
