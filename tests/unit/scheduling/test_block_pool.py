"""The block pool: the scratch block stays, no block has two owners unless shared, all come back; names end in time."""

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
        BlockPool(5, 16).hold([1])


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(3, 16)
    block = pool.allocate(1)
    pool.hold(block)
    assert pool.num_holders(block[0]) == 2
    pool.release(block)
    assert pool.num_free == 1
    pool.release(block)
    assert pool.num_free == 2
    assert pool.num_holders(block[0]) == 0


def keyed(pool: BlockPool, *keys: bytes) -> list[int]:
    """Takes a block for each key and names it."""
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.set_key(block, key)
    return blocks


def test_a_named_block_is_found_in_use_and_free_until_it_is_handed_out_anew() -> None:
    pool = BlockPool(4, 16)
    blocks = keyed(pool, b"a", b"b")
    assert pool.find([b"a", b"b"]) == blocks
    pool.release(blocks)
    assert pool.find([b"a", b"b"]) == blocks
    pool.allocate(3)
    assert pool.find([b"a", b"b"]) == []
    assert pool.num_keyed == 0


def test_what_is_found_ends_before_the_first_key_that_is_not_there() -> None:
    pool = BlockPool(6, 16)
    a, b, c = keyed(pool, b"a", b"b", b"c")
    assert pool.find([b"a", b"x", b"c"]) == [a]
    assert pool.find([b"x", b"a"]) == []
    assert pool.find([]) == []
    assert pool.find([b"c", b"a", b"b"]) == [c, a, b]


def test_a_free_named_block_can_be_held_again_and_is_not_handed_out_then() -> None:
    pool = BlockPool(3, 16)
    (block,) = keyed(pool, b"a")
    pool.release([block])
    pool.hold([block])
    assert (pool.num_holders(block), pool.num_free) == (1, 1)
    assert pool.allocate(1) != [block]
    assert pool.find([b"a"]) == [block]


def test_a_free_block_without_a_name_cannot_be_held() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="without contents"):
        pool.hold(blocks)


def test_naming_a_free_block_is_our_bug() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="naming a free block"):
        pool.set_key(blocks[0], b"a")


def test_of_blocks_with_the_same_contents_the_first_keeps_the_name() -> None:
    pool = BlockPool(5, 16)
    first, second = pool.allocate(2)
    for block in (first, second):
        pool.set_key(block, b"a")
    assert pool.find([b"a"]) == [first]
    assert pool.num_keyed == 1
    pool.release([second])
    assert pool.allocate(1) == [second], "a duplicate holds nothing that can be found, so it goes first"
    assert pool.find([b"a"]) == [first]


def test_a_name_stays_as_it_is() -> None:
    pool = BlockPool(3, 16)
    (block,) = keyed(pool, b"a")
    pool.set_key(block, b"b")
    assert (pool.find([b"a"]), pool.find([b"b"])) == ([block], [])


def test_free_blocks_without_a_name_are_handed_out_before_named_ones() -> None:
    pool = BlockPool(5, 16)
    named = keyed(pool, b"a", b"b")
    plain = pool.allocate(2)
    pool.release(plain)
    pool.release(named)
    assert sorted(pool.allocate(2)) == sorted(plain)
    assert pool.find([b"a", b"b"]) == named


def test_of_named_blocks_the_one_that_was_let_go_first_is_handed_out_first() -> None:
    pool = BlockPool(5, 16)
    a, b, c, d = keyed(pool, b"a", b"b", b"c", b"d")
    for block in (c, a, d, b):
        pool.release([block])
    pool.hold([c])
    pool.release([c])  # used again, so it is the last
    assert [pool.allocate(1)[0] for _ in range(4)] == [a, d, b, c]


def test_the_end_of_a_prefix_is_handed_out_before_its_beginning() -> None:
    pool = BlockPool(4, 16)
    blocks = keyed(pool, b"a", b"b", b"c")
    pool.release(blocks)
    pool.allocate(1)
    assert pool.find([b"a", b"b", b"c"]) == blocks[:2]


