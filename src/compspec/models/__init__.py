"""Models: where weights come from (source, gguf), how they load (loader), and how they run (adapter, self_check)."""

from compspec.models.adapter import AttentionLayer, ModelAdapter
from compspec.models.loader import LoadedModel, load_model

__all__ = ["AttentionLayer", "LoadedModel", "ModelAdapter", "load_model"]
