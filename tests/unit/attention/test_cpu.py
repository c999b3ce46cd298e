"""The compiled CPU kernels: right values, rows that depend on nothing but themselves, and a working fallback."""

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

KERNELS = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16 in tiles": torch.bfloat16}
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
    if cpu._kernel(torch.float32, 64) is None:
        pytest.skip("there is no C++ compiler here")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def use_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Makes `name` the kernel for heads that fit it, and returns its type."""
    if name == "bf16 in tiles" and cpu._tiles_library() is None:
        pytest.skip("this processor has no tiles")
    if name == "bf16":
        monkeypatch.setattr(cpu, "_tiles_library", lambda: None)
    cpu._kernel.cache_clear()
    return KERNELS[name]


@pytest.fixture(params=KERNELS)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """The type of a kernel that is in use for the time of the test."""
    yield use_kernel(request.param, monkeypatch)
    cpu._kernel.cache_clear()


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """Skips the test on processors without tiles."""
    yield use_kernel("bf16 in tiles", monkeypatch)
    cpu._kernel.cache_clear()


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


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, a zero's sign included."""
    words = torch.int16 if found.dtype == torch.bfloat16 else torch.int32
    return torch.equal(found.view(words), expected.contiguous().view(words))


def rounds_probabilities(case: Case) -> bool:
    return case.q.dtype == torch.bfloat16 and case.q.shape[-1] % 32 == 0 and cpu._tiles_library() is not None


def assert_close(case: Case) -> None:
    found, exact = case.run().double(), by_definition(case)
    # An output is an average, so its error is that of the numbers averaged; a score is a sum over the head dim.
    size = exact.abs().amax().clamp(min=1.0) * max(1.0, case.q.shape[-1] / 128)
    rounding = exact.abs() * 2.0**-8 if case.q.dtype == torch.bfloat16 else torch.zeros(())
    if rounds_probabilities(case):
        rounding = rounding + by_definition(replace(case, v_cache=case.v_cache.abs())) * 2.0**-8
    error = (found - exact).abs()
    assert (error <= 2e-6 * size + rounding).all()
    reference = case.run(SdpaBackend()).double()
    slack = 2e-2 if case.q.dtype == torch.bfloat16 else 4e-6
    torch.testing.assert_close(found, reference, atol=slack, rtol=slack)
    # Roundings of many probabilities cancel: a lost token of hundreds is larger than what is left.
    assert error.square().mean().sqrt() <= 2 * (reference - exact).square().mean().sqrt() + 2e-6 * size


SHAPES = [
    pytest.param([1], 1, id="one token"),
    pytest.param([1, 64, 65, 127, 300, 1500], 1, id="ragged decode"),
    pytest.param([3, 64, 70, 513, 1100], 8, id="ragged verify"),
    pytest.param([150], 150, id="prefill from the start"),
    pytest.param([700], 64, id="a later chunk"),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("lengths", "rows"), SHAPES)
def test_equals_attention_written_out(
    lengths: list[int], rows: int, options: dict[str, float], dtype: torch.dtype
) -> None:
    assert_close(make_case(lengths, rows, dtype=dtype, **options))


@pytest.mark.parametrize("head_dim", [1, 16, 20, 24, 37, 64, 72, 80, 96, 128, 256])
def test_any_head_dim_and_group(head_dim: int, dtype: torch.dtype) -> None:
    for heads in ((2, 2), (3, 1), (8, 2), (8, 1), (60, 1)):
        for lengths, rows in (([200, 7], 1), ([90, 130], 3), ([67], 67)):
            assert_close(make_case(lengths, rows, heads=heads, head_dim=head_dim, dtype=dtype))


