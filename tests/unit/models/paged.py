"""Runs sequences through a model over a small paged cache: chunked prefill, then windows of decode rows."""

import torch
from torch import Tensor

from compspec.attention.backend import in_force
from compspec.attention.cpu import CpuBackend
from compspec.models import ModelAdapter

BLOCK_SIZE = 4
MAX_BLOCKS = 16


class PagedRun:
    """A cache with shuffled blocks for a few sequences, and the logits that each of their rows got."""

    def __init__(self, adapter: ModelAdapter, sequences: list[Tensor]) -> None:
        self.adapter = adapter
        self.sequences = sequences
        num_blocks = len(sequences) * MAX_BLOCKS + 1
        shuffled = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.table = shuffled.view(len(sequences), MAX_BLOCKS).int()
        caches = [
            [
                # NaN where nothing was written: a stale slot that is read shows.
                torch.full(
                    (num_blocks * BLOCK_SIZE, layer.spec.num_kv_heads, layer.spec.head_dim),
                    float("nan"),
                    dtype=adapter.dtype,
                )
                for layer in adapter.layers
            ]
            for _ in range(2)
        ]
        adapter.set_kv_buffers(*caches)
        self.done = [0] * len(sequences)
        self.logits: list[list[Tensor]] = [[] for _ in sequences]

    def step(self, rows: int, advance: int | None = None) -> None:
        """Runs up to `rows` tokens of each sequence; only `advance` of them count, the rest are wrong drafts."""
        advance = rows if advance is None else advance
        num = len(self.sequences)
        ids, positions, slots = (torch.zeros(num, rows, dtype=torch.int64) for _ in range(3))
        lengths = torch.ones(num, dtype=torch.int32)
        kept = [0] * num
        for index, sequence in enumerate(self.sequences):
            start = self.done[index]
            chunk = sequence[start : start + rows].clone()
            chunk[advance:] = (chunk[advance:] + 1) % 100
            at = torch.arange(start, start + len(chunk))
            ids[index, : len(chunk)] = chunk
            positions[index, : len(chunk)] = at
            slots[index, : len(chunk)] = self.table[index, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
            lengths[index] = max(1, start + len(chunk))
            kept[index] = min(advance, len(chunk))
        keep = torch.arange(num * rows)
        with torch.no_grad(), in_force(CpuBackend(self.adapter.dtype)):
            logits = self.adapter.forward(
                ids.view(1, -1), positions.view(1, -1), slots.view(-1), self.table, lengths, BLOCK_SIZE, keep
            )
        logits = logits.view(num, rows, -1)
        for index in range(num):
            self.logits[index].append(logits[index, : kept[index]])
            self.done[index] += kept[index]

    def run(self) -> list[Tensor]:
        """Prefills in chunks and decodes in windows that lose some of their rows; logits [length, V] of each."""
        self.step(16)
        self.step(16)
        width = 0
        while any(done < len(sequence) for done, sequence in zip(self.done, self.sequences, strict=True)):
            width = width % 3 + 1
            self.step(4, width)
        return [torch.cat(rows) for rows in self.logits]
