"""A forward as a list of calls with fixed arguments, which one C++ loop runs: what a CUDA graph is on a GPU.

Between two kernels of a compiled forward Python spends tens of microseconds, in which the other threads fall asleep. A
program has no Python in it and one team of threads for all of its calls.

While a `Recorder` is at work, compspec's own operators tell it what they call, and take their memory from it.
"""

import ctypes
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from compspec.kernels.build import default_cache_dir, load_library

MOST_ARGUMENTS = 32
"""Pointers that a recorded function can take."""

_ALONE, _TEAM = 0, 1


class _Call(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int64), ("function", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


@functools.cache
def _run() -> "ctypes._NamedFuncPointer | None":
    library = load_library("program", default_cache_dir())
    if library is None:
        return None
    function = library.compspec_program_run
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int)
    function.restype = ctypes.c_int
    return function


class Program:
    """Calls that can be run again and again.

    Args:
        calls: in order.
        keep: whatever holds the memory that they work on, and their code.
        memory: what they write before they read it, results included; bytes.
        together: whether one team of threads goes through all of them; else each makes its own.
    """

    def __init__(
        self,
        calls: Sequence[tuple[int, int, int]],
        keep: Sequence[object],
        memory: Sequence[Tensor],
        *,
        together: bool,
    ) -> None:
        function = _run()
        assert function is not None
        self._function = function
        self._calls = (_Call * len(calls))(*(_Call(*call) for call in calls))
        self._address = ctypes.addressof(self._calls)
        self._keep = tuple(keep)
        self._memory = tuple(memory)
        self._together = int(together)

    def run(self) -> None:
        """Runs all calls.

        Raises:
            RuntimeError: a kernel threw.
        """
        if self._function(self._address, len(self._calls), torch.get_num_threads(), self._together):
            raise RuntimeError("a kernel of a recorded forward failed")

    def forget(self) -> None:
        """Fills memory with what is no number, so that a result that nobody computes anew is noticed."""
        for piece in self._memory:
            piece.fill_(255)


class NotRecordable(Exception):  # noqa: N818  (a reason, no error)
    """Why there is no program."""


class Recorder:
    """Collects the calls of one forward, and owns the memory between them.

    Args:
        known: other memory that calls may work on, and that stays where it is: inputs, weights, the KV cache.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        known = list(known)
        self._known = {_storage(tensor) for tensor in known}
        self.calls: list[tuple[int, int, int]] = []
        self._keep: list[object] = [*known]
        self.num_team_calls = 0
        self._free: dict[int, list[Tensor]] = {}
        self._idle_uses = 0  # what `_uses` says of memory that no tensor but the piece itself has

    @staticmethod
    def is_available() -> bool:
        """Whether programs can run here: there is a C++ compiler."""
        return _run() is not None

    def pointer(self, tensor: Tensor) -> int:
        """Where a tensor's values are.

        Raises:
            NotRecordable: nobody vouches for that memory.
        """
        if _storage(tensor) not in self._known:
            raise NotRecordable("it works on memory of an unknown owner")
        return tensor.data_ptr()

    def alone(self, function: int, pointers: Sequence[int], owner: object) -> None:
        """A function that one thread calls with pointers.

        Args:
            owner: keeps the function's code loaded.
        """
        assert len(pointers) <= MOST_ARGUMENTS
        arguments = (ctypes.c_void_p * MOST_ARGUMENTS)(*pointers)
        self._keep += [arguments, owner]
        self.calls.append((_ALONE, function, ctypes.addressof(arguments)))

    def in_team(self, function: int, arguments: ctypes.Structure) -> None:
        """A function that all threads call: a `TeamFunction` of team.h."""
        self._keep.append(arguments)
        self.num_team_calls += 1
        self.calls.append((_TEAM, function, ctypes.addressof(arguments)))

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that nobody else ever gets; what is no longer in use is given out again.

        The same calls come in the same order whenever the program runs, so that they can share memory.
        """
        count = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else 0
        num_bytes = -(-max(count, 1) * torch.empty((), dtype=dtype).element_size() // 64) * 64
        pieces = self._free.setdefault(num_bytes, [])
        piece = next((one for one in pieces if _uses(one) == self._idle_uses), None)
        if piece is None:
            piece = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            self._idle_uses = _uses(piece)
            self._known.add(_storage(piece))
            pieces.append(piece)
        return piece.view(dtype).as_strided(tuple(size), tuple(stride))

    def empty_contiguous(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As `empty`, row after row."""
        stride = [1] * len(size)
        for axis in range(len(size) - 2, -1, -1):
            stride[axis] = stride[axis + 1] * size[axis + 1]
        return self.empty(size, stride, dtype)

    def program(self, *, together: bool) -> Program:
        """What was recorded."""
        memory = [piece for pieces in self._free.values() for piece in pieces]
        return Program(self.calls, self._keep, memory, together=together)


def _storage(tensor: Tensor) -> int:
    """Names the memory that a tensor is a part of."""
    return tensor.untyped_storage().data_ptr()


def _uses(piece: Tensor) -> int:
    """How many tensors share a piece's memory."""
    return int(torch._C._storage_Use_Count(piece.untyped_storage()._cdata))


_recorder: ContextVar[Recorder | None] = ContextVar("compspec_recorder", default=None)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Inside, compspec's operators tell `recorder` what they call."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def active_recorder() -> Recorder | None:
    """Who wants to know."""
    return _recorder.get()


def address_of(function: Any) -> int:
    """Where the code of a ctypes function lies."""
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)
