"""The kernel for noise: every bit is that of the noise in torch."""

import ctypes
import functools
import itertools
import platform
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.unit.fakes import same_bits
from torch import Tensor

from compspec.kernels import build, noise
from compspec.kernels.noise import NoiseKernel, noise_kernel
from compspec.runner.compiled import compile_noise
from compspec.sampling.noise import (
    ACCEPTANCE_STREAM,
    DRAFT_STREAM,
    RECOVERY_STREAM,
    GumbelNoise,
    stream_salts,
    uniform,
)

CPU = torch.device("cpu")
TILE = 256  # of noise.cpp
ALONE = 1 << 14
PLAIN_FLAGS = {"any": [], "avx2": ["-mavx2"]} if platform.machine() in ("x86_64", "AMD64") else {"any": []}
EXTREME_SEEDS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1]
EXTREME_POSITIONS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]
EXTREME_SALTS = [
    0,
    *(
        int(stream_salts(stream, torch.tensor(start)))
        for stream in (DRAFT_STREAM, ACCEPTANCE_STREAM, RECOVERY_STREAM)
        for start in (0, 2**31, 2**32 - 1)
    ),
]


@functools.cache
def plain_library(flags: str, folder: Path) -> ctypes.CDLL:
    """The same source for a processor with fewer instructions."""
    command = build._command(Path(build.__file__).with_name("noise.cpp"))
    at = command.index("-march=native")
    library = folder / f"noise-{flags}.so"
    parts = [*command[:at], *PLAIN_FLAGS[flags], *command[at + 1 :], "-o", str(library)]
    done = subprocess.run(parts, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:500]
    return ctypes.CDLL(str(library))


@pytest.fixture(params=["native", *PLAIN_FLAGS])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], NoiseKernel]:
    """Makes the kernel for a size of the vocabulary: as it is built here, and for other processors."""
    library = noise._library()
    if library is None:
        pytest.skip("there is no C++ compiler here")
    if request.param != "native":
        if request.param == "avx2" and not torch.cpu._is_avx2_supported():
            pytest.skip("this processor has no AVX2")
        library = plain_library(request.param, tmp_path_factory.getbasetemp())
    return lambda vocab_size: NoiseKernel(GumbelNoise(vocab_size, CPU), library)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, and puts back what was set before."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random_rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ends = (2**63 - 1, 2**32, 2**34)
    seeds, positions, salts = (torch.randint(0, end, (count,), generator=generator) for end in ends)
    return seeds, positions, salts


def assert_same(kernel: NoiseKernel, rows: tuple[Tensor, Tensor, Tensor]) -> None:
    assert same_bits(kernel(*rows), GumbelNoise(kernel.vocab_size, CPU)(*rows))


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 31, 33, TILE - 1, TILE, TILE + 1, 3 * TILE + 7])
def test_bits_are_those_of_torch_at_every_size_of_the_vocabulary(
    make: Callable[[int], NoiseKernel], vocab_size: int
) -> None:
    for count in (1, 2, 7):
        assert_same(make(vocab_size), random_rows(count))


def test_bits_are_those_of_torch_for_many_seeds_and_positions(make: Callable[[int], NoiseKernel]) -> None:
    assert_same(make(301), random_rows(3000, seed=1))


def test_bits_are_those_of_torch_at_the_ends_of_what_rows_can_be(make: Callable[[int], NoiseKernel]) -> None:
    rows = torch.tensor(list(itertools.product(EXTREME_SEEDS, EXTREME_POSITIONS, EXTREME_SALTS)))
    assert_same(make(37), (rows[:, 0], rows[:, 1], rows[:, 2]))


def test_bits_are_those_of_torch_for_the_smallest_and_the_largest_word(make: Callable[[int], NoiseKernel]) -> None:
    seeds, zeros = torch.tensor([171431, 149059]), torch.zeros(2, dtype=torch.int64)
    kernel = make(42029)
    found = kernel(seeds, zeros, zeros)
    assert found.isfinite().all()
    assert found[0, 42028] == pytest.approx(-3.1299946)  # of the word 0
    assert found[1, 30338] == pytest.approx(22.8738575)  # of the word 2**32 - 1
    assert_same(kernel, (seeds, zeros, zeros))


def test_every_product_and_sum_of_float64_is_rounded_on_its_own(make: Callable[[int], NoiseKernel]) -> None:
    """Contracted products or regrouped sums change the float32 of one token in four million; each row here has one."""
    seeds = torch.tensor([3825, 33614, 38610, 40767, 73770, 82793, 126759, 191900])
    assert_same(make(256), (seeds, 0 * seeds, 0 * seeds))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_bits_do_not_depend_on_the_number_of_threads(
    make: Callable[[int], NoiseKernel], threads: Callable[[int], None], num_threads: int
) -> None:
    threads(num_threads)
    for vocab_size, count in ((ALONE, 1), (ALONE + 1, 1), (6001, 3), (ALONE // 2 + 1, 5), (TILE // 2, 333)):
        assert_same(make(vocab_size), random_rows(count))


def test_a_row_does_not_depend_on_the_others_or_its_place(make: Callable[[int], NoiseKernel]) -> None:
    rows, kernel = random_rows(9), make(1001)
    together = kernel(*rows)
    for row in range(9):
        assert same_bits(kernel(*(each[row : row + 1] for each in rows))[0], together[row])
    assert same_bits(kernel(*(each.flip(0) for each in rows)), together.flip(0))


def test_rows_may_have_any_strides(make: Callable[[int], NoiseKernel]) -> None:
    rows = torch.stack(random_rows(8), dim=1)
    assert_same(make(50), (rows[::2, 0], rows[::2, 1], rows[::2, 2]))
    assert_same(make(50), (rows[0, 0].expand(5), rows[:5, 1], rows[0, 2].expand(5)))


def test_no_rows_give_no_noise(make: Callable[[int], NoiseKernel]) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert make(50)(empty, empty, empty).shape == (0, 50)


def test_rows_that_contradict_each_other_are_not_read(make: Callable[[int], NoiseKernel]) -> None:
    seeds, positions, salts = random_rows(3)
    for wrong in (
        (seeds, positions[:2], salts),
        (seeds, positions, salts[:1]),
        (seeds, positions.int(), salts),
        (seeds.double(), positions, salts),
        (seeds[:, None], positions[:, None], salts[:, None]),
        (seeds, positions, salts.to("meta")),
    ):
        with pytest.raises(AssertionError):
            make(50)(*wrong)


def test_the_uniform_number_of_a_row_is_that_of_its_first_token(make: Callable[[int], NoiseKernel]) -> None:
    rows = random_rows(100)
    expected = -torch.log(-torch.log(uniform(*rows)))
    torch.testing.assert_close(make(1)(*rows)[:, 0], expected.float(), rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize("mode", ["none", "default", "reduce-overhead"])
def test_noise_on_a_cpu_is_the_kernels(mode: str) -> None:
    if noise._library() is None:
        pytest.skip("there is no C++ compiler here")
    assert isinstance(compile_noise(GumbelNoise(5, CPU), mode), NoiseKernel)


def test_other_devices_have_no_kernel() -> None:
    assert noise_kernel(GumbelNoise(5, torch.device("meta"))) is None


def test_without_a_library_torch_makes_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_library", lambda: None)
    eager = GumbelNoise(37, CPU)
    assert compile_noise(eager, "none") is eager
    fused = compile_noise(eager, "default")
    assert fused is not eager
    assert not isinstance(fused, NoiseKernel)
