"""Packed weights: what goes in comes out bit for bit, and rounding to few bits stays within half a step."""

import pytest
import torch
from torch import Tensor

from compspec.kernels.packing import (
    GROUP,
    Format,
    Quantised,
    pack_bf16,
    pack_quantised,
    packed_bytes,
    padded_size,
    quantise,
    unpack,
)

SHAPES = ((32, 32), (1, 1), (67, 33), (50, 7), (33, 160), (192, 576))
FEWEST_BITS = {Format.INT8: 127, Format.INT4: 15}

# Groups that a rounding to 8 or 4 bits has to live with.
GROUPS = {
    "random": torch.randn(GROUP, generator=torch.Generator().manual_seed(0)),
    "zeros": torch.zeros(GROUP),
    "one value": torch.full((GROUP,), 0.1),
    "one negative value": torch.full((GROUP,), -0.1),
    "positive": torch.linspace(0.5, 2, GROUP),
    "negative": torch.linspace(-2, -0.5, GROUP),
    "one outlier": torch.tensor([1000.0] + [0.01] * (GROUP - 1)),
    "far from zero": torch.linspace(0.10002, 0.1002, GROUP),
    "far below zero": torch.linspace(-0.10003, -0.0999, GROUP),
    "large": torch.linspace(-60_000, 60_000, GROUP),
}


def random_weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def random_blocks(rows: int, columns: int, form: Format, seed: int = 0) -> Quantised:
    """Any bits in any place: every value that a block can hold."""
    generator = torch.Generator().manual_seed(seed)
    num_groups = padded_size(columns) // GROUP
    scale, minimum = torch.randn(2, rows, num_groups, generator=generator).half()
    low, high = (-128, 128) if form is Format.INT8 else (0, 16)
    values = torch.randint(low, high, (rows, num_groups * GROUP), generator=generator)
    if form is Format.INT8:
        return Quantised(scale=scale, minimum=None, values=values.to(torch.int8))
    return Quantised(scale=scale, minimum=minimum, values=values.to(torch.uint8))


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_bf16_comes_back_bit_for_bit(rows: int, columns: int) -> None:
    weight = random_weight(rows, columns).bfloat16()
    packed = pack_bf16(weight)
    assert packed.dtype == torch.uint8
    assert packed.shape == (packed_bytes(rows, columns, Format.BF16),)
    assert torch.equal(unpack(packed, rows, columns, Format.BF16), weight.float())


@pytest.mark.parametrize("form", [Format.INT8, Format.INT4])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_blocks_come_back_bit_for_bit(rows: int, columns: int, form: Format) -> None:
    blocks = random_blocks(rows, columns, form)
    assert blocks.format is form
    packed = pack_quantised(blocks)
    assert packed.dtype == torch.uint8
    assert packed.shape == (packed_bytes(rows, columns, form),)
    assert torch.equal(unpack(packed, rows, columns, form), blocks.dequantise()[:, :columns])


