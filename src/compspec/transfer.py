"""Small arrays on their way from the host to the device, without making the host wait."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Moves arrays to the device, in one copy; on a CPU the tensors are the arrays.

    The pinned memory between comes from torch's caching allocator, which does not hand it out again before the
    copy is over.

    Returns:
        A tensor of the same type and shape for each array. On a GPU they are parts of one, valid once the current
        stream gets there.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed, places = pack(arrays)
    sent = torch.from_numpy(packed).pin_memory().to(device, non_blocking=True)
    return unpack(sent, arrays, places)


def pack(arrays: Sequence[NDArray[Any]]) -> tuple[NDArray[np.uint8], list[int]]:
    """All arrays in one, each at an aligned place; and these places, in bytes."""
    places: list[int] = []
    end = 0
    for array in arrays:
        places.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    # Never empty: an empty array becomes a tensor of stride zero, which has no views of other types.
    packed = np.zeros(max(end, _ALIGNMENT), dtype=np.uint8)
    for array, place in zip(arrays, places, strict=True):
        packed[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed, places


def unpack(packed: Tensor, arrays: Sequence[NDArray[Any]], places: Sequence[int]) -> list[Tensor]:
    """Views of `packed` in the types and shapes of the arrays."""
    return [
        packed[place : place + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, place in zip(arrays, places, strict=True)
    ]


class CopyFence:
    """Keeps the host from writing into pinned memory while a copy out of it is on its way. On a CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Waits for the copies before the last `raise_`."""
        if self._event is not None:
            self._event.synchronize()

    def raise_(self) -> None:
        """Stands after the copies that have been started so far."""
        if self._event is not None:
            # Copies go through the stream of their device, which need not be the current one.
            self._event.record(torch.cuda.current_stream(self._device))
