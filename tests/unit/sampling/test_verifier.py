"""Accept iff equal: the leading run of right drafts, and one more target token."""

import pytest
import torch

from compspec.batch import Batch
from compspec.sampling.verifier import EqualityVerifier
from tests.unit.fakes import decode, draft, entry, make_request, prefill

# target row, drafts, tokens kept, drafts accepted
ROWS = [
    pytest.param([5, 6, 7, 8], [5, 6, 7], (5, 6, 7, 8), 3, id="all accepted and the bonus token"),
    pytest.param([5, 6, 7, 8], [9, 6, 7], (5,), 0, id="first wrong: the correction token alone"),
    pytest.param([5, 6, 7, 8], [5, 9, 7], (5, 6), 1, id="a right draft after a wrong one does not count"),
    pytest.param([5, 6, 7, 8], [5, 9, 6], (5, 6), 1, id="nor one that would be right a place earlier"),
    pytest.param([5, 6, 7, 8], [5, 6, 9], (5, 6, 7), 2, id="last wrong"),
    pytest.param([5, 6, 7, 8], [5, 6], (5, 6, 7), 2, id="fewer drafts than rows: rows after them are ignored"),
    pytest.param([5, 6, 7, 8], [], (5,), 0, id="nothing drafted"),
    pytest.param([-1, 6, 7, 8], [], (-1,), 0, id="padding is never taken for a draft, even where it is equal"),
    pytest.param([5, 5, 5, 5], [5, 5, 5], (5, 5, 5, 5), 3, id="the same token again and again"),
]


@pytest.mark.parametrize(("target", "drafts", "kept", "accepted"), ROWS)
def test_one_request(target: list[int], drafts: list[int], kept: tuple[int, ...], accepted: int) -> None:
    output = EqualityVerifier().verify(torch.tensor([target]), decode(make_request()), draft(drafts, k=3))
    assert output.token_ids == (kept,)
    assert output.num_accepted_tokens == (accepted,)
    assert output.num_draft_tokens == (len(drafts),)


def test_a_ragged_batch_equals_its_requests_alone_and_padding_is_ignored() -> None:
    targets = [row.values[0] for row in ROWS] + [[1, 2, 3, 4]] * 3
    batch = decode(*[make_request() for _ in ROWS])
    output = EqualityVerifier().verify(torch.tensor(targets), batch, draft(*[row.values[1] for row in ROWS], k=3))
    assert output.token_ids == tuple(row.values[2] for row in ROWS)
    assert output.num_accepted_tokens == tuple(row.values[3] for row in ROWS)
    assert output.num_draft_tokens == tuple(len(row.values[1]) for row in ROWS)


def test_a_chunk_inside_a_prompt_samples_nothing() -> None:
    request = make_request(range(10))
    output = EqualityVerifier().verify(torch.tensor([[7]]), prefill(request, 0, 0, 4), draft([]))
    assert output.token_ids == ((),)
    assert output.num_accepted_tokens == (0,)


def test_the_last_chunk_of_a_prompt_samples_one_token() -> None:
    request = make_request(range(10))
    output = EqualityVerifier().verify(torch.tensor([[7]]), prefill(request, 0, 4, 6), draft([]))
    assert output.token_ids == ((7,),)


def test_entries_that_do_not_sample_keep_their_place_in_a_batch() -> None:
    silent = entry(make_request(), 0, samples=False)
    batch = Batch(scheduled=(silent, entry(make_request(), 1)), is_prefill=False)
    output = EqualityVerifier().verify(torch.tensor([[5, 6], [7, 8]]), batch, draft([], [7]))
    assert output.token_ids == ((), (7, 8))
    assert output.num_accepted_tokens == (0, 1)