class SimplePool:
    """The same, by definition: lists of who holds what, and free blocks in the order in which they go."""

    def __init__(self, num_blocks: int) -> None:
        self.holders = dict.fromkeys(range(1, num_blocks), 0)
        self.plain = list(self.holders)  # free and nameless
        self.named: list[int] = []  # free, the least recently used first
        self.keys: dict[int, bytes] = {}

    def allocate(self, count: int) -> list[int]:
        taken = [*self.plain, *self.named][:count]
        for block in taken:
            (self.plain if block in self.plain else self.named).remove(block)
            self.keys.pop(block, None)
            self.holders[block] = 1
        return taken

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.named:
                self.named.remove(block)
            self.holders[block] += 1

    def release(self, blocks: list[int]) -> None:
        for block in blocks[::-1]:
            self.holders[block] -= 1
            if self.holders[block] == 0 and block in self.keys:
                self.named.append(block)
            elif self.holders[block] == 0:
                self.plain.insert(0, block)

    def set_key(self, block: int, key: bytes) -> None:
        owner = next(iter(self.find(key)), None)
        if block in self.keys or (owner is not None and self.holders[owner]):
            return
        if owner is not None:  # a free block gives its name to one in use
            del self.keys[owner]
            self.named.remove(owner)
            self.plain.insert(0, owner)
        self.keys[block] = key

    def find(self, key: bytes) -> list[int]:
        return [block for block, name in self.keys.items() if name == key]


operations = st.lists(
    st.tuples(st.sampled_from(["allocate", "share", "release", "release", "name", "name", "find"]), st.integers(0, 9)),
    max_size=80,
)


@settings(max_examples=400, deadline=None)
@given(st.integers(2, 12), operations)
def test_blocks_are_held_found_and_handed_out_exactly_as_by_a_simple_pool(
    num_blocks: int, steps: list[tuple[str, int]]
) -> None:
    pool, simple = BlockPool(num_blocks, 4), SimplePool(num_blocks)
    held: list[list[int]] = []
    keys = [bytes([number]) for number in range(10)]
    for name, number in steps:
        if name == "allocate" and number <= pool.num_free:
            taken = pool.allocate(number)
            assert taken == simple.allocate(number)
            assert not set(taken) & {block for blocks in held for block in blocks}, "a block in use was handed out"
            held.append(taken)
        elif name == "share" and held:
            blocks = held[number % len(held)]
            for each in (pool, simple):
                each.hold(blocks)
            held.append(list(blocks))
        elif name == "release" and held:
            blocks = held.pop(number % len(held))
            for each in (pool, simple):
                each.release(blocks)
        elif name == "name" and held:
            for block in held[number % len(held)][:2]:
                for each in (pool, simple):
                    each.set_key(block, keys[(number + block) % 10])
        elif name == "find":
            found = pool.find([keys[number]])
            for each in (pool, simple):
                each.hold(found)
            held.append(found)
        counts = Counter(block for blocks in held for block in blocks)
        assert SCRATCH_BLOCK not in counts
        assert pool.num_free == pool.num_usable - len(counts)
        assert [pool.num_holders(block) for block in range(num_blocks)] == [counts[b] for b in range(num_blocks)]
        assert [pool.find([key]) for key in keys] == [simple.find(key) for key in keys]
        assert pool.num_keyed == len(simple.keys)


def test_a_block_in_use_takes_over_the_name_of_a_free_one() -> None:
    pool = BlockPool(4, 16)
    old, new = pool.allocate(2)
    pool.set_key(old, b"text")
    pool.release([old])
    pool.set_key(new, b"text")
    assert pool.find([b"text"]) == [new]
    assert pool.allocate(1) == [old], "what nobody can find goes first"
    pool.release([new])
    assert pool.find([b"text"]) == [new]
