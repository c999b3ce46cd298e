"""Turns a compiled forward on a CPU into a program: what `reduce-overhead` means where there are no CUDA graphs.

Inductor compiles a forward into C++ kernels and a Python function that allocates buffers and calls them. That function
runs once under observation: who is called with which memory. All of it is the same whenever the forward runs, since
shapes, weights, KV cache and input buffers are. If anything is called that is not known to be recorded, there is no
program, and the forward runs as before.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, ModuleType
from typing import Any

from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch.autograd.profiler_legacy import profile

from compspec.kernels.program import MOST_ARGUMENTS, Program, Recorder, recording

# What may be called besides kernels: compspec's own operators, which are recorded, and what touches no values.
_RECORDED = frozenset({"compspec::packed_linear", "compspec::paged_attention"})
_WITHOUT_EFFECT = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_strided",
        "empty_like",
        "new_empty",
        "view",
        "_unsafe_view",
        "reshape",
        "as_strided",
        "select",
        "slice",
        "transpose",
        "t",
        "detach",
        "alias",
        "result_type",
    )
)


class NotRecordable(Exception):  # noqa: N818  (a reason, no error)
    """Why there is no program."""


def record(step: Callable[..., Tensor], inputs: Sequence[Tensor], *, together: bool) -> tuple[Program, Tensor]:
    """Runs a compiled forward once and records it.

    Args:
        step: has run before, so that nothing is compiled now.
        inputs: the buffers that it reads, at addresses that stay.
        together: as in `Program`.

    Returns:
        The program, and the logits that it writes.

    Raises:
        NotRecordable: it does something that cannot be recorded.
    """
    if not Recorder.is_available():
        raise NotRecordable("there is no C++ compiler")
    _check_operators(step, inputs)
    recorder = Recorder()
    with recording(recorder), _observed(recorder):
        logits = step(*inputs)
    return recorder.program(together=together), logits


def _check_operators(step: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """Looks for operators that go through torch and are not recorded."""
    with profile() as seen:  # type: ignore[no-untyped-call]
        step(*inputs)
    names = {event.name for event in seen.function_events if "::" in event.name}
    unknown = sorted(name for name in names if name not in _RECORDED | _WITHOUT_EFFECT)
    if unknown:
        raise NotRecordable(f"it calls {', '.join(unknown[:5])}")


@contextmanager
def _observed(recorder: Recorder) -> Iterator[None]:
    """Puts observers in the place of the kernels and the allocator in all of Inductor's modules."""
    changed: list[tuple[ModuleType, str, Any]] = []
    try:
        for module in PyCodeCache.modules:
            for name, value in list(vars(module).items()):
                observer = _observer(recorder, name, value)
                if observer is not None:
                    changed.append((module, name, value))
                    setattr(module, name, observer)
        yield
    finally:
        for module, name, value in reversed(changed):
            setattr(module, name, value)


def _observer(recorder: Recorder, name: str, value: Any) -> Callable[..., Any] | None:
    """What stands in for a module's global, if anything."""
    if name == "empty_strided_cpu":
        return recorder.empty
    if not name.startswith("cpp_fused") or not isinstance(value, BuiltinFunctionType):
        return None

    def kernel(*arguments: Any) -> None:
        if len(arguments) > MOST_ARGUMENTS or not all(isinstance(one, Tensor) for one in arguments):
            raise NotRecordable(f"kernel {name} takes more than {MOST_ARGUMENTS} tensors, or something else")
        library = ctypes.CDLL(str(getattr(value.__self__, "__file__", "")))
        address = ctypes.cast(library.kernel, ctypes.c_void_p).value
        assert address is not None
        recorder.alone(address, [one.data_ptr() for one in arguments], library)
        value(*arguments)

    return kernel
