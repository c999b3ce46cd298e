"""compspec: speculative decoding that never changes the output."""

from typing import TYPE_CHECKING, Any

from compspec.config import EngineConfig, load_config, make_config
from compspec.errors import (
    CapacityError,
    CompspecError,
    ConfigError,
    ModelError,
    NumericsError,
    RequestError,
    UnsupportedError,
)
from compspec.request import FinishReason, Logprob
from compspec.sampling.params import SamplingParams
from compspec.version import __version__ as __version__

if TYPE_CHECKING:
    from compspec.llm import LLM, Chunk, CompletionOutput, RequestOutput, Stream


__all__ = [
    "LLM",
    "CapacityError",
    "Chunk",
    "CompletionOutput",
    "CompspecError",
    "ConfigError",
    "EngineConfig",
    "FinishReason",
    "Logprob",
    "ModelError",
    "NumericsError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Stream",
    "UnsupportedError",
    "load_config",
    "make_config",
]


def __getattr__(name: str) -> Any:
    # torch and transformers take seconds to import; the command's --help does without them.
    if name in ("LLM", "Chunk", "CompletionOutput", "RequestOutput", "Stream"):
        import compspec.llm

        return getattr(compspec.llm, name)
    raise AttributeError(f"module 'compspec' has no attribute '{name}'")
