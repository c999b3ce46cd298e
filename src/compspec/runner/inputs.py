"""From token lists to the padded tensors of a bucket.

Legend: R requests of the bucket, Q query rows, T = R * Q, B blocks per request, M scored rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compspec.batch import SCRATCH_BLOCK, Bucket
from compspec.transfer import CopyFence


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """The rows of one request in one forward.

    Attributes:
        token_ids: 1 .. Q tokens.
        start: absolute position of the first.
        block_ids: the request's blocks, in logical order; they reach at least to the last row. A list that was given
            once is not changed: with the blocks, a request gets a new one.
        writes: whether the rows' keys and values are stored; if not, they must be in the cache already.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    writes: bool = True


class InputBuffers:
    """Persistent inputs of one bucket; filled on the host, copied to the device, valid until the next fill.

    Rows beyond a request's tokens repeat its last position and write to the scratch block; requests
    beyond the batch have one token in the scratch block. Neither is read by a real row.

    Attributes:
        tensors: on the device, the same at every step: the arguments of `ModelAdapter.forward`, which are input_ids
            [1, T], positions [1, T], slot_mapping [T], block_table [R, B], seq_lens [R], logits_to_keep [M].
        block_table: [R, B] int32, on the host.
        starts: [R] int64, the absolute position of each request's first row, on the host.
    """

    def __init__(self, bucket: Bucket, block_size: int, max_blocks: int, device: torch.device) -> None:
        self.bucket = bucket
        self._block_size = block_size
        requests, rows = bucket.num_requests, bucket.query_len
        self._fence = CopyFence(device)
        self._pinned = device.type == "cuda"
        self._host: list[Tensor] = []
        self._token_ids = self._array((requests, rows), np.int64)
        self._positions = self._array((requests, rows), np.int64)
        self._slots = self._array((requests, rows), np.int64)
        self.block_table = self._array((requests, max_blocks), np.int32)
        self._seq_lens = self._array((requests,), np.int32)
        self._scored = self._array((requests, bucket.num_logits), np.int64)
        self._scored[:] = np.arange(requests)[:, None] * rows + np.arange(bucket.num_logits)
        self._device = [tensor.to(device) for tensor in self._host]  # on a CPU the same tensors
        ids, positions, slots, table, seq_lens, scored = self._device
        self.tensors = (ids.view(1, -1), positions.view(1, -1), slots.view(-1), table, seq_lens, scored.view(-1))
        self.starts = self._positions[:, 0]
        self._rows, self._offsets = np.arange(requests)[:, None], np.arange(rows)
        # What stands in each row of the block table, so that a step does not write a long one again.
        self._tables: list[tuple[Sequence[int], int] | None] = [None] * requests
        self._num_filled = requests  # rows that may not be padding

    def _array(self, shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
        """Zeros on the host, in pinned memory where they will be copied to a GPU."""
        tensor = torch.from_numpy(np.zeros(shape, dtype=dtype))
        self._host.append(tensor.pin_memory() if self._pinned else tensor)
        array: NDArray[Any] = self._host[-1].numpy()
        return array

    def fill(self, queries: Sequence[Query]) -> tuple[Tensor, ...]:
        """Loads a batch into `tensors`, and returns them. Waits for the copies of the last fill alone."""
        count = len(queries)
        assert count <= self.bucket.num_requests
        self._fence.wait()
        self._num_filled = max(self._num_filled, count)
        if queries:
            self._fill_requests(queries)
        for row in range(count, self._num_filled):
            self._token_ids[row] = 0
            self._positions[row] = 0
            self._slots[row] = SCRATCH_BLOCK * self._block_size
            self._seq_lens[row] = 1
            self._fill_table(row, (), 0)
        self._num_filled = count
        if self._pinned:
            try:
                for source, target in zip(self._host, self._device, strict=True):
                    target.copy_(source, non_blocking=True)
            finally:
                self._fence.raise_()
        return self.tensors

    def _fill_requests(self, queries: Sequence[Query]) -> None:
        count, size = len(queries), self._block_size
        lengths = np.array([len(query.token_ids) for query in queries])
        starts = np.array([query.start for query in queries])
        last = starts + lengths - 1
        assert lengths.min() >= 1 and lengths.max() <= self.bucket.query_len
        is_real = self._offsets < lengths[:, None]
        token_ids, positions, slots = self._token_ids[:count], self._positions[:count], self._slots[:count]
        token_ids[:] = 0
        token_ids[is_real] = [token for query in queries for token in query.token_ids]
        np.minimum(starts[:, None] + self._offsets, last[:, None], out=positions)
        for row, (query, num_blocks) in enumerate(zip(queries, (last // size + 1).tolist(), strict=True)):
            self._fill_table(row, query.block_ids, num_blocks)
        blocks = self.block_table[self._rows[:count], positions // size]
        slots[:] = blocks * np.int64(size) + positions % size
        is_real &= np.array([query.writes for query in queries])[:, None]
        slots[~is_real] = SCRATCH_BLOCK * size
        self._seq_lens[:count] = last + 1
        if not self.bucket.is_decode:
            self._scored[:count, 0] = np.arange(count) * self.bucket.query_len + lengths - 1

    def _fill_table(self, row: int, block_ids: Sequence[int], num_blocks: int) -> None:
        """The first `num_blocks` of a request's blocks, and the scratch block after them."""
        assert num_blocks <= len(block_ids), "rows beyond the request's blocks"
        written = self._tables[row]
        if written is not None and written[0] is block_ids and written[1] == num_blocks:
            return
        self._tables[row] = None  # until it is written whole
        self.block_table[row, :num_blocks] = block_ids[:num_blocks]
        self.block_table[row, num_blocks:] = SCRATCH_BLOCK
        self._tables[row] = block_ids, num_blocks
