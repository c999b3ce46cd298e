"""Paged attention: the operator's contract (backend.py) and its implementations, one file each."""

from compspec.attention import backend
from compspec.attention.sdpa import SdpaBackend

_reference = SdpaBackend()
for _key in ("CPU", "CUDA"):
    backend.register(_reference, _key)
