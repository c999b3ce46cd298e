"""What timings depend on beside the configuration."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from compspec.version import __version__

_PACKAGES = ("torch", "transformers", "numpy", "flashinfer-python")


def describe_machine() -> dict[str, Any]:
    """The hardware."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {
        "system": platform.platform(),
        "cpu": model,
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def describe_versions() -> dict[str, str]:
    """The software; packages that are not installed are left out."""
    found = {"compspec": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
