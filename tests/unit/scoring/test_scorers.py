"""Both scorers score the newest token and every draft, each at its position and in its request's own blocks."""

import numpy as np
import pytest

from compspec.batch import Batch, DraftTokens, ScheduledRequest
from compspec.request import Request
from compspec.scoring.batch_expansion import BatchExpansionScorer
from compspec.scoring.multi_query import MultiQueryScorer
from compspec.scoring.scorer import Scorer
from tests.unit.fakes import decode, draft, entry, make_request, prefill
from tests.unit.scoring.fake_runner import FakeRunner

K = 4
SEQS = 5
SHAPES = {"speculative__method": "ngram", "speculative__num_draft_tokens": K, "scheduler__max_num_seqs": SEQS}
SCORERS: dict[str, type[Scorer]] = {"multi_query": MultiQueryScorer, "batch_expansion": BatchExpansionScorer}


def make(scorer: str, **settings: object) -> tuple[FakeRunner, Scorer]:
    runner = FakeRunner(speculative__scorer=scorer, **{**SHAPES, **settings})
    return runner, SCORERS[scorer](runner)


def running(number: int, num_output: int) -> Request:
    """A request with tokens and blocks of its own."""
    request = make_request([10 * number + 3, 10 * number + 4], output=[50 + number] * num_output)
    request.block_ids = [100 + number, 200 + number]
    return request


def expected_rows(batch: Batch, drafts: DraftTokens, row: int) -> list[list[float]]:
    """[token, position, first block, stored] of a request's rows, by definition."""
    entry = batch.scheduled[row]
    tokens = [entry.request.token_ids[-1], *drafts.token_ids[row, : drafts.num_draft_tokens[row]]]
    start = entry.request.num_tokens - 1
    return [[token, start + at, entry.request.block_ids[0], 1] for at, token in enumerate(tokens)]


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("scorer", SCORERS)
def test_every_row_is_found_where_the_scores_say(scorer: str, numerics: str) -> None:
    """Any number of requests, any draft counts, none and all among them."""
    rng = np.random.default_rng(0)
    runner, scores_of = make(scorer, numerics__mode=numerics)
    cases = [[0] * n for n in range(1, SEQS + 1)] + [[K] * n for n in range(1, SEQS + 1)] + [[0, 3, 0, 1], [K, 0, K]]
    cases += [rng.integers(0, K + 1, rng.integers(1, SEQS + 1)).tolist() for _ in range(30)]
    for counts in cases:
        batch = decode(*(running(number, 1 + number) for number in range(len(counts))))
        drafts = draft(*(rng.integers(0, 100, count).tolist() for count in counts), k=K)
        scores = scores_of.score(batch, drafts)
        for row, first in enumerate(scores.first_row[: len(counts)]):
            assert scores.logits[first : first + counts[row] + 1].tolist() == expected_rows(batch, drafts, row)
    assert len(runner.calls) == len(cases), "one forward for each step"


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_step_takes_the_smallest_shape_that_holds_it(scorer: str) -> None:
    runner, scores_of = make(scorer, numerics__plain_width=None, numerics__decode_width=K + 1)
    for counts in ([0], [K], [1, 1], [0, K, 0], [K] * SEQS):
        scores_of.score(decode(*(running(n, 1) for n in range(len(counts)))), draft(*([7] * c for c in counts), k=K))
    taken = [str(bucket) for bucket, _ in runner.calls]
    assert (
        taken
        == {
            "multi_query": ["decode 1x5", "decode 1x5", "decode 4x5", "decode 4x5", "decode 5x5"],
            "batch_expansion": ["decode 5x1", "decode 5x1", "decode 5x1", "decode 20x1", "decode 25x1"],
        }[scorer]
    )


