"""The CPU kernel: rows that depend on nothing but themselves, right values, and a working fallback."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compspec.kernels import build, linear

ROWS = (1, 2, 3, 5, 7, 8, 9, 16, 31, 64, 100, 256)
SHAPES = ((192, 576), (67, 33), (1, 1), (50, 7), (29, 130), (24, 512))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, and puts back what was set before."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def operands(rows: int, n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, k], weight [n, k], bias [n]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, k), (n, k), (n,))
    x, weight, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return x, weight, bias


def kernel_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.compspec.linear(x, weight, bias)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_depends_on_nothing_but_the_row(n: int, k: int) -> None:
    x, weight, bias = operands(max(ROWS), n, k)
    alone = torch.cat([kernel_linear(row, weight, bias) for row in x.split(1)])
    for rows in ROWS:
        for start in {0, 1, (max(ROWS) - rows) // 2, max(ROWS) - rows}:
            part = x[start : start + rows]
            assert torch.equal(kernel_linear(part, weight, bias), alone[start : start + len(part)])
    order = torch.randperm(max(ROWS), generator=torch.Generator().manual_seed(1))
    assert torch.equal(kernel_linear(x[order], weight, bias), alone[order])


def test_neighbours_without_numbers_change_nothing() -> None:
    x, weight, _ = operands(9, 67, 40)
    expected = kernel_linear(x, weight)
    x[3], x[5] = torch.nan, torch.inf
    result = kernel_linear(x, weight)
    others = [0, 1, 2, 4, 6, 7, 8]
    assert torch.equal(result[others], expected[others])
    assert result[3].isnan().all()
    assert not result[5].isfinite().any()


@pytest.mark.parametrize(("n", "k"), [(192, 576), (67, 33), (600, 96)])
def test_the_number_of_threads_changes_nothing(n: int, k: int, threads: Callable[[int], None]) -> None:
    for rows in (1, 4, 9, 100, 300):
        x, weight, bias = operands(rows, n, k)
        threads(1)
        one = kernel_linear(x, weight, bias)
        for count in (2, 3):
            threads(count)
            assert torch.equal(kernel_linear(x, weight, bias), one)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 11, 70, 300, 520])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_values_are_the_exact_ones_rounded(rows: int, with_bias: bool, n: int, k: int) -> None:
    x, weight, bias = operands(rows, n, k)
    added = bias if with_bias else None
    result = kernel_linear(x, weight, added).double()
    exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
    # Half a step of bfloat16 for the rounding, and what k single precision additions may lose.
    size = F.linear(x.double().abs(), weight.double().abs(), None if added is None else added.double().abs())
    assert ((result - exact).abs() <= exact.abs() * 2.0**-8 + size * (k + 8) * 2.0**-24).all()


def test_ties_go_to_even() -> None:
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 2.0**-8], [1.0 + 2.0**-7, 2.0**-8], [1.0, -(2.0**-9)]]).bfloat16()
    assert kernel_linear(x, weight).tolist() == [[1.0, 1.0 + 2.0**-6, 1.0]]


def test_any_strides_and_dimensions() -> None:
    x, weight, bias = operands(30, 40, 24)
    expected = kernel_linear(x, weight, bias)
    wide = torch.full((30, 61), torch.nan, dtype=torch.bfloat16)
    wide[:, 5:29] = x
    assert torch.equal(kernel_linear(wide[:, 5:29], weight, bias), expected)
    assert torch.equal(kernel_linear(x.t().contiguous().t(), weight, bias), expected)
    assert torch.equal(kernel_linear(x[::3], weight, bias), expected[::3])
    assert torch.equal(kernel_linear(x, weight.t().contiguous().t(), bias), expected)
    assert torch.equal(kernel_linear(x.view(2, 3, 5, 24), weight, bias), expected.view(2, 3, 5, 40))
    blocks = wide.view(5, 6, 61)[1:, :4, 5:29]
    assert torch.equal(kernel_linear(blocks, weight, bias), expected.view(5, 6, 40)[1:, :4])
    assert torch.equal(kernel_linear(x[:1].expand(3, 24), weight, bias), expected[:1].expand(3, 40))
    assert torch.equal(kernel_linear(x[0], weight, bias), expected[0])
    assert kernel_linear(x[:0], weight, bias).shape == (0, 40)


def test_shapes_that_do_not_fit() -> None:
    x, weight, bias = operands(2, 4, 6)
    with pytest.raises(ValueError, match="do not fit"):
        kernel_linear(x[:, :5], weight, bias)
    with pytest.raises(ValueError, match="do not fit"):
        kernel_linear(x, weight, bias[:3])


def test_the_operator_is_well_formed() -> None:
    x, weight, bias = operands(3, 8, 16)
    for arguments in ((x, weight, bias), (x, weight, None), (x.view(1, 3, 16), weight, None)):
        torch.library.opcheck(torch.ops.compspec.linear.default, arguments)


def test_other_types_use_torch() -> None:
    x, weight, bias = (operand.float() for operand in operands(3, 8, 16))
    assert torch.equal(kernel_linear(x, weight, bias), F.linear(x, weight, bias))


def test_without_a_library_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, cache_dir: Path) -> None:
        return None

    monkeypatch.setattr(linear, "load_library", missing)
    monkeypatch.setattr(linear, "_KERNEL", linear._Kernel())
    x, weight, bias = operands(3, 8, 16)
    assert torch.equal(kernel_linear(x, weight, bias), F.linear(x, weight, bias))
    assert not linear.is_wanted()
    model = nn.Linear(8, 8, dtype=torch.bfloat16)
    assert linear.use_linear_kernel(model) == 0
    assert type(model) is nn.Linear


# machine, what torch says of AVX-512 BF16, AMX and oneDNN, whether torch's own products are good
CPUS = [
    ("x86_64", False, False, True, False),  # AVX-512 stands in for the instructions, so oneDNN calls it supported
    ("x86_64", False, False, False, False),
    ("x86_64", True, False, True, True),
    ("x86_64", False, True, True, True),
    ("aarch64", False, False, True, True),
    ("aarch64", False, False, False, False),
]


@pytest.mark.parametrize(("machine", "avx512_bf16", "amx", "onednn", "native"), CPUS)
def test_wanted_only_without_bfloat16_instructions(
    machine: str, avx512_bf16: bool, amx: bool, onednn: bool, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    assert linear.has_native_bf16() is native
    assert linear.is_wanted() is not native


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_a_failed_build_says_why(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING):
        assert build.load_library("linear", tmp_path) is None
    assert [compiler in record.getMessage() for record in caplog.records] == [True]
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_used_and_only_while_nothing_changed(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (library,) = cache_dir.iterdir()
    command = build._command(Path(build.__file__).with_name("linear.cpp"))
    assert library.name == f"linear-{build._fingerprint(command)}.so"
    assert build._fingerprint([*command, "-DSOMETHING"]) not in library.name
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.load_library.__wrapped__("linear", cache_dir) is not None
    monkeypatch.setattr(build, "_processor", lambda: "another")
    assert build._fingerprint(command) not in library.name


def test_the_kernel_brings_no_openmp_runtime_of_its_own() -> None:
    """Loaded after torch in a fresh process, it uses the runtime that torch has mapped already."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    code = (
        "import torch, pathlib\n"
        "def mapped():\n"
        "    lines = pathlib.Path('/proc/self/maps').read_text().splitlines()\n"
        "    return {line.split()[-1] for line in lines if 'libgomp' in line or 'libiomp' in line}\n"
        "before = mapped()\n"
        "from compspec.kernels.linear import use_linear_kernel\n"
        "layer = torch.nn.Linear(8, 8).bfloat16()\n"
        "assert use_linear_kernel(layer.requires_grad_(False)) == 1\n"
        "layer(torch.zeros(1, 8, dtype=torch.bfloat16))\n"
        "assert before and mapped() == before, (before, mapped())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
