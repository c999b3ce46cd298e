"""Paged attention: the operator's contract (backend.py) and its implementations, one file each."""

import logging
from collections.abc import Callable

from compspec.attention import cpu, flashinfer, sdpa, varlen
from compspec.attention.backend import AttentionBackend, AttentionSetup
from compspec.errors import UnsupportedError

logger = logging.getLogger(__name__)

# How each is made, and why one cannot be (None if it can). On each device the first that can serves.
_BACKENDS: dict[str, tuple[Callable[[AttentionSetup], AttentionBackend], Callable[[AttentionSetup], str | None]]] = {
    "cpu": (cpu.make, cpu.refusal),
    "flashinfer": (flashinfer.FlashInferBackend, flashinfer.refusal),
    "varlen": (varlen.VarlenBackend, varlen.refusal),
    "sdpa": (sdpa.make, sdpa.refusal),
}
_PREFERRED = {"cpu": ("cpu", "sdpa"), "cuda": ("flashinfer", "varlen", "sdpa")}


def choose(setup: AttentionSetup, wanted: str = "auto") -> tuple[str, dict[str, str]]:
    """Decides which backend serves.

    Args:
        wanted: `auto` or a backend's name.

    Returns:
        Its name, and why those that would have been better do not serve.

    Raises:
        UnsupportedError: the one that is wanted cannot serve; the message says why.
    """
    if wanted != "auto":
        reason = _BACKENDS[wanted][1](setup)
        if reason is not None:
            raise UnsupportedError(f"model.attention: {wanted} cannot serve: {reason}")
        return wanted, {}
    refused: dict[str, str] = {}
    for name in _PREFERRED[setup.device.type]:
        reason = _BACKENDS[name][1](setup)
        if reason is None:
            return name, refused
        refused[name] = reason
    raise UnsupportedError("no attention backend can serve: " + "; ".join(refused.values()))


def make_backend(setup: AttentionSetup, wanted: str = "auto") -> AttentionBackend:
    """Makes the backend for one runner.

    Raises:
        UnsupportedError: as `choose`.
    """
    name, refused = choose(setup, wanted)
    for other, reason in refused.items():
        logger.info("attention: %s instead of %s: %s", name, other, reason)
    if setup.device.type == "cuda" and name == "sdpa":
        logger.warning("slow reference attention on %s: %s", setup.device, "; ".join(refused.values()))
    return _BACKENDS[name][0](setup)
