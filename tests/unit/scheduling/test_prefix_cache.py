"""The prefix cache: whole units of verified tokens, found by requests that began the same and may know each other."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compspec.request import Request
from compspec.scheduling.block_pool import BlockPool
from compspec.scheduling.prefix_cache import PrefixCache
from tests.unit.fakes import make_request

SIZE = 4


class Caching:
    """A pool with a cache, and requests that compute, find and let go."""

    def __init__(self, chunk: int | None = None, num_blocks: int = 64, block_size: int = SIZE) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.cache = PrefixCache(self.pool, chunk)

    def compute(self, request: Request, num_tokens: int, *, final: int | None = None) -> Request:
        """Computes up to `num_tokens` tokens; so many of them are final."""
        missing = self.pool.blocks_for(num_tokens) - len(request.block_ids)
        request.block_ids = [*request.block_ids, *self.pool.allocate(missing)]
        request.num_computed_tokens = num_tokens
        self.cache.keep(request, num_tokens if final is None else final)
        return request

    def begin(self, tokens: Sequence[int], *, output: Sequence[int] = (), **params: Any) -> Request:
        """A request that has nothing yet."""
        request = make_request(tokens, output=output, max_tokens=40, **params)
        request.num_computed_tokens = 0
        return request

    def run(self, tokens: Sequence[int], **params: Any) -> Request:
        """A request that computes its whole prompt, whatever is there."""
        return self.compute(self.begin(tokens, **params), len(tokens))

    def found(self, tokens: Sequence[int], **params: Any) -> int:
        """How many tokens such a request finds; it takes them, and gives them back."""
        request = self.begin(tokens, **params)
        blocks = self.cache.find(request)
        self.cache.take(request)
        assert request.block_ids == blocks
        assert request.num_computed_tokens == len(blocks) * self.pool.block_size
        self.let_go(request)
        return len(blocks) * self.pool.block_size

    def let_go(self, request: Request) -> None:
        """As a preemption does."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = request.num_kept_blocks = 0


@pytest.mark.parametrize(
    ("block_size", "chunk", "unit"), [(4, None, 4), (4, 8, 8), (4, 4, 4), (8, 4, 8), (4, 6, 12), (3, 4, 12), (1, 5, 5)]
)
def test_whole_units_are_shared_and_no_part_of_one(block_size: int, chunk: int | None, unit: int) -> None:
    """A block in fast numerics; in exact numerics whole blocks of whole chunks."""
    for length in range(1, 40):
        caching = Caching(chunk, block_size=block_size)
        caching.run(range(length))
        assert caching.found([*range(length), 99]) == length // unit * unit


@pytest.mark.parametrize("chunk", [None, 8])
def test_one_token_is_always_left_to_sample_from(chunk: int | None) -> None:
    caching = Caching(chunk)
    caching.run(range(16))
    unit = chunk or SIZE
    assert caching.found(range(16)) == 16 - unit
    assert caching.found(range(17)) == 16


@pytest.mark.parametrize("chunk", [None, 8])
def test_a_request_with_output_may_find_its_whole_prompt(chunk: int | None) -> None:
    caching = Caching(chunk)
    caching.run(range(16))
    assert caching.found(range(16), output=[99]) == 16


def test_in_fast_numerics_output_is_shared_and_can_be_the_next_ones_prompt() -> None:
    caching = Caching()
    caching.compute(caching.begin(range(6), output=range(6, 13)), 12)
    assert caching.found(range(20)) == 12
    assert caching.found(range(6), output=range(6, 13)) == 12


def test_in_exact_numerics_no_output_is_shared() -> None:
    """Its keys and values were computed in decode steps, those of a prompt are not."""
    caching = Caching(4)
    caching.compute(caching.begin(range(6), output=range(6, 23)), 22)
    assert caching.found(range(30)) == 4
    caching.run(range(24))
    assert caching.found(range(6), output=range(6, 23)) == 4, "nor is a prompt taken for output"


def test_what_is_not_final_is_not_found_until_it_is() -> None:
    caching = Caching()
    request = caching.compute(caching.begin(range(16)), 16, final=7)
    assert caching.found(range(20)) == 4
    caching.compute(request, 16, final=3)  # a proposer that began anew
    assert caching.found(range(20)) == 4
    caching.compute(request, 16, final=12)
    assert caching.found(range(20)) == 12


def test_computed_rows_beyond_the_last_token_are_none_of_the_request() -> None:
    """An output that was cut has rows of drafts beyond it."""
    caching = Caching()
    request = caching.begin(range(6), output=[6])
    caching.compute(request, 12)
    assert caching.found(range(20)) == 4
    assert caching.pool.num_keyed == 1


def test_the_same_tokens_after_others_are_something_else() -> None:
    caching = Caching()
    caching.run([1, 2, 3, 4, 5, 6, 7, 8])
    assert caching.found([9, 2, 3, 4, 5, 6, 7, 8, 0]) == 0
    assert caching.found([5, 6, 7, 8, 0]) == 0
    assert caching.found([1, 2, 3, 4, 5, 6, 7, 9, 0]) == 4
    assert caching.found([1, 2, 3, 4, 5, 6, 7, 8, 0]) == 8


@pytest.mark.parametrize("chunk", [None, 8])
def test_only_requests_with_the_same_salt_meet(chunk: int | None) -> None:
    caching = Caching(chunk)
    salts: list[dict[str, str]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "é"}]
    for number, own in enumerate(salts):
        caching.run(range(16), **own)
        seen = [caching.found(range(20), **other) for other in salts]
        assert seen == [16 if index <= number else 0 for index in range(len(salts))]


