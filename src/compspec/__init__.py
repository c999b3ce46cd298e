"""compspec: speculative decoding that never changes the output."""

from compspec.config import EngineConfig, load_config
from compspec.errors import (
    CapacityError,
    CompspecError,
    ConfigError,
    ModelError,
    NumericsError,
    RequestError,
    UnsupportedError,
)
from compspec.llm import LLM, Chunk, RequestOutput
from compspec.request import FinishReason
from compspec.sampling.params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "Chunk",
    "CompspecError",
    "ConfigError",
    "EngineConfig",
    "FinishReason",
    "ModelError",
    "NumericsError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "UnsupportedError",
    "load_config",
]
