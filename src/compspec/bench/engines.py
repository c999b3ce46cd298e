"""Starts the engines of a benchmark, all of which live at the same time, and says what each of them took."""

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from compspec.bench.measure import Tell
from compspec.bench.sides import Setup
from compspec.errors import CapacityError, one_line
from compspec.llm import LLM
from compspec.runner.kv_cache import available_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An engine that is ready.

    Attributes:
        start_up_s: seconds for loading, compiling and self-tests.
        memory_bytes: how much more the process held afterwards: resident memory on a CPU, allocated on the device on
            CUDA.
    """

    setup: Setup
    llm: LLM
    start_up_s: float
    memory_bytes: int


def start_engines(setups: Sequence[Setup], tell: Tell) -> list[Started]:
    """Starts one engine after the other.

    Raises:
        CapacityError: they do not fit into memory together.
        CompspecError: one of them cannot start; the message says which.
    """
    started: list[Started] = []
    for setup in setups:
        tell(f"starting {setup.label}: {setup.config.model.source}")
        _check_room(setup, started)
        held, began = _held_bytes(setup), time.perf_counter()
        try:
            llm = LLM(setup.config)
        except (CapacityError, torch.OutOfMemoryError, MemoryError) as error:
            beside = f", beside {len(started)} other engines; compare fewer sides in one run" if started else ""
            raise CapacityError(f"'{setup.label}' does not fit: {one_line(error)}{beside}") from None
        seconds = time.perf_counter() - began
        memory = max(0, _held_bytes(setup) - held)
        started.append(Started(setup=setup, llm=llm, start_up_s=seconds, memory_bytes=memory))
    return started


def peak_memory(engines: Sequence[Started]) -> tuple[int, str]:
    """The most memory that this process has held so far, in bytes, and which kind of memory that is."""
    device = engines[0].llm.engine.loaded.adapter.device
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device)), "CUDA memory allocated by the whole process"
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "resident memory of the whole process"


def _check_room(setup: Setup, started: Sequence[Started]) -> None:
    """An engine of the size of the largest so far has to fit, else the machine would end the process."""
    if not started:
        return
    device = started[0].llm.engine.loaded.adapter.device
    largest, free = max(each.memory_bytes for each in started), available_bytes(device)
    if largest > free:
        raise CapacityError(
            f"no memory for the engine of '{setup.label}': {len(started)} engines live already, the largest takes "
            f"{largest / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free on {device}; compare fewer sides in one "
            "run, or lower cache.memory or scheduler.max_num_seqs"
        )


def _held_bytes(setup: Setup) -> int:
    on_cpu = setup.config.model.device == "cpu" or not torch.cuda.is_available()
    return int(psutil.Process().memory_info().rss) if on_cpu else int(torch.cuda.memory_allocated())
