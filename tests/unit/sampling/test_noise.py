"""Gumbel noise: the published generator, the right distribution, and a pure function of seed, position and id."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from compspec.runner import compiled
from compspec.sampling import noise
from compspec.sampling.noise import GumbelNoise, philox
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


def reference_uniform(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """The random words of a row, [V] float64."""
    groups = range(-(-vocab_size // 4))
    words = [reference_philox((group, position, 0, 0), (seed & MASK, seed >> 32)) for group in groups]
    return np.array(words, dtype=np.float64).reshape(-1)[:vocab_size]


def draw(vocab_size: int, seeds: list[int], positions: list[int]) -> Tensor:
    return GumbelNoise(vocab_size, CPU)(torch.tensor(seeds), torch.tensor(positions))


def uniforms(gumbel: Tensor) -> np.ndarray:
    """Back to (0, 1), where the distribution is known."""
    return np.exp(-np.exp(-gumbel.double().numpy()))


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: tuple, key: tuple, answer: tuple) -> None:
    words = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(map(int, words)) == answer
    assert reference_philox(counter, key) == answer


@pytest.mark.parametrize(
    ("seed", "position"), [(0, 0), (7, 1), (2**32 - 1, 5), (2**32, 5), (2**63 - 1, 2**31), (123456789012345, 99999)]
)
def test_noise_is_the_gumbel_transform_of_philox_words(seed: int, position: int) -> None:
    vocab_size = 203
    uniform = (2 * reference_uniform(seed, position, vocab_size) + 1) / 2**33
    expected = -np.log(-np.log(uniform))
    (found,) = draw(vocab_size, [seed], [position]).double().numpy()
    assert found == pytest.approx(expected, rel=2e-7, abs=1e-7)


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
    uniform = [(2 * word + 1) / 2**33 for word in extremes.tolist()]
    # 1 - u is exact where u is near 1; log(u) itself would not be.
    expected = [-math.log(-math.log1p(-(1 - u))) if u > 0.5 else -math.log(-math.log(u)) for u in uniform]
    assert found.tolist() == pytest.approx(expected, rel=2e-6)


def test_noise_is_uniform_after_the_inverse_transform() -> None:
    sample = np.sort(uniforms(draw(1000, list(range(60)), [17] * 60)).ravel())
    steps = np.arange(1, len(sample) + 1) / len(sample)
    distance = max((steps - sample).max(), (sample - steps + 1 / len(sample)).max())
    assert distance * math.sqrt(len(sample)) < 1.95  # Kolmogorov-Smirnov at 0.1 %
    assert sample.var() == pytest.approx(1 / 12, rel=0.01)


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


def test_every_bit_of_seed_and_position_matters() -> None:
    seeds = [0, *(1 << bit for bit in range(63))]
    positions = [0] * len(seeds) + [1 << bit for bit in range(32)]
    rows = draw(8, seeds + [0] * 32, positions)
    assert len({tuple(row) for row in rows.tolist()}) == len(rows)


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 257])
def test_bits_do_not_depend_on_the_number_or_the_place_of_rows(vocab_size: int) -> None:
    seeds, positions = [3, 2**40, 3, 0, 11], [0, 5, 9, 1, 2**20]
    together = draw(vocab_size, seeds, positions)
    assert together.shape == (5, vocab_size)
    for row in range(5):
        assert same_bits(draw(vocab_size, seeds[row : row + 1], positions[row : row + 1])[0], together[row])
    assert same_bits(draw(vocab_size, seeds[::-1], positions[::-1]), together.flip(0))


def test_bits_of_a_token_do_not_depend_on_the_size_of_the_vocabulary() -> None:
    assert same_bits(draw(1001, [9], [4])[:, :130], draw(130, [9], [4]))


def test_compiled_noise_has_the_bits_of_eager_noise() -> None:
    eager = GumbelNoise(37, CPU)
    fused = compiled.compile_noise(eager, "default")
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(0, 2**62, (8,), generator=generator)
    positions = torch.randint(0, 2**20, (8,), generator=generator)
    assert fused is not eager
    assert same_bits(fused(seeds, positions), eager(seeds, positions))
