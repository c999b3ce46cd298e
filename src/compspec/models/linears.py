"""Puts the linear layers of a model on kernels: packed weights, perhaps quantised; equal inputs share a product."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compspec.config import ModelSection
from compspec.errors import ConfigError
from compspec.kernels.linear import is_wanted, use_linear_kernel
from compspec.kernels.packed import PackedLinear, packs_bf16
from compspec.kernels.packed import implementation as packed_implementation
from compspec.kernels.packing import Format, Quantised, pack_bf16, pack_quantised, padded_size, quantise
from compspec.models.packed_store import PackedStore
from compspec.models.torchao import quantise_by_torchao

logger = logging.getLogger(__name__)

# Routers of experts and the like: a few outputs, on which much hangs.
_FEWEST_QUANTISED = 64

FindBlocks = Callable[[str, Tensor], Quantised | None]
"""A layer's name and weight [N, K] -> the blocks that its file holds for it, in this order of rows, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownWeights:
    """Where quantised weights come from, if not from rounding.

    Attributes:
        find_blocks: knows weights that the model's file holds in blocks.
        store: has what an earlier start made.
    """

    find_blocks: FindBlocks | None = None
    store: PackedStore | None = None


@contextmanager
def same_inputs(module: nn.Module) -> Iterator[list[tuple[str, ...]]]:
    """Collects, during a forward, the names of the linear layers of one parent that get the same tensor in turn."""
    found: list[tuple[str, ...]] = []
    last: list[Any] = [None, None]

    def look(name: str, x: Tensor) -> None:
        parent = name.rpartition(".")[0]
        if last[0] is x and last[1] == parent:
            found[-1] = (*found[-1], name)
        else:
            found.append((name,))
        last[:] = x, parent

    def hook_for(name: str) -> Any:
        return lambda _, args, kwargs: look(name, args[0] if args else kwargs["input"])

    hooks = [
        layer.register_forward_pre_hook(hook_for(name), with_kwargs=True)
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear
    ]
    try:
        yield found
    finally:
        last[:] = None, None
        for hook in hooks:
            hook.remove()


def use_kernels(
    module: nn.Module,
    groups: Iterable[Sequence[str]],
    section: ModelSection,
    dtype: torch.dtype,
    device: torch.device,
    known: KnownWeights = KnownWeights(),
) -> str:
    """Puts the linear layers of a model on other kernels where the configuration and the machine want it.

    Args:
        module, groups, known: as in `pack_linears`; `known` is for CPUs.
        section: says what is wanted.
        dtype, device: of the model.

    Returns:
        The name of what multiplies now; results measured with one do not hold for another.

    Raises:
        ConfigError: what is wanted does not fit the model or the machine.
    """
    if section.quantization != "none":
        _check_quantised(section, dtype, device)
        if device.type != "cpu":
            return quantise_by_torchao(module, _quantised_layers(module, groups), section.quantization)
        pack_linears(module, groups, Format[section.quantization.upper()], known)
        _tell_what_is_left(module, section)
        return f"{section.quantization}:{packed_implementation()}"
    fits = device.type == "cpu" and dtype == torch.bfloat16
    if section.cpu_linear == "kernel" and not fits:
        raise ConfigError(
            f"model.cpu_linear is 'kernel', which is for bfloat16 on cpu; the model is {dtype} on {device}"
        )
    if section.cpu_linear == "native" or not fits:
        return "native"
    if packs_bf16():
        pack_linears(module, groups, Format.BF16)
        return f"bf16:{packed_implementation()}"
    if section.cpu_linear == "auto" and not is_wanted():
        return "native"
    if use_linear_kernel(module) == 0 and section.cpu_linear == "kernel":
        raise ConfigError(
            "model.cpu_linear is 'kernel', but it cannot be built here (see the log); use 'auto' or 'native'"
        )
    return "kernel"


def _check_quantised(section: ModelSection, dtype: torch.dtype, device: torch.device) -> None:
    wanted = f"model.quantization is '{section.quantization}'"
    if dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(f"{wanted}, which computes in bfloat16 or float32; set model.dtype, which is {dtype}")
    if device.type == "cpu" and section.cpu_linear == "native":
        raise ConfigError(f"{wanted}, which needs compspec's kernels; model.cpu_linear: native leaves them out")
    if device.type != "cpu" and section.cpu_linear == "kernel":
        raise ConfigError(f"{wanted}, which torchao does on {device}; model.cpu_linear: kernel is for cpu")


