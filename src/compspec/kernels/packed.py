"""Linear layers over packed weights on CPUs; a row of the result depends on nothing but the row.

Importing this module registers the operator `compspec::packed_linear(x, packed, bias, columns, form)`. It is for
inference: there is no gradient formula. The kernel is packed.cpp, the order of bytes is that of packing.py.
"""

import ctypes
import threading
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compspec.kernels.build import default_cache_dir, load_library
from compspec.kernels.packing import GROUP, Format, packed_bytes, padded_size, unpack
from compspec.kernels.program import Recorder, active_recorder, address_of

_P = ctypes.c_void_p
_I = ctypes.c_int64
_C = ctypes.c_int
# x, stride of its rows, rows, groups, packed, bias, out, columns, format, path, threads
_ARGUMENTS = (_P, _I, _I, _I, _P, _P, _P, _I, _C, _C, _C)
# As in packed.cpp: a group of x whose largest value is below counts as zero.
_SMALLEST = 1e-30

_SYMBOLS = {torch.bfloat16: "compspec_packed_linear_bf16", torch.float32: "compspec_packed_linear_fp32"}
_TEAM_SYMBOLS = {torch.bfloat16: "compspec_packed_work_bf16", torch.float32: "compspec_packed_work_fp32"}

_LIBRARY = torch.library.Library("compspec", "FRAGMENT")  # type: ignore[no-untyped-call]


class _Recorded(ctypes.Structure):
    """`Recorded` of packed.cpp."""

    _fields_ = (
        ("x", _P),
        ("stride", _I),
        ("rows", _I),
        ("groups", _I),
        ("packed", _P),
        ("bias", _P),
        ("out", _P),
        ("columns", _I),
        ("format", _C),
        ("path", _C),
        ("memory", _P),
    )


