"""The block pool: the scratch block stays, no block has two owners unless shared, all come back."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compspec.batch import SCRATCH_BLOCK
from compspec.scheduling.block_pool import BlockPool


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for_rounds_up(num_tokens: int, blocks: int) -> None:
    assert BlockPool(4, 16).blocks_for(num_tokens) == blocks


def test_the_scratch_block_is_never_handed_out() -> None:
    pool = BlockPool(5, 16)
    assert pool.num_usable == 4
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert SCRATCH_BLOCK == 0
    assert pool.num_free == 0


def test_taking_more_than_there_is_is_our_bug() -> None:
    pool = BlockPool(5, 16)
    with pytest.raises(AssertionError):
        pool.allocate(5)
    assert pool.num_free == 4


def test_releasing_a_free_block_is_our_bug() -> None:
    pool = BlockPool(5, 16)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


def test_sharing_a_free_block_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        BlockPool(5, 16).share([1])


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(3, 16)
    block = pool.allocate(1)
    pool.share(block)
    assert pool.num_holders(block[0]) == 2
    pool.release(block)
    assert pool.num_free == 1
    pool.release(block)
    assert pool.num_free == 2
    assert pool.num_holders(block[0]) == 0


operations = st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 9)), max_size=60)


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 12), operations)
def test_blocks_are_held_exactly_as_often_as_by_a_simple_count(num_blocks: int, steps: list[tuple[str, int]]) -> None:
    pool = BlockPool(num_blocks, 4)
    held: list[list[int]] = []
    for name, number in steps:
        if name == "allocate" and number <= pool.num_free:
            taken = pool.allocate(number)
            assert len(taken) == number
            assert not set(taken) & {block for blocks in held for block in blocks}, "a block in use was handed out"
            held.append(taken)
        elif name == "share" and held:
            blocks = held[number % len(held)]
            pool.share(blocks)
            held.append(list(blocks))
        elif name == "release" and held:
            pool.release(held.pop(number % len(held)))
        counts = Counter(block for blocks in held for block in blocks)
        assert SCRATCH_BLOCK not in counts
        assert pool.num_free == pool.num_usable - len(counts)
        assert [pool.num_holders(block) for block in range(num_blocks)] == [counts[b] for b in range(num_blocks)]
