"""A recording attention function: runs paged attention over a cache of its own and notes what layers ask for."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from compspec.attention.backend import METADATA_KEYS, LayerSpec, layer_options, unknown_options
from compspec.attention.sdpa import SdpaBackend
from compspec.errors import UnsupportedError
from compspec.models.adapter import AttentionLayer

PROBE_NAME = "compspec_probe"


@dataclass(slots=True)
class Probe:
    """Stands in for the attention function during one forward, to which it travels as a keyword argument.

    Attributes:
        names: of the model's modules, by id.
        dtype: of the model.
        num_slots: KV slots that the forward's metadata may name.
        layers: what was recorded, in the order of the calls.
    """

    names: dict[int, str]
    dtype: torch.dtype
    num_slots: int
    layers: list[AttentionLayer] = field(default_factory=list)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Same contract as `attention_forward`, with a cache that lives for this call."""
        if attention_mask is not None:
            raise UnsupportedError("it gives its attention a mask of its own, which compspec does not implement")
        spec = self._record(module, query, key, value, options)
        slots = options["slot_mapping"]
        # NaN in a slot that nobody wrote shows up in the output if it is ever read.
        shape = (self.num_slots, spec.num_kv_heads, spec.head_dim)
        k_cache, v_cache = (torch.full(shape, float("nan"), dtype=key.dtype, device=key.device) for _ in range(2))
        k_cache.index_copy_(0, slots, key[0].transpose(0, 1))
        v_cache.index_copy_(0, slots, value[0].transpose(0, 1))
        out = SdpaBackend().paged_attention(
            query[0].transpose(0, 1).contiguous(),
            k_cache,
            v_cache,
            options["block_table"],
            options["seq_lens"],
            options["query_positions"],
            options["block_size"],
            spec.scale,
            spec.window,
            spec.softcap,
        )
        return out.unsqueeze(0), None

    def _record(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> LayerSpec:
        unknown = unknown_options(options)
        if unknown:
            raise UnsupportedError(f"its attention needs {', '.join(unknown)}, which compspec does not implement")
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise UnsupportedError(
                f"its query, key and value heads differ in size ({query.shape[-1]}, {key.shape[-1]}, {value.shape[-1]})"
            )
        if {query.dtype, key.dtype, value.dtype} != {self.dtype}:
            raise UnsupportedError(
                f"its query, key and value are {query.dtype}, {key.dtype} and {value.dtype} "
                f"where the model is {self.dtype}"
            )
        if query.shape[1] % key.shape[1]:
            raise UnsupportedError(f"its {query.shape[1]} query heads do not divide into {key.shape[1]} KV heads")
        if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise UnsupportedError("its attention is not causal")
        scale, window, softcap = layer_options(module, query, options)
        spec = LayerSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[-1],
            scale=scale,
            window=window,
            softcap=softcap,
        )
        self.layers.append(AttentionLayer(name=self.names.get(id(module), ""), module=module, spec=spec))
        return spec


def _probed_attention(*args: Any, **options: Any) -> tuple[Tensor, None]:
    """The function under `PROBE_NAME`: the probe travels the way that the metadata of a step does."""
    if not {"compspec_probe", *METADATA_KEYS} <= options.keys():
        raise UnsupportedError("its layers drop the extra arguments (KV slots, block table) of the attention function")
    probe = options.pop("compspec_probe")
    assert isinstance(probe, Probe)
    return probe(*args, **options)


AttentionInterface.register(PROBE_NAME, _probed_attention)
