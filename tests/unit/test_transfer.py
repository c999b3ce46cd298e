"""Arrays on their way to the device: packed and unpacked unchanged, and no write into memory that is being copied."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from compspec import transfer
from compspec.batch import Bucket
from compspec.runner import inputs
from compspec.runner.inputs import InputBuffers, Query
from compspec.transfer import CopyFence, pack, unpack, upload

CPU = torch.device("cpu")
DTYPES = [np.int64, np.int32, np.float32, np.bool_, np.uint8]
ALIGNMENT = 16  # of the vector loads of CUDA kernels


def random_array(shape: tuple[int, ...], dtype: type, seed: int = 0) -> NDArray[Any]:
    """Values that fill every byte; bool of both kinds."""
    rng = np.random.default_rng(seed)
    if dtype is np.bool_:
        return np.asarray(rng.random(shape) < 0.5)
    if dtype is np.float32:
        return np.asarray(rng.normal(size=shape), dtype=dtype)
    limits = np.iinfo(dtype)
    return np.asarray(rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True))


def round_trip(arrays: list[NDArray[Any]]) -> list[Tensor]:
    """What `upload` does for a GPU, without one."""
    packed, places = pack(arrays)
    return unpack(torch.from_numpy(packed), arrays, places)


def check(arrays: list[NDArray[Any]], found: list[Tensor]) -> None:
    """Types, shapes and bits are those of the arrays."""
    assert len(found) == len(arrays)
    for array, tensor in zip(arrays, found, strict=True):
        assert tensor.dtype == torch.from_numpy(np.zeros(1, array.dtype)).dtype
        assert tuple(tensor.shape) == array.shape
        assert tensor.is_contiguous()
        assert tensor.numpy().tobytes() == np.ascontiguousarray(array).tobytes()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**20)), max_size=12
    )
)
def test_arrays_come_out_as_they_went_in(kinds: list[tuple[type, list[int], int]]) -> None:
    """Every type, 0-d and empty arrays and no array at all among them."""
    arrays = [random_array(tuple(shape), dtype, seed) for dtype, shape, seed in kinds]
    check(arrays, round_trip(arrays))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_empty_and_0d_arrays_of_every_type(dtype: type) -> None:
    shapes: list[tuple[int, ...]] = [(0,), (), (3, 0), (0, 3), (5,), (0,)]
    arrays = [random_array(shape, dtype) for shape in shapes]
    check(arrays, round_trip(arrays))
    check([arrays[0]], round_trip([arrays[0]]))


def test_no_array() -> None:
    assert pack([])[1] == []
    assert round_trip([]) == upload([], CPU) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_arrays_that_are_not_contiguous_come_out_so(dtype: type) -> None:
    whole = random_array((6, 8), dtype)
    arrays = [whole[:, ::2], whole.T, whole[1:4, 3], np.broadcast_to(whole[0], (3, 8)).copy()[:, 1:]]
    assert not any(array.flags.c_contiguous for array in arrays)
    check(arrays, round_trip(arrays))


def test_places_are_aligned_and_do_not_overlap() -> None:
    arrays = [random_array((size,), dtype) for size in (0, 1, 3, 16, 17) for dtype in DTYPES]
    packed, places = pack(arrays)
    end = 0
    for array, place in zip(arrays, places, strict=True):
        assert place % ALIGNMENT == 0
        assert end <= place < end + ALIGNMENT, "no more than padding between two"
        end = place + array.nbytes
    assert end <= packed.nbytes < end + ALIGNMENT


def test_unpacked_tensors_are_views_of_one_copy() -> None:
    arrays = [random_array((3,), dtype) for dtype in DTYPES]
    packed, places = pack(arrays)
    sent = torch.from_numpy(packed)
    for tensor, place in zip(unpack(sent, arrays, places), places, strict=True):
        assert tensor.data_ptr() == sent.data_ptr() + place


def test_packing_copies_so_that_an_array_may_change_afterwards() -> None:
    array = np.arange(4)
    (found,) = round_trip([array])
    array[:] = -1
    assert found.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_on_a_cpu_the_tensors_are_the_arrays(dtype: type) -> None:
    arrays = [random_array(shape, dtype) for shape in ((3, 2), (), (0,))]
    found = upload(arrays, CPU)
    check(arrays, found)
    arrays[0][1, 1] = not arrays[0][1, 1]
    assert found[0].numpy().tobytes() == arrays[0].tobytes()
    assert found[0].data_ptr() == arrays[0].ctypes.data


def test_a_gpu_gets_one_copy_out_of_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All arrays in one, and the host does not wait for it."""
    calls: list[Any] = []

    def pin_memory(self: Tensor) -> Tensor:
        calls.append("pin")
        return self.clone()

    def to(self: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        calls.append((str(device), non_blocking))
        return self.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", to)
    arrays = [random_array((2, 3), dtype) for dtype in DTYPES]
    found = upload(arrays, torch.device("cuda"))
    assert calls == ["pin", ("cuda", True)]
    check(arrays, found)


class FakeEvent:
    """Writes down what is done with it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def record(self, stream: str) -> None:
        self.calls.append(f"record {stream}")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def forbidden(*_: Any) -> None:
    raise AssertionError("a CPU has no events")


def test_a_fence_on_a_cpu_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", forbidden)
    fence = CopyFence(CPU)
    fence.wait()
    fence.raise_()
    fence.wait()


def test_a_fence_on_a_gpu_waits_for_the_event_that_stands_after_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[FakeEvent] = []

    def make() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    monkeypatch.setattr(transfer.torch.cuda, "Event", make)
    # The stream of the fence's own device, which need not be the current one.
    monkeypatch.setattr(transfer.torch.cuda, "current_stream", lambda device: f"stream of {device}")
    fence = CopyFence(torch.device("cuda", 1))
    fence.wait()
    fence.raise_()
    fence.wait()
    (event,) = events
    assert event.calls == ["synchronize", "record stream of cuda:1", "synchronize"]


class FakeFence:
    """Looks at the buffers whenever it is used: what the host holds, and what the device holds."""

    buffers: InputBuffers

    def __init__(self, device: torch.device) -> None:
        self.seen: list[tuple[str, list[Tensor], list[Tensor]]] = []

    def _look(self, name: str) -> None:
        host, device = ([tensor.clone() for tensor in side] for side in (self.buffers._host, self.buffers._device))
        self.seen.append((name, host, device))

    def wait(self) -> None:
        self._look("wait")

    def raise_(self) -> None:
        self._look("raise")


def equal(one: list[Tensor], other: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize(
    "bucket",
    [Bucket(num_requests=3, query_len=2, num_logits=2), Bucket(num_requests=2, query_len=4, num_logits=1)],
    ids=str,
)
def test_inputs_are_written_after_the_last_copies_and_fenced_after_the_new_ones(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the wait the host would overwrite what the device is still to read."""
    monkeypatch.setattr(inputs, "CopyFence", FakeFence)
    buffers = InputBuffers(bucket, 4, 10, CPU)
    buffers._pinned = True
    buffers._device = [tensor.clone() for tensor in buffers._host]
    fence = buffers._fence
    assert isinstance(fence, FakeFence)
    fence.buffers = buffers
    fills = [
        [Query(token_ids=[7, 8], start=3, block_ids=[5, 6])],
        [Query(token_ids=[9], start=6, block_ids=[2, 3]), Query(token_ids=[4], start=1, block_ids=[8])],
    ]
    for queries in fills:
        before = [tensor.clone() for tensor in buffers._host]
        fence.seen.clear()
        buffers.fill(queries)
        (first, host_at_wait, _), (second, host_at_raise, device_at_raise) = fence.seen
        assert (first, second) == ("wait", "raise")
        assert all(equal(host_at_wait, before)), "written before the wait"
        assert all(equal(buffers._host, host_at_raise)), "written after the fence"
        assert all(equal(device_at_raise, host_at_raise)), "copied after the fence, or not at all"
        changed = equal(host_at_raise, before)
        assert changed.count(False) >= 5, "the fill changed too little to show anything"


def test_copies_to_the_device_do_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = InputBuffers(Bucket(num_requests=2, query_len=2, num_logits=2), 4, 10, CPU)
    buffers._pinned = True
    buffers._device = [tensor.clone() for tensor in buffers._host]
    calls: list[bool] = []
    real = Tensor.copy_

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        calls.append(non_blocking)
        return real(self, source)

    monkeypatch.setattr(Tensor, "copy_", copy_)
    buffers.fill([Query(token_ids=[7, 8], start=3, block_ids=[5, 6])])
    assert calls == [True] * 6
