"""A Hugging Face causal LM as a function from packed token ids to logits over a paged KV cache.

Legend: R requests, Q query rows per request, T = R * Q packed tokens, M rows that get logits,
V vocabulary, S KV slots, Hkv KV heads, D head dim, B blocks per request.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compspec.attention.backend import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """One module that calls the attention function, and what it asks of a backend.

    Attributes:
        name: its path in the model, "model.layers.0.self_attn".
        module: gets buffers `compspec_k_cache` and `compspec_v_cache`.
        spec: heads, scale, window, soft cap.
    """

    name: str
    module: nn.Module
    spec: LayerSpec


class ModelAdapter:
    """A loaded model that passed its self-check.

    Attributes:
        module: the Hugging Face module, in eval mode.
        config: its text config.
        dtype, device: of its keys, values and logits.
        vocab_size: V, the width of the logits.
        max_model_len: tokens of prompt and output together.
        layers: its attention layers in the order in which they run.
        decoder_layer_classes: the classes of its repeated blocks, for compile regions; those that cannot be
            one are left out.
        eos_token_ids: token ids that end a text.
        weight_bytes: parameters and buffers, tied ones counted once.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        layers: Sequence[AttentionLayer],
        dtype: torch.dtype,
        device: torch.device,
        vocab_size: int,
        max_model_len: int,
        no_region: frozenset[type[nn.Module]] = frozenset(),
    ) -> None:
        self.module = module
        self.config: Any = text_config(module)
        self.dtype = dtype
        self.device = device
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.layers = tuple(layers)
        blocks = decoder_layer_classes(module, [layer.module for layer in self.layers])
        self.decoder_layer_classes = tuple(kind for kind in blocks if kind not in no_region)
        self.eos_token_ids = eos_token_ids(module)
        self.weight_bytes = weight_bytes(module)
        self._slices_logits = slices_logits(module)

    def set_kv_buffers(self, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor]) -> None:
        """Hands each layer its part of the KV cache; a later call replaces an earlier one's.

        Args:
            k_caches, v_caches: one [S, Hkv, D] tensor per layer, in the order of `layers`.
        """
        for layer, k_cache, v_cache in zip(self.layers, k_caches, v_caches, strict=True):
            layer.module.register_buffer("compspec_k_cache", k_cache, persistent=False)
            layer.module.register_buffer("compspec_v_cache", v_cache, persistent=False)

    def use_row_independent_experts(self) -> None:
        """Makes a mixture of experts multiply row by row.

        By default rows that chose the same expert share one matrix product, so a row's bits depend on how many
        others did. This way each row reads its own experts' weights, which costs memory traffic.
        """
        module: Any = self.module
        if hasattr(module, "set_experts_implementation") and module._can_set_experts_implementation():
            module.set_experts_implementation("batched_mm")

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        block_size: int,
        logits_to_keep: Tensor,
    ) -> Tensor:
        """Runs R * Q packed query rows and writes their keys and values.

        Args:
            input_ids: [1, T] int64; the rows of one request stand together.
            positions: [1, T] int64, absolute.
            slot_mapping: [T] int64, the KV slot of each row; rows of padding write to block 0.
            block_table: [R, B] int32.
            seq_lens: [R] int32, tokens in the cache after this step.
            block_size: tokens per block.
            logits_to_keep: [M] int64, the rows whose logits are wanted.

        Returns:
            Logits, [M, V].
        """
        return run_module(
            self.module,
            self._slices_logits,
            input_ids,
            positions,
            logits_to_keep,
            slot_mapping=slot_mapping,
            block_table=block_table,
            seq_lens=seq_lens,
            query_positions=positions[0],
            block_size=block_size,
        )


def run_module(
    module: nn.Module,
    slices: bool,
    input_ids: Tensor,
    positions: Tensor,
    logits_to_keep: Tensor,
    **metadata: Any,
) -> Tensor:
    """Calls a Hugging Face causal LM without a cache object and returns logits [M, V].

    Args:
        slices: whether its forward takes `logits_to_keep`; where it does not, rows are picked afterwards.
        metadata: reaches the attention function.
    """
    if slices:
        metadata["logits_to_keep"] = logits_to_keep
    logits: Tensor = module(input_ids=input_ids, position_ids=positions, use_cache=False, **metadata).logits[0]
    return logits if slices else logits.index_select(0, logits_to_keep)


def slices_logits(module: nn.Module) -> bool:
    """Whether the module's forward takes an index tensor of rows that get logits."""
    return "logits_to_keep" in inspect.signature(module.forward).parameters


def text_config(module: nn.Module) -> Any:
    """The part of the config that describes the decoder."""
    config: Any = module.config
    return config.get_text_config(decoder=True)


def decoder_layer_classes(module: nn.Module, attention: Sequence[nn.Module]) -> tuple[type[nn.Module], ...]:
    """The classes named by transformers as indivisible that hold attention; else those of the lists holding it."""
    named = set(getattr(module, "_no_split_modules", None) or ())
    wanted = {id(layer) for layer in attention}

    def holds_attention(part: nn.Module) -> bool:
        return any(id(inner) in wanted for inner in part.modules())

    found = {type(part) for part in module.modules() if type(part).__name__ in named and holds_attention(part)}
    if not found:
        lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
        found = {type(part) for parts in lists for part in parts if holds_attention(part)}
    return tuple(sorted(found, key=lambda cls: cls.__name__))


def eos_token_ids(module: nn.Module) -> tuple[int, ...]:
    """End-of-text ids of the generation config and of the config, sorted."""
    ids: set[int] = set()
    for config in (getattr(module, "generation_config", None), module.config, text_config(module)):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            ids.update(int(token) for token in (value if isinstance(value, list | tuple) else [value]))
    return tuple(sorted(ids))


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers; a tied weight counts once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.numel() * tensor.element_size()
        for tensor in (*module.parameters(), *module.buffers())
    }
    return sum(storages.values())
