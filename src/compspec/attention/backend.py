"""The attention operator that every model runs through, and what a layer asks of it.

Legend: R requests, Q query rows per request, T = R * Q packed tokens, Hq query heads, Hkv KV heads,
D head dim, S = num_blocks * block_size KV slots, B blocks per request.

A Hugging Face attention module calls `attention_forward` with its projected q, k and v. The KV write is
ordinary in-graph indexing and the operator only reads the caches: a custom operator that mutates
cannot be functionalised inside a nested compile region.

The operator runs the plan in force. What the host has to decide for a forward is decided before it, by
`AttentionBackend.plan`, outside of compiled and captured code; a forward without a plan is an error.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from compspec.batch import Bucket
from compspec.errors import CompspecError

ATTENTION_NAME = "compspec"
"""The name under which transformers finds our attention function."""

# Every one of these reaches the attention function as a keyword argument of the model's forward.
METADATA_KEYS = ("slot_mapping", "block_table", "seq_lens", "query_positions", "block_size")

# What transformers passes beside them and how we treat it.
_USED = {"scaling", "sliding_window", "softcap"}
_HARMLESS = {
    "dropout",
    "is_causal",
    "position_ids",
    "position_embeddings",
    "output_attentions",
    "use_cache",
    "cache_position",
    "logits_to_keep",
    "output_router_logits",
    "output_hidden_states",
    "return_dict",
    "layer_idx",
    "layer_head_mask",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}

# torch.library has no annotations; its untyped calls are confined to this module.
_library: Any = torch.library.Library("compspec", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
    "Tensor query_positions, int block_size, float scale, int window, float softcap) -> Tensor"
)


def _paged_attention_fake(q: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


torch.library.register_fake("compspec::paged_attention", _paged_attention_fake)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What one attention layer needs of a backend.

    Attributes:
        num_heads, num_kv_heads, head_dim: Hq, Hkv, D.
        scale: factor on q @ k.
        window: how many tokens back a query sees, itself included; 0 for all.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSetup:
    """What a runner needs attention for, known before its first forward.

    Attributes:
        layers: what the layers of the model ask for.
        dtype, device: of queries, keys and values.
        block_size: tokens per block.
        max_blocks: B, the width of every block table.
        max_model_len: the longest a request can get, tokens.
        buckets: the shapes of all forwards.
        exact: a row's bits may depend on nothing but its own request.
    """

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    device: torch.device
    block_size: int
    max_blocks: int
    max_model_len: int
    buckets: tuple[Bucket, ...]
    exact: bool


class AttentionPlan(Protocol):
    """Attention of one forward: what the operator calls, once per layer."""

    @abstractmethod
    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_positions: Tensor,
        block_size: int,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        """Causal attention of R * Q packed query rows over paged keys and values.

        Args:
            q: [T, Hq, D], RoPE applied.
            k_cache, v_cache: [S, Hkv, D]; this step's tokens are written already.
            block_table: [R, B] int32; entries past a request's length may hold anything.
            seq_lens: [R] int32, tokens of each request in the cache, this step's included.
            query_positions: [T] int64, the absolute position of each query row.
            block_size: tokens per block.
            scale, window, softcap: as in `LayerSpec`.

        Returns:
            [T, Hq, D], contiguous. Row t depends on its own query and on the keys and values of its own
            request at positions <= query_positions[t], and on nothing else. On CPU not even through NaN; on
            CUDA kernels multiply masked values by zero, and `attention_forward` keeps them finite.
        """
        ...


class AttentionBackend(Protocol):
    """An implementation of `compspec::paged_attention`, made for one runner.

    Attributes:
        implementation: names the code; results measured with one do not hold for another.
    """

    @property
    def implementation(self) -> str: ...

    def arithmetic(self, bucket: Bucket) -> object:
        """Names the order in which a row of the bucket is computed; with other names bits can differ.

        The self-test compares a few lengths. What is known to differ at others is not left to it.
        """
        ...

    def plan(self, bucket: Bucket, block_table: NDArray[np.int32], starts: NDArray[np.int64]) -> AttentionPlan:
        """Prepares one forward, on the host.

        Args:
            bucket: its shape, one of `AttentionSetup.buckets`.
            block_table: [R, B].
            starts: [R], the absolute position of each request's first row. Rows that are real follow one another;
                rows of padding come after them.

        Returns:
            The plan; it is superseded by the next one for the same bucket.
        """
        ...


class StatelessBackend(AttentionPlan):
    """A backend with nothing to plan: it is its own plan. `name` is that of `model.attention`."""

    name: str

    @property
    def implementation(self) -> str:
        """See `AttentionBackend.implementation`."""
        return self.name

    def arithmetic(self, bucket: Bucket) -> object:
        """See `AttentionBackend.arithmetic`."""
        return None

    def plan(self, bucket: Bucket, block_table: NDArray[np.int32], starts: NDArray[np.int64]) -> AttentionPlan:
        """See `AttentionBackend.plan`."""
        return self


_in_force: ContextVar[AttentionPlan | None] = ContextVar("compspec_attention_plan", default=None)


@contextmanager
def in_force(plan: AttentionPlan) -> Iterator[None]:
    """Inside, the operator runs `plan`."""
    token = _in_force.set(plan)
    try:
        yield
    finally:
        _in_force.reset(token)


def _run_plan_in_force(*arguments: Any) -> Tensor:
    plan = _in_force.get()
    if plan is None:
        raise CompspecError("attention ran without a plan: call the model through its runner")
    return plan.paged_attention(*arguments)


for _key in ("CPU", "CUDA"):
    _library.impl("paged_attention", _run_plan_in_force, _key)


def layer_options(module: nn.Module, query: Tensor, options: dict[str, Any]) -> tuple[float, int, float]:
    """Reads (scale, window, softcap) from what transformers passed to the attention function."""
    scaling = options.get("scaling")
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    return scale, int(options.get("sliding_window") or 0), float(options.get("softcap") or 0.0)


def unknown_options(options: dict[str, Any]) -> list[str]:
    """Names among `options` that carry a meaning this operator does not implement (sinks, for one)."""
    known = _USED | _HARMLESS | set(METADATA_KEYS)
    return sorted(name for name, value in options.items() if name not in known and value is not None)


def storable_values(value: Tensor) -> Tensor:
    """Values as they go into the cache. On CUDA those that are no numbers count as zero.

    Tensor cores multiply what is masked by zero, and zero times infinity is NaN: one overflown draft, or a stale
    page, would reach the rows before it. Values are expected to stay below 1e36: FlashInfer may sum masked ones of a
    tile before it multiplies the sum by zero.
    """
    return value.nan_to_num(0.0, 0.0, 0.0) if value.is_cuda else value


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function registered with `transformers.AttentionInterface`.

    Args:
        module: the attention module; owns buffers `compspec_k_cache` and `compspec_v_cache`, [S, Hkv, D].
        query: [1, Hq, T, D]; key, value: [1, Hkv, T, D].
        attention_mask: ignored; always None for a name without a mask function.
        options: `METADATA_KEYS` of this step, and the layer's own options.

    Returns:
        ([1, T, Hq, D], None).
    """
    scale, window, softcap = layer_options(module, query, options)
    k_cache, v_cache = module.compspec_k_cache, module.compspec_v_cache
    assert isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)
    slot_mapping = options["slot_mapping"]
    k_cache.index_copy_(0, slot_mapping, key[0].transpose(0, 1))
    v_cache.index_copy_(0, slot_mapping, storable_values(value)[0].transpose(0, 1))
    out = torch.ops.compspec.paged_attention(
        query[0].transpose(0, 1).contiguous(),
        k_cache,
        v_cache,
        options["block_table"],
        options["seq_lens"],
        options["query_positions"],
        options["block_size"],
        scale,
        window,
        softcap,
    )
    return out.unsqueeze(0), None
