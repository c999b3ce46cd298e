"""A model's first layers and its head as a model of their own, without weights of its own."""

import copy
from typing import Any

from torch import nn

from compspec.errors import UnsupportedError
from compspec.models.adapter import ModelAdapter


def first_layers(adapter: ModelAdapter, num_layers: int) -> ModelAdapter:
    """A view of a model that runs its first decoder layers, then its last norm and its head.

    Modules that hold the list of layers are copied, everything else is shared: weights, compile regions, and the keys
    and values of these layers.

    Args:
        adapter: the whole model.
        num_layers: at least 1, fewer than it has.

    Raises:
        UnsupportedError: the model's layers are not one list with one attention layer each.
    """
    name = type(adapter.module).__name__
    path = _layer_list(adapter)
    if path is None:
        raise UnsupportedError(f"the decoder layers of {name} are not one list with one attention layer each")
    assert 1 <= num_layers < len(adapter.layers)
    module = _with_shorter_list(adapter.module, path.split("."), num_layers)
    return ModelAdapter(
        module=module,
        layers=adapter.layers[:num_layers],
        dtype=adapter.dtype,
        device=adapter.device,
        vocab_size=adapter.vocab_size,
        max_model_len=adapter.max_model_len,
        no_region=frozenset(),
    )


def _layer_list(adapter: ModelAdapter) -> str | None:
    """The path of the list whose i-th member holds the i-th attention layer, and no other."""
    attention = [layer.module for layer in adapter.layers]
    for path, part in adapter.module.named_modules():
        if not isinstance(part, nn.ModuleList) or len(part) != len(attention):
            continue
        inside = [[inner for inner in layer.modules() if any(inner is one for one in attention)] for layer in part]
        if all(len(found) == 1 and found[0] is own for found, own in zip(inside, attention, strict=True)):
            return str(path)
    return None


def _with_shorter_list(module: nn.Module, path: list[str], num_layers: int) -> nn.Module:
    if not path:
        assert isinstance(module, nn.ModuleList)
        return module[:num_layers]
    view: Any = copy.copy(module)
    view._modules = dict(module._modules)
    config: Any = getattr(module, "config", None)
    if getattr(config, "num_hidden_layers", None) is not None:
        view.config = copy.copy(config)
        view.config.num_hidden_layers = num_layers
    view._modules[path[0]] = _with_shorter_list(module.get_submodule(path[0]), path[1:], num_layers)
    shorter: nn.Module = view
    return shorter
