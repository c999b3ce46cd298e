"""The compiled CPU backend: right values, rows that depend on nothing but themselves, and a working fallback."""

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compspec.attention import cpu
from compspec.attention.backend import in_force
from compspec.attention.cpu import CpuBackend
from compspec.attention.sdpa import SdpaBackend

DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"window": 1}, id="window of one"),
    pytest.param({"window": 70}, id="window"),
    pytest.param({"softcap": 3.0}, id="softcap"),
    pytest.param({"softcap": 20.0, "window": 200}, id="softcap and window"),
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, and puts back what was set before."""
    if cpu._function(torch.float32) is None:
        pytest.skip("there is no C++ compiler here")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    """A batch over a paged cache: q [R, Q, Hq, D], positions [R, Q]."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    positions: Tensor
    block_size: int = 16
    scale: float = 0.3
    window: int = 0
    softcap: float = 0.0

    def run(self, backend: CpuBackend | SdpaBackend | None = None) -> Tensor:
        """[R, Q, Hq, D]"""
        out = (backend or CpuBackend()).paged_attention(
            self.q.flatten(0, 1),
            self.k_cache,
            self.v_cache,
            self.block_table,
            self.seq_lens,
            self.positions.flatten(),
            self.block_size,
            self.scale,
            self.window,
            self.softcap,
        )
        assert out.is_contiguous() and out.dtype == self.q.dtype
        return out.view(self.q.shape)

    def slots(self, index: int) -> Tensor:
        """Where the tokens of a request are, in order."""
        where = torch.arange(int(self.seq_lens[index]))
        return self.block_table[index, where // self.block_size].long() * self.block_size + where % self.block_size

    def requests(self, order: list[int]) -> "Case":
        """Some of the requests, in another order, over the same caches."""
        names = ("q", "block_table", "seq_lens", "positions")
        return replace(self, **{name: getattr(self, name)[order] for name in names})

    def rows(self, start: int, end: int) -> "Case":
        """Some of the query rows of every request; the length is what those rows would have."""
        positions = self.positions[:, start:end]
        lengths = (positions.amax(1) + 1).to(torch.int32)
        return replace(self, q=self.q[:, start:end].contiguous(), positions=positions, seq_lens=lengths)

    def paged(self, block_size: int, seed: int = 3) -> "Case":
        """The same requests in other blocks of another size, block 0 unused; no slot is shared."""
        generator = torch.Generator().manual_seed(seed)
        per_request = -(-int(self.seq_lens.max()) // block_size)
        order = torch.randperm(len(self.q) * per_request, generator=generator) + 1
        table = order.view(len(self.q), per_request).to(torch.int32)
        shape = ((len(order) + 1) * block_size, *self.k_cache.shape[1:])
        moved = replace(
            self,
            k_cache=torch.full(shape, torch.nan, dtype=self.q.dtype),
            v_cache=torch.full(shape, torch.nan, dtype=self.q.dtype),
            block_table=table,
            block_size=block_size,
        )
        for index in range(len(self.q)):
            moved.k_cache[moved.slots(index)] = self.k_cache[self.slots(index)]
            moved.v_cache[moved.slots(index)] = self.v_cache[self.slots(index)]
        return moved


def make_case(
    lengths: list[int],
    rows: int,
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    **options: float,
) -> Case:
    """Requests of `lengths` tokens whose last `rows` are queried; short ones repeat the last position."""
    generator = torch.Generator().manual_seed(sum(lengths) + rows + head_dim)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    per_request = -(-max(lengths) // 16) + 2
    order = torch.randperm(len(lengths) * per_request, generator=generator) + 1
    slots = (len(order) + 1) * 16
    ends = torch.tensor(lengths)[:, None]
    positions = torch.minimum((ends - rows).clamp(min=0) + torch.arange(rows), ends - 1)
    return Case(
        q=random(len(lengths), rows, heads[0], head_dim),
        k_cache=random(slots, heads[1], head_dim),
        v_cache=random(slots, heads[1], head_dim),
        block_table=order.view(len(lengths), per_request).to(torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        positions=positions,
        scale=1.5 * head_dim**-0.5,
        **options,
    )


def by_definition(case: Case) -> Tensor:
    """Attention in float64, one request at a time."""
    out = torch.zeros_like(case.q, dtype=torch.float64)
    groups = case.q.shape[2] // case.k_cache.shape[1]
    for r in range(len(case.seq_lens)):
        k, v = (
            cache[case.slots(r)].double().repeat_interleave(groups, 1).transpose(0, 1)
            for cache in (case.k_cache, case.v_cache)
        )
        scores = case.q[r].double().transpose(0, 1) @ k.transpose(1, 2) * case.scale
        if case.softcap:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        ago = case.positions[r][:, None] - torch.arange(int(case.seq_lens[r]))
        visible = (ago >= 0) & (ago < case.window) if case.window else ago >= 0
        out[r] = (scores.masked_fill(~visible, -math.inf).softmax(-1) @ v).transpose(0, 1)
    return out


def assert_close(case: Case) -> None:
    found, exact = case.run().double(), by_definition(case)
    # An output is an average, so its error is that of the numbers averaged; a score is a sum over the head dim.
    size = exact.abs().amax().clamp(min=1.0) * max(1.0, case.q.shape[-1] / 128)
    rounding = exact.abs() * 2.0**-8 if case.q.dtype == torch.bfloat16 else 0.0
    assert ((found - exact).abs() <= 2e-6 * size + rounding).all()
    reference = case.run(SdpaBackend()).double()
    slack = 2e-2 if case.q.dtype == torch.bfloat16 else 4e-6
    torch.testing.assert_close(found, reference, atol=slack, rtol=slack)


SHAPES = [
    pytest.param([1], 1, id="one token"),
    pytest.param([1, 64, 65, 127, 300, 1500], 1, id="ragged decode"),
    pytest.param([3, 64, 70, 513, 1100], 8, id="ragged verify"),
    pytest.param([150], 150, id="prefill from the start"),
    pytest.param([700], 64, id="a later chunk"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("lengths", "rows"), SHAPES)
def test_equals_attention_written_out(
    lengths: list[int], rows: int, options: dict[str, float], dtype: torch.dtype
) -> None:
    assert_close(make_case(lengths, rows, dtype=dtype, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 16, 20, 24, 37, 64, 72, 80, 96, 128, 256])
def test_any_head_dim_and_group(head_dim: int, dtype: torch.dtype) -> None:
    for heads in ((2, 2), (3, 1), (8, 2), (8, 1), (60, 1)):
        for lengths, rows in (([200, 7], 1), ([90, 130], 3), ([67], 67)):
            assert_close(make_case(lengths, rows, heads=heads, head_dim=head_dim, dtype=dtype))


def test_large_and_far_apart_scores() -> None:
    """Most probabilities underflow, and later runs raise the maximum."""
    for scale in (1.0, 8.0, 100.0):
        case = replace(make_case([300], 8), scale=scale)
        exact = by_definition(case)
        assert (case.run() - exact).abs().max() < 3e-6 * max(scale, 1.0) * 10


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_row_depends_on_nothing_but_the_row(
    options: dict[str, float], dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    """Bit equality over the number of rows, their place, neighbours, requests, blocks and threads."""
    case = make_case([256, 700, 390], 256, heads=(3, 1), dtype=dtype, **options)
    expected = case.run()
    for rows in (1, 2, 3, 8, 64):
        for start in (0, 61, 255 - rows, 256 - rows):
            part = case.rows(start, start + rows)
            assert torch.equal(part.run(), expected[:, start : start + rows]), (rows, start)
    for order in ([0], [2], [2, 0], [1, 1, 0, 2, 1], [2, 1, 0]):
        assert torch.equal(case.requests(order).run(), expected[order]), order
    for block_size in (1, 16, 32, 512):
        assert torch.equal(case.paged(block_size).run(), expected), block_size
    threads(2)
    assert torch.equal(case.run(), expected)
    decode = case.rows(255, 256).requests([0, 1, 2] * 12)
    assert torch.equal(decode.run(), expected[[0, 1, 2] * 12, 255:])


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 1), (8, 2)])
def test_a_row_depends_on_nothing_but_the_row_in_any_group(heads: tuple[int, int]) -> None:
    for head_dim in (20, 80):
        case = make_case([200, 70], 70, heads=heads, head_dim=head_dim, dtype=torch.bfloat16, window=50)
        expected = case.run()
        for start, rows in itertools.product((0, 1, 30), (1, 2, 5, 40)):
            assert torch.equal(case.rows(start, start + rows).run(), expected[:, start : start + rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("lengths", "rows"), [([5, 64, 300], 1), ([3, 37, 130, 511], 8), ([100], 100)])
def test_poison_outside_a_request_changes_nothing(
    lengths: list[int], rows: int, options: dict[str, float], dtype: torch.dtype
) -> None:
    """Scratch, unused blocks, the unused end of the last block and the tail of the tables may hold anything."""
    case = make_case(lengths, rows, dtype=dtype, **options)
    expected = case.run()
    stale = torch.ones(len(case.k_cache), dtype=torch.bool)
    stale[torch.cat([case.slots(index) for index in range(len(lengths))])] = False
    for poison, wrong in ((math.nan, 2**31 - 1), (math.inf, -(2**31)), (3e38, 0)):
        case.k_cache[stale] = case.v_cache[stale] = poison
        for index, length in enumerate(lengths):
            case.block_table[index, -(-length // case.block_size) :] = wrong
        assert torch.equal(case.run(), expected)
        wide = replace(case, block_table=torch.nn.functional.pad(case.block_table, (0, 99), value=wrong))
        assert torch.equal(wide.run(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("heads", [(6, 2), (2, 2)], ids=str)
def test_later_tokens_of_the_same_request_change_nothing(
    heads: tuple[int, int], options: dict[str, float], dtype: torch.dtype
) -> None:
    """A row sees the drafts before it and none after it, whatever those hold."""
    case = make_case([37, 130], 8, heads=heads, dtype=dtype, **options)
    expected = case.run()
    for index in range(2):
        later = case.slots(index)[-3:]
        for poison in (0.0, math.nan, math.inf):
            case.k_cache[later] = case.v_cache[later] = poison
            assert torch.equal(case.run()[index, :5], expected[index, :5])
    assert case.run()[:, 5:].isfinite().logical_not().any()


def test_tokens_before_the_window_change_nothing() -> None:
    case = make_case([200], 8, window=20)
    expected = case.run()
    for row in range(8):
        begin = int(case.positions[0, row]) - 19
        slots = case.slots(0)[:begin]
        case.k_cache[slots] = case.v_cache[slots] = math.nan
        assert torch.equal(case.run()[:, row:], expected[:, row:])
    assert case.run()[:, :7].isnan().all()


def test_rows_without_numbers_stay_alone() -> None:
    case = make_case([100, 90], 8)
    expected = case.run()
    case.q[0, 3, 1] = math.nan
    case.q[1, 5, 4, 7] = math.inf
    found = case.run()
    assert not found[0, 3, 1].isfinite().any() and not found[1, 5, 4].isfinite().any()
    found[0, 3, 1], found[1, 5, 4] = expected[0, 3, 1], expected[1, 5, 4]
    assert torch.equal(found, expected)


def test_a_row_that_sees_nothing_is_zero() -> None:
    case = make_case([40, 50], 2)
    case.positions[0, 0] = -1
    assert not case.run()[0, 0].any()
    case.positions[1] = 1000
    windowed = replace(case, window=7)
    assert not windowed.run()[1].any()


def test_strided_arguments() -> None:
    case = make_case([40, 50], 3)
    expected = case.run()
    wide = torch.full((2, 3, 9, 70), math.nan)
    wide[:, :, :6, :64] = case.q
    table = case.block_table.repeat_interleave(2, 1)[:, ::2]
    assert torch.equal(replace(case, q=wide[:, :, :6, :64], block_table=table).run(), expected)


def test_it_is_the_operator_on_cpu() -> None:
    case = make_case([40], 3, dtype=torch.bfloat16)
    arguments = (case.q[0], case.k_cache, case.v_cache, case.block_table, case.seq_lens, case.positions[0])
    options = (case.block_size, case.scale, case.window, case.softcap)
    with in_force(CpuBackend(torch.bfloat16)):
        found = torch.ops.compspec.paged_attention(*arguments, *options)
    assert torch.equal(found, case.run()[0])


def test_other_types_use_torch_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    cpu._function.cache_clear()
    case = make_case([40], 3, dtype=torch.float64)
    with caplog.at_level(logging.WARNING):
        found = [case.run() for _ in range(3)]
    assert torch.equal(found[2], case.run(SdpaBackend()))
    assert [record.levelname for record in caplog.records if "float64" in record.getMessage()] == ["WARNING"]


def test_without_a_library_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, cache_dir: Path) -> None:
        return None

    monkeypatch.setattr(cpu, "load_library", missing)
    cpu._function.cache_clear()
    try:
        case = make_case([40, 600], 3)
        assert torch.equal(case.run(), case.run(SdpaBackend()))
    finally:
        cpu._function.cache_clear()
