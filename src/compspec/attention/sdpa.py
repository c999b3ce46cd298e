"""The reference backend: gathers pages and calls torch's scaled dot-product attention. Any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from compspec.attention.backend import AttentionSetup, StatelessBackend

# The KV capacity handed to SDPA is a multiple of this: the CPU kernel splits keys into runs of 512, and
# other capacities change the bits of a row (measured on torch 2.13).
CAPACITY_STEP = 512


def make(setup: AttentionSetup) -> "SdpaBackend":
    """On CUDA with one capacity for all: reading lengths on the host could not be captured in a graph."""
    on_host = setup.device.type == "cpu"
    return SdpaBackend(capacity=None if on_host else setup.max_blocks * setup.block_size)


def refusal(setup: AttentionSetup) -> str | None:
    """Serves every setup."""
    return None


class SdpaBackend(StatelessBackend):
    """Gather + `scaled_dot_product_attention`. Correct everywhere, fast where nothing better exists.

    Args:
        capacity: KV tokens that every request is padded to; None: requests are grouped by their own length, which is
            read on the host.
    """

    name = "sdpa"

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity

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

        Requests are grouped by capacity, so that a request's arithmetic is a function of its own length
        and never of its longest neighbour.
        """
        num_requests = block_table.shape[0]
        rows = q.shape[0] // num_requests
        q = q.view(num_requests, rows, *q.shape[1:])
        positions = query_positions.view(num_requests, rows)
        out = torch.empty_like(q)
        for capacity, members in self._groups(seq_lens).items():
            at = slice(None) if members is None else torch.tensor(members, device=q.device)
            keys, values = (
                _gather(cache, block_table[at], capacity, block_size, seq_lens[at]) for cache in (k_cache, v_cache)
            )
            visible = _visible(positions[at], capacity, window)
            out[at] = _attend(q[at], keys, values, visible, scale, softcap)
        return out.reshape(num_requests * rows, *q.shape[2:])

    def _groups(self, seq_lens: Tensor) -> dict[int, list[int] | None]:
        """Requests by the capacity that they are padded to; None stands for all of them."""
        if self._capacity is not None:
            return {self._capacity: None}
        groups: dict[int, list[int]] = {}
        for index, length in enumerate(seq_lens.tolist()):
            groups.setdefault(-(-length // CAPACITY_STEP) * CAPACITY_STEP, []).append(index)
        return dict.fromkeys(groups) if len(groups) == 1 else dict(groups)


def _gather(cache: Tensor, block_table: Tensor, capacity: int, block_size: int, seq_lens: Tensor) -> Tensor:
    """The first tokens of each request as [R, Hkv, capacity, D]; zero beyond its length, whatever a stale page holds.

    Values that are no numbers count as zero inside it: a masked key still meets its value as 0 * v, so one
    overflown draft would reach the rows before it.
    """
    num_blocks = -(-capacity // block_size)
    table = block_table[:, :num_blocks].clamp(0, cache.shape[0] // block_size - 1)
    table = F.pad(table, (0, num_blocks - table.shape[1]))
    pages = cache.view(-1, block_size * cache.shape[1] * cache.shape[2]).index_select(0, table.reshape(-1))
    gathered = pages.view(len(table), num_blocks * block_size, *cache.shape[1:])[:, :capacity]
    beyond = torch.arange(capacity, device=cache.device) >= seq_lens[:, None]
    gathered.masked_fill_(beyond[:, :, None, None], 0)
    return gathered.nan_to_num_(0.0, 0.0, 0.0).transpose(1, 2)


def _visible(positions: Tensor, capacity: int, window: int) -> Tensor:
    """Which of the first `capacity` keys each row at `positions` [R, Q] sees: [R, 1, Q, L] bool."""
    keys = torch.arange(capacity, device=positions.device)
    visible = keys <= positions[:, :, None]
    if window:
        visible &= positions[:, :, None] - keys < window
    return visible.unsqueeze(1)


def _attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, softcap: float) -> Tensor:
    """Attention of requests that share a capacity: q [R, Q, Hq, D] -> [R, Q, Hq, D]."""
    q = q.transpose(1, 2)
    if softcap:
        out = _capped(q, keys, values, visible, scale, softcap)
    else:
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def _capped(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, softcap: float) -> Tensor:
    """Attention with a soft cap on the scores, in fp32: q [R, Hq, Q, D] -> the same."""
    groups = q.shape[1] // keys.shape[1]
    keys = keys.float().repeat_interleave(groups, 1)
    values = values.float().repeat_interleave(groups, 1)
    scores = (q.float() @ keys.transpose(-1, -2)) * scale
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1) @ values).to(q.dtype)