def test_large_and_far_apart_scores(dtype: torch.dtype) -> None:
    """Most probabilities underflow, and later runs raise the maximum."""
    for scale in (1.0, 8.0, 100.0, -8.0):
        case = replace(make_case([700], 8, dtype=dtype), scale=scale)
        exact = by_definition(case)
        rounding = 2.0**-7 * case.v_cache.abs().max() if dtype == torch.bfloat16 else 0.0
        assert (case.run() - exact).abs().max() < 3e-6 * max(abs(scale), 1.0) * 10 + rounding


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
            assert same(part.run(), expected[:, start : start + rows]), (rows, start)
    for order in ([0], [2], [2, 0], [1, 1, 0, 2, 1], [2, 1, 0]):
        assert same(case.requests(order).run(), expected[order]), order
    for block_size in (1, 16, 32, 512):
        assert same(case.paged(block_size).run(), expected), block_size
    for count in (2, 3):
        threads(count)
        assert same(case.run(), expected)
        assert same(case.rows(248, 256).run(), expected[:, 248:])
    decode = case.rows(255, 256).requests([0, 1, 2] * 12)
    assert same(decode.run(), expected[[0, 1, 2] * 12, 255:])


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (3, 1), (8, 1), (8, 2), (7, 1)])
def test_a_row_depends_on_nothing_but_the_row_in_any_group(heads: tuple[int, int]) -> None:
    for head_dim in (20, 32, 64, 80, 96, 128, 256):
        case = make_case([300, 70], 70, heads=heads, head_dim=head_dim, dtype=torch.bfloat16, window=50)
        expected = case.run()
        for start, rows in itertools.product((0, 1, 30), (1, 2, 5, 40)):
            assert same(case.rows(start, start + rows).run(), expected[:, start : start + rows])