def test_expansion_gives_each_row_a_sequence_of_its_own_in_shared_blocks() -> None:
    runner, scorer = make("batch_expansion")
    batch = decode(running(1, 1), running(2, 3))
    scorer.score(batch, draft([5, 6], [7], k=K))
    ((bucket, queries),) = runner.calls
    assert bucket.query_len == 1
    found = [(query.token_ids, query.start, list(query.block_ids), query.writes) for query in queries]
    assert found == [
        ([51], 2, [101, 201], True),
        ([5], 3, [101, 201], True),
        ([6], 4, [101, 201], True),
        ([52], 4, [102, 202], True),
        ([7], 5, [102, 202], True),
    ]


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize(("num_computed", "num_new"), [(0, 32), (32, 8), (32, 1)])
def test_a_prompt_chunk_is_one_sequence_and_its_last_row_is_scored(
    scorer: str, num_computed: int, num_new: int
) -> None:
    runner, scores_of = make(scorer, numerics__prefill_chunk=32)
    request = make_request(range(3, 3 + num_computed + num_new))
    request.block_ids = [9, 8, 7]
    batch = prefill(request, 0, num_computed, num_new)
    scores = scores_of.score(batch, draft([]))
    last = num_computed + num_new - 1
    assert scores.first_row == (0,)
    assert scores.logits[0].tolist() == [3 + last, last, 9, 1]
    ((bucket, queries),) = runner.calls
    assert not bucket.is_decode
    assert [len(query.token_ids) for query in queries] == [num_new]


def behind(number: int, num_output: int, num_computed: int, num_new: int, slot: int) -> ScheduledRequest:
    """A request that replays its output, and whether the step reaches its newest token."""
    request = make_request([10 * number + 3, 10 * number + 4], output=range(50, 50 + num_output))
    request.block_ids = [100 + number, 200 + number]
    ends = num_computed + num_new == request.num_tokens
    return entry(request, slot, num_computed=num_computed, num_new=num_new, max_drafts=0, samples=ends)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("scorer", SCORERS)
def test_a_request_that_is_behind_runs_all_its_rows_and_is_scored_after_its_newest_token(
    scorer: str, numerics: str
) -> None:
    """Among others that draft; a window that does not reach the newest token is run for its keys and values alone."""
    rng = np.random.default_rng(0)
    runner, scores_of = make(scorer, numerics__mode=numerics)
    for _ in range(60):
        parts, lists = [], []
        for number in range(int(rng.integers(1, SEQS + 1))):
            output = int(rng.integers(1, 12))
            if rng.random() < 0.5:
                start = 2 + int(rng.integers(0, output))
                count = min(K + 1, 2 + output - start)
                parts.append(behind(number, output, start, count, number))
                lists.append([])
            else:
                parts.append(entry(running(number, output), number))
                lists.append(rng.integers(0, 100, rng.integers(0, K + 1)).tolist())
        batch, drafts = Batch(scheduled=tuple(parts), is_prefill=False), draft(*lists, k=K)
        scores = scores_of.score(batch, drafts)
        for row, (part, own) in enumerate(zip(parts, lists, strict=True)):
            first = scores.first_row[row]
            if part.samples:
                assert scores.logits[first : first + len(own) + 1].tolist() == expected_rows(batch, drafts, row)
        stored = {
            (query.block_ids[0], query.start + place): token
            for query in runner.calls[-1][1]
            for place, token in enumerate(query.token_ids)
            if query.writes
        }
        assert stored == {
            (part.request.block_ids[0], part.num_computed_tokens + place): token
            for part, own in zip(parts, lists, strict=True)
            for place, token in enumerate(
                [*part.request.token_ids[part.num_computed_tokens :][: part.num_new_tokens].tolist(), *own]
            )
        }
    assert len(runner.calls) == 60, "one forward for each step"


@pytest.mark.parametrize("scorer", SCORERS)
def test_replayed_rows_are_as_many_as_a_step_holds(scorer: str) -> None:
    runner, scores_of = make(scorer, numerics__plain_width=None, numerics__decode_width=K + 1)
    parts = tuple(behind(number, 9, 2, K + 1, number) for number in range(SEQS))
    scores_of.score(Batch(scheduled=parts, is_prefill=False), draft(*[[]] * SEQS, k=K))
    ((bucket, _),) = runner.calls
    assert bucket == runner.buckets.widest_decode