def test_finding_changes_nothing() -> None:
    caching = Caching()
    caching.let_go(caching.run(range(16)))
    request = caching.begin(range(20))
    free = caching.pool.num_free
    assert len(caching.cache.find(request)) == 4
    assert (request.block_ids, request.num_computed_tokens, caching.pool.num_free) == ([], 0, free)


def test_blocks_that_are_taken_are_shared() -> None:
    caching = Caching()
    first = caching.run(range(16))
    second = caching.begin(range(20))
    caching.cache.take(second)
    assert second.block_ids == first.block_ids
    assert [caching.pool.num_holders(block) for block in first.block_ids] == [2] * 4
    caching.let_go(first)
    assert caching.pool.num_free == caching.pool.num_usable - 4


def test_a_request_goes_on_with_what_another_has_computed_meanwhile() -> None:
    caching = Caching(8)
    behind = caching.compute(caching.begin(range(30)), 8)
    caching.run(range(26))
    caching.cache.take(behind)
    assert (behind.num_computed_tokens, len(behind.block_ids)) == (24, 6)


@pytest.mark.parametrize(("chunk", "num_computed"), [(None, 6), (8, 4), (8, 10)])
def test_nothing_is_found_between_units(chunk: int | None, num_computed: int) -> None:
    caching = Caching(chunk)
    caching.run(range(24))
    assert caching.cache.find(caching.compute(caching.begin(range(30)), num_computed)) == []


def test_nothing_is_found_where_a_request_has_blocks_of_its_own_already() -> None:
    caching = Caching()
    caching.run(range(24))
    request = caching.compute(caching.begin(range(30)), 8)
    request.block_ids = [*request.block_ids, *caching.pool.allocate(1)]
    assert caching.cache.find(request) == []


def test_of_two_that_computed_the_same_the_first_is_found_and_the_second_goes_on() -> None:
    caching = Caching()
    first, second = caching.run(range(8)), caching.run(range(16))
    request = caching.begin(range(20))
    caching.cache.take(request)
    assert request.block_ids == [*first.block_ids, *second.block_ids[2:]]


def test_a_unit_with_a_missing_block_is_not_there_and_what_follows_it_neither() -> None:
    """The pool hands out single blocks, and units may be larger."""
    caching = Caching(8, num_blocks=9)
    request = caching.run(range(32))
    blocks = request.block_ids
    for block in (blocks[3], *blocks[:3], *blocks[4:]):  # the second unit's last block is the oldest
        caching.pool.release([block])
    caching.pool.allocate(1)
    assert caching.found(range(40)) == 8


def test_what_was_handed_out_anew_is_found_again_once_it_is_computed_again() -> None:
    caching = Caching(num_blocks=5)
    caching.let_go(caching.run(range(16)))
    other = caching.run(range(50, 58))
    assert caching.found(range(20)) == 8, "the end goes first"
    caching.let_go(other)
    request = caching.begin(range(17))
    caching.cache.take(request)
    request.num_kept_blocks = 0
    caching.compute(request, 16)
    caching.let_go(request)
    assert caching.found(range(20)) == 16


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    caching = Caching()
    request = caching.compute(caching.begin(range(6), output=range(6, 13)), 12)
    blocks = request.block_ids
    caching.let_go(request)
    request.stats.num_preemptions = 1
    caching.cache.take(request)
    assert (request.block_ids, request.num_computed_tokens) == (blocks, 12)


def test_tokens_count_as_cached_for_the_first_admission_alone() -> None:
    caching = Caching()
    caching.run(range(16))
    request = caching.begin(range(20))
    caching.cache.take(request)
    assert request.stats.num_cached_tokens == 16
    caching.let_go(request)
    request.stats.num_preemptions = 1
    caching.cache.take(request)
    assert (request.num_computed_tokens, request.stats.num_cached_tokens) == (16, 16)


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@settings(max_examples=300, deadline=None)
@given(
    chunk=st.sampled_from([None, 2, 3, 4]),
    block_size=st.sampled_from([1, 2]),
    requests=st.lists(st.tuples(tokens, tokens, st.sampled_from([None, "a"])), min_size=1, max_size=6),
)
def test_exactly_the_leading_units_that_somebody_computed_are_found(
    chunk: int | None, block_size: int, requests: list[tuple[list[int], list[int], str | None]]
) -> None:
    caching = Caching(chunk, num_blocks=400, block_size=block_size)
    unit = next(size for size in range(1, 99) if size % block_size == 0 and size % (chunk or 1) == 0)
    known: set[tuple[str | None, tuple[int, ...]]] = set()
    for prompt, output, salt in requests:
        request = caching.begin(prompt, output=output, cache_salt=salt)
        everything = [*prompt, *output]
        shared = prompt if chunk is not None else everything
        most = min(len(shared), len(everything) - 1)
        expected = 0
        while expected + unit <= most and (salt, tuple(everything[: expected + unit])) in known:
            expected += unit
        caching.cache.take(request)
        assert request.num_computed_tokens == expected
        caching.compute(request, len(everything) - 1)
        computed = min(len(shared), len(everything) - 1)
        known |= {(salt, tuple(everything[:end])) for end in range(unit, computed + 1, unit)}
        caching.let_go(request)
