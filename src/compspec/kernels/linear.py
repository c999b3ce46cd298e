"""A bfloat16 linear layer for CPUs whose row results depend on nothing but the row.

Importing this module registers the operator `compspec::linear(x, weight, bias)`. It is for inference:
there is no gradient formula.
"""

import ctypes
import platform
import threading
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compspec.kernels.build import default_cache_dir, load_library

_P = ctypes.c_void_p
_I = ctypes.c_int64
# x, stride of its rows, weight, bias, out, rows, out features, in features, threads
_ARGUMENTS = (_P, _I, _P, _P, _P, _I, _I, _I, ctypes.c_int)

# FRAGMENT and not DEF: other modules may add operators to the same namespace.
_LIBRARY = torch.library.Library("compspec", "FRAGMENT")  # type: ignore[no-untyped-call]


class _Kernel:
    """The C function, loaded once per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tried = False
        self._function: ctypes._NamedFuncPointer | None = None

    def load(self, cache_dir: Path | None) -> bool:
        """Builds and loads on the first call; later calls return the same answer, whatever the folder."""
        with self._lock:
            if not self._tried:
                library = load_library("linear", cache_dir or default_cache_dir())
                if library is not None:
                    function = library.compspec_linear_bf16
                    function.argtypes = _ARGUMENTS
                    function.restype = ctypes.c_int
                    self._function = function
                self._tried = True
        return self._function is not None

    def get(self) -> "ctypes._NamedFuncPointer | None":
        """The function, or None if there is no library."""
        if not self._tried:
            self.load(None)
        return self._function


_KERNEL = _Kernel()


def is_wanted(cache_dir: Path | None = None) -> bool:
    """Whether this machine gains from the kernel: it has no bfloat16 instructions, and a working compiler.

    Args:
        cache_dir: folder for the compiled library; default: `kernels` below $COMPSPEC_CACHE or
            ~/.cache/compspec. The first call in a process decides.
    """
    return not has_native_bf16() and _KERNEL.load(cache_dir)


def has_native_bf16() -> bool:
    """Whether torch's own matrix products use bfloat16 instructions of this CPU.

    On x86 oneDNN calls bfloat16 supported where AVX-512 alone stands in for such instructions.
    """
    if platform.machine() in ("x86_64", "AMD64"):
        tests = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
        return any(test is not None and test() for test in tests)
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is not None and bool(supported())


def use_linear_kernel(model: nn.Module, cache_dir: Path | None = None) -> int:
    """Makes every plain `nn.Linear` of a model that lives on the CPU in bfloat16 call the kernel.

    Only the class of the modules changes: parameters, ties between them and the state dict stay.

    Args:
        model: changed in place.
        cache_dir: as in `is_wanted`.

    Returns:
        How many modules call the kernel now; 0, and an untouched model, if there is no library.
    """
    if not _KERNEL.load(cache_dir):
        return 0
    count = 0
    for module in model.modules():
        if type(module) is nn.Linear and _is_suitable(module.weight):
            module.__class__ = _LinearOnKernel
            count += 1
    return count


def _is_suitable(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu"


class _LinearOnKernel(nn.Linear):
    """`nn.Linear` with another operator."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return torch.ops.compspec.linear(input, self.weight, self.bias)  # type: ignore[no-any-return]


def _linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The operator on CPU.

    Args:
        x: [..., in_features], any strides.
        weight: [out_features, in_features].
        bias: [out_features] or None.

    Returns:
        [..., out_features], contiguous.
    """
    if not (x.dtype == weight.dtype == torch.bfloat16 and (bias is None or bias.dtype == x.dtype)):
        return F.linear(x, weight, bias)
    function = _KERNEL.get()
    if function is None:
        return F.linear(x, weight, bias)
    out_features, in_features = weight.shape
    shape = x.shape
    if shape[-1] != in_features or (bias is not None and bias.shape != (out_features,)):
        raise ValueError(
            f"shapes do not fit: x {list(shape)}, weight {list(weight.shape)}, "
            f"bias {None if bias is None else list(bias.shape)}"
        )
    out = x.new_empty((*shape[:-1], out_features))
    if out.numel() == 0:
        return out
    if in_features == 0:
        return F.linear(x, weight, bias)
    # Copies have to live until the call is over, so each has a name.
    stride = in_features
    if not x.is_contiguous():
        x = x.reshape(-1, in_features)
        x = x if x.stride(1) == 1 else x.contiguous()
        stride = x.stride(0)
    weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    failed = function(
        x.data_ptr(),
        stride,
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out.numel() // out_features,
        out_features,
        in_features,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for the scratch of compspec::linear")
    return out


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Shape and type of the result, for tracing."""
    message = "the last size of x is not the number of in features"
    torch._check(x.shape[-1] == weight.shape[1], lambda: message)  # type: ignore[no-untyped-call]
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_LIBRARY.define(  # type: ignore[no-untyped-call]
    "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_LIBRARY.impl("linear", _linear_cpu, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("compspec::linear", _linear_fake, lib=_LIBRARY)
