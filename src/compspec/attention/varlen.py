"""The CUDA backend without FlashInfer: flash attention as torch ships it, over a block table."""

import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor

from compspec.attention.backend import AttentionSetup, StatelessBackend

# torch's kernel reads pages of whole multiples of this.
PAGE_MULTIPLE = 256
LARGEST_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
OLDEST_GENERATION = (8, 0)
_NEEDED = {"block_table", "seqused_k", "num_splits", "enable_gqa", "window_size", "scale"}


def refusal(setup: AttentionSetup) -> str | None:
    """Why torch's variable-length attention cannot serve, or None if it can."""
    if setup.device.type != "cuda":
        return f"it runs on CUDA, the model is on {setup.device}"
    missing = unavailable()
    if missing is not None:
        return missing
    generation = torch.cuda.get_device_capability(setup.device)
    if generation < OLDEST_GENERATION:
        return f"it needs a GPU of compute capability 8.0 or newer, this one has {generation[0]}.{generation[1]}"
    if setup.dtype not in (torch.bfloat16, torch.float16):
        return f"it runs bfloat16 and float16, the model is {setup.dtype}"
    if setup.block_size % PAGE_MULTIPLE:
        return f"it needs cache.block_size to be a multiple of {PAGE_MULTIPLE}, which is {setup.block_size}"
    if any(layer.softcap for layer in setup.layers):
        return "it has no soft cap, which the model needs"
    odd = next((layer.head_dim for layer in setup.layers if layer.head_dim % HEAD_DIM_MULTIPLE), None)
    if odd is not None:
        return f"it needs head dims that are multiples of {HEAD_DIM_MULTIPLE}, the model has {odd}"
    largest = max(layer.head_dim for layer in setup.layers)
    return f"it goes up to head dim {LARGEST_HEAD_DIM}, the model has {largest}" if largest > LARGEST_HEAD_DIM else None


def unavailable() -> str | None:
    """Why this torch cannot do it at all, or None."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    missing = sorted(_NEEDED - set(inspect.signature(_function()).parameters))
    if missing:
        return f"torch.nn.attention.varlen of torch {torch.__version__} has no {', '.join(missing)}"
    return None


def _function() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


class VarlenBackend(StatelessBackend):
    """`torch.nn.attention.varlen.varlen_attn`; reads nothing on the host, so that graphs can capture it."""

    name = "varlen"

    def __init__(self, setup: AttentionSetup) -> None:
        self.attend = _function()
        # One split of the keys: a row's bits do not depend on the lengths of others.
        self._num_splits = 1 if setup.exact else None

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
        """See `AttentionPlan.paged_attention`.

        The kernel aligns the last row with the last key, so lengths count all rows of a request, those of padding too.
        """
        assert not softcap
        num_requests, num_blocks = block_table.shape
        rows = len(q) // num_requests
        lengths = query_positions.view(num_requests, rows)[:, 0] + rows
        pages = (-1, block_size, *k_cache.shape[1:])
        out: Tensor = self.attend(
            q,
            k_cache.view(pages),
            v_cache.view(pages),
            torch.arange(0, len(q) + 1, rows, dtype=torch.int32, device=q.device),
            torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to(torch.int32),
            rows,
            num_blocks * block_size,
            scale=scale,
            window_size=(window - 1 if window else -1, 0),
            enable_gqa=True,
            seqused_k=lengths.to(torch.int32),
            block_table=block_table,
            num_splits=self._num_splits,
        )
        return out.contiguous()