def test_bytes_lie_in_the_order_that_the_kernel_reads() -> None:
    """The layout that packed.cpp states; a round trip alone would accept any."""
    weight = torch.arange(64 * 64).view(64, 64).float()
    bf16 = pack_bf16(weight.remainder(251).bfloat16()).view(torch.bfloat16).view(2, 2, 2, 16, 16, 2)
    int8 = random_blocks(64, 64, Format.INT8)
    head = pack_quantised(int8).view(2, 2, -1)[..., :64].contiguous().view(torch.float16)
    bytes8 = pack_quantised(int8).view(2, 2, -1)[..., 64:].reshape(2, 2, 2, 8, 16, 4)
    int4 = random_blocks(64, 64, Format.INT4)
    assert int4.minimum is not None
    heads = pack_quantised(int4).view(2, 2, -1)[..., :128].contiguous().view(torch.float16).view(2, 2, 2, 32)
    bytes4 = pack_quantised(int4).view(2, 2, -1)[..., 128:].reshape(2, 2, 2, 4, 16, 4)
    for row, column in ((0, 0), (1, 2), (17, 5), (40, 30), (63, 63), (31, 32), (32, 15), (5, 16)):
        block, half, line = row // 32, row // 16 % 2, row % 16
        group, place = column // 32, column % 32
        assert bf16[block, group, half, place // 2, line, place % 2] == weight[row, column].remainder(251)
        assert head[block, group, row % 32] == int8.scale[row, group]
        assert int(bytes8[block, group, half, place // 4, line, place % 4]) - 128 == int8.values[row, column]
        assert heads[block, group, 0, row % 32] == int4.scale[row, group]
        assert heads[block, group, 1, row % 32] == int4.minimum[row, group]
        both = int(bytes4[block, group, half, place % 16 // 4, line, place % 4])
        assert both >> (4 if place >= 16 else 0) & 15 == int4.values[row, column]


@pytest.mark.parametrize(("form", "per_weight"), [(Format.BF16, 2), (Format.INT8, 34 / 32), (Format.INT4, 20 / 32)])
def test_sizes_are_those_of_whole_blocks(form: Format, per_weight: float) -> None:
    assert packed_bytes(64, 96, form) == 64 * 96 * per_weight
    assert packed_bytes(33, 65, form) == packed_bytes(64, 96, form)
    assert packed_bytes(1, 1, form) == packed_bytes(32, 32, form)
    assert [padded_size(size) for size in (0, 1, 31, 32, 33, 64)] == [0, 32, 32, 32, 64, 64]


@pytest.mark.parametrize("form", [Format.INT8, Format.INT4])
@pytest.mark.parametrize("kind", GROUPS)
def test_rounding_is_within_half_a_step(kind: str, form: Format) -> None:
    """And what float16 loses of the smallest value, which may be large next to the range."""
    group = GROUPS[kind]
    rounded = quantise(group[None], form)
    assert rounded.format is form
    assert rounded.scale.shape == (1, 1)
    step = float(rounded.scale.abs())
    lost = 0.0 if rounded.minimum is None else float((rounded.minimum.float() - group.min()).abs())
    error = (rounded.dequantise()[0] - group).abs().max()
    assert error <= 0.501 * step + lost
    levels = rounded.values.to(torch.int16)
    most = FEWEST_BITS[form]
    assert int(levels.abs().max()) <= most
    if kind in ("random", "one outlier", "large"):
        assert int(levels.abs().max()) == most, "all bits are used"
        assert step == pytest.approx(
            float(group.abs().max() if most == 127 else group.max() - group.min()) / most, rel=1e-3
        )


@pytest.mark.parametrize("form", [Format.INT8, Format.INT4])
def test_zeros_stay_zeros(form: Format) -> None:
    assert torch.equal(quantise(torch.zeros(3, 40), form).dequantise(), torch.zeros(3, 64))
    weight = random_weight(2, 64)
    weight[0, :32] = 0
    rounded = quantise(weight, form).dequantise()
    assert torch.equal(rounded[0, :32], torch.zeros(32))
    assert bool((rounded[0, 32:] != 0).any())


@pytest.mark.parametrize("form", [Format.INT8, Format.INT4])
@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-6, 1e-7, 1e-9, 1e-38])
def test_weights_too_small_for_the_scale_lose_no_more_than_the_scale(size: float, form: Format) -> None:
    """A float16 has a smallest step of 2 ** -24; scales near it are coarse, and below it weights become zero."""
    group = GROUPS["random"] * size
    rounded = quantise(group[None], form)
    step = float(rounded.scale[0, 0].abs())
    error = float((rounded.dequantise()[0] - group).abs().max())
    assert error <= 0.5 * step + FEWEST_BITS[form] * 2.0**-25 + 2.0**-11 * float(group.abs().max())
    assert bool(rounded.dequantise().isfinite().all())


def test_blocks_of_q8_0_are_kept() -> None:
    """Each holds its largest value as 127 or -127, so that rounding finds its scale again."""
    blocks = random_blocks(40, 96, Format.INT8)
    values = blocks.values.clamp(-127, 127).view(40, 3, GROUP)
    values[:, :, 5] = 127 * (1 - 2 * (torch.arange(120).view(40, 3) % 2)).to(torch.int8)
    blocks = Quantised(scale=blocks.scale.abs(), minimum=None, values=values.view(40, 96))
    again = quantise(blocks.dequantise(), Format.INT8)
    assert torch.equal(again.scale, blocks.scale)
    assert torch.equal(again.values, blocks.values)


def test_blocks_of_q4_1_are_kept() -> None:
    """Each holds its smallest value as 0 and its largest as 15."""
    blocks = random_blocks(40, 96, Format.INT4)
    assert blocks.minimum is not None
    values = blocks.values.view(40, 3, GROUP).clone()
    values[:, :, 3], values[:, :, 9] = 0, 15
    blocks = Quantised(scale=blocks.scale.abs() + 0.01, minimum=blocks.minimum, values=values.view(40, 96))
    again = quantise(blocks.dequantise(), Format.INT4)
    assert again.minimum is not None
    assert torch.equal(again.minimum, blocks.minimum)
    assert torch.equal(again.scale, blocks.scale)
    assert torch.equal(again.values, blocks.values)


def test_padding_is_worth_nothing() -> None:
    for form in (Format.INT8, Format.INT4):
        whole = unpack(pack_quantised(quantise(random_weight(5, 7), form)), 32, 32, form)
        assert torch.equal(whole[5:], torch.zeros(27, 32))
    whole = unpack(pack_bf16(random_weight(5, 7).bfloat16()), 32, 32, Format.BF16)
    assert torch.equal(whole[5:], torch.zeros(27, 32))
    assert torch.equal(whole[:5, 7:], torch.zeros(5, 25))
