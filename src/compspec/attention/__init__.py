"""Paged attention: the operator's contract (backend.py) and its implementations, one file each."""

from compspec.attention import backend
from compspec.attention.cpu import CpuBackend
from compspec.attention.sdpa import SdpaBackend

backend.register(CpuBackend(), "CPU")
backend.register(SdpaBackend(), "CUDA")
