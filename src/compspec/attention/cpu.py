"""The CPU backend: compiled kernels that read pages where they lie.

kernels/attention.cpp serves every shape in bf16 and fp32, kernels/attention_amx.cpp bf16 on processors with tiles.
"""

import ctypes
import functools
import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compspec.attention.backend import AttentionSetup, StatelessBackend
from compspec.attention.sdpa import SdpaBackend
from compspec.kernels.build import default_cache_dir, load_library
from compspec.kernels.program import Recorder, active_recorder, address_of

_LOGGER = logging.getLogger(__name__)

_P = ctypes.c_void_p
_I = ctypes.c_int64
_F = ctypes.c_float
# q, k_cache, v_cache, block_table, seq_lens, query_positions, out; R, Q, Hq, Hkv, D, B, block_size, window;
# scale, softcap; threads
_ARGUMENTS = (_P, _P, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I, _I, _I, _I, _F, _F, ctypes.c_int)
_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
# A tile is 32 bf16 wide; a narrower rest would need a path of its own.
_TILES_DIM = 32


@functools.cache
def _tiles_library() -> ctypes.CDLL | None:
    """The kernel that multiplies with tiles, or None where the processor or the system has none."""
    library = load_library("attention_amx", default_cache_dir())
    return library if library is not None and library.compspec_attention_amx_usable() else None


class _Recorded(ctypes.Structure):
    """The arguments of a call in a program."""

    _fields_ = (
        *((name, _P) for name in ("q", "k_cache", "v_cache", "table", "lengths", "positions", "out")),
        *((name, _I) for name in ("requests", "queries", "heads", "kv_heads", "head_dim")),
        *((name, _I) for name in ("table_width", "block_size", "window")),
        ("scale", _F),
        ("softcap", _F),
        ("shared", _P),
    )


@dataclass(frozen=True, slots=True)
class _Kernel:
    """The functions of one library for one type; their names begin alike. `function` makes one call."""

    library: ctypes.CDLL
    prefix: str
    type_name: str

    function: "ctypes._NamedFuncPointer"

    @staticmethod
    def of(library: ctypes.CDLL, prefix: str, type_name: str) -> "_Kernel":
        """Looks the function up."""
        function: ctypes._NamedFuncPointer = getattr(library, f"{prefix}_{type_name}")
        function.argtypes = _ARGUMENTS
        function.restype = ctypes.c_int
        return _Kernel(library, prefix, type_name, function)

    def record(self, recorder: Recorder, arguments: tuple[int | float, ...]) -> None:
        """Tells a recorder of one call: everything but the number of threads."""
        make, forget = (getattr(self.library, f"{self.prefix}_{name}") for name in ("shared", "forget"))
        make.restype, forget.argtypes = _P, (_P,)
        shared = make()
        if not shared:
            raise MemoryError("no memory for compspec::paged_attention in a program")
        recorded = _Recorded(*arguments, shared)
        weakref.finalize(recorded, forget, shared)
        recorder.in_team(address_of(getattr(self.library, f"{self.prefix}_work_{self.type_name}")), recorded)


@functools.cache
def _kernel(dtype: torch.dtype, head_dim: int) -> _Kernel | None:
    """The kernel for heads of one type and size; None, with a warning, where torch has to do the work."""
    if dtype not in _TYPES:
        _LOGGER.warning("no attention kernel for %s on CPU, torch's own operator stands in for it", dtype)
        return None
    if dtype == torch.bfloat16 and head_dim % _TILES_DIM == 0:
        tiles = _tiles_library()
        if tiles is not None:
            return _Kernel.of(tiles, "compspec_attention_amx", _TYPES[dtype])
    library = load_library("attention", default_cache_dir())
    return None if library is None else _Kernel.of(library, "compspec_attention", _TYPES[dtype])


def make(setup: AttentionSetup) -> "CpuBackend":
    """One backend for all types."""
    return CpuBackend(setup.dtype, [layer.head_dim for layer in setup.layers])


def refusal(setup: AttentionSetup) -> str | None:
    """Serves every setup on a CPU."""
    return None if setup.device.type == "cpu" else f"it runs on CPUs, the model is on {setup.device}"


class CpuBackend(StatelessBackend):
    """Paged attention in bf16 and fp32, whose rows depend on nothing but themselves.

    The kernels are compiled on first use, into `kernels` below $COMPSPEC_CACHE or ~/.cache/compspec. Without
    a compiler, and for other types, `SdpaBackend` does the work.

    Args:
        dtype: of the model.
        head_dims: D of its layers.
    """

    name = "cpu"

    def __init__(self, dtype: torch.dtype = torch.float32, head_dims: Iterable[int] = ()) -> None:
        self._dtype = dtype
        self._head_dims = frozenset(head_dims)
        self._fallback = SdpaBackend()

    @property
    def implementation(self) -> str:
        """The libraries of the kernels that the layers use, each named after all that is in it, or SDPA."""
        kernels = [_kernel(self._dtype, head_dim) for head_dim in sorted(self._head_dims)]
        names = {SdpaBackend.name if kernel is None else Path(kernel.library._name).name for kernel in kernels}
        return "+".join(sorted(names))

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
        kernel = _kernel(dtype, q.shape[-1])
        if kernel is None or k_cache.dtype != dtype or v_cache.dtype != dtype:
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
        recorder = active_recorder()
        if recorder is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        else:
            out = recorder.empty_contiguous(q.shape, dtype)
        if num_rows == 0:
            return out
        # Copies have to live until the call is over, so each has a name.
        q, block_table = q.contiguous(), block_table.contiguous()
        seq_lens, query_positions = seq_lens.contiguous(), query_positions.contiguous()
        arguments = (
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
        )
        if recorder is not None:
            for tensor in (q, k_cache, v_cache, block_table, seq_lens, query_positions, out):
                recorder.pointer(tensor)
            kernel.record(recorder, arguments)
        if kernel.function(*arguments, torch.get_num_threads()):
            raise MemoryError("no memory for the scratch of compspec::paged_attention")
        return out
