"""The paged KV cache: how many blocks fit, counted before any is taken, and the tensors themselves."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from compspec.config import EngineConfig
from compspec.errors import CapacityError
from compspec.models.adapter import ModelAdapter
from compspec.sampling.metadata import MetadataState

logger = logging.getLogger(__name__)

# How much of the memory that is free after loading the weights may be used. On a CPU the rest of the system
# and the compiler live in the same memory.
_USABLE_SHARE = {"cpu": 0.6, "cuda": 0.9}

# fp32 logits, their penalised and scaled copies, noise in float64 and its integers.
_SAMPLING_COPIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory goes, in bytes.

    Attributes:
        weight_bytes: the models, loaded already.
        sampling_bytes: rows x vocabulary fp32 logits and what sampling makes of them, and per-slot metadata.
        block_bytes: one KV block over all layers of all models.
        num_blocks: blocks of the cache, the scratch block included.
    """

    weight_bytes: int
    sampling_bytes: int
    block_bytes: int
    num_blocks: int

    @property
    def kv_bytes(self) -> int:
        """The whole KV cache."""
        return self.block_bytes * self.num_blocks


def available_bytes(device: torch.device) -> int:
    """Memory that is free on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(int(psutil.virtual_memory().available), _container_bytes())


def _container_bytes() -> int:
    """What a container's memory limit (cgroup v2) leaves, or a number beyond any machine."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        return max(0, int(limit) - used) if limit != "max" else 1 << 60
    except (OSError, ValueError):
        return 1 << 60


def _token_bytes(adapter: ModelAdapter) -> int:
    """Keys and values of one token over all layers."""
    element = torch.empty((), dtype=adapter.dtype).element_size()
    return sum(2 * layer.spec.num_kv_heads * layer.spec.head_dim * element for layer in adapter.layers)


def plan_memory(
    config: EngineConfig, adapters: Sequence[ModelAdapter], max_model_len: int, available: int
) -> MemoryPlan:
    """Decides the number of KV blocks.

    Args:
        adapters: the target, and the models that have keys and values of their own beside it.
        available: bytes free on the device, weights already loaded.

    Raises:
        CapacityError: not even one request of the full length fits; the message names the knobs.
    """
    block_size = config.cache.block_size
    adapter = adapters[0]
    block_bytes = sum(map(_token_bytes, adapters)) * block_size
    rows = config.scheduler.max_num_seqs * config.query_len
    sampling_bytes = rows * adapter.vocab_size * 4 * _SAMPLING_COPIES
    sampling_bytes += MetadataState.state_bytes(config.scheduler.max_num_seqs, adapter.vocab_size, max_model_len)
    per_request = -(-max_model_len // block_size)
    usable = int(available * _USABLE_SHARE.get(adapter.device.type, 0.6)) - sampling_bytes
    if config.cache.num_blocks is not None:
        num_blocks, knob = config.cache.num_blocks, "cache.num_blocks"
    elif config.cache.memory != "auto":
        num_blocks, knob = int(config.cache.memory * 2**30) // block_bytes, "cache.memory"
        if num_blocks - 1 < per_request:
            raise CapacityError(
                f"cache.memory = {config.cache.memory} GiB holds {max(num_blocks - 1, 0) * block_size} tokens, one "
                f"request of model.max_model_len = {max_model_len} needs {per_request * block_bytes / 2**30:.2f} GiB; "
                "raise cache.memory or lower model.max_model_len"
            )
    else:
        wanted = config.scheduler.max_num_seqs * per_request + 1
        num_blocks, knob = min(wanted, max(usable, 0) // block_bytes), "model.max_model_len"
        if num_blocks - 1 < per_request:
            raise CapacityError(
                f"one request of model.max_model_len = {max_model_len} tokens needs "
                f"{(per_request + 1) * block_bytes / 2**30:.2f} GiB of KV cache; {available / 2**30:.2f} GiB are free, "
                f"of which {sampling_bytes / 2**30:.2f} GiB go to logits and sampling (scheduler.max_num_seqs x rows x "
                "vocabulary); lower model.max_model_len or scheduler.max_num_seqs"
            )
    if num_blocks * block_bytes > usable:
        raise CapacityError(
            f"{num_blocks} KV blocks take {num_blocks * block_bytes / 2**30:.2f} GiB and sampling "
            f"{sampling_bytes / 2**30:.2f} GiB, {available / 2**30:.2f} GiB are free on {adapter.device}; lower {knob}"
        )
    return MemoryPlan(
        weight_bytes=sum(each.weight_bytes for each in adapters),
        sampling_bytes=sampling_bytes,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
    )


def allocate(adapter: ModelAdapter, num_blocks: int, block_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Makes the key and value caches of each layer, [num_blocks * block_size, Hkv, D]."""
    slots = num_blocks * block_size

    def make() -> list[Tensor]:
        return [
            torch.zeros(
                slots,
                layer.spec.num_kv_heads,
                layer.spec.head_dim,
                dtype=adapter.dtype,
                device=adapter.device,
            )
            for layer in adapter.layers
        ]

    return make(), make()
