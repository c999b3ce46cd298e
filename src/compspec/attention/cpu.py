"""The CPU backend: a compiled kernel that reads pages where they lie (kernels/attention.cpp)."""

import ctypes
import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

from compspec.attention.backend import AttentionSetup, StatelessBackend
from compspec.attention.sdpa import SdpaBackend
from compspec.kernels.build import default_cache_dir, load_library

_LOGGER = logging.getLogger(__name__)

_P = ctypes.c_void_p
_I = ctypes.c_int64
_F = ctypes.c_float
# q, k_cache, v_cache, block_table, seq_lens, query_positions, out; R, Q, Hq, Hkv, D, B, block_size, window;
# scale, softcap; threads
_ARGUMENTS = (_P, _P, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I, _I, _I, _I, _F, _F, ctypes.c_int)
_SYMBOLS = {torch.bfloat16: "compspec_attention_bf16", torch.float32: "compspec_attention_fp32"}


@functools.cache
def _function(dtype: torch.dtype) -> "ctypes._NamedFuncPointer | None":
    """The kernel for one type, or None, with a warning, where torch has to do the work."""
    if dtype not in _SYMBOLS:
        _LOGGER.warning("no attention kernel for %s on CPU, torch's own operator stands in for it", dtype)
        return None
    library = load_library("attention", default_cache_dir())
    if library is None:
        return None
    function: ctypes._NamedFuncPointer = getattr(library, _SYMBOLS[dtype])
    function.argtypes = _ARGUMENTS
    function.restype = ctypes.c_int
    return function


def make(setup: AttentionSetup) -> "CpuBackend":
    """One backend for all types."""
    return CpuBackend(setup.dtype)


def refusal(setup: AttentionSetup) -> str | None:
    """Serves every setup on a CPU."""
    return None if setup.device.type == "cpu" else f"it runs on CPUs, the model is on {setup.device}"


class CpuBackend(StatelessBackend):
    """Paged attention in bf16 and fp32, whose rows depend on nothing but themselves.

    The kernel is compiled on first use, into `kernels` below $COMPSPEC_CACHE or ~/.cache/compspec. Without
    a compiler, and for other types, `SdpaBackend` does the work.

    Args:
        dtype: of the model.
    """

    name = "cpu"

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self._fallback = SdpaBackend()

    @property
    def implementation(self) -> str:
        """The kernel's library, which is named after all that is in it, or SDPA."""
        library = load_library("attention", default_cache_dir()) if self._dtype in _SYMBOLS else None
        return Path(library._name).name if library is not None else SdpaBackend.name

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_positions: Tensor,
        block_size: int,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        """See `AttentionPlan.paged_attention`. A row that sees no token is zero."""
        dtype = q.dtype
        function = _function(dtype)
        if function is None or k_cache.dtype != dtype or v_cache.dtype != dtype:
            return self._fallback.paged_attention(
                q, k_cache, v_cache, block_table, seq_lens, query_positions, block_size, scale, window, softcap
            )
        num_rows, num_heads, head_dim = q.shape
        num_requests, num_blocks = block_table.shape
        num_kv_heads = k_cache.shape[1]
        assert block_table.dtype == seq_lens.dtype == torch.int32 and query_positions.dtype == torch.int64
        assert k_cache.shape == v_cache.shape and k_cache.shape[2] == head_dim and num_heads % num_kv_heads == 0
        assert seq_lens.shape[0] == num_requests and query_positions.shape[0] == num_rows
        # A copy of a cache would cost more than the attention.
        assert k_cache.is_contiguous() and v_cache.is_contiguous()
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if num_rows == 0:
            return out
        # Copies have to live until the call is over, so each has a name.
        q, block_table = q.contiguous(), block_table.contiguous()
        seq_lens, query_positions = seq_lens.contiguous(), query_positions.contiguous()
        failed = function(
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            block_table.data_ptr(),
            seq_lens.data_ptr(),
            query_positions.data_ptr(),
            out.data_ptr(),
            num_requests,
            num_rows // num_requests,
            num_heads,
            num_kv_heads,
            head_dim,
            num_blocks,
            block_size,
            window,
            scale,
            softcap,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the scratch of compspec::paged_attention")
        return out
