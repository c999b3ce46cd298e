"""All torch.compile settings. One static graph per bucket; the decoder layer is compiled once and reused in it."""

import contextlib
import inspect
import logging
import os
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor
import torch._inductor.cpu_vec_isa
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

from compspec.batch import Bucket
from compspec.cache import chosen_inductor_folder
from compspec.errors import UnsupportedError
from compspec.kernels.noise import noise_kernel
from compspec.runner.passes import ShareProducts
from compspec.sampling.noise import GumbelNoise
from compspec.sampling.sampler import NoiseFunction

logger = logging.getLogger(__name__)

StepFunction = Callable[..., Tensor]

REGION_MARK = "_compspec_region"

# Rows of a forward whose small kernels (norms, rotation, activation) cost less than waking a second thread.
FEW_ROWS = 32

# Torch before 2.8 knows no filter.
_FILTERS_GUARDS = hasattr(torch.compiler, "skip_guard_on_globals_unsafe")

# Reductions (RMSNorm) and padded matrix products are otherwise chosen by timing them on the device.
_NO_TIMINGS = {"deterministic": True, "shape_padding": False}


def prepare(cache_path: Path) -> None:
    """Keeps compiled code below `cache_path`, unless the user chose a folder through the environment.

    Also begins to find out which vector instructions compiler and processor have in common. For a CPU Inductor asks
    that first, and waits for a dozen processes.
    """
    if chosen_inductor_folder() is None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_path / "inductor")
    if not torch.cuda.is_available():
        threading.Thread(target=_ask_for_instructions, daemon=True).start()


def _ask_for_instructions() -> None:
    with contextlib.suppress(Exception):  # it is asked again, and then it is told
        torch._inductor.cpu_vec_isa.pick_vec_isa()


@contextmanager
def clear_compile_errors() -> Iterator[None]:
    """Turns the failure of a missing or broken C++ compiler into an error that says what to do.

    Raises:
        UnsupportedError: Inductor found no working compiler.
    """
    try:
        yield
    except Exception as error:
        chain = [error, error.__cause__, getattr(error, "inner_exception", None)]
        if any(isinstance(one, InvalidCxxCompiler | CppCompileError) for one in chain):
            raise UnsupportedError(
                "torch.compile needs a working C++ compiler ($CXX, g++ or clang++); "
                "install one, or set compile.mode: none"
            ) from error
        raise


def mark_regions(module: nn.Module, layer_classes: tuple[type[nn.Module], ...]) -> int:
    """Makes every decoder layer of `module` a nested compile region; returns how many there are.

    The layers become instances of a subclass of their own, so other models of the same class are not touched. A
    `forward` that is set on the instances would do that too, but then Dynamo, which traces a region once and puts the
    weights of each later layer in the place of the first one's, can take all of them for the first (torch 2.14).

    Raises:
        UnsupportedError: this torch has no nested compile regions.
    """
    if not hasattr(torch.compiler, "nested_compile_region"):
        raise UnsupportedError(
            f"torch {torch.__version__} cannot compile regions; use a newer one, or compile.mode: none"
        )
    layers = [layer for layer in module.modules() if isinstance(layer, layer_classes)]
    options: dict[str, Any] = {}
    if "max_reuse_entries" in inspect.signature(torch.compiler.nested_compile_region).parameters:
        # Layers that cannot share a trace have one each.
        options["max_reuse_entries"] = max(8, len(layers))
    regions: dict[type[nn.Module], type[nn.Module]] = {}
    for layer in layers:
        kind = type(layer)
        if getattr(kind, REGION_MARK, False):
            continue
        if kind not in regions:
            members = {
                "forward": torch.compiler.nested_compile_region(kind.forward, **options),
                REGION_MARK: True,
                "__module__": kind.__module__,
                "__qualname__": kind.__qualname__,
            }
            regions[kind] = type(kind.__name__, (kind,), members)
        layer.__class__ = regions[kind]
    return len(layers)


def compile_step(step: StepFunction, bucket: Bucket, mode: str, device: torch.device, *, exact: bool) -> StepFunction:
    """Compiles one bucket's step.

    Dynamo counts recompilations per code object and stops compiling after eight, so each bucket gets a
    code object of its own.

    Args:
        exact: no choice of a kernel may hang on a timing, which comes out differently for each shape and at each start.
    """
    if mode == "none":
        return step
    name = f"step_{bucket.num_requests}x{bucket.query_len}"
    code = step.__code__.replace(co_name=name)
    own = types.FunctionType(code, step.__globals__, name, step.__defaults__, step.__closure__)
    options = step_options(mode, device, exact)
    if device.type == "cpu":
        options |= _cpu_options(bucket)
    if _FILTERS_GUARDS:
        options["guard_filter_fn"] = _guards_of(step)
    compiled: StepFunction = torch.compile(own, fullgraph=True, dynamic=False, options=options or None)
    return compiled


def step_options(mode: str, device: torch.device, exact: bool) -> dict[str, Any]:
    """Inductor's options for the model: those of the mode (torch takes a mode or options), and what exactness needs."""
    if device.type != "cuda":  # nothing to capture, and no kernel is chosen by timing
        return {}
    options = dict(torch._inductor.list_mode_options(mode)) if mode == "reduce-overhead" else {}
    if exact:
        known = set(torch._inductor.list_options())
        options |= {name: value for name, value in _NO_TIMINGS.items() if name in known}
    return options


def _cpu_options(bucket: Bucket) -> dict[str, Any]:
    """Less work on the host between kernels."""
    options: dict[str, Any] = {"post_grad_custom_pre_pass": ShareProducts(), "size_asserts": False}
    if bucket.num_tokens <= FEW_ROWS:
        options["cpp.threads"] = 1
    return options


def _guards_of(step: StepFunction) -> Callable[[Sequence[Any]], list[bool]]:
    """Keeps the guards on the arguments of a step and drops the hundreds on the model, which nobody changes."""
    arguments = set(inspect.signature(step).parameters)
    return lambda guards: [guard.name in arguments for guard in guards]


def compile_noise(noise: GumbelNoise, mode: str) -> NoiseFunction:
    """One kernel for the noise generator: compspec's own on CPUs, else Inductor's; bits are those of the eager one."""
    kernel = noise_kernel(noise)
    if kernel is not None:
        return kernel
    if mode == "none":
        return noise
    compiled: NoiseFunction = torch.compile(noise, fullgraph=True, dynamic=False)
    return compiled


def num_compilations() -> int:
    """Graphs that Dynamo has made in this process."""
    return int(counters["stats"]["unique_graphs"])


def no_recompilation(mode: str) -> AbstractContextManager[Any]:
    """Inside, a call that would compile again raises instead of compiling or running eagerly."""
    if mode == "none":
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("fail_on_recompile")
    return stance


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._start
