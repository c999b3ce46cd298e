"""Paged attention: the operator's contract (backend.py) and its implementations, one file each."""

import torch

from compspec.attention import backend, cpu
from compspec.attention.cpu import CpuBackend
from compspec.attention.sdpa import SdpaBackend

backend.register(CpuBackend(), "CPU")
backend.register(SdpaBackend(), "CUDA")


def implementation(device: torch.device, dtype: torch.dtype) -> str:
    """Names the code that serves a device and type; results measured with one do not hold for another."""
    return cpu.implementation(dtype) if device.type == "cpu" else SdpaBackend.name


def fits_cuda_graphs(device: torch.device) -> bool:
    """Whether the attention on this device may be captured: no reads of lengths on the host in it."""
    return device.type != "cuda"  # the reference backend, alone on CUDA so far, reads them
