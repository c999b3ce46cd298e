"""Gumbel noise on CPUs from one C++ loop (noise.cpp), bit for bit what `sampling.noise.GumbelNoise` gives."""

import ctypes
import functools

import torch
from torch import Tensor

from compspec.kernels.build import default_cache_dir, load_library
from compspec.sampling.noise import LOG_2, GumbelNoise

_P = ctypes.c_void_p
_I = ctypes.c_int64
# seeds, positions, salts, rows, vocabulary size, inverse table, log table, log(2), out, threads
_ARGUMENTS = (_P, _P, _P, _I, _I, _P, _P, ctypes.c_double, _P, ctypes.c_int)


class NoiseKernel:
    """Standard Gumbel noise for every token of the vocabulary, one row per sampled position.

    Args:
        noise: on a CPU; whose noise this is.
        library: made from noise.cpp.
    """

    def __init__(self, noise: GumbelNoise, library: ctypes.CDLL) -> None:
        self.vocab_size = noise.vocab_size
        self._inverse, self._log = noise.inverse_table, noise.log_table
        self._function = library.compspec_gumbel_noise
        self._function.argtypes = _ARGUMENTS
        self._function.restype = None

    def __call__(self, seeds: Tensor, positions: Tensor, salts: Tensor) -> Tensor:
        """Draws the noise; arguments and result as those of `GumbelNoise`."""
        # Copies have to live until the call is over, so each has a name.
        seeds, positions, salts = seeds.contiguous(), positions.contiguous(), salts.contiguous()
        for each in (seeds, positions, salts):
            assert each.shape == seeds.shape == (len(seeds),)
            assert each.dtype == torch.int64
            assert each.device.type == "cpu"
        out = torch.empty(len(seeds), self.vocab_size, dtype=torch.float32, device="cpu")
        self._function(
            seeds.data_ptr(),
            positions.data_ptr(),
            salts.data_ptr(),
            len(seeds),
            self.vocab_size,
            self._inverse.data_ptr(),
            self._log.data_ptr(),
            LOG_2,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_library("noise", default_cache_dir())


def noise_kernel(noise: GumbelNoise) -> NoiseKernel | None:
    """The kernel for this noise; None on other devices than CPUs, and where the library cannot be built."""
    if noise.device.type != "cpu":
        return None
    library = _library()
    return None if library is None else NoiseKernel(noise, library)