def _quantised_layers(module: nn.Module, groups: Iterable[Sequence[str]]) -> list[str]:
    """The layers in `groups` whose weights get fewer bits, each once."""
    names = dict.fromkeys(name for group in groups for name in group)
    layers = {name: module.get_submodule(name) for name in names}
    return [
        name for name, layer in layers.items() if type(layer) is nn.Linear and layer.out_features >= _FEWEST_QUANTISED
    ]


def _tell_what_is_left(module: nn.Module, section: ModelSection) -> None:
    """Warns where most of the weights are in modules of other kinds: fused experts, GPT-2's Conv1D."""
    quantised = sum(
        layer.in_features * layer.out_features
        for layer in module.modules()
        if isinstance(layer, PackedLinear) and layer.form != Format.BF16
    )
    embeddings = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)}
    left = sum(one.numel() for one in module.parameters() if one.dim() > 1 and id(one) not in embeddings)
    if left > quantised:
        logger.warning(
            "model.quantization is '%s', but only %.0f %% of the weights are in layers that it knows; the rest stays",
            section.quantization,
            100 * quantised / (quantised + left),
        )


def pack_linears(
    module: nn.Module, groups: Iterable[Sequence[str]], wanted: Format, known: KnownWeights = KnownWeights()
) -> int:
    """Replaces every plain `nn.Linear` that is named in `groups`, where it can be.

    Args:
        module: on a CPU; changed in place. Tied input embeddings keep their weight.
        groups: names of layers that get the same input, as `same_inputs` collects them.
        wanted: BF16 takes weights of that type as they are. With INT8 and INT4 others are rounded; the output embedding
            gets 8 bits, and layers of a few outputs stay as they are.
        known: blocks that a file holds are taken over if they have no more bits than wanted.

    Returns:
        How many layers were replaced.
    """
    any_module: Any = module
    head = any_module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    count = 0
    for group in groups:
        packed: dict[Format, list[tuple[str, nn.Linear, Tensor]]] = {}
        for name in group:
            layer = module.get_submodule(name)
            # One that runs twice is in two groups.
            if type(layer) is nn.Linear:
                form = Format.INT8 if layer is head and wanted is Format.INT4 else wanted
                found = _pack(name, layer, form, known)
                if found is not None:
                    packed.setdefault(found[0], []).append((name, layer, found[1]))
        for form, members in packed.items():
            _replace(module, members, form)
            count += len(members)
    if known.store is not None:
        known.store.save()
    return count


def _pack(name: str, layer: nn.Linear, form: Format, known: KnownWeights) -> tuple[Format, Tensor] | None:
    """The format and the packed weight of a layer; None where it stays as it is."""
    weight = layer.weight
    if form is Format.BF16 or layer.out_features < _FEWEST_QUANTISED:
        fits = weight.dtype == torch.bfloat16 and packs_bf16()
        return (Format.BF16, pack_bf16(weight)) if fits else None
    found = known.store.get(name) if known.store is not None else None
    if found is None:
        blocks = known.find_blocks(name, weight) if known.find_blocks is not None else None
        if blocks is None or blocks.format < form:  # the number of bits falls
            blocks = quantise(weight, form)
            parts = [part for part in (blocks.scale, blocks.minimum) if part is not None]
            if not all(part.isfinite().all() for part in parts):
                raise ConfigError(
                    f"layer '{name}' has weights that are too large for {form.name.lower()}, whose scales are float16; "
                    "set model.quantization: none"
                )
        found = blocks.format, pack_quantised(blocks)
        if known.store is not None:
            known.store.put(name, *found)
    return found


def _replace(module: nn.Module, members: Sequence[tuple[str, nn.Linear, Tensor]], form: Format) -> None:
    """Gives layers of one input one weight."""
    widths = [layer.out_features for _, layer, _ in members]
    if len(members) > 1:
        widths = [padded_size(width) for width in widths]
    whole = torch.cat([packed for _, _, packed in members]) if len(members) > 1 else members[0][2]
    biases = [_padded_bias(layer, width) for (_, layer, _), width in zip(members, widths, strict=True)]
    bias = torch.cat(biases) if any(layer.bias is not None for _, layer, _ in members) else None
    first = 0
    for (name, layer, _), width in zip(members, widths, strict=True):
        replacement = PackedLinear(
            whole,
            bias,
            in_features=layer.in_features,
            columns=sum(widths),
            first=first,
            out_features=layer.out_features,
            form=form,
        )
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, replacement.eval())
        first += width


def _padded_bias(layer: nn.Linear, width: int) -> Tensor:
    """[width] float32, zeros where there is no bias."""
    if layer.bias is None:
        return torch.zeros(width, device=layer.weight.device)
    return F.pad(layer.bias.float(), (0, width - layer.out_features))
