"""Turns a compiled forward on a CPU into a program: what `reduce-overhead` means where there are no CUDA graphs.

Inductor compiles a forward into C++ kernels and a Python function that allocates buffers and calls them. That function
runs once under observation: who is called with which memory. All of it is the same whenever the forward runs, since
shapes, weights, KV cache and input buffers are. If anything is called that is not known to be recorded, there is no
program, and the forward runs as before.
"""

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, ModuleType
from typing import Any

from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch.autograd.profiler_legacy import profile

from compspec.errors import one_line
from compspec.kernels.program import (
    MOST_ARGUMENTS,
    NotRecordable,
    Program,
    Recorder,
    active_recorder,
    address_of,
    recording,
)

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

# Observers stand in for all threads, though each looks at its own calls alone.
_one_at_a_time = threading.Lock()


def record(
    step: Callable[..., Tensor], inputs: Sequence[Tensor], known: Iterable[Tensor], *, together: bool
) -> tuple[Program, Tensor]:
    """Runs a compiled forward once and records it.

    Args:
        step: has run before, so that nothing is compiled now.
        inputs: the buffers that it reads, at addresses that stay.
        known: whatever else it works on: weights and the KV cache.
        together: as in `Program`.

    Returns:
        The program, and the logits that it writes.

    Raises:
        NotRecordable: it does something that cannot be recorded.
    """
    if not Recorder.is_available():
        raise NotRecordable("there is no C++ compiler")
    num_calls = _count_operators(step, inputs)
    recorder = Recorder([*inputs, *known])
    with _one_at_a_time, recording(recorder), _observed(recorder):
        logits = step(*inputs)
    if recorder.num_team_calls != num_calls:
        raise NotRecordable(f"of {num_calls} calls of operators {recorder.num_team_calls} were recorded")
    return recorder.program(together=together), logits


def _count_operators(step: Callable[..., Tensor], inputs: Sequence[Tensor]) -> int:
    """Calls of operators that will be recorded; what else goes through torch is refused if it has an effect."""
    try:
        with profile() as seen:  # type: ignore[no-untyped-call]
            step(*inputs)
    except RuntimeError as error:
        if "rofiler" not in str(error):
            raise
        raise NotRecordable(f"a profiler is at work ({one_line(error)})") from None
    names = [event.name for event in seen.function_events if "::" in event.name]
    unknown = sorted(set(names) - _RECORDED - _WITHOUT_EFFECT)
    if unknown:
        raise NotRecordable(f"it calls {', '.join(unknown[:5])}")
    return sum(name in _RECORDED for name in names)


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
        return lambda *arguments: (recorder.empty if active_recorder() is recorder else value)(*arguments)
    if not name.startswith("cpp_fused") or not isinstance(value, BuiltinFunctionType):
        return None

    def kernel(*arguments: Any) -> None:
        if active_recorder() is recorder:  # not another thread's
            _record_kernel(recorder, name, value, arguments)
        value(*arguments)

    return kernel


def _record_kernel(recorder: Recorder, name: str, kernel: BuiltinFunctionType, arguments: Sequence[Any]) -> None:
    if len(arguments) > MOST_ARGUMENTS or not all(isinstance(one, Tensor) for one in arguments):
        raise NotRecordable(f"kernel {name} takes more than {MOST_ARGUMENTS} tensors, or something else")
    try:
        library = ctypes.CDLL(str(kernel.__self__.__file__))  # type: ignore[attr-defined]
        function = library.kernel
    except (OSError, AttributeError) as error:
        raise NotRecordable(f"kernel {name} is not where it is looked for ({one_line(error)})") from None
    recorder.alone(address_of(function), [recorder.pointer(one) for one in arguments], library)
