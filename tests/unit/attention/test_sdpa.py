"""The reference backend against attention written out in float64, and against everything a stale cache can hold."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from compspec.attention.sdpa import CAPACITY_STEP, SdpaBackend

HEAD_DIM = 16
BLOCK_SIZE = 16
NAN = float("nan")


@dataclass
class Case:
    """A batch over a paged cache. Every request has its own blocks, in random order; block 0 is scratch."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    positions: Tensor
    scale: float = 0.3
    window: int = 0
    softcap: float = 0.0

    def run(self) -> Tensor:
        """[R, Q, Hq, D]"""
        out = SdpaBackend().paged_attention(
            self.q.flatten(0, 1),
            self.k_cache,
            self.v_cache,
            self.block_table,
            self.seq_lens,
            self.positions.flatten(),
            BLOCK_SIZE,
            self.scale,
            self.window,
            self.softcap,
        )
        assert out.is_contiguous()
        return out.view(self.q.shape)

    def only(self, index: int) -> "Case":
        """The same caches and one request."""
        one = slice(index, index + 1)
        return Case(
            self.q[one],
            self.k_cache,
            self.v_cache,
            self.block_table[one],
            self.seq_lens[one],
            self.positions[one],
            self.scale,
            self.window,
            self.softcap,
        )

    def slots(self, index: int) -> Tensor:
        """Where the tokens of a request are, in order."""
        where = torch.arange(int(self.seq_lens[index]))
        return self.block_table[index, where // BLOCK_SIZE].long() * BLOCK_SIZE + where % BLOCK_SIZE


def make_case(
    lengths: list[int],
    rows: int,
    *,
    heads: tuple[int, int] = (4, 2),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    window: int = 0,
    softcap: float = 0.0,
) -> Case:
    """Requests of `lengths` tokens whose last `rows` (or fewer: then padding repeats the last) are queried."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    per_request = max(-(-length // BLOCK_SIZE) for length in lengths) + 2
    order = torch.randperm(len(lengths) * per_request, generator=generator) + 1
    slots = (len(order) + 1) * BLOCK_SIZE
    starts = [max(0, length - rows) for length in lengths]
    positions = [
        [min(start + row, length - 1) for row in range(rows)] for start, length in zip(starts, lengths, strict=True)
    ]
    return Case(
        q=random(len(lengths), rows, heads[0], HEAD_DIM),
        k_cache=random(slots, heads[1], HEAD_DIM),
        v_cache=random(slots, heads[1], HEAD_DIM),
        block_table=order.view(len(lengths), per_request).to(torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        positions=torch.tensor(positions),
        window=window,
        softcap=softcap,
    )


def by_definition(case: Case) -> Tensor:
    """Attention in float64, one row and one head at a time."""
    out = torch.zeros_like(case.q, dtype=torch.float64)
    groups = case.q.shape[2] // case.k_cache.shape[1]
    for r in range(len(case.seq_lens)):
        keys, values = case.k_cache[case.slots(r)].double(), case.v_cache[case.slots(r)].double()
        for row, position in enumerate(case.positions[r].tolist()):
            first = max(0, position - case.window + 1) if case.window else 0
            for head in range(case.q.shape[2]):
                k, v = keys[first : position + 1, head // groups], values[first : position + 1, head // groups]
                scores = (k @ case.q[r, row, head].double()) * case.scale
                if case.softcap:
                    scores = torch.tanh(scores / case.softcap) * case.softcap
                out[r, row, head] = scores.softmax(0) @ v
    return out


SHAPES = [
    pytest.param([1], 1, id="one token"),
    pytest.param([37], 1, id="decode"),
    pytest.param([5, 37, 16, 17, 1], 1, id="ragged decode"),
    pytest.param([37, 8, 9, 64], 8, id="verify"),
    pytest.param([3, 40], 8, id="verify with padded rows"),
    pytest.param([32], 32, id="prefill from the start"),
    pytest.param([90], 32, id="a later chunk"),
    pytest.param([600, 20, 513, 512], 3, id="beyond and at the capacity step"),
]
OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"window": 7}, id="window"),
    pytest.param({"window": 1}, id="window of one"),
    pytest.param({"softcap": 2.0}, id="softcap"),
    pytest.param({"softcap": 5.0, "window": 20}, id="softcap and window"),
    pytest.param({"heads": (4, 4)}, id="one KV head per head"),
    pytest.param({"heads": (6, 1)}, id="one KV head"),
]
SOME_OPTIONS = [OPTIONS[0], OPTIONS[1], OPTIONS[4]]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("lengths", "rows"), SHAPES)
def test_equals_attention_written_out_in_float64(lengths: list[int], rows: int, options: dict) -> None:
    case = make_case(lengths, rows, **options)
    assert torch.allclose(case.run().double(), by_definition(case), atol=2e-6)


@pytest.mark.parametrize("options", SOME_OPTIONS)
def test_bfloat16_is_as_good_as_its_rounding(options: dict) -> None:
    case = make_case([37, 8, 9, 64], 8, dtype=torch.bfloat16, **options)
    found = case.run()
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), by_definition(case), atol=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", SOME_OPTIONS)
@pytest.mark.parametrize(("lengths", "rows"), SHAPES)
def test_poison_outside_a_request_never_changes_a_bit(
    lengths: list[int], rows: int, options: dict, dtype: torch.dtype
) -> None:
    """Scratch, unused blocks, the unused end of the last block and the tail of the tables may hold anything."""
    case = make_case(lengths, rows, dtype=dtype, **options)
    clean = case.run()
    used = torch.cat([case.slots(index) for index in range(len(lengths))])
    for poison in (NAN, math.inf, 3e38):
        for cache in (case.k_cache, case.v_cache):
            stale = torch.ones(len(cache), dtype=torch.bool)
            stale[used] = False
            cache[stale] = poison
        for wrong in (2**31 - 1, -1, 0):
            for index, length in enumerate(lengths):
                case.block_table[index, -(-length // BLOCK_SIZE) :] = wrong
            assert torch.equal(case.run(), clean), (poison, wrong)


@pytest.mark.parametrize("options", SOME_OPTIONS)
def test_later_tokens_of_the_same_request_never_change_a_bit(options: dict) -> None:
    """Row j sees the drafts before it and none after it: those may be anything finite."""
    case = make_case([37, 530], 8, **options)
    clean = case.run()
    for index in range(2):
        later = case.slots(index)[-3:]
        for value in (0.0, 1e4):
            case.k_cache[later] = value
            case.v_cache[later] = -value
            assert torch.equal(case.run()[index, :5], clean[index, :5])
        assert not torch.equal(case.run()[index, 5:], clean[index, 5:])


@pytest.mark.parametrize("options", SOME_OPTIONS)
def test_later_tokens_that_are_nan_never_change_a_bit(options: dict) -> None:
    """What `AttentionBackend.paged_attention` promises: "and on nothing else, not even through NaN"."""
    case = make_case([37], 8, **options)
    clean = case.run()
    later = case.slots(0)[-3:]
    case.k_cache[later] = case.v_cache[later] = NAN
    assert torch.equal(case.run()[0, :5], clean[0, :5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rows", [1, 8])
def test_a_request_is_bit_equal_whatever_its_neighbours(rows: int, options: dict, dtype: torch.dtype) -> None:
    lengths = [9, 37, 600, 40, 1100, 530]  # three groups of capacity
    case = make_case(lengths, rows, dtype=dtype, **options)
    together = case.run()
    # A single query row takes another path in torch, whose bits depend on the number of requests once there are
    # several threads: a matter of shape, which the start-up self-test looks at.
    for index in range(len(lengths) if rows > 1 else 0):
        assert torch.equal(case.only(index).run()[0], together[index]), f"alone: {index}"
    short = make_case([9] * len(lengths), rows, dtype=dtype, seed=1, **options)
    for index in (1, 2):  # all neighbours are replaced: other lengths, other values, another place
        k_cache, v_cache = torch.cat([case.k_cache, short.k_cache]), torch.cat([case.v_cache, short.v_cache])
        table = torch.full(
            (len(lengths), max(case.block_table.shape[1], short.block_table.shape[1])), 0, dtype=torch.int32
        )
        table[:, : short.block_table.shape[1]] = short.block_table + case.k_cache.shape[0] // BLOCK_SIZE
        moved = Case(
            short.q.clone(),
            k_cache,
            v_cache,
            table,
            short.seq_lens.clone(),
            short.positions.clone(),
            case.scale,
            case.window,
            case.softcap,
        )
        place = 5 - index
        moved.q[place], moved.seq_lens[place] = case.q[index], case.seq_lens[index]
        moved.positions[place] = case.positions[index]
        moved.block_table[place, : case.block_table.shape[1]] = case.block_table[index]
        assert torch.equal(moved.run()[place], together[index]), f"among others: {index}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", SOME_OPTIONS)
@pytest.mark.parametrize("position", [20, 100, 508, 511, 512, 700])
def test_a_row_is_bit_equal_wherever_it_stands_in_the_window_and_however_many_drafts_follow(
    position: int, options: dict, dtype: torch.dtype
) -> None:
    """The law in small: the row at `position` as the j-th of a window with `after` rows behind it."""
    rows = 8
    case = make_case([position + rows], rows, dtype=dtype, **options)
    query = torch.randn(case.q.shape[2:], generator=torch.Generator().manual_seed(9)).to(dtype)
    found = []
    for j in range(rows):
        for after in range(rows - j):
            last = position + after
            case.seq_lens[0] = last + 1
            case.positions[0] = (torch.arange(rows) + position - j).clamp(max=last)
            case.q = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(j)).to(dtype)
            case.q[0, j] = query
            found.append(case.run()[0, j])
    assert all(torch.equal(row, found[0]) for row in found)


def test_a_request_does_not_depend_on_the_width_of_the_block_table() -> None:
    case = make_case([37, 600], 8)
    clean = case.run()
    case.block_table = torch.nn.functional.pad(case.block_table, (0, CAPACITY_STEP), value=12)
    assert torch.equal(case.run(), clean)


def test_a_request_does_not_depend_on_which_blocks_it_has() -> None:
    case = make_case([37, 600], 8)
    clean = case.run()
    moved = torch.randperm(len(case.k_cache) // BLOCK_SIZE - 1, generator=torch.Generator().manual_seed(3)) + 1
    moved = torch.cat([torch.zeros(1, dtype=torch.int64), moved])
    for name in ("k_cache", "v_cache"):
        pages = getattr(case, name).view(len(moved), BLOCK_SIZE, *case.k_cache.shape[1:])
        target = torch.empty_like(pages)
        target[moved] = pages
        setattr(case, name, target.flatten(0, 1))
    case.block_table = moved[case.block_table.long()].to(torch.int32)
    assert torch.equal(case.run(), clean)