class _Kernel:
    """The C functions, loaded and tried once per process.

    Attributes:
        name: of the library's file; None without one.
        path: how it multiplies bf16: 2 with tiles, 1 with dot products, 0 not at all.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tried = False
        self._functions: dict[torch.dtype, ctypes._NamedFuncPointer] = {}
        self._library: ctypes.CDLL | None = None
        self.name: str | None = None
        self.path = 0

    def load(self) -> bool:
        """Builds and loads on the first call; later calls return the same answer."""
        with self._lock:
            if not self._tried:
                self._tried = True
                library = load_library("packed", default_cache_dir())
                if library is not None:
                    self._bind(library)
        return self.name is not None

    def _bind(self, library: ctypes.CDLL) -> None:
        for dtype, symbol in _SYMBOLS.items():
            function = getattr(library, symbol)
            function.argtypes = _ARGUMENTS
            function.restype = _C
            self._functions[dtype] = function
        library.compspec_packed_scratch.argtypes = (_I, _I)
        library.compspec_packed_scratch.restype = _I
        self._library = library
        self.path = library.compspec_packed_best_path()
        self.name = Path(library._name).name

    def function(self, dtype: torch.dtype, form: int) -> "ctypes._NamedFuncPointer | None":
        """What multiplies x of this type, or None where torch has to."""
        if not self._tried:
            self.load()
        if form == Format.BF16 and (dtype != torch.bfloat16 or self.path == 0):
            return None
        return self._functions.get(dtype)

    def record(
        self, recorder: Recorder, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, form: int
    ) -> None:
        """Tells a recorder of one product."""
        assert self._library is not None
        in_features = x.shape[-1]
        rows, groups = x.numel() // in_features, in_features // GROUP
        num_bytes = self._library.compspec_packed_scratch(rows, groups) if form != Format.BF16 else 0
        memory = recorder.empty((num_bytes,), (1,), torch.uint8)
        recorder.in_team(
            address_of(getattr(self._library, _TEAM_SYMBOLS[x.dtype])),
            _Recorded(
                recorder.pointer(x),
                in_features,
                rows,
                groups,
                recorder.pointer(packed),
                None if bias is None else recorder.pointer(bias),
                recorder.pointer(out),
                out.shape[-1],
                form,
                self.path,
                recorder.pointer(memory),
            ),
        )


_KERNEL = _Kernel()


def packs_bf16() -> bool:
    """Whether packed bf16 weights pay here: a processor with bf16 instructions, and a compiler."""
    return _KERNEL.load() and _KERNEL.path > 0


def implementation() -> str:
    """Names the code that multiplies; results measured with one do not hold for another."""
    return f"{_KERNEL.name}:{_KERNEL.path}" if _KERNEL.load() else "torch"


class PackedLinear(nn.Module):
    """Takes the place of an `nn.Linear`; may share its packed weight with layers that get the same input.

    Args:
        packed: bytes of the whole weight, `packing.packed_bytes` of them.
        bias: [columns] float32 of the whole weight, or None.
        in_features: of x.
        columns: output features of the whole weight; with several layers each has a multiple of 32 of them.
        first, out_features: which of them are this layer's.
        form: of `packed`.
    """

    packed: Tensor
    bias: Tensor | None

    def __init__(
        self,
        packed: Tensor,
        bias: Tensor | None,
        *,
        in_features: int,
        columns: int,
        first: int,
        out_features: int,
        form: Format,
    ) -> None:
        super().__init__()
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.in_features = in_features
        self.columns = columns
        self.first = first
        self.out_features = out_features
        self.form = int(form)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if torch.compiler.is_compiling():
            # All layers of the group ask for the same product; the compiler makes it once.
            whole: Tensor = torch.ops.compspec.packed_linear(input, self.packed, self.bias, self.columns, self.form)
            return whole[..., self.first : self.first + self.out_features]
        own: Tensor = torch.ops.compspec.packed_linear(input, *self._own(), self.form)
        return own[..., : self.out_features]

    def _own(self) -> tuple[Tensor, Tensor | None, int]:
        """This layer's part of the weight and bias, and its columns."""
        columns = min(padded_size(self.out_features), self.columns - self.first)
        before, size = (packed_bytes(n, self.in_features, Format(self.form)) for n in (self.first, columns))
        bias = None if self.bias is None else self.bias[self.first : self.first + columns]
        return self.packed[before : before + size], bias, columns

    def extra_repr(self) -> str:
        """For the module's repr."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {Format(self.form).name.lower()}"


def reference(x: Tensor, packed: Tensor, bias: Tensor | None, columns: int, form: int) -> Tensor:
    """The operator in plain torch: x [..., K] -> [..., columns]. Rounds x as the kernel does, sums in another order."""
    in_features = x.shape[-1]
    weight = unpack(packed, columns, in_features, Format(form))
    wide = x.float()
    if form != Format.BF16:
        groups = F.pad(wide, (0, -in_features % GROUP)).view(*wide.shape[:-1], -1, GROUP)
        most = groups.abs().amax(-1, keepdim=True)
        counts = (most >= _SMALLEST) & most.isfinite()
        whole = torch.tensor(127.0)  # as a tensor, for torch multiplies a number by the reciprocal
        rounded = torch.where(counts, groups * (whole / most), 0).round() * (most / whole)
        wide = rounded.flatten(-2)[..., :in_features]
    return F.linear(wide, weight, None if bias is None else bias[:columns]).to(x.dtype)


def _packed_linear_cpu(x: Tensor, packed: Tensor, bias: Tensor | None, columns: int, form: int) -> Tensor:
    """The operator on CPU.

    Args:
        x: [..., in_features].
        packed, bias, columns: as in `PackedLinear`; bias is contiguous.
        form: a `Format`.

    Returns:
        [..., columns], contiguous, of x's type.

    Raises:
        ValueError: the sizes contradict each other.
    """
    function = _KERNEL.function(x.dtype, form)
    if function is None:
        return reference(x, packed, bias, columns, form)
    in_features = x.shape[-1]
    fits = packed.numel() == packed_bytes(columns, in_features, form) and (bias is None or bias.numel() >= columns)
    if not fits:
        raise ValueError(
            f"shapes do not fit: x {list(x.shape)}, {packed.numel()} packed bytes, "
            f"bias {None if bias is None else list(bias.shape)}, {columns} columns of {Format(form).name.lower()}"
        )
    if in_features % GROUP:
        x = F.pad(x, (0, -in_features % GROUP))
        in_features = x.shape[-1]
    if not x.is_contiguous():
        x = x.contiguous()
    shape = (*x.shape[:-1], columns)
    recorder = active_recorder()
    if recorder is None:
        out = x.new_empty(shape)
    else:
        out = recorder.empty_contiguous(shape, x.dtype)
        _KERNEL.record(recorder, x, packed, bias, out, form)
    failed = function(
        x.data_ptr(),
        in_features,
        x.numel() // in_features,
        in_features // GROUP,
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        columns,
        form,
        _KERNEL.path,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for the scratch of compspec::packed_linear")
    return out


def _packed_linear_fake(x: Tensor, packed: Tensor, bias: Tensor | None, columns: int, form: int) -> Tensor:
    """Shape and type of the result, for tracing."""
    return x.new_empty((*x.shape[:-1], columns))


_LIBRARY.define(  # type: ignore[no-untyped-call]
    "packed_linear(Tensor x, Tensor packed, Tensor? bias, int columns, int form) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl("packed_linear", _packed_linear_cpu, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("compspec::packed_linear", _packed_linear_fake, lib=_LIBRARY)
