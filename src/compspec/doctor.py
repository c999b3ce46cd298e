"""What this machine can do: versions, devices, compilers, folders."""

import importlib.metadata
import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from compspec.config import default_cache_path
from compspec.kernels.linear import has_native_bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report; `good` is None where there is nothing to judge."""

    name: str
    value: str
    good: bool | None


def examine() -> list[Finding]:
    """Looks at the machine; changes nothing."""
    return [_versions(), _cpu(), _gpu(), _flashinfer(), _compiler(), _cache()]


def _versions() -> Finding:
    names = ("compspec", "torch", "transformers", "accelerate", "gguf")
    found = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return Finding(name="versions", value=", ".join(found), good=None)


def _cpu() -> Finding:
    native = has_native_bf16()
    value = f"{os.cpu_count()} CPUs, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, "
    return Finding(name="cpu", value=value + ("bf16 instructions" if native else "no bf16 instructions"), good=True)


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding(name="gpu", value="none that torch can use; models run on the CPU", good=False)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding(name="gpu", value=f"{', '.join(names)}; CUDA {torch.version.cuda}", good=True)


def _flashinfer() -> Finding:
    if importlib.util.find_spec("flashinfer") is None:
        return Finding(name="flashinfer", value='not installed (pip install "compspec[cuda]")', good=False)
    return Finding(name="flashinfer", value="installed, not used by this version of compspec", good=None)


def _compiler() -> Finding:
    chosen = os.environ.get("CXX")
    found = shutil.which(chosen) if chosen else shutil.which("g++") or shutil.which("clang++")
    if found is None:
        value = "no C++ compiler: set compile.mode: none, or install one"
        return Finding(name="compiler", value=value, good=False)
    return Finding(name="compiler", value=found, good=True)


def _cache() -> Finding:
    path = default_cache_path()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(existing).free / 2**30
    writable = os.access(existing, os.W_OK)
    used = sum(file.stat().st_size for file in _files(path)) / 2**30
    value = f"{path}: {used:.2f} GiB used, {free:.1f} GiB free" + ("" if writable else ", not writable")
    return Finding(name="cache", value=value, good=writable)


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
