"""All torch.compile settings. One static graph per bucket; the decoder layer is compiled once and reused in it."""

import logging
import os
import time
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

from compspec.batch import Bucket
from compspec.errors import UnsupportedError
from compspec.sampling.sampler import NoiseFunction

logger = logging.getLogger(__name__)

StepFunction = Callable[..., Tensor]

REGION_MARK = "_compspec_region"


def use_cache_folder(path: Path) -> None:
    """Keeps compiled code below `path`, unless the user chose a folder through the environment."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(path / "inductor"))


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

    The mark is on the instances, so other models of the same class are not touched.

    Raises:
        UnsupportedError: this torch has no nested compile regions.
    """
    if not hasattr(torch.compiler, "nested_compile_region"):
        raise UnsupportedError(
            f"torch {torch.__version__} cannot compile regions; use a newer one, or compile.mode: none"
        )
    marked: dict[type[nn.Module], Any] = {}
    layers = [layer for layer in module.modules() if isinstance(layer, layer_classes)]
    for layer in layers:
        if hasattr(layer, REGION_MARK):
            continue
        kind = type(layer)
        if kind not in marked:
            marked[kind] = torch.compiler.nested_compile_region(kind.forward)
        layer.forward = types.MethodType(marked[kind], layer)
        setattr(layer, REGION_MARK, True)
    return len(layers)


def compile_step(step: StepFunction, bucket: Bucket, mode: str, device: torch.device) -> StepFunction:
    """Compiles one bucket's step.

    Dynamo counts recompilations per code object and stops compiling after eight, so each bucket gets a
    code object of its own.
    """
    if mode == "none":
        return step
    name = f"step_{bucket.num_requests}x{bucket.query_len}"
    code = step.__code__.replace(co_name=name)
    own = types.FunctionType(code, step.__globals__, name, step.__defaults__, step.__closure__)
    # Without CUDA there is no graph to capture and "reduce-overhead" is the default mode.
    inductor_mode = "reduce-overhead" if mode == "reduce-overhead" and device.type == "cuda" else None
    compiled: StepFunction = torch.compile(own, fullgraph=True, dynamic=False, mode=inductor_mode)
    return compiled


def compile_noise(noise: NoiseFunction, mode: str) -> NoiseFunction:
    """Fuses the noise generator into one kernel; its bits are those of the eager one."""
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