@pytest.mark.parametrize("options", OPTIONS)
def test_where_runs_begin_and_end(
    options: dict[str, float], dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    """One request, whose runs are shared out among threads, and one row at a time."""
    for length in (31, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1300):
        case = make_case([length], 8, heads=(3, 1), dtype=dtype, **options)
        assert_close(case)
        alone = [case.rows(row, row + 1).run() for row in range(8)]
        threads(2)
        assert same(case.run(), torch.cat(alone, 1)), length
        threads(1)


def test_a_zero_does_not_tell_who_else_was_there(dtype: torch.dtype) -> None:
    """The first row's output is negative and below the smallest number; zeros of tokens it does not see come after."""
    case = make_case([352], 33, dtype=dtype)
    slots = case.slots(0)
    case.q.fill_(1)
    case.k_cache[slots[:256]], case.k_cache[slots[256:]] = 0, 16
    case.v_cache[slots[:256]], case.v_cache[slots[256:]] = -1, 0
    case.v_cache[slots[256]], case.v_cache[slots[288]] = 1.5e-38, -2e-38
    assert same(case.run()[:, :1], case.rows(0, 1).run())


def test_a_run_of_scores_of_minus_infinity_counts_nothing(tiles: torch.dtype) -> None:
    case = make_case([700], 2, dtype=tiles)
    case.q.abs_()
    case.k_cache[case.slots(0)[:600]] = -math.inf
    expected = by_definition(case)
    assert expected.isfinite().all()
    torch.testing.assert_close(case.run().double(), expected, atol=2e-2, rtol=2e-2)


def test_every_token_counts_once(dtype: torch.dtype) -> None:
    """With equal scores an output is an average; here of ones in a dim that goes round with the token."""
    for length, window in itertools.product((1, 16, 31, 33, 64, 257, 600), (0, 1, 5, 40, 300)):
        case = make_case([length], 1, dtype=dtype, window=window)
        case.q.zero_()
        case.v_cache.zero_()
        for token, slot in enumerate(case.slots(0).tolist()):
            case.v_cache[slot, :, token % 64] = 1
        seen = range(max(0, length - window) if window else 0, length)
        count = torch.tensor([sum(token % 64 == d for token in seen) for d in range(64)])
        expected = (count.double() / len(seen)).to(dtype)
        torch.testing.assert_close(case.run()[0, 0, 0], expected, atol=0.0, rtol=2.0**-7)


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


def test_tokens_before_the_window_change_nothing(dtype: torch.dtype) -> None:
    case = make_case([200], 8, window=20, dtype=dtype)
    expected = case.run()
    for row in range(8):
        begin = int(case.positions[0, row]) - 19
        slots = case.slots(0)[:begin]
        case.k_cache[slots] = case.v_cache[slots] = math.nan
        assert torch.equal(case.run()[:, row:], expected[:, row:])
    assert case.run()[:, :7].isnan().all()


def test_a_token_without_numbers_reaches_the_rows_that_see_it(
    dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    """Somewhere in the middle, with rows before it that do not see it and rows after it that no longer do."""
    for (length, rows), window in itertools.product([(90, 90), (600, 64), (1300, 8)], (0, 5)):
        case = make_case([length, length], rows, heads=(3, 1), dtype=dtype, window=window)
        expected = case.run()
        token = length - rows + rows // 2
        ago = case.positions[0] - token
        sees = (ago >= 0) & (ago < window) if window else ago >= 0
        for poison, count in itertools.product((math.nan, math.inf, -math.inf), (1, 2)):
            threads(count)
            poisoned = replace(case, v_cache=case.v_cache.clone())
            poisoned.v_cache[case.slots(0)[token], :, 7] = poison
            found = poisoned.run()
            assert not found[0, sees, :, 7].isfinite().any()
            found[0, sees, :, 7] = expected[0, sees, :, 7]
            assert same(found, expected), (length, window, poison, count)
        threads(1)


def test_rows_without_numbers_stay_alone(dtype: torch.dtype) -> None:
    case = make_case([100, 90], 8, dtype=dtype)
    expected = case.run()
    case.q[0, 3, 1] = math.nan
    case.q[1, 5, 4, 7] = math.inf
    found = case.run()
    assert not found[0, 3, 1].isfinite().any() and not found[1, 5, 4].isfinite().any()
    found[0, 3, 1], found[1, 5, 4] = expected[0, 3, 1], expected[1, 5, 4]
    assert torch.equal(found, expected)


def test_a_row_that_sees_nothing_is_zero(dtype: torch.dtype) -> None:
    case = make_case([40, 50], 2, dtype=dtype)
    case.positions[0, 0] = -1
    assert not case.run()[0, 0].any()
    case.positions[1] = 1000
    windowed = replace(case, window=7)
    assert not windowed.run()[1].any()


def test_strided_arguments(dtype: torch.dtype) -> None:
    case = make_case([40, 50], 3, dtype=dtype)
    expected = case.run()
    wide = torch.full((2, 3, 9, 70), math.nan, dtype=dtype)
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


def test_an_implementation_is_named_after_the_kernels_in_use(tiles: torch.dtype) -> None:
    plain = CpuBackend(torch.float32, [64]).implementation
    in_tiles = CpuBackend(tiles, [64, 96]).implementation
    assert plain.startswith("attention-") and in_tiles.startswith("attention_amx-")
    assert CpuBackend(tiles, [80]).implementation == plain
    assert CpuBackend(tiles, [80, 64]).implementation == f"{plain}+{in_tiles}"
    assert CpuBackend(torch.float64, [64]).implementation == SdpaBackend.name


@pytest.mark.usefixtures("tiles")
def test_without_tiles_the_name_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_tiles_library", lambda: None)
    cpu._kernel.cache_clear()
    assert CpuBackend(torch.bfloat16, [64]).implementation == CpuBackend(torch.float32, [64]).implementation


def test_other_types_use_torch_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    cpu._kernel.cache_clear()
    case = make_case([40], 3, dtype=torch.float64)
    with caplog.at_level(logging.WARNING):
        found = [case.run() for _ in range(3)]
    assert torch.equal(found[2], case.run(SdpaBackend()))
    assert [record.levelname for record in caplog.records if "float64" in record.getMessage()] == ["WARNING"]


def test_without_a_library_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, cache_dir: Path) -> None:
        return None

    monkeypatch.setattr(cpu, "load_library", missing)
    cpu._kernel.cache_clear()
    try:
        case = make_case([40, 600], 3)
        assert torch.equal(case.run(), case.run(SdpaBackend()))
    finally:
        cpu._kernel.cache_clear()
