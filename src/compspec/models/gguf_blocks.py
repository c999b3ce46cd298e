"""Weights that a GGUF file holds in blocks of 32 four or eight bit numbers, as they are."""

import functools
import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compspec.kernels.packing import GROUP, Quantised

logger = logging.getLogger(__name__)

# Bytes of a block: scales and minima (fp16), then the numbers.
_BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}


class GgufBlocks:
    """Finds the blocks of a loaded weight by its values.

    A converter may have named a weight anew and put its rows in another order (Llama's queries and keys), but it has
    not changed a row: the rows that the file holds, rounded to the type of the weight, are looked for among those of
    the same shape.

    Args:
        path: the `.gguf` file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known_rows: dict[tuple[str, torch.dtype], dict[bytes, int]] = {}

    def find(self, name: str, weight: Tensor) -> Quantised | None:
        """The blocks of a weight [N, K], in the order of its rows; None where the file does not have all of them."""
        wanted = _row_keys(weight)
        for tensor in self._tensors.get(tuple(weight.shape), ()):
            rows = self._rows(tensor, weight.dtype)
            order = [rows.get(key) for key in wanted]
            if None not in order:
                blocks = _blocks(tensor, np.array(order))
                if blocks.minimum is None or bool(blocks.minimum.isfinite().all()):  # -8 times a scale can overflow
                    return blocks
        logger.info("%s is not in blocks of a known kind in %s and is rounded", name, self._path.name)
        return None

    @functools.cached_property
    def _tensors(self) -> dict[tuple[int, ...], list[Any]]:
        """The quantised matrices of known types by their shape [N, K]."""
        from gguf import GGUFReader

        found: dict[tuple[int, ...], list[Any]] = {}
        for tensor in GGUFReader(self._path).tensors:
            if tensor.tensor_type.name in _BLOCK_BYTES and len(tensor.shape) == 2:
                found.setdefault(tuple(int(size) for size in reversed(tensor.shape)), []).append(tensor)
        return found

    def _rows(self, tensor: Any, dtype: torch.dtype) -> dict[bytes, int]:
        """Where each row of values stands in a tensor."""
        key = tensor.name, dtype
        if key not in self._known_rows:
            keys = _row_keys(_dequantised(tensor).to(dtype))
            self._known_rows[key] = {row_key: row for row, row_key in enumerate(keys)}
        return self._known_rows[key]


def _row_keys(weight: Tensor) -> list[bytes]:
    """A short name for each row's values."""
    rows = weight.contiguous().view(torch.uint8).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]


def _dequantised(tensor: Any) -> Tensor:
    """[N, K] float32."""
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))


def _blocks(tensor: Any, order: NDArray[np.int64]) -> Quantised:
    """Scales, minima and numbers of some rows."""
    kind = tensor.tensor_type.name
    size = _BLOCK_BYTES[kind]
    rows = np.ascontiguousarray(tensor.data.view(np.uint8).reshape(len(tensor.data), -1)[order])
    blocks = rows.reshape(len(rows), -1, size)

    def halves(first: int) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(blocks[..., first : first + 2]).view(np.float16)[..., 0].copy())

    scale = halves(0)
    if kind == "Q8_0":
        values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
        return Quantised(scale=scale, minimum=None, values=torch.from_numpy(values).flatten(1))
    packed = blocks[..., -GROUP // 2 :]
    values = np.concatenate([packed & 15, packed >> 4], axis=-1)
    minimum = halves(2) if kind == "Q4_1" else -8 * scale
    return Quantised(scale=scale, minimum=minimum, values=torch.from_numpy(values).flatten(1))
