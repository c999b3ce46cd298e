"""The kernel over packed weights: exact up to single precision, and rows that depend on nothing but themselves."""

import ctypes
import functools
import platform
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compspec.kernels import build, packed
from compspec.kernels.packed import PackedLinear
from compspec.kernels.packing import GROUP, Format, Quantised, pack_bf16, pack_quantised, padded_size, quantise

ROWS = (0, 1, 2, 7, 8, 9, 31, 32, 33, 100)
SHAPES = ((192, 576), (67, 33), (1, 1), (50, 7), (33, 100))
KINDS = [
    (Format.BF16, torch.bfloat16),
    *((form, dtype) for form in (Format.INT8, Format.INT4) for dtype in (torch.bfloat16, torch.float32)),
]

all_kinds = pytest.mark.parametrize(
    ("form", "dtype"), KINDS, ids=[f"{form.name.lower()}-{str(dtype).removeprefix('torch.')}" for form, dtype in KINDS]
)


@dataclass(frozen=True)
class Case:
    """Operands of the operator; `weight` is what `packed` stands for."""

    x: Tensor
    weight: Quantised | Tensor
    packed: Tensor
    bias: Tensor | None
    columns: int
    form: Format

    def product(self, x: Tensor | None = None) -> Tensor:
        given = self.x if x is None else x
        return torch.ops.compspec.packed_linear(given, self.packed, self.bias, self.columns, self.form)


def case(
    form: Format, dtype: torch.dtype, n: int, k: int, *, rows: int = 100, bias: bool = True, seed: int = 0
) -> Case:
    """Random operands; the sizes of groups of x differ widely."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator)
    sizes = torch.exp(2 * torch.randn(rows, -(-k // GROUP), generator=generator)).repeat_interleave(GROUP, 1)[:, :k]
    x = (torch.randn(rows, k, generator=generator) * sizes).to(dtype)
    held = weight.bfloat16() if form is Format.BF16 else quantise(weight, form)
    return Case(
        x=x,
        weight=held,
        packed=pack_quantised(held) if isinstance(held, Quantised) else pack_bf16(held),
        bias=torch.randn(n, generator=generator) if bias else None,
        columns=n,
        form=form,
    )


def exact(of: Case) -> tuple[Tensor, Tensor]:
    """[rows, columns] float64: the product with integers that are summed exactly, and the sum of all absolute terms."""
    x, weight = of.x.float(), of.weight
    if isinstance(weight, Tensor):
        x64, w64 = x.double(), weight.double()
        value, size = x64 @ w64.T, x64.abs() @ w64.abs().T
    else:
        groups = F.pad(x, (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
        most = groups.abs().amax(-1, keepdim=True)
        levels = (groups * (torch.tensor(127.0) / most)).round().double()
        scale = (most / torch.tensor(127.0)).double()
        of_weight = weight.values.double().view(len(weight.values), -1, GROUP)
        terms = torch.einsum("mgk,ngk->mng", levels, of_weight) * scale.transpose(1, 2) * weight.scale.double()
        value, size = terms.sum(-1), terms.abs().sum(-1)
        if weight.minimum is not None:
            terms = (levels.sum(-1) * scale[..., 0])[:, None] * weight.minimum.double()
            value, size = value + terms.sum(-1), size + terms.abs().sum(-1)
    if of.bias is not None:
        value, size = value + of.bias.double(), size + of.bias.double().abs()
    return value, size


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, and puts back what was set before."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def kernel() -> packed._Kernel:
    """The kernel of this machine."""
    if not packed._KERNEL.load():
        pytest.skip("there is no C++ compiler here")
    return packed._KERNEL


@pytest.fixture(params=[2, 1], ids=["tiles", "dot products"])
def bf16_path(request: pytest.FixtureRequest, kernel: packed._Kernel, monkeypatch: pytest.MonkeyPatch) -> int:
    """Each way to multiply bf16 that this machine has."""
    path: int = request.param
    if kernel.path < path:
        pytest.skip(f"this processor has not the instructions of path {path}")
    monkeypatch.setattr(kernel, "path", path)
    return path


@functools.cache
def plain_library(folder: Path) -> ctypes.CDLL:
    """The same source for a processor without the instructions of AVX-512."""
    command = build._command(Path(build.__file__).with_name("packed.cpp"))
    at = command.index("-march=native")
    library = folder / "packed-plain.so"
    flags = ["-mavx2", "-mfma", "-mf16c"] if platform.machine() in ("x86_64", "AMD64") else []
    done = subprocess.run(
        [*command[:at], *flags, *command[at + 1 :], "-o", str(library)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[:500]
    return ctypes.CDLL(str(library))


@pytest.fixture
def plain(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Called, puts the plain code in the place of this machine's."""
    made = packed._Kernel()
    made._tried = True
    made._bind(plain_library(tmp_path_factory.getbasetemp()))
    assert made.path == 0
    yield lambda: monkeypatch.setattr(packed, "_KERNEL", made)


