"""Recorded programs: calls come in order, with their memory, from any number of threads; failures are told."""

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from compspec.kernels.packed import PackedLinear, packs_bf16
from compspec.kernels.packing import Format, pack_bf16, pack_quantised, quantise
from compspec.kernels.program import MOST_ARGUMENTS, NotRecordable, Recorder, address_of, recording

pytestmark = pytest.mark.skipif(not Recorder.is_available(), reason="no C++ compiler")

ALONE = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * MOST_ARGUMENTS)
TEAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class Number(ctypes.Structure):
    _fields_ = (("value", ctypes.c_int64),)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("together", [True, False])
def test_calls_come_in_order_with_their_arguments(threads: int, together: bool) -> None:
    seen: list[tuple[str, int]] = []
    alone = ALONE(lambda *pointers: seen.append(("alone", pointers[1])))
    recorder = Recorder([])
    for number in range(1, 6):
        recorder.alone(address_of(alone), [7, number], alone)
    program = recorder.program(together=together)
    program.run()
    program.run()
    assert seen == [("alone", number) for number in range(1, 6)] * 2


def test_all_threads_of_a_team_make_a_call_before_the_next_begins(threads: int) -> None:
    seen: list[int] = []

    def note(arguments: int, _: int) -> int:
        seen.append(Number.from_address(arguments).value)
        return 0

    team = TEAM(note)
    recorder = Recorder([])
    for number in range(20):
        recorder.in_team(address_of(team), Number(number))
    recorder.program(together=True).run()
    assert seen == [number for number in range(20) for _ in range(threads)]


@pytest.mark.parametrize("together", [True, False])
def test_a_call_that_fails_is_told(together: bool) -> None:
    results = iter([0, 1, 0] * 8)
    team = TEAM(lambda *_: next(results))
    recorder = Recorder([])
    for number in range(3):
        recorder.in_team(address_of(team), Number(number))
    with pytest.raises(RuntimeError, match="recorded forward failed"):
        recorder.program(together=together).run()


def test_memory_is_shared_with_what_is_dead_and_with_nothing_else() -> None:
    recorder = Recorder([])
    first = recorder.empty((2, 8), (8, 1), torch.float32)
    second = recorder.empty((2, 8), (8, 1), torch.float32)
    assert first.data_ptr() != second.data_ptr()
    address, view = first.data_ptr(), first[1]
    del first
    assert recorder.empty((16,), (1,), torch.float32).data_ptr() != address
    assert view.shape == (8,)
    del view
    again = recorder.empty((4, 4), (1, 4), torch.float32)
    assert again.data_ptr() == address and again.stride() == (1, 4)
    assert recorder.empty((0, 3), (3, 1), torch.bfloat16).numel() == 0


def test_memory_of_an_unknown_owner_is_refused() -> None:
    known, unknown = torch.zeros(4), torch.zeros(4)
    recorder = Recorder([known])
    assert recorder.pointer(known[2:]) == known[2:].data_ptr()
    own = recorder.empty((3,), (1,), torch.float32)
    assert recorder.pointer(own) == own.data_ptr()
    with pytest.raises(NotRecordable, match="unknown owner"):
        recorder.pointer(unknown)
    layer = _layer(32, 32, Format.INT8, torch.Generator())
    with recording(Recorder([known])), pytest.raises(NotRecordable, match="unknown owner"):
        layer(torch.zeros(1, 32))


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("together", [True, False])
def test_a_recorded_chain_of_products_computes_what_the_operator_does(form: Format, together: bool) -> None:
    if form is Format.BF16 and not packs_bf16():
        pytest.skip("no bf16 instructions")
    generator = torch.Generator().manual_seed(0)
    layers = [_layer(96, 64, form, generator), _layer(64, 96, form, generator), _layer(96, 64, form, generator)]

    def forward(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    x = torch.randn(5, 64, generator=generator).bfloat16()
    recorder = Recorder([x, *(buffer for layer in layers for buffer in layer.buffers())])
    with torch.no_grad(), recording(recorder):
        out = forward(x)
    program = recorder.program(together=together)
    assert torch.equal(out, forward(x))
    for _ in range(3):
        x.copy_(torch.randn(5, 64, generator=generator))
        program.run()
        assert torch.equal(out, forward(x))


def _layer(columns: int, in_features: int, form: Format, generator: torch.Generator) -> PackedLinear:
    weight = torch.randn(columns, in_features, generator=generator).bfloat16() / 8
    packed = pack_bf16(weight) if form is Format.BF16 else pack_quantised(quantise(weight, form))
    bias = torch.randn(columns, generator=generator)
    return PackedLinear(
        packed, bias, in_features=in_features, columns=columns, first=0, out_features=columns, form=form
    )
