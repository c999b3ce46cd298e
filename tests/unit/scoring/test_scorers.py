"""Both scorers score the newest token and every draft, each at its position and in its request's own blocks."""

import numpy as np
import pytest

from compspec.batch import Batch, DraftTokens
from compspec.request import Request
from compspec.scoring.batch_expansion import BatchExpansionScorer
from compspec.scoring.multi_query import MultiQueryScorer
from compspec.scoring.scorer import Scorer
from tests.unit.fakes import decode, draft, make_request, prefill
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
