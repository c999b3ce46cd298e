"""Noise: the published generator, the right distribution, a pure function of what it is for, in independent streams."""

import math
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from compspec.kernels import noise as kernels
from compspec.runner import compiled
from compspec.sampling import noise
from compspec.sampling.noise import (
    ACCEPTANCE_STREAM,
    DRAFT_STREAM,
    RECOVERY_STREAM,
    TARGET_STREAM,
    GumbelNoise,
    philox,
    sample_seed,
    stream_salts,
    uniform,
)
from compspec.sampling.sampler import NoiseFunction
from tests.unit.fakes import same_bits

CPU = torch.device("cpu")
MASK = 0xFFFFFFFF

# Random123, kat_vectors: philox4x32 10.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def reference_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 in Python's unbounded integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(c0 * 0xD2511F53, 1 << 32)
        high1, low1 = divmod(c2 * 0xCD9E8D57, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def reference_words(seed: int, position: int, salt: int, vocab_size: int) -> np.ndarray:
    """The random words of a row, [V] float64."""
    groups = range(-(-vocab_size // 4))
    key = (seed & MASK, seed >> 32)
    words = [reference_philox((group, position, salt & MASK, salt >> 32), key) for group in groups]
    return np.array(words, dtype=np.float64).reshape(-1)[:vocab_size]


def make_noise(vocab_size: int) -> NoiseFunction:
    """What `draw` and `uniform_rows` draw from; see `each_noise`."""
    return GumbelNoise(vocab_size, CPU)


@pytest.fixture(params=["torch", "kernel"])
def each_noise(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test on the noise in torch and on the kernel."""
    if request.param == "kernel":
        if kernels.noise_kernel(GumbelNoise(1, CPU)) is None:
            pytest.skip("there is no C++ compiler here")
        monkeypatch.setattr(
            sys.modules[__name__], "make_noise", lambda vocab_size: kernels.noise_kernel(GumbelNoise(vocab_size, CPU))
        )


on_each_noise = pytest.mark.usefixtures("each_noise")


def draw(vocab_size: int, seeds: list[int], positions: list[int], salts: list[int] | None = None) -> Tensor:
    """Noise of rows; the target's own where no salts are given."""
    salts = [0] * len(seeds) if salts is None else salts
    return make_noise(vocab_size)(torch.tensor(seeds), torch.tensor(positions), torch.tensor(salts))


def uniforms(gumbel: Tensor) -> np.ndarray:
    """Back to (0, 1), where the distribution is known."""
    return np.exp(-np.exp(-gumbel.double().numpy()))


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: tuple, key: tuple, answer: tuple) -> None:
    words = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(map(int, words)) == answer
    assert reference_philox(counter, key) == answer


# Seeds in both halves of 64 bits, large positions, and salts in both halves.
ROWS = [
    (0, 0, 0),
    (7, 1, 0),
    (2**32 - 1, 5, 0),
    (2**32, 5, 3),
    (2**63 - 1, 2**31, 2**32),
    (123456789012345, 99999, (3 << 32) + 99990),
]


@on_each_noise
@pytest.mark.parametrize(("seed", "position", "salt"), ROWS)
def test_noise_is_the_gumbel_transform_of_philox_words(seed: int, position: int, salt: int) -> None:
    vocab_size = 203
    words = reference_words(seed, position, salt, vocab_size)
    expected = -np.log(-np.log((2 * words + 1) / 2**33))
    (found,) = draw(vocab_size, [seed], [position], [salt]).double().numpy()
    assert found == pytest.approx(expected, rel=2e-7, abs=1e-7)


@pytest.mark.parametrize(("seed", "position", "salt"), ROWS)
def test_a_uniform_number_is_the_first_word_of_its_row(seed: int, position: int, salt: int) -> None:
    found = uniform(torch.tensor([seed]), torch.tensor([position]), torch.tensor([salt]))
    assert found.tolist() == [(2 * reference_words(seed, position, salt, 1)[0] + 1) / 2**33]


def test_seed_position_and_salt_stand_where_the_published_answer_has_key_and_counter() -> None:
    counter, key, answer = KNOWN_ANSWERS[2]
    gumbel = GumbelNoise(4, CPU)
    gumbel._token_group = torch.tensor([counter[0]])
    seed, salt = key[1] << 32 | key[0], counter[3] << 32 | counter[2]
    (found,) = gumbel(torch.tensor([seed]), torch.tensor([counter[1]]), torch.tensor([salt]))
    expected = [-math.log(-math.log((2 * word + 1) / 2**33)) for word in answer]
    assert same_bits(found, torch.tensor(expected, dtype=torch.float32))


# seed, position -> -log(-log((2 w + 1) / 2**33)) of the words w of Philox4x32-10; the first from the published answers.
FROZEN = [
    (0, 0, [0.08482025, 2.0616612, 1.1811829, 0.6896918]),
    (7, 1, [-0.5305982, -0.6650343, 3.275844, 0.3719063]),
    (2**63 - 1, 4097, [0.5858051, -0.48265746, 0.121413894, -0.4072957]),
]


@on_each_noise
@pytest.mark.parametrize(("seed", "position", "values"), FROZEN)
def test_the_targets_own_noise_has_the_bits_it_always_had(seed: int, position: int, values: list[float]) -> None:
    """Reports, caches and other releases hold outputs that were sampled with them."""
    assert same_bits(draw(4, [seed], [position])[0], torch.tensor(values, dtype=torch.float32))


@pytest.mark.parametrize(("low", "high", "error"), [(1.0, 1.05, 3e-16), (1e-10, 1e-9, 8e-15), (1.0, 2.0**33, 8e-15)])
def test_the_logarithm_is_as_good_as_its_rounding(low: float, high: float, error: float) -> None:
    x = torch.linspace(low, high, 100_001, dtype=torch.float64)
    found = GumbelNoise(1, CPU)._logarithm(x).numpy()
    assert np.abs(found - np.log(x.numpy())).max() < error


def test_noise_is_finite_and_right_at_both_ends_of_the_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([0, MASK, MASK - 1, 1])

    def fixed(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(word.expand(len(key[0]), 1) for word in extremes)

    monkeypatch.setattr(noise, "philox", fixed)
    (found,) = draw(4, [1], [1]).double()
    uniforms = [(2 * word + 1) / 2**33 for word in extremes.tolist()]
    # 1 - u is exact where u is near 1; log(u) itself would not be.
    expected = [-math.log(-math.log1p(-(1 - u))) if u > 0.5 else -math.log(-math.log(u)) for u in uniforms]
    assert found.tolist() == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("word", [0, MASK])
def test_uniform_numbers_are_inside_the_open_interval(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "philox", lambda counter, key: (torch.full_like(key[0], word),))
    (found,) = uniform(*[torch.tensor([1])] * 3).tolist()
    assert 0.0 < found < 1.0


@on_each_noise
def test_noise_is_uniform_after_the_inverse_transform() -> None:
    sample = np.sort(uniforms(draw(1000, list(range(60)), [17] * 60)).ravel())
    steps = np.arange(1, len(sample) + 1) / len(sample)
    distance = max((steps - sample).max(), (sample - steps + 1 / len(sample)).max())
    assert distance * math.sqrt(len(sample)) < 1.95  # Kolmogorov-Smirnov at 0.1 %
    assert sample.var() == pytest.approx(1 / 12, rel=0.01)


@on_each_noise
@pytest.mark.parametrize("what", ["position", "seed", "high half of the seed", "token id", "seed against position"])
def test_neighbours_are_not_correlated(what: str) -> None:
    vocab_size, count = 500, 100
    steps = list(range(count + 1))
    if what == "position":
        rows = draw(vocab_size, [5] * (count + 1), steps)
    elif what == "seed":
        rows = draw(vocab_size, steps, [5] * (count + 1))
    elif what == "high half of the seed":
        rows = draw(vocab_size, [step << 32 for step in steps], [5] * (count + 1))
    elif what == "seed against position":
        rows = torch.stack([draw(vocab_size, [a], [b])[0] for s in range(50) for a, b in ((s, s + 1), (s + 1, s))])
        pairs = (rows[0::2], rows[1::2])
    else:
        rows = draw(vocab_size, steps, [5] * (count + 1))
        pairs = (rows[:, :-1], rows[:, 1:])
    if what in ("position", "seed", "high half of the seed"):
        pairs = (rows[:-1], rows[1:])
    a, b = (uniforms(part).ravel() for part in pairs)
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(len(a))


STREAMS = [DRAFT_STREAM, ACCEPTANCE_STREAM, RECOVERY_STREAM]


def salted(stream: int, window_starts: Tensor) -> Tensor:
    """The target's stream has one salt for all windows."""
    return torch.zeros_like(window_starts) if stream == TARGET_STREAM else stream_salts(stream, window_starts)


def uniform_rows(stream: int, count: int, *, window: int = 40) -> np.ndarray:
    """The uniform numbers of the first four tokens of many positions of one window, one seed per row."""
    seeds, positions = torch.arange(count), torch.arange(count) % 8 + window
    salts = salted(stream, torch.full((count,), window))
    return uniforms(make_noise(4)(seeds, positions, salts)).ravel()


def dependence(a: np.ndarray, b: np.ndarray, cells: int = 8) -> float:
    """Chi-square of the joint histogram of two samples in (0, 1), in standard deviations from independence."""
    counts = np.bincount((a * cells).astype(int) * cells + (b * cells).astype(int), minlength=cells**2)
    expected = len(a) / cells**2
    freedom = cells**2 - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def independent(a: np.ndarray, b: np.ndarray) -> bool:
    return abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(len(a)) and abs(dependence(a, b)) < 4


def test_the_test_of_independence_sees_a_dependence() -> None:
    a, b = uniform_rows(TARGET_STREAM, 5000), uniform_rows(DRAFT_STREAM, 5000)
    assert not independent(a, np.where(a < 0.1, a, b))
    assert not independent(a, np.abs(a - 0.5) + b / 2)  # of no correlation


@on_each_noise
@pytest.mark.parametrize("a", [TARGET_STREAM, *STREAMS])
@pytest.mark.parametrize("b", [TARGET_STREAM, *STREAMS])
def test_streams_are_independent(a: int, b: int) -> None:
    assert a == b or independent(uniform_rows(a, 5000), uniform_rows(b, 5000))


@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_is_drawn_anew_in_every_window(stream: int) -> None:
    """The same seeds and positions, seen from two windows."""
    seeds, positions = torch.arange(20_000), torch.full((20_000,), 50)
    first, second = (uniform(seeds, positions, salted(stream, torch.full_like(seeds, w))).numpy() for w in (49, 50))
    assert independent(first, second)


def test_salts_are_the_targets_for_no_other_stream_and_no_window() -> None:
    starts = torch.tensor([0, 1, 2**31, 2**32 - 1])
    salts = torch.cat([stream_salts(stream, starts) for stream in STREAMS]).tolist()
    assert len({0, *salts}) == len(salts) + 1


@pytest.mark.parametrize("stream", [TARGET_STREAM, *STREAMS])
@pytest.mark.parametrize("what", ["seeds", "positions", "windows"])
def test_uniform_numbers_are_uniform_and_neighbours_independent(stream: int, what: str) -> None:
    count = 20_001
    steps, fixed = torch.arange(count), torch.full((count,), 1000)
    windows = steps if what == "windows" and stream != TARGET_STREAM else fixed
    positions = steps if what == "positions" or (what == "windows" and stream == TARGET_STREAM) else fixed
    found = uniform(steps if what == "seeds" else fixed, positions, salted(stream, windows)).numpy()
    assert found.dtype == np.float64
    assert found.min() > 0.0
    assert found.max() < 1.0
    assert found.mean() == pytest.approx(0.5, abs=4 / math.sqrt(12 * count))
    assert found.var() == pytest.approx(1 / 12, rel=0.03)
    counts = np.bincount((found * 50).astype(int), minlength=50)
    assert abs(((counts - count / 50) ** 2 / (count / 50)).sum() - 49) < 4 * math.sqrt(2 * 49)
    assert independent(found[:-1], found[1:])


def test_samples_of_a_request_have_seeds_of_their_own() -> None:
    pairs = [(seed, index) for seed in (0, 1, 11, 111, 2**32, 2**63 - 1) for index in range(1, 200)]
    seeds = [sample_seed(*pair) for pair in pairs]
    assert len({*seeds, *(seed for seed, _ in pairs)}) == len(pairs) + 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # no bit is wasted


def test_seeds_of_samples_are_the_same_in_every_process_and_release() -> None:
    assert [sample_seed(0, 1), sample_seed(7, 3), sample_seed(2**63 - 1, 1)] == [
        2476498335814239165,
        6220209672464955248,
        7426481598824073936,
    ]


def test_samples_of_a_request_are_independent() -> None:
    seeds = torch.tensor([[seed, sample_seed(seed, 1), sample_seed(seed, 2)] for seed in range(20_000)])
    fixed = torch.full((len(seeds),), 9)
    first, second, third = (uniform(column, fixed, 0 * fixed).numpy() for column in seeds.T)
    assert independent(first, second) and independent(second, third)


@on_each_noise
def test_every_bit_of_seed_position_and_salt_matters() -> None:
    rows = [(1 << bit, 0, 0) for bit in range(63)] + [(0, 1 << bit, 0) for bit in range(32)]
    rows += [(0, 0, 1 << bit) for bit in range(34)]
    found = draw(8, *map(list, zip((0, 0, 0), *rows, strict=True)))
    assert len({tuple(row) for row in found.tolist()}) == len(rows) + 1


@on_each_noise
@pytest.mark.parametrize("vocab_size", [1, 3, 4, 257])
def test_bits_do_not_depend_on_the_number_or_the_place_of_rows(vocab_size: int) -> None:
    rows = [3, 2**40, 3, 0, 11], [0, 5, 9, 1, 2**20], [0, 0, 1 << 32, (2 << 32) + 1, 5]
    together = draw(vocab_size, *rows)
    assert together.shape == (5, vocab_size)
    for row in range(5):
        assert same_bits(draw(vocab_size, *[each[row : row + 1] for each in rows])[0], together[row])
    assert same_bits(draw(vocab_size, *[each[::-1] for each in rows]), together.flip(0))


@on_each_noise
def test_bits_of_a_token_do_not_depend_on_the_size_of_the_vocabulary() -> None:
    assert same_bits(draw(1001, [9], [4])[:, :130], draw(130, [9], [4]))


def test_noise_that_inductor_compiles_has_the_bits_of_eager_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "noise_kernel", lambda noise: None)
    eager = GumbelNoise(37, CPU)
    fused = compiled.compile_noise(eager, "default")
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(0, 2**62, (8,), generator=generator)
    positions = torch.randint(0, 2**20, (8,), generator=generator)
    assert fused is not eager
    for stream in (TARGET_STREAM, RECOVERY_STREAM):
        salts = salted(stream, positions - 3)
        assert same_bits(fused(seeds, positions, salts), eager(seeds, positions, salts))


# The signs of both operands in a sum.
SUMS = {torch.ops.aten.add: (1, 1), torch.ops.aten.sub: (1, -1), torch.ops.aten.rsub: (-1, 1)}


class Contracting(TorchDispatchMode):
    """Rounds a * b + c of float64 once, as compilers for GPUs do; counts these sums and the numbers they change."""

    def __init__(self) -> None:
        super().__init__()
        self.num_contracted = self.num_changed = 0
        self._products: list[tuple[Tensor, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or result.dtype != torch.float64:
            return result
        if func.overloadpacket == torch.ops.aten.mul:
            self._products.append((result, *args))
        if func.overloadpacket not in SUMS:
            return result
        x, y = args
        sign_x, sign_y = SUMS[func.overloadpacket]
        for product, a, b in self._products:
            if product is x:
                return self._fused(result, (sign_x, a, b), (sign_y, y))
            if product is y:
                return self._fused(result, (sign_y, a, b), (sign_x, x))
        return result

    def _fused(self, result: Tensor, product: tuple[int, Any, Any], term: tuple[int, Any]) -> Tensor:
        (sign, a, b), (sign_c, c) = product, term
        rows = zip(*(fractions(each, result) for each in (a, b, c)), strict=True)
        fused = result.new_tensor([float(sign * a * b + sign_c * c) for a, b, c in rows]).view_as(result)
        self.num_contracted += 1
        self.num_changed += int((fused != result).sum())
        return fused


def fractions(numbers: Tensor | float, like: Tensor) -> list[Fraction]:
    return list(map(Fraction, torch.as_tensor(numbers, dtype=like.dtype).expand_as(like).flatten().tolist()))


ANY_ROWS = torch.tensor([3, 2**40]), torch.tensor([7, 8]), torch.tensor([0, 1 << 32])


def test_a_compiler_for_a_gpu_may_contract_and_changes_no_bit() -> None:
    gumbel = GumbelNoise(64, CPU)
    expected = gumbel(*ANY_ROWS)
    with Contracting() as contracting:
        gumbel(*ANY_ROWS)
    # Eight products in each of two logarithms; the compiler for a CPU does not contract.
    assert contracting.num_contracted == 16
    assert contracting.num_changed > 200
    assert GumbelNoise(64, torch.device("meta"))._one is not None
    gumbel._one = torch.ones((), dtype=torch.float64)
    with Contracting() as contracting:
        assert same_bits(gumbel(*ANY_ROWS), expected)
        uniform(*ANY_ROWS)
    assert contracting.num_contracted == 16
    assert contracting.num_changed == 0


def test_a_compiler_does_not_see_that_the_one_is_1() -> None:
    """Else it could drop the multiplication. What is an input of the graph is read when the code runs."""
    scalars: list[Tensor] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        scalars.extend(each for each in inputs if each.dim() == 0)
        return graph.forward

    gumbel = GumbelNoise(4, CPU)
    gumbel._one = torch.ones((), dtype=torch.float64)
    torch.compile(gumbel, backend=backend, fullgraph=True, dynamic=False)(*ANY_ROWS)
    assert [each.dtype for each in scalars] == [torch.float64]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "default"])
def test_bits_are_those_of_the_cpu(mode: str) -> None:
    rows = torch.arange(64), torch.arange(64) + 1000, torch.zeros(64, dtype=torch.int64)
    found = compiled.compile_noise(GumbelNoise(49152, torch.device("cuda")), mode)(*(row.cuda() for row in rows))
    assert same_bits(found.cpu(), GumbelNoise(49152, CPU)(*rows))
