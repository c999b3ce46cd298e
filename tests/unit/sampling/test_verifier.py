"""Accept iff equal: the leading run of right drafts, and one more target token or the reason why there is none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compspec.batch import Batch, DraftTokens, StepOutput
from compspec.sampling.sampler import NO_TOKEN, Sampled
from compspec.sampling.verifier import EqualityVerifier
from tests.unit.fakes import decode, draft, entry, make_metadata, make_request, prefill

# target rows, drafts, tokens kept, drafts accepted
ROWS = [
    pytest.param([5, 6, 7, 8], [5, 6, 7], (5, 6, 7, 8), 3, id="all accepted and the bonus token"),
    pytest.param([5, 6, 7, 8], [9, 6, 7], (5,), 0, id="first wrong: the correction token alone"),
    pytest.param([5, 6, 7, 8], [5, 9, 7], (5, 6), 1, id="a right draft after a wrong one does not count"),
    pytest.param([5, 6, 7, 8], [5, 9, 6], (5, 6), 1, id="nor one that would be right a place earlier"),
    pytest.param([5, 6, 7, 8], [5, 6, 9], (5, 6, 7), 2, id="last wrong"),
    pytest.param([5, 6, 7], [5, 6], (5, 6, 7), 2, id="fewer drafts than others have"),
    pytest.param([5], [], (5,), 0, id="nothing drafted"),
    pytest.param([NO_TOKEN], [], (), 0, id="padding is never taken for a draft, even where it is equal"),
    pytest.param([5, 5, 5, 5], [5, 5, 5], (5, 5, 5, 5), 3, id="the same token again and again"),
]


def verify(
    batch: Batch, targets: list[list[int]], drafts: DraftTokens, failures: dict[int, str] | None = None
) -> StepOutput:
    """Verifies requests with their targets one after the other."""
    starts = torch.tensor([0, *map(len, targets)]).cumsum(0).tolist()
    tokens = torch.tensor([token for target in targets for token in target], dtype=torch.int64)
    sampled = Sampled(token_ids=tokens, logits=torch.empty(len(tokens), 0), failures=failures or {})
    metadata = make_metadata(len(tokens), row_starts=tuple(starts), drafts=drafts)
    return EqualityVerifier().verify(sampled, metadata, batch, drafts)


@pytest.mark.parametrize(("target", "drafts", "kept", "accepted"), ROWS)
def test_one_request(target: list[int], drafts: list[int], kept: tuple[int, ...], accepted: int) -> None:
    output = verify(decode(make_request()), [target], draft(drafts, k=3))
    assert output.token_ids == (kept,)
    assert output.num_accepted_tokens == (accepted,)
    assert output.num_draft_tokens == (len(drafts),)
    assert (output.errors == (None,)) == (NO_TOKEN not in target)


def test_a_ragged_batch_equals_its_requests_alone() -> None:
    batch = decode(*[make_request() for _ in ROWS])
    output = verify(batch, [row.values[0] for row in ROWS], draft(*[row.values[1] for row in ROWS], k=5))
    assert output.token_ids == tuple(row.values[2] for row in ROWS)
    assert output.num_accepted_tokens == tuple(row.values[3] for row in ROWS)
    assert output.num_draft_tokens == tuple(len(row.values[1]) for row in ROWS)


def test_a_chunk_inside_a_prompt_samples_nothing() -> None:
    output = verify(prefill(make_request(range(10)), 0, 0, 4), [[]], draft([]))
    assert (output.token_ids, output.num_accepted_tokens, output.errors) == (((),), (0,), (None,))


def test_the_last_chunk_of_a_prompt_samples_one_token() -> None:
    output = verify(prefill(make_request(range(10)), 0, 4, 6), [[7]], draft([]))
    assert output.token_ids == ((7,),)


def test_entries_that_do_not_sample_keep_their_place_in_a_batch() -> None:
    silent = entry(make_request(), 0, samples=False)
    batch = Batch(scheduled=(silent, entry(make_request(), 1)), is_prefill=False)
    output = verify(batch, [[], [7, 8]], draft([], [7]))
    assert output.token_ids == ((), (7, 8))
    assert output.num_accepted_tokens == (0, 1)


FAILED = {1: "row 1 failed", 2: "row 2 failed"}


@pytest.mark.parametrize(
    ("target", "drafts", "kept", "accepted", "error"),
    [
        pytest.param([5, NO_TOKEN, 7], [5, 6], (5,), 1, FAILED[1], id="what was accepted before it is kept"),
        pytest.param([5, 6, NO_TOKEN], [5, 6], (5, 6), 2, FAILED[2], id="the bonus token failed"),
        pytest.param([5, NO_TOKEN, NO_TOKEN], [5, 6], (5,), 1, FAILED[1], id="the first of two is told"),
        pytest.param([5, NO_TOKEN, 7], [9, 6], (5,), 0, None, id="behind a wrong draft it is never reached"),
    ],
)
def test_a_failing_row_counts_only_if_it_is_reached(
    target: list[int], drafts: list[int], kept: tuple[int, ...], accepted: int, error: str | None
) -> None:
    output = verify(decode(make_request()), [target], draft(drafts), FAILED)
    assert (output.token_ids, output.num_accepted_tokens, output.errors) == ((kept,), (accepted,), (error,))


def test_a_failure_belongs_to_its_request_alone() -> None:
    batch = decode(*[make_request() for _ in range(3)])
    output = verify(batch, [[5, 6], [7, NO_TOKEN], [8, 9]], draft([5], [7], [8]), {3: "bad processor"})
    assert output.errors == (None, "bad processor", None)
    assert output.token_ids == ((5, 6), (7,), (8, 9))


def test_a_row_without_a_token_and_without_a_failure_has_a_reason_too() -> None:
    (error,) = verify(decode(make_request()), [[NO_TOKEN]], draft([])).errors
    assert error is not None and "no token can be sampled" in error and "\n" not in error


few = st.integers(NO_TOKEN, 2)
windows = st.lists(
    st.tuples(st.lists(few, min_size=6, max_size=6), st.lists(st.integers(0, 2), max_size=5)), min_size=1
)


@settings(max_examples=200, deadline=None)
@given(windows)
def test_no_token_never_becomes_a_token_and_an_error_takes_the_place_of_one(
    windows: list[tuple[list[int], list[int]]],
) -> None:
    targets = [target[: len(drafts) + 1] for target, drafts in windows]
    batch = decode(*[make_request() for _ in windows])
    output = verify(batch, targets, draft(*[drafts for _, drafts in windows], k=5))
    for index, (target, (_, drafts)) in enumerate(zip(targets, windows, strict=True)):
        agree = next((at for at, token in enumerate(drafts) if token != target[at]), len(drafts))
        kept = [token for token in target[: agree + 1] if token != NO_TOKEN]
        assert output.token_ids[index] == tuple(kept)
        assert output.num_accepted_tokens[index] == agree
        assert len(kept) + (output.errors[index] is not None) == agree + 1
