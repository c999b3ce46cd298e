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
        block_ids: the request's blocks, in logical order; they reach at least to the last row.
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

    def _array(self, shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
        """Zeros on the host, in pinned memory where they will be copied to a GPU."""
        tensor = torch.from_numpy(np.zeros(shape, dtype=dtype))
        self._host.append(tensor.pin_memory() if self._pinned else tensor)
        array: NDArray[Any] = self._host[-1].numpy()
        return array

    def fill(self, queries: Sequence[Query]) -> tuple[Tensor, ...]:
        """Loads a batch into `tensors`, and returns them. Waits for the copies of the last fill alone."""
        assert len(queries) <= self.bucket.num_requests
        self._fence.wait()
        for row, query in enumerate(queries):
            self._fill_request(row, query)
        for row in range(len(queries), self.bucket.num_requests):
            self._token_ids[row] = 0
            self._positions[row] = 0
            self._slots[row] = SCRATCH_BLOCK * self._block_size
            self._seq_lens[row] = 1
            self.block_table[row] = SCRATCH_BLOCK
        if self._pinned:
            try:
                for source, target in zip(self._host, self._device, strict=True):
                    target.copy_(source, non_blocking=True)
            finally:
                self._fence.raise_()
        return self.tensors

    def _fill_request(self, row: int, query: Query) -> None:
        count = len(query.token_ids)
        assert 1 <= count <= self.bucket.query_len
        last = query.start + count - 1
        positions = np.arange(query.start, last + 1)
        num_blocks = last // self._block_size + 1
        assert num_blocks <= len(query.block_ids), "rows beyond the request's blocks"
        self._token_ids[row, :count] = query.token_ids
        self._token_ids[row, count:] = 0
        self._positions[row, :count] = positions
        self._positions[row, count:] = last
        blocks = np.asarray(query.block_ids[:num_blocks], dtype=np.int32)
        self._slots[row] = SCRATCH_BLOCK * self._block_size
        if query.writes:
            self._slots[row, :count] = blocks[positions // self._block_size].astype(np.int64) * self._block_size
            self._slots[row, :count] += positions % self._block_size
        self._seq_lens[row] = last + 1
        self.block_table[row, :num_blocks] = blocks
        self.block_table[row, num_blocks:] = SCRATCH_BLOCK
        if not self.bucket.is_decode:
            self._scored[row, 0] = row * self.bucket.query_len + count - 1