def assert_exact(of: Case, result: Tensor) -> None:
    value, size = exact(of)
    num_terms = padded_size(of.x.shape[1]) if of.form is Format.BF16 else 2 * -(-of.x.shape[1] // GROUP)
    rounding = value.abs() * (2.0**-8 if result.dtype == torch.bfloat16 else 0)
    error = (result.double() - value).abs()
    assert (error <= rounding + size * (num_terms + 4) * 2.0**-24).all(), float((error / size).max())


@all_kinds
@pytest.mark.parametrize("rows", [1, 8, 9, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_values_are_the_exact_ones_rounded(
    form: Format, dtype: torch.dtype, rows: int, bias: bool, n: int, k: int
) -> None:
    of = case(form, dtype, n, k, rows=rows, bias=bias)
    result = of.product()
    assert result.dtype == dtype
    assert_exact(of, result)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_both_ways_to_multiply_bf16_are_exact(bf16_path: int, n: int, k: int) -> None:
    for rows in (1, 5, 17, 40):
        of = case(Format.BF16, torch.bfloat16, n, k, rows=rows)
        assert_exact(of, of.product())


@all_kinds
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_fallback_in_torch_rounds_x_to_the_same_eight_bits(
    form: Format, dtype: torch.dtype, n: int, k: int
) -> None:
    of = case(form, dtype, n, k)
    result = packed.reference(of.x, of.packed, of.bias, n, form)
    value, size = exact(of)
    # It also rounds the product of levels and scale.
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 0
    weight = of.weight.dequantise()[:, :k] if isinstance(of.weight, Quantised) else of.weight.float()
    size += of.x.double().abs() @ weight.double().abs().T
    assert ((result.double() - value).abs() <= value.abs() * rounding + size * (k + 8) * 2.0**-24).all()


def assert_rows_are_independent(of: Case) -> None:
    alone = torch.cat([of.product(row) for row in of.x.split(1)])
    most = len(of.x)
    for rows in ROWS:
        for start in {0, 1, (most - rows) // 2, most - rows}:
            part = of.x[start : start + rows]
            assert torch.equal(of.product(part), alone[start : start + len(part)]), (rows, start)
    order = torch.randperm(most, generator=torch.Generator().manual_seed(1))
    assert torch.equal(of.product(of.x[order]), alone[order])


@all_kinds
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_depends_on_nothing_but_the_row(form: Format, dtype: torch.dtype, n: int, k: int) -> None:
    assert_rows_are_independent(case(form, dtype, n, k))


def test_a_row_depends_on_nothing_but_the_row_either_way(bf16_path: int) -> None:
    assert_rows_are_independent(case(Format.BF16, torch.bfloat16, 67, 100))


@all_kinds
def test_neighbours_without_numbers_change_nothing(form: Format, dtype: torch.dtype) -> None:
    of = case(form, dtype, 67, 100, rows=40)
    expected = of.product()
    x = of.x.clone()
    x[3], x[20, 99], x[37, 0] = torch.nan, torch.nan, -torch.inf
    x[5, 50] = torch.inf
    x[6] = torch.finfo(dtype).max
    result = of.product(x)
    strange = [3, 5, 6, 20, 37]
    others = [row for row in range(40) if row not in strange]
    assert torch.equal(result[others], expected[others])
    assert result[[3, 20]].isnan().all()
    assert not result[[5, 37]].isfinite().any()


@pytest.mark.parametrize("rows", [1, 12, 40])
def test_neighbours_without_numbers_change_nothing_either_way(bf16_path: int, rows: int) -> None:
    of = case(Format.BF16, torch.bfloat16, 67, 100, rows=rows + 1)
    expected = of.product()
    x = of.x.clone()
    x[rows] = torch.nan
    result = of.product(x)
    assert torch.equal(result[:rows], expected[:rows])
    assert result[rows].isnan().all()


@all_kinds
def test_extreme_rows(form: Format, dtype: torch.dtype) -> None:
    """Zeros give the bias; so does what is too small for a float16's weight to make anything of; nothing overflows."""
    of = case(form, dtype, 40, 64, rows=4)
    assert of.bias is not None
    x = of.x.clone()
    x[0], x[1], x[2], x[3] = 0, -0.0, 1e-40, 1e30
    result = of.product(x)
    assert torch.equal(result[:3], of.bias.to(dtype).expand(3, -1))
    assert result[3].isfinite().all()


def test_the_largest_sums_of_integers_do_not_overflow() -> None:
    for form in (Format.INT8, Format.INT4):
        levels = {Format.INT8: (-128, 127), Format.INT4: (0, 15)}[form]
        for level in levels:
            weight = Quantised(
                scale=torch.ones(32, 128).half(),
                minimum=None if form is Format.INT8 else torch.ones(32, 128).half(),
                values=torch.full((32, 4096), level, dtype=torch.int8 if form is Format.INT8 else torch.uint8),
            )
            for sign in (1, -1):
                x = torch.full((3, 4096), 127.0 * sign)
                result = torch.ops.compspec.packed_linear(x, pack_quantised(weight), None, 32, form)
                each = level + (0 if form is Format.INT8 else 1)
                assert torch.equal(result, torch.full((3, 32), 4096.0 * 127 * sign * each))


@all_kinds
def test_the_number_of_threads_changes_nothing(
    form: Format, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    for n, k in ((192, 576), (67, 33), (600, 96)):
        for rows in (1, 9, 100):
            of = case(form, dtype, n, k, rows=rows)
            threads(1)
            one = of.product()
            for count in (2, 4):
                threads(count)
                assert torch.equal(of.product(), one)


@all_kinds
def test_calls_at_once_and_calls_after_larger_ones_do_not_meet(form: Format, dtype: torch.dtype) -> None:
    """Scratch is kept from call to call, one per thread."""
    sizes = ((100, 640), (1, 32), (40, 1280), (9, 96))
    cases = [case(form, dtype, 640, k, rows=rows, seed=rows) for rows, k in sizes]
    expected = [of.product() for of in cases]

    def work(offset: int) -> bool:
        order = [(offset + step) % len(cases) for step in range(40)]
        return all(torch.equal(cases[index].product(), expected[index]) for index in order)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.parametrize("form", [Format.INT8, Format.INT4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_code_without_vector_instructions_gives_the_same_bits(
    form: Format, dtype: torch.dtype, n: int, k: int, plain: Callable[[], None]
) -> None:
    of = case(form, dtype, n, k)
    here = of.product()
    plain()
    assert torch.equal(of.product(), here)
    assert_exact(of, here)


def test_code_without_vector_instructions_leaves_bf16_to_torch(plain: Callable[[], None]) -> None:
    plain()
    assert not packed.packs_bf16()
    of = case(Format.BF16, torch.bfloat16, 67, 33)
    assert of.bias is not None
    assert isinstance(of.weight, Tensor)
    expected = F.linear(of.x.float(), of.weight.float(), of.bias).bfloat16()
    assert torch.equal(of.product(), expected)


@all_kinds
def test_any_strides_and_dimensions(form: Format, dtype: torch.dtype) -> None:
    of = case(form, dtype, 40, 64, rows=30)
    x, expected = of.x, of.product()
    wide = torch.full((30, 99), torch.nan, dtype=dtype)
    wide[:, 5:69] = x
    assert torch.equal(of.product(wide[:, 5:69]), expected)
    assert torch.equal(of.product(x.t().contiguous().t()), expected)
    assert torch.equal(of.product(x[::3]), expected[::3])
    assert torch.equal(of.product(x.view(2, 3, 5, 64)), expected.view(2, 3, 5, 40))
    assert torch.equal(of.product(x[:1].expand(3, 64)), expected[:1].expand(3, 40))
    assert torch.equal(of.product(x[0]), expected[0])
    shifted = torch.cat([torch.zeros(1, dtype=dtype), x.flatten()])[1:].view(30, 64)
    assert torch.equal(of.product(shifted), expected), "x need not lie at a multiple of anything"
    for shape in ((0, 64), (2, 0, 64)):
        assert of.product(torch.empty(shape, dtype=dtype)).shape == (*shape[:-1], 40)


@all_kinds
def test_sizes_that_contradict_each_other(form: Format, dtype: torch.dtype) -> None:
    of = case(form, dtype, 40, 64, rows=2)
    operator = torch.ops.compspec.packed_linear
    for x, packed_weight, bias, columns in (
        (of.x[:, :32], of.packed, of.bias, 40),
        (F.pad(of.x, (0, 1)), of.packed, of.bias, 40),
        (of.x, of.packed[:-1], of.bias, 40),
        (of.x, of.packed, of.bias, 65),
        (of.x, of.packed, of.bias[:39] if of.bias is not None else None, 40),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            operator(x, packed_weight, bias, columns, form)


def test_other_types_use_torch() -> None:
    of = case(Format.BF16, torch.bfloat16, 40, 64)
    for dtype in (torch.float32, torch.float16):
        result = of.product(of.x.to(dtype))
        assert result.dtype == dtype
        torch.testing.assert_close(result.float(), of.product().float(), atol=0.5, rtol=0.02)
    half = case(Format.INT8, torch.bfloat16, 40, 64)
    assert half.product(half.x.half()).dtype == torch.float16


@all_kinds
def test_without_a_library_torch_does_the_work(
    form: Format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = case(form, dtype, 67, 100)
    monkeypatch.setattr(packed, "load_library", lambda *_: None)
    monkeypatch.setattr(packed, "_KERNEL", packed._Kernel())
    assert not packed.packs_bf16()
    assert packed.implementation() == "torch"
    assert torch.equal(of.product(), packed.reference(of.x, of.packed, of.bias, 67, form))


def test_the_implementation_names_the_library_and_how_it_multiplies(kernel: packed._Kernel) -> None:
    name, path = packed.implementation().split(":")
    assert name.startswith("packed-")
    assert name.endswith(".so")
    assert int(path) == kernel.path
    assert packed.packs_bf16() == (kernel.path > 0)


def test_no_memory_is_an_error(kernel: packed._Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    of = case(Format.INT8, torch.float32, 32, 32)
    monkeypatch.setattr(kernel, "function", lambda *_: lambda *_: 1)
    with pytest.raises(MemoryError, match="packed_linear"):
        of.product()


@all_kinds
def test_the_operator_is_well_formed(form: Format, dtype: torch.dtype) -> None:
    of = case(form, dtype, 40, 33, rows=6)
    for x, bias in ((of.x, of.bias), (of.x.view(2, 3, 33), None)):
        torch.library.opcheck(torch.ops.compspec.packed_linear.default, (x, of.packed, bias, 40, int(form)))


@all_kinds
def test_a_layer_takes_its_part_of_the_product(form: Format, dtype: torch.dtype) -> None:
    of = case(form, dtype, 96, 64)
    expected = of.product()
    for first, count in ((0, 96), (0, 30), (32, 64), (64, 1)):
        layer = PackedLinear(of.packed, of.bias, in_features=64, columns=96, first=first, out_features=count, form=form)
        assert torch.equal(layer(of.x), expected[:, first : first + count])
        assert f"out_features={count}, {form.name.lower()}" in repr(layer)
