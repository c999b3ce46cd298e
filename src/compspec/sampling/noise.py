"""Noise that is a pure function of (seed, position, token id), in independent streams.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in int64 arithmetic, then
-log(-log(u)) from multiplications and additions of float64 alone. Each of these is rounded correctly by every
device and by scalar and vector code alike, and none is contracted (`GumbelNoise._times`), so the bits do not depend on
where a row stands, on the number of threads, on the device or on the compiler; a library `log` gives no such promise.
"""

import decimal
import hashlib

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

TARGET_STREAM, DRAFT_STREAM, ACCEPTANCE_STREAM, RECOVERY_STREAM = range(4)
"""What a random number decides. The equality verifier needs the first alone; a draft model shares it then."""

_LOG_TABLE_BITS = 7
_MANTISSA_MASK = (1 << 52) - 1
_ONE_BITS = 1023 << 52


def _log(value: float) -> float:
    """Correctly rounded, so the same on every host; `math.log` is as good as the host's C library."""
    return float(decimal.Context(prec=40).ln(decimal.Decimal(value)))


LOG_2 = _log(2.0)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10.

    Args:
        counter, key: int64 tensors that broadcast together, each value in [0, 2**32).

    Returns:
        Four int64 tensors of random words in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The signed product wraps, its bits are those of the unsigned one.
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def stream_salts(stream: int, window_starts: Tensor) -> Tensor:
    """Salts of a stream that is drawn anew in every window.

    What the rejection verifier draws at a position in one window must not come again in the next: that the window
    ended before the position says something about those numbers.

    Args:
        stream: one of the `*_STREAM` numbers but `TARGET_STREAM`, whose salt is 0.
        window_starts: [N] int64, the position of the first row of each row's window, below 2**32.

    Returns:
        [N] int64.
    """
    return window_starts + (stream << 32)


def sample_seed(seed: int, index: int) -> int:
    """The seed of the sample `index` > 0 of a request that makes several; below 2**63, as seeds are."""
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniform(seeds: Tensor, positions: Tensor, salts: Tensor) -> Tensor:
    """One number in (0, 1) per row, float64; arguments as those of `GumbelNoise`."""
    word = philox(*_counter_and_key(torch.zeros_like(seeds), seeds, positions, salts))[0]
    return (2 * word + 1).to(torch.float64) * 2.0**-33


def _counter_and_key(
    token_group: Tensor, seeds: Tensor, positions: Tensor, salts: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    return (token_group, positions, salts & _MASK, salts >> 32), (seeds & _MASK, seeds >> 32)


class GumbelNoise:
    """Standard Gumbel noise for every token of the vocabulary, one row per sampled position.

    Args:
        vocab_size: V.
        device: where the noise is made.

    Attributes:
        inverse_table, log_table: [2 ** 7] float64, what the logarithm reads.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        num_groups = -(-vocab_size // 4)
        self._token_group = torch.arange(num_groups, dtype=torch.int64, device=device)
        inverses = [2.0 / (2.0 + (2 * index + 1) / (1 << _LOG_TABLE_BITS)) for index in range(1 << _LOG_TABLE_BITS)]
        self.inverse_table = torch.tensor(inverses, dtype=torch.float64, device=device)
        self.log_table = torch.tensor([-_log(value) for value in inverses], dtype=torch.float64, device=device)
        self._one = None if device.type == "cpu" else torch.ones((), dtype=torch.float64, device=device)

    def __call__(self, seeds: Tensor, positions: Tensor, salts: Tensor) -> Tensor:
        """Draws the noise.

        Args:
            seeds: [N] int64, >= 0.
            positions: [N] int64, the absolute position of the token each row samples.
            salts: [N] int64, 0 for the target's own noise, else from `stream_salts`.

        Returns:
            [N, V] float32.
        """
        words = philox(*_counter_and_key(self._token_group, seeds[:, None], positions[:, None], salts[:, None]))
        uniform = torch.stack(words, dim=-1).flatten(-2)[:, : self.vocab_size]
        # u = (2 r + 1) / 2**33 lies strictly inside (0, 1).
        exponential = 33.0 * LOG_2 - self._logarithm((2 * uniform + 1).to(torch.float64))
        return -self._logarithm(exponential).to(torch.float32)

    def _logarithm(self, x: Tensor) -> Tensor:
        """Natural logarithm of positive normal float64, good to about 1e-15."""
        bits = x.view(torch.int64)
        exponent = ((bits >> 52) - 1023).to(torch.float64)
        index = (bits >> (52 - _LOG_TABLE_BITS)) & ((1 << _LOG_TABLE_BITS) - 1)
        mantissa = ((bits & _MANTISSA_MASK) | _ONE_BITS).view(torch.float64)
        # mantissa = (1 + r) / inverse with |r| <= 2**-8: the series of log(1 + r) ends after six terms.
        times = self._times
        r = times(mantissa, self.inverse_table[index]) - 1.0
        series = times(r, 1.0 - times(r, 1 / 2 - times(r, 1 / 3 - times(r, 1 / 4 - times(r, 1 / 5 - times(r, 1 / 6))))))
        return times(exponent, LOG_2) + (self.log_table[index] + series)

    def _times(self, a: Tensor, b: Tensor | float) -> Tensor:
        """The product, rounded before anything is added to it.

        Compilers for GPUs contract a * b + c to fma(a, b, c), which rounds once and so has other bits. Of a product
        times a 1 that is read from memory they can make fma(a * b, 1, c) at most, and that is a * b + c. Inductor
        compiles for CPU with -ffp-contract=off, and there the 1 would add a seventh to the time of the noise.
        """
        return a * b if self._one is None else a * b * self._one
