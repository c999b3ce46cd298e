"""Weights of linear layers in the order in which the CPU kernel reads them, as they are or quantised.

Legend: N output features, K input features, both padded with zeros to multiples of 32; B = N / 32 blocks of rows of the
weight, G = K / 32 groups of input features.

Formats:
    BF16: the weight itself.
    INT8: a scale per row and group (fp16) and signed bytes; weight = scale * byte. GGUF's Q8_0 is this.
    INT4: a scale and a minimum per row and group (fp16) and four bits; weight = scale * bits + minimum. GGUF's Q4_1 is
        this, and Q4_0 with minimum = -8 * scale.
"""

import functools
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

COLUMNS = 32
"""Output features of a block."""

GROUP = 32
"""Input features that share a scale."""

_HALF = 16


class Format(IntEnum):
    """How a weight is stored; the numbers are those of packed.cpp."""

    BF16 = 0
    INT8 = 1
    INT4 = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """A weight in groups of 32 input features.

    Attributes:
        scale: [N, G] float16.
        minimum: [N, G] float16; None for INT8.
        values: [N, K] int8, or uint8 below 16 where there is a minimum.
    """

    scale: Tensor
    minimum: Tensor | None
    values: Tensor

    @property
    def format(self) -> Format:
        """INT4 where there is a minimum."""
        return Format.INT8 if self.minimum is None else Format.INT4

    def dequantise(self) -> Tensor:
        """[N, K] float32."""
        weight = _grouped(self.values.float()) * self.scale.float()[..., None]
        if self.minimum is not None:
            weight += self.minimum.float()[..., None]
        return weight.flatten(1)


def padded_size(size: int) -> int:
    """The next multiple of 32."""
    return -(-size // GROUP) * GROUP


@functools.cache
def packed_bytes(out_features: int, in_features: int, form: Format) -> int:
    """Bytes of a packed weight."""
    per_group = {Format.BF16: 2 * COLUMNS * GROUP, Format.INT8: COLUMNS * (2 + GROUP), Format.INT4: COLUMNS * 20}
    return padded_size(out_features) // COLUMNS * (padded_size(in_features) // GROUP) * per_group[form]


def quantise(weight: Tensor, form: Format) -> Quantised:
    """Rounds a weight [N, K] to 8 bits (symmetric) or 4 bits (from the smallest to the largest of each group)."""
    groups = _grouped(_padded(weight.float(), 0))
    if form is Format.INT8:
        scale = (groups.abs().amax(-1) / 127).half()
        values = (groups / _divisor(scale)).round().clamp(-127, 127).to(torch.int8)
        return Quantised(scale=scale, minimum=None, values=values.flatten(1))
    minimum = groups.amin(-1).half()
    scale = ((groups.amax(-1) - minimum.float()) / 15).half()
    values = ((groups - minimum.float()[..., None]) / _divisor(scale)).round().clamp(0, 15).to(torch.uint8)
    return Quantised(scale=scale, minimum=minimum, values=values.flatten(1))


def pack_bf16(weight: Tensor) -> Tensor:
    """[N, K] bfloat16 -> bytes of [B, G, 2 halves, 16 pairs, 16 rows, 2]."""
    weight = _padded(weight, COLUMNS)
    blocks = weight.view(len(weight) // COLUMNS, 2, _HALF, -1, _HALF, 2)
    return blocks.permute(0, 3, 1, 4, 2, 5).contiguous().view(torch.uint8).flatten()


def pack_quantised(weight: Quantised) -> Tensor:
    """Bytes of [B, G, scales, minima where there are, 2 halves, fours, 16 rows, 4]."""
    values = weight.values
    if weight.format is Format.INT8:
        values = (values.to(torch.int16) + 128).to(torch.uint8)
    values = F.pad(values, (0, 0, 0, -len(values) % COLUMNS))
    blocks = values.view(len(values) // COLUMNS, 2, _HALF, -1, GROUP // 4, 4).permute(0, 3, 1, 4, 2, 5)
    if weight.format is Format.INT4:
        low, high = blocks.chunk(2, dim=3)
        blocks = low | high << 4
    parts = [weight.scale] if weight.minimum is None else [weight.scale, weight.minimum]
    columns = [_columns(part) for part in parts]
    return torch.cat([*columns, blocks.flatten(2)], dim=2).flatten()


def unpack(packed: Tensor, out_features: int, in_features: int, form: Format) -> Tensor:
    """The weight that packed bytes stand for, [N, K] float32, without the padding."""
    num_groups = padded_size(in_features) // GROUP
    blocks = packed.view(padded_size(out_features) // COLUMNS, num_groups, -1)
    if form is Format.BF16:
        halves = blocks.view(torch.bfloat16).view(*blocks.shape[:2], 2, _HALF, _HALF, 2)
        return halves.permute(0, 2, 4, 1, 3, 5).reshape(-1, num_groups * GROUP)[:out_features, :in_features].float()
    head = 2 * COLUMNS
    scale = blocks[..., :head].contiguous().view(torch.float16).transpose(1, 2).reshape(-1, num_groups)
    minimum = None
    body = blocks[..., head:]
    if form is Format.INT4:
        minimum = blocks[..., head : 2 * head].contiguous().view(torch.float16).transpose(1, 2).reshape(-1, num_groups)
        body = blocks[..., 2 * head :]
    fours = body.reshape(*blocks.shape[:2], 2, -1, _HALF, 4)
    if form is Format.INT4:
        fours = torch.cat([fours & 15, fours >> 4], dim=3)
    values = fours.permute(0, 2, 4, 1, 3, 5).reshape(-1, num_groups * GROUP)
    if form is Format.INT8:
        values = (values.to(torch.int16) - 128).to(torch.int8)
    whole = Quantised(scale=scale, minimum=minimum, values=values).dequantise()
    return whole[:out_features, :in_features]


def _grouped(weight: Tensor) -> Tensor:
    """[N, K] -> [N, G, 32]."""
    return weight.view(len(weight), -1, GROUP)


def _divisor(scale: Tensor) -> Tensor:
    """[N, G, 1]; 1 where the scale is zero, and the values with it."""
    wide = scale.float()
    return torch.where(wide == 0, 1, wide)[..., None]


def _padded(weight: Tensor, rows: int) -> Tensor:
    """Zeros up to whole groups, and up to whole blocks of rows if asked."""
    return F.pad(weight, (0, -weight.shape[1] % GROUP, 0, -len(weight) % rows if rows else 0))


def _columns(part: Tensor) -> Tensor:
    """[N, G] float16 -> bytes [B, G, 64]."""
    part = F.pad(part, (0, 0, 0, -len(part) % COLUMNS))
    return part.view(len(part) // COLUMNS, COLUMNS, -1).transpose(1, 2).contiguous().view(torch.uint8)
