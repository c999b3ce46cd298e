"""Suffix decoding: the longest match, its most frequent continuation, and a store that keeps requests apart."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from compspec.batch import Batch
from compspec.proposers.proposer import check_drafts, make_proposer
from compspec.proposers.suffix import (
    MARGIN,
    MAX_PLACES,
    Continuation,
    Options,
    OutputStore,
    SuffixProposer,
    continue_from,
    continue_own,
)
from compspec.request import FinishReason, Request
from tests.unit.fakes import entry, make_request

ANY_LENGTH: dict[str, Any] = {"max_spec_factor": 1024.0, "min_token_prob": 0.0}
"""Drafts as many as asked for, so that a table row shows what it is about."""

MOST_DRAFTS = 3


def own(text: list[int], count: int, **options: Any) -> Continuation:
    return continue_own(np.array(text, dtype=np.int32), count, Options(**options))


def stored(outputs: list[list[int]], text: list[int], count: int, **options: Any) -> Continuation:
    store = OutputStore(1000)
    for output in outputs:
        store.add(np.array(output, dtype=np.int32))
    return continue_from(store.tokens, np.array(text, dtype=np.int32), count, Options(**options))


TABLE = [
    pytest.param([1, 2, 3, 9, 1, 2], 2, [3, 9], id="what followed the same two tokens"),
    pytest.param([1, 2, 5, 7, 2, 6, 8, 2, 6, 1, 2], 1, [5], id="a longer match wins over more frequent ones"),
    pytest.param([2, 5, 2, 5, 2, 6, 2], 1, [5], id="of one length the most frequent continuation wins"),
    pytest.param([1, 5, 1, 6, 1], 1, [6], id="of equally frequent ones the most recent wins"),
    pytest.param([1, 5, 1, 6, 1, 5, 1], 1, [6], id="a match is as long as it can be"),
    pytest.param(
        [3, 1, 5, 4, 4, 1, 6, 8, 7, 1, 6, 9, 0, 1], 2, [6, 9], id="later tokens from the places that are left"
    ),
    pytest.param([1, 2, 3, 4], 2, [], id="nothing repeats"),
    pytest.param([5], 2, [], id="one token"),
    pytest.param([5, 5], 3, [5, 5, 5], id="a run goes on"),
    pytest.param([1, 2, 1, 2], 5, [1, 2, 1, 2, 1], id="an overlap goes on with its period"),
    pytest.param([7, 1, 2, 3, 1, 2], 6, [3, 1, 2, 3, 1, 2], id="a period of three"),
]


@pytest.mark.parametrize(("text", "count", "drafts"), TABLE)
def test_own_text(text: list[int], count: int, drafts: list[int]) -> None:
    assert own(text, count, **ANY_LENGTH).token_ids == drafts


def by_brute_force(texts: list[list[int]], text: list[int], count: int, options: Options) -> Continuation:
    """The definition, place by place; `texts` is [text] for its own continuation, and grows with the drafts."""
    is_own = texts == [text]
    places = []
    for source in texts:
        for start in range(1, len(source)):
            matched = 0
            most = min(options.max_match, len(text), start)
            while matched < most and source[start - 1 - matched] == text[-1 - matched]:
                matched += 1
            places.append((source, start, matched))
    matched = max((length for _, _, length in places), default=0)
    drafts: list[int] = []
    score, probability = 0.0, 1.0
    left = [(source, start) for source, start, length in places if length == matched]
    allowed = min(count, int(options.max_spec_factor * matched)) if matched >= options.min_match else 0
    for depth in range(allowed):
        pairs = []
        for source, start in left:
            known = source + drafts if is_own else source
            if start + depth < len(known):
                pairs.append((known[start + depth], (source, start)))
        if not pairs:
            break
        tokens = [token for token, _ in pairs]
        counts = Counter(tokens)
        # Ascending places: the last index is the most recent.
        best = max(counts, key=lambda token: (counts[token], len(tokens) - tokens[::-1].index(token)))
        probability *= counts[best] / len(tokens)
        if probability < options.min_token_prob:
            break
        drafts.append(best)
        score += probability
        left = [place for token, place in pairs if token == best]
    return Continuation(token_ids=drafts, score=score, matched=matched)


def texts_of(most: int, size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, most), min_size=1, max_size=size)


OPTIONS = st.builds(
    lambda a, b, factor, prob: Options(
        max_match=max(a, b), min_match=min(a, b), max_spec_factor=factor, min_token_prob=prob
    ),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([0.5, 1.0, 1.5, 4.0, 100.0]),
    st.sampled_from([0.0, 0.1, 0.4, 1.0]),
)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 4).flatmap(lambda most: texts_of(most, 40)), st.integers(1, 9), OPTIONS)
def test_the_own_continuation_equals_brute_force(text: list[int], count: int, options: Options) -> None:
    found = continue_own(np.array(text, dtype=np.int32), count, options)
    assert found == by_brute_force([text], text, count, options)


@settings(max_examples=400, deadline=None)
@given(
    st.integers(0, 4).flatmap(lambda most: st.tuples(st.lists(texts_of(most, 12), max_size=6), texts_of(most, 12))),
    st.integers(1, 9),
    OPTIONS,
)
def test_the_stored_continuation_equals_brute_force(
    given_texts: tuple[list[list[int]], list[int]], count: int, options: Options
) -> None:
    outputs, text = given_texts
    # An output that equals the text would be taken for its own by the reference.
    outputs = [output for output in outputs if output != text]
    store = OutputStore(1000)
    for output in outputs:
        store.add(np.array(output, dtype=np.int32))
    found = continue_from(store.tokens, np.array(text, dtype=np.int32), count, options)
    assert found == by_brute_force(outputs, text, count, options)


@settings(max_examples=200, deadline=None)
@given(st.lists(texts_of(3, 12), max_size=4), texts_of(3, 12), st.integers(1, 6))
def test_drafts_are_what_followed_the_last_token_somewhere(outputs: list[list[int]], text: list[int], k: int) -> None:
    proposer = SuffixProposer(Options(), k)
    for output in outputs:
        proposer.forget(ended(make_request([9], output=output)))
    batch = Batch(scheduled=(entry(make_request(text), 0, max_drafts=k),), is_prefill=False)
    drafts = proposer.propose(batch)
    check_drafts(batch, drafts, 128)
    real = drafts.token_ids[0, : drafts.num_draft_tokens[0]].tolist()
    run = [text[-1], *real]
    sources = [*outputs, [*text, *real][:-1] if real else text]
    assert any(source[at : at + len(run)] == run for source in sources for at in range(len(source)))


def test_a_match_is_at_most_max_match_long() -> None:
    text = [4, 1, 2, 5, 3, 1, 2, 6, 4, 1, 2]
    assert own(text, 1, max_match=2).token_ids == [6]
    assert own(text, 1, max_match=3).token_ids == [5]
    # The windows of the longest match begin at the first token of the array.
    assert own([1, 2] * MARGIN, 1, max_match=MARGIN).matched == MARGIN


def test_a_match_below_min_match_proposes_nothing() -> None:
    assert own([1, 2, 3, 2], 2, min_match=2) == Continuation(token_ids=[], score=0.0, matched=1)
    assert own([1, 2, 3, 1, 2], 1, min_match=2).token_ids == [3]


@pytest.mark.parametrize(("factor", "num_drafts"), [(0.4, 0), (0.5, 1), (1.0, 2), (1.5, 3), (8.0, 5)])
def test_a_longer_match_earns_more_drafts(factor: float, num_drafts: int) -> None:
    assert len(own([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], 5, max_spec_factor=factor).token_ids) == num_drafts


@pytest.mark.parametrize(("least", "drafts"), [(0.5, [3]), (0.3, [3, 5])])
def test_drafts_end_where_they_grow_unlikely(least: float, drafts: list[int]) -> None:
    # After 9: 3 twice, 4 once. After 9 3: 5 and 6, once each.
    text = [9, 4, 0, 9, 3, 6, 1, 9, 3, 5, 2, 9]
    found = own(text, 2, min_token_prob=least)
    assert found.token_ids == drafts
    assert found.score == pytest.approx(2 / 3 + (len(drafts) - 1) / 3)


def test_no_match_spans_two_outputs_and_no_draft_leaves_its_own() -> None:
    assert stored([[7, 1], [2, 3]], [1, 2], 3, **ANY_LENGTH) == Continuation(token_ids=[3], score=1.0, matched=1)
    assert stored([[1, 2], [3, 4]], [1], 3, **ANY_LENGTH).token_ids == [2]


def test_a_place_where_an_output_ends_does_not_hide_others() -> None:
    assert stored([[2, 5], [1, 2]], [1, 2], 1) == Continuation(token_ids=[5], score=1.0, matched=1)
    # Of three places two are known beyond the first token.
    assert stored([[1, 2, 3], [1, 2, 3], [1, 2]], [1], 2).score == 2.0


def test_a_long_match_is_found_beyond_many_short_ones() -> None:
    text = [1, 2, 3, 4, 8] + [3, 4, 9] * (2 * MAX_PLACES) + [1, 2, 3, 4]
    assert own(text, 1).token_ids == [8]


def test_only_so_many_places_are_followed_and_those_are_the_most_recent() -> None:
    old = [token for at in range(40) for token in (7, 1, 100 + at)]
    new = [token for at in range(MAX_PLACES) for token in (7, 2, 200 + at)]
    assert own([*old, *new, 7], 1) == Continuation(token_ids=[2], score=1.0, matched=1)
    assert own([*old, *new[3:], 7], 1).score == 1 - 1 / MAX_PLACES


def test_the_text_is_left_alone_and_drafts_are_python_integers() -> None:
    text = np.array([1, 2, 1, 2, 1], dtype=np.int32)
    drafts = continue_own(text, 4, Options()).token_ids
    assert text.tolist() == [1, 2, 1, 2, 1]
    assert all(type(token) is int for token in drafts)


@settings(max_examples=200, deadline=None)
@given(st.lists(texts_of(5, 9), max_size=12), st.integers(0, 20))
def test_the_store_keeps_the_newest_outputs_and_never_more_than_its_limit(outputs: list[list[int]], most: int) -> None:
    store = OutputStore(most)
    kept: list[list[int]] = []
    for output in outputs:
        store.add(np.array(output, dtype=np.int32))
        assert store.num_tokens <= most
        if most >= 2:
            kept.append(output[-(most - 1) :])
        while sum(len(one) + 1 for one in kept) > most:
            kept.pop(0)
        assert store.tokens.tolist() == [-1] * MARGIN + [token for one in kept for token in (*one, -1)]
        assert store.tokens.dtype == np.int32


def ended(request: Request, reason: FinishReason | None = FinishReason.STOP) -> Request:
    request.finish_reason = reason
    return request


def drafts_after(proposer: SuffixProposer, *requests: Request, most: int = MOST_DRAFTS) -> list[list[int]]:
    parts = [entry(request, slot, max_drafts=most) for slot, request in enumerate(requests)]
    drafts = proposer.propose(Batch(scheduled=tuple(parts), is_prefill=False))
    return [row[:count].tolist() for row, count in zip(drafts.token_ids, drafts.num_draft_tokens, strict=True)]


@pytest.mark.parametrize("reason", [*FinishReason, None])
def test_an_output_is_kept_when_its_request_is_complete(reason: FinishReason | None) -> None:
    proposer = SuffixProposer(Options(), MOST_DRAFTS)
    proposer.forget(ended(make_request([1, 2, 3], output=[5, 6, 7]), reason))
    complete = reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert drafts_after(proposer, make_request([5])) == [[6, 7] if complete else []]


def test_a_prompt_is_not_kept() -> None:
    proposer = SuffixProposer(Options(), MOST_DRAFTS)
    proposer.forget(ended(make_request([1, 2, 3], output=[5, 6, 7])))
    assert drafts_after(proposer, make_request([1]), make_request([3])) == [[], []]


def test_a_kept_output_does_not_change_with_its_request() -> None:
    proposer = SuffixProposer(Options(), MOST_DRAFTS)
    request = ended(make_request([1], output=[5, 6]))
    proposer.forget(request)
    request.token_ids[:] = 9
    assert drafts_after(proposer, make_request([5])) == [[6]]


def test_a_salted_request_neither_reads_the_store_nor_writes_it() -> None:
    proposer = SuffixProposer(Options(), MOST_DRAFTS)
    proposer.forget(ended(make_request([1], output=[5, 6])))
    proposer.forget(ended(make_request([1], output=[7, 8], cache_salt="a")))
    salted = [make_request([5], cache_salt="b"), make_request([7], cache_salt="a")]
    assert drafts_after(proposer, *salted, make_request([5]), make_request([7])) == [[], [], [6], []]
    assert drafts_after(proposer, make_request([5, 4, 5], cache_salt="b")) == [[4, 5, 4]]


def test_the_higher_score_wins_then_the_longer_match_then_the_own_text() -> None:
    proposer = SuffixProposer(Options(), 1)
    proposer.forget(ended(make_request([1], output=[2, 3, 6])))
    # Own text after 3: 4 and 5, so 1/2; stored: 6 alone.
    assert drafts_after(proposer, make_request([3, 4, 3, 5, 3]), most=1) == [[6]]
    # One place each, and as many drafts: the store agrees in two tokens.
    assert drafts_after(proposer, make_request([3, 4, 2, 3]), most=1) == [[6]]
    assert drafts_after(proposer, make_request([3, 4, 3]), most=1) == [[4]]
    # Own text: 3 2 3 after 3 4, so it agrees in two tokens as well.
    assert drafts_after(proposer, make_request([2, 3, 4, 2, 3]), most=1) == [[4]]


def test_a_longer_match_does_not_outweigh_a_lower_score() -> None:
    proposer = SuffixProposer(Options(), 1)
    for last in (6, 7):
        proposer.forget(ended(make_request([1], output=[2, 3, last])))
    assert drafts_after(proposer, make_request([2, 3]), most=1) == [[7]]
    assert drafts_after(proposer, make_request([3, 4, 2, 3]), most=1) == [[4]]


def test_a_reset_empties_the_store_and_keeps_its_limit() -> None:
    proposer = SuffixProposer(Options(max_store_tokens=3), MOST_DRAFTS)
    proposer.forget(ended(make_request([1], output=[5, 6])))
    proposer.reset()
    assert drafts_after(proposer, make_request([5])) == [[]]
    proposer.forget(ended(make_request([1], output=[7, 8, 9])))
    # As after the start, two tokens and a separator fit.
    assert drafts_after(proposer, make_request([7]), make_request([8])) == [[], [9]]


def test_without_a_store_nothing_is_shared() -> None:
    proposer = SuffixProposer(Options(max_store_tokens=0), MOST_DRAFTS)
    proposer.forget(ended(make_request([1], output=[5, 6])))
    assert drafts_after(proposer, make_request([5]), make_request([5, 6, 5])) == [[], [6, 5, 6]]


@pytest.mark.parametrize("allowed", range(5))
def test_no_more_drafts_than_the_scheduler_allows(allowed: int) -> None:
    batch = Batch(scheduled=(entry(make_request([1, 1, 1]), 0, max_drafts=allowed),), is_prefill=False)
    drafts = SuffixProposer(Options(), 4).propose(batch)
    assert drafts.num_draft_tokens.tolist() == [allowed]
    assert drafts.token_ids.shape == (1, 4)
    check_drafts(batch, drafts, 128)


def test_it_is_found_by_its_name() -> None:
    assert isinstance(make_proposer("suffix", {"max_spec_factor": 2, "max_store_tokens": 0}, 3), SuffixProposer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_match": 9, "max_match": 8}, "min_match 9 is more than max_match 8"),
        ({"max_match": MARGIN + 1}, "max_match"),
        ({"min_token_prob": 1.5}, "min_token_prob"),
        ({"max_spec_factor": 0.0}, "max_spec_factor"),
        ({"max_store_tokens": -1}, "max_store_tokens"),
        ({"max_store_tokens": 2**20 + 1}, "max_store_tokens"),
    ],
)
def test_an_option_out_of_bounds_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Options(**options)
