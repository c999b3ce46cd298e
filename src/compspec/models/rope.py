"""RoPE that changes with the length of the text, held to the range in which it does not change."""

from collections.abc import Iterator
from typing import Any

from torch import nn


def rope_limit(config: Any) -> tuple[int | None, str]:
    """The longest text for which the rotation of a token depends on its position alone.

    Args:
        config: a text config.

    Returns:
        (tokens, kind of RoPE); (None, "") where there is no such limit.
    """
    limits = []
    for parameters in _rope_parameters(config):
        kind = str(parameters.get("rope_type", "default"))
        if "dynamic" in kind or kind == "longrope":
            original = parameters.get("original_max_position_embeddings")
            limits.append((int(original or config.max_position_embeddings), kind))
    return min(limits, default=(None, ""))


def freeze_rope(module: nn.Module) -> None:
    """Keeps rotary modules at the frequencies they start with, which hold up to `rope_limit`.

    transformers otherwise compares the largest position of each forward with the limit, which makes the
    host wait for the device, and lets the rows of one request change the rotation of another's.
    """
    for part in module.modules():
        kinds: Any = getattr(part, "rope_type", None)
        if isinstance(kinds, str) and _changes(kinds):
            part.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            part.rope_type = {key: "default" if _changes(kind) else kind for key, kind in kinds.items()}  # type: ignore[assignment]


def _changes(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The parameters of each kind of layer; one dict where all layers share them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters or not all(isinstance(value, dict) for value in parameters.values()):
        yield parameters
    else:
        yield from parameters.values()
