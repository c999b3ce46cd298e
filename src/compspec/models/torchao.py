"""Weights of 8 and 4 bits on CUDA: torchao quantises them and multiplies."""

import importlib.metadata
import re
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compspec.errors import ConfigError

# Older ones round int8 coarsely, or know other settings.
OLDEST_VERSION = (0, 16)

GROUP = 32
"""Weights of a row that share a scale in int4; in int8 a whole row does."""


class TorchaoLinear(nn.Linear):
    """A linear layer with a weight of torchao's, held as the plain tensors of which it consists.

    A compile region takes no tensor subclasses, and neither does what counts the bytes of parameters. So torchao's
    tensor is put together where it is used, which costs nothing once it is compiled.

    Args:
        layer: one that `torchao.quantization.quantize_` has changed.
        whole: multiply with the whole weight in the type of the model, made anew each time. Of torchao's own product
            in int8 Inductor makes `_weight_int8pack_mm`, which on CUDA does without tensor cores (torch 2.13).
    """

    def __init__(self, layer: nn.Linear, *, whole: bool) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a weight
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        weight: Any = layer.weight
        self._kind = type(weight)
        self._parts, self._context = weight.__tensor_flatten__()
        for name in self._parts:
            self.register_buffer(name, getattr(weight, name))
        self._whole = whole

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[out_features, in_features] of torchao's type."""
        parts = {name: getattr(self, name) for name in self._parts}
        weight: Tensor = self._kind.__tensor_unflatten__(parts, self._context, None, None)
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the type of `x`."""
        return F.linear(x, self.weight.dequantize() if self._whole else self.weight, self.bias)


@torch.no_grad()
def quantise_by_torchao(module: nn.Module, names: Collection[str], quantization: str) -> str:
    """Quantises linear layers in place: int8 per row, or int4 in groups of `GROUP`.

    Args:
        module: on the device where it will run. An input embedding tied to a quantised layer keeps its weight.
        names: of the layers, each a plain `nn.Linear`. The output embedding gets 8 bits with int4 as well.
        quantization: "int8" or "int4".

    Returns:
        What multiplies now, torchao's version included.

    Raises:
        ConfigError: torchao is missing, or does not fit the model or the GPU.
    """
    wanted = f"model.quantization is '{quantization}'"
    version = _version(wanted)
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    # With its own settings of Inductor torchao would have kernels chosen by timing, in the whole process.
    int8 = Int8WeightOnlyConfig(version=2, set_inductor_config=False)
    # The packing whose kernel torch itself has.
    int4 = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False)
    any_module: Any = module
    head = any_module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    layers: dict[str, Any] = {name: module.get_submodule(name) for name in names}
    in_int4 = [name for name, layer in layers.items() if quantization == "int4" and layer is not head]
    for name in in_int4:
        _check_int4(name, layers[name].weight, wanted)
    for name, layer in layers.items():
        quantize_(layer, int4 if name in in_int4 else int8)
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, TorchaoLinear(layer, whole=name not in in_int4).eval())
    torch.cuda.empty_cache()  # what the weights took is free for the KV cache
    return f"{quantization}:torchao-{version}"


def _version(wanted: str) -> str:
    needed = f"{wanted}, which on CUDA needs torchao {'.'.join(map(str, OLDEST_VERSION))} or newer"
    install = 'pip install "compspec[quant]"'
    try:
        version = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{needed}: {install}") from None
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST_VERSION:
        raise ConfigError(f"{needed}, not {version}: {install}")
    return version


def _check_int4(name: str, weight: Tensor, wanted: str) -> None:
    if weight.dtype != torch.bfloat16:
        raise ConfigError(f"{wanted}, which on CUDA computes in bfloat16; set model.dtype, which is {weight.dtype}")
    if weight.shape[1] % GROUP:
        raise ConfigError(
            f"{wanted}, which needs inputs in multiples of {GROUP}; layer '{name}' has {weight.shape[1]}, use int8"
        )
    capability = torch.cuda.get_device_capability(weight.device)
    if capability < (8, 0):
        raise ConfigError(f"{wanted}, which needs compute capability 8.0; this GPU has {capability[0]}.{capability[1]}")
