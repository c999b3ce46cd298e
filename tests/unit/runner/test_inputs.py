"""Input buffers: real rows follow the block table, padding points at scratch, nothing of an earlier fill is left."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compspec.batch import SCRATCH_BLOCK, Bucket
from compspec.runner.inputs import InputBuffers, Query

CPU = torch.device("cpu")
BLOCK_SIZE = 4
MAX_BLOCKS = 10
DECODE = Bucket(num_requests=3, query_len=5, num_logits=5)
PREFILL = Bucket(num_requests=2, query_len=6, num_logits=1)
NAMES = ("input_ids", "positions", "slot_mapping", "block_table", "seq_lens", "logits_to_keep")


def filled(buffers: InputBuffers, queries: list[Query]) -> dict[str, np.ndarray]:
    """A copy of what a fill gave, by name."""
    return {name: tensor.numpy().copy() for name, tensor in zip(NAMES, buffers.fill(queries), strict=True)}


def new_buffers(bucket: Bucket) -> InputBuffers:
    return InputBuffers(bucket, BLOCK_SIZE, MAX_BLOCKS, CPU)


@st.composite
def queries(draw: st.DrawFn, bucket: Bucket) -> list[Query]:
    found = []
    for _ in range(draw(st.integers(0, bucket.num_requests))):
        count = draw(st.integers(1, bucket.query_len))
        start = draw(st.integers(0, MAX_BLOCKS * BLOCK_SIZE - bucket.query_len))
        least = -(-(start + count) // BLOCK_SIZE)
        blocks = draw(st.permutations(range(1, 60)))[: draw(st.integers(least, MAX_BLOCKS))]
        tokens = draw(st.lists(st.integers(1, 99), min_size=count, max_size=count))
        found.append(Query(token_ids=tokens, start=start, block_ids=blocks, writes=draw(st.booleans())))
    return found


def check(bucket: Bucket, given_queries: list[Query], found: dict[str, np.ndarray]) -> None:
    """Everything that is promised of a fill, by arithmetic on single tokens."""
    requests, rows = bucket.num_requests, bucket.query_len
    ids, positions = found["input_ids"].reshape(requests, rows), found["positions"].reshape(requests, rows)
    slots = found["slot_mapping"].reshape(requests, rows)
    for row, query in enumerate(given_queries):
        count = len(query.token_ids)
        for j, token in enumerate(query.token_ids):
            position = query.start + j
            assert (ids[row, j], positions[row, j]) == (token, position)
            own = query.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            if query.writes:
                assert slots[row, j] == own
            else:
                assert slots[row, j] // BLOCK_SIZE == SCRATCH_BLOCK
        last = query.start + count - 1
        assert found["seq_lens"][row] == last + 1
        assert (positions[row, count:] == last).all()
        assert (ids[row, count:] == 0).all()
        assert (slots[row, count:] // BLOCK_SIZE == SCRATCH_BLOCK).all()
        used = last // BLOCK_SIZE + 1
        assert found["block_table"][row, :used].tolist() == list(query.block_ids[:used])
        assert (found["block_table"][row, used:] == SCRATCH_BLOCK).all()
        if not bucket.is_decode:
            assert found["logits_to_keep"][row] == row * rows + count - 1
    for row in range(len(given_queries), requests):
        assert (ids[row] == 0).all() and (positions[row] == 0).all()
        assert (slots[row] // BLOCK_SIZE == SCRATCH_BLOCK).all()
        assert (found["block_table"][row] == SCRATCH_BLOCK).all()
        assert found["seq_lens"][row] == 1
    if bucket.is_decode:
        assert found["logits_to_keep"].tolist() == list(range(bucket.num_tokens))


@pytest.mark.parametrize("bucket", [DECODE, PREFILL], ids=str)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rows_follow_the_block_table_and_padding_points_at_scratch(bucket: Bucket, data: st.DataObject) -> None:
    """Several fills of one buffer: each must be right whatever the one before it left."""
    buffers = new_buffers(bucket)
    for _ in range(3):
        chosen = data.draw(queries(bucket))
        check(bucket, chosen, filled(buffers, chosen))


@pytest.mark.parametrize("bucket", [DECODE, PREFILL], ids=str)
def test_a_small_fill_after_the_largest_equals_one_of_a_new_buffer(bucket: Bucket) -> None:
    full = [
        Query(
            token_ids=[99] * bucket.query_len, start=MAX_BLOCKS * BLOCK_SIZE - bucket.query_len, block_ids=range(20, 30)
        )
        for _ in range(bucket.num_requests)
    ]
    small = [Query(token_ids=[7], start=3, block_ids=[11])]
    used, new = new_buffers(bucket), new_buffers(bucket)
    filled(used, full)
    after, fresh = filled(used, small), filled(new, small)
    for name in NAMES:
        real = slice(0, 1) if name == "logits_to_keep" and not bucket.is_decode else slice(None)
        assert (after[name][real] == fresh[name][real]).all(), name


@pytest.mark.parametrize("bucket", [DECODE, PREFILL], ids=str)
def test_rows_that_are_not_stored_differ_in_their_slots_alone(bucket: Bucket) -> None:
    """They read what rows that are stored read, and the next fill stores again."""
    buffers = new_buffers(bucket)
    sizes = {"token_ids": [7, 8, 9], "start": 6, "block_ids": [31, 32, 33]}
    beside = Query(token_ids=[5, 6], start=2, block_ids=[21, 22])
    stored, silent, again = (filled(buffers, [Query(**sizes, writes=writes), beside]) for writes in (True, False, True))
    rows = bucket.query_len
    assert (silent["slot_mapping"][:rows] // BLOCK_SIZE == SCRATCH_BLOCK).all()
    assert (stored["slot_mapping"][:3] // BLOCK_SIZE).tolist() == [32, 32, 33]
    assert (silent["slot_mapping"][rows:] == stored["slot_mapping"][rows:]).all()
    for name in NAMES:
        assert (again[name] == stored[name]).all(), name
        if name != "slot_mapping":
            assert (silent[name] == stored[name]).all(), name


def test_shapes_and_types_are_those_of_the_bucket_at_every_fill() -> None:
    buffers = new_buffers(DECODE)
    for chosen in ([], [Query(token_ids=[1, 2], start=0, block_ids=[5])]):
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in zip(NAMES, buffers.fill(chosen), strict=True)}
        assert shapes == {
            "input_ids": ((1, 15), torch.int64),
            "positions": ((1, 15), torch.int64),
            "slot_mapping": ((15,), torch.int64),
            "block_table": ((3, MAX_BLOCKS), torch.int32),
            "seq_lens": ((3,), torch.int32),
            "logits_to_keep": ((15,), torch.int64),
        }


def test_a_table_is_written_again_only_where_it_is_another_or_reaches_further() -> None:
    buffers, blocks = new_buffers(DECODE), [11, 12, 13]

    def row(start: int, block_ids: list[int]) -> list[int]:
        filled(buffers, [Query(token_ids=[7, 8], start=start, block_ids=block_ids)])
        return buffers.block_table[0, :3].tolist()

    assert row(2, blocks) == [11, SCRATCH_BLOCK, SCRATCH_BLOCK]
    assert row(3, blocks) == [11, 12, SCRATCH_BLOCK]
    buffers.block_table[0, 0] = 99
    assert row(5, blocks) == [99, 12, SCRATCH_BLOCK], "a long table would be written at every step"
    assert row(5, [11, 12, 13]) == [11, 12, SCRATCH_BLOCK]


@pytest.mark.parametrize("bucket", [DECODE, PREFILL], ids=str)
def test_nothing_is_left_of_a_fill_that_failed(bucket: Bucket) -> None:
    buffers, blocks = new_buffers(bucket), [21, 22, 23]
    good = Query(token_ids=[7, 8], start=5, block_ids=blocks)
    filled(buffers, [good])
    with pytest.raises(AssertionError):
        filled(buffers, [Query(token_ids=[9], start=0, block_ids=[31]), Query(token_ids=[9], start=9, block_ids=[32])])
    check(bucket, [good], filled(buffers, [good]))


def test_the_tensors_of_every_fill_are_the_same_memory() -> None:
    """A CUDA graph reads from fixed addresses."""
    buffers = new_buffers(DECODE)
    first = [tensor.data_ptr() for tensor in buffers.fill([])]
    second = [tensor.data_ptr() for tensor in buffers.fill([Query(token_ids=[1], start=0, block_ids=[5])])]
    assert first == second


@pytest.mark.parametrize(
    "query",
    [
        Query(token_ids=[], start=0, block_ids=[5]),
        Query(token_ids=[1] * 6, start=0, block_ids=[5, 6]),
        Query(token_ids=[1, 2], start=3, block_ids=[5]),
    ],
    ids=["no rows", "more rows than the bucket", "rows beyond the blocks"],
)
def test_a_query_that_does_not_fit_is_our_bug(query: Query) -> None:
    with pytest.raises(AssertionError):
        new_buffers(DECODE).fill([query])


def test_more_requests_than_the_bucket_are_our_bug() -> None:
    with pytest.raises(AssertionError):
        new_buffers(DECODE).fill([Query(token_ids=[1], start=0, block_ids=[5])] * 4)
