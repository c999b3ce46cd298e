"""The prompt scorer covers each row that a prompt token follows once, in order, and stores nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compspec.scoring.prompt import PromptScorer
from tests.unit.fakes import make_request, prefill
from tests.unit.scoring.fake_runner import FakeRunner


def scored(runner: FakeRunner, length: int, chunk: int) -> list[list[float]]:
    """The rows of a whole prompt, chunk by chunk, [token, position, first block, stored]."""
    request = make_request(np.arange(3, 3 + length).tolist())
    request.block_ids = [11, 12]
    scorer, rows = PromptScorer(runner), []
    for start in range(0, length, chunk):
        batch = prefill(request, 0, start, min(chunk, length - start))
        for first, logits in scorer.score(batch.scheduled[0], len(rows)):
            assert first == len(rows), "some row was left out, or came twice"
            rows += logits.tolist()
    return rows


@settings(max_examples=150, deadline=None)
@given(
    length=st.integers(1, 90),
    chunk=st.integers(1, 90),
    max_num_seqs=st.integers(1, 7),
    width=st.integers(2, 9),
    scorer=st.sampled_from(["multi_query", "batch_expansion"]),
    numerics=st.sampled_from(["exact", "fast"]),
)
def test_each_row_but_the_last_is_scored_once_for_any_sizes_and_none_is_stored(
    length: int, chunk: int, max_num_seqs: int, width: int, scorer: str, numerics: str
) -> None:
    runner = FakeRunner(
        numerics__mode=numerics,
        numerics__decode_width=width,
        numerics__plain_width=None,
        scheduler__max_num_seqs=max_num_seqs,
        speculative__method="ngram",
        speculative__num_draft_tokens=width - 1,
        speculative__scorer=scorer,
    )
    assert scored(runner, length, chunk) == [[3 + place, place, 11, 0] for place in range(length - 1)]
    assert all(query.writes is False for _, queries in runner.calls for query in queries)
    assert {bucket for bucket, _ in runner.calls} <= {runner.buckets.widest_decode}, "rows of more than one shape"
    assert all(queries for _, queries in runner.calls)


@pytest.mark.parametrize("length", [1, 2, 32, 33])
def test_the_row_after_the_whole_prompt_is_not_scored(length: int) -> None:
    """It samples the first output token, and its forward has run already."""
    runner = FakeRunner()
    assert len(scored(runner, length, 32)) == length - 1
    assert bool(runner.calls) == (length > 1)


@pytest.mark.parametrize("cached", [8, 32, 40])
def test_rows_that_came_from_the_prefix_cache_are_scored_with_the_first_chunk_that_runs(cached: int) -> None:
    runner = FakeRunner()
    request = make_request(np.arange(3, 3 + 50).tolist(), prompt_logprobs=0)
    request.block_ids = [11, 12, 13, 14]
    scorer, found = PromptScorer(runner), []
    for first, logits in scorer.score(prefill(request, 0, cached, 50 - cached).scheduled[0], 0):
        assert first == len(found)
        found += logits.tolist()
    assert found == [[3 + place, place, 11, 0] for place in range(49)]


def test_a_report_that_is_there_already_is_not_made_again() -> None:
    """A request that lost its blocks runs its prompt a second time."""
    runner = FakeRunner()
    request = make_request([0, 1, 2, 3, 0, 1, 2, 3, 0, 1], prompt_logprobs=0)
    request.block_ids = [11]
    scorer = PromptScorer(runner)
    scorer.report(prefill(request, 0, 0, 6))
    assert request.prompt_logprobs is not None and len(request.prompt_logprobs) == 7
    before = list(request.prompt_logprobs)
    scorer.report(prefill(request, 0, 0, 6))
    assert request.prompt_logprobs == before
    scorer.report(prefill(request, 0, 0, 10))
    assert request.prompt_logprobs[:7] == before
    assert len(request.prompt_logprobs) == 10
    assert [next(iter(each)) for each in request.prompt_logprobs[1:] if each] == request.token_ids[1:].tolist()
