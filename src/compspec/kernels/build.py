"""Compiles the C++ beside this file on first use and keeps the result in a cache folder."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import torch

from compspec.config import default_cache_path

_LOGGER = logging.getLogger(__name__)

# No contraction: what is fused and what is not must not differ between two tiles of one kernel.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-ffp-contract=off", "-fPIC", "-shared")
_TIMEOUT_S = 300.0
_OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b")


class _BuildError(Exception):
    """Why there is no library."""


_chosen: list[Path] = []


def choose_cache_dir(path: Path) -> None:
    """Makes `path` the folder for libraries that are not loaded yet in this process."""
    _chosen[:] = [path]


def default_cache_dir() -> Path:
    """The chosen folder, or `kernels` in the cache folder of compspec."""
    return _chosen[0] if _chosen else default_cache_path() / "kernels"


@functools.cache
def load_library(name: str, cache_dir: Path) -> ctypes.CDLL | None:
    """Loads the library made from `<name>.cpp`, compiling it unless the cache has it.

    The compiler is $CXX, or g++. The cached file is named after everything that decides what is in it:
    source, flags, compiler and processor. Two processes may build at once; either's file is whole.

    Args:
        name: stem of a C++ file beside this one.
        cache_dir: folder for the library, created if missing.

    Returns:
        The library, or None if it cannot be built or loaded; a warning says why.
    """
    try:
        command = _command(Path(__file__).with_name(f"{name}.cpp"))
        library = cache_dir / f"{name}-{_fingerprint(command)}.so"
        if not library.exists():
            _compile(command, library)
        return ctypes.CDLL(str(library))
    except (_BuildError, OSError) as error:
        _LOGGER.warning("no '%s' kernel, torch's own operator stands in for it: %s", name, error)
        return None


def _command(source: Path) -> list[str]:
    """The compiler's command line up to the output file."""
    command = [*shlex.split(os.environ.get("CXX") or "g++"), *_FLAGS, str(source)]
    runtime = _openmp_runtime()
    if runtime is not None:
        # Named before the compiler's own runtime, which --as-needed then leaves out.
        command += ["-Wl,--as-needed", str(runtime), f"-Wl,-rpath,{runtime.parent}"]
    return command


def _openmp_runtime() -> Path | None:
    """The OpenMP runtime that torch runs on, or None if it cannot be told.

    A second runtime in the process would bring a second team of threads, and each team spins for a
    while after its work, on the processors the other one needs.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    mapped = {Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    runtimes = sorted(path for path in mapped if _OPENMP.match(path.name) and path.exists())
    # Wheels keep it in torch/lib or torch.libs.
    folder = Path(torch.__file__).resolve().parent
    own = [path for path in runtimes if str(path).startswith(str(folder))]
    return next(iter(own or runtimes), None)


def _fingerprint(command: list[str]) -> str:
    """Names the source, the flags, the compiler's version and the processor, in 16 hex digits."""
    source = next(word for word in command if word.endswith(".cpp"))
    compiler = command[: command.index(_FLAGS[0])]
    flags = [word for word in command if word != source]
    headers = [path.read_text() for path in sorted(Path(source).parent.glob("*.h"))]
    parts = [Path(source).read_text(), *headers, *flags, _run([*compiler, "--version"]), _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What -march=native looks at: the model and the instruction sets of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *(line for line in lines if line.startswith(wanted))])


def _compile(command: list[str], library: Path) -> None:
    """Builds in a folder of its own and moves the result into place in one step."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as folder:
        built = Path(folder) / library.name
        _run([*command, "-o", str(built)])
        os.replace(built, library)


def _run(command: list[str]) -> str:
    """Standard output of a command that has to succeed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except FileNotFoundError:
        raise _BuildError(f"there is no C++ compiler '{command[0]}'; install g++ or set CXX") from None
    except subprocess.TimeoutExpired:
        raise _BuildError(f"'{command[0]}' took more than {_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        said = next((line for line in lines if "error" in line), lines[-1])
        raise _BuildError(f"'{command[0]}' failed with exit code {done.returncode}: {said}")
    return done.stdout
