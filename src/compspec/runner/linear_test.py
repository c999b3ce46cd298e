"""Proves that the matrix products of a model give the same bits for any number of rows in use.

Libraries choose another kernel, and with it another order of summation, by the number of rows. In bfloat16 the
rounding of the result hides that in all but one of tens of thousands of elements, so a few forwards of a small model
can miss it. Here every kind of product is compared in enough elements to be sure.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from compspec.kernels.packed import PackedLinear

# Elements of the result that are compared. Sums in another order differ by about 1e-7 of their size and so fall on
# two sides of a bfloat16 rounding boundary about once in 25,000 times.
_ELEMENTS = {torch.float32: 1 << 14, torch.bfloat16: 1 << 18, torch.float16: 1 << 18}
_MOST_CALLS = 2048


# Kernels are chosen by shapes and never by values, so one answer serves every model of a process.
_known: dict[tuple[object, ...], bool] = {}


def products(module: nn.Module) -> list[nn.Module]:
    """One layer of each kind of matrix product in a model: `nn.Linear`, `PackedLinear`, and the Conv1D of GPT-2."""
    kinds = (nn.Linear, PackedLinear)
    layers = [one for one in module.modules() if isinstance(one, kinds) or type(one).__name__ == "Conv1D"]
    return list({_kind(layer): layer for layer in layers}.values())


def rows_differ(layer: nn.Module, dtype: torch.dtype, num_rows: int, reference_rows: int) -> bool:
    """Whether a row of `num_rows` has other bits than among `reference_rows`, at another place, or beside others.

    Args:
        layer: one of `products`.
        dtype: of what a `PackedLinear` multiplies; others multiply the type of their weight.
        num_rows, reference_rows: rows of a forward; the second at least as large as the first.
    """
    key = (*_kind(layer), dtype, num_rows, reference_rows, torch.get_num_threads())
    if key not in _known:
        _known[key] = _compare(layer, dtype, num_rows, reference_rows)
    return _known[key]


def _kind(layer: nn.Module) -> tuple[object, ...]:
    if isinstance(layer, PackedLinear):
        return type(layer), layer.form, layer.in_features, layer.columns, layer.bias is None
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return type(layer), type(weight), weight.shape, weight.dtype, weight.device, layer.bias is None


@torch.no_grad()
def _compare(layer: nn.Module, dtype: torch.dtype, num_rows: int, reference_rows: int) -> bool:
    for x in _inputs(layer, dtype, num_rows, reference_rows):
        reference = layer(x)
        # From the last row on backwards: the places of rows change as well.
        starts = range(reference_rows - num_rows, -1, -num_rows)
        if any(not torch.equal(layer(x[:, at : at + num_rows]), reference[:, at : at + num_rows]) for at in starts):
            return True
        if not torch.equal(layer(x.roll(1, dims=1)), reference.roll(1, dims=1)):
            return True
    return False


def _inputs(layer: nn.Module, dtype: torch.dtype, num_rows: int, reference_rows: int) -> Iterator[Tensor]:
    """Random rows [1, reference_rows, in features], until enough elements or calls are made of them."""
    if isinstance(layer, PackedLinear):
        in_features, out_features, device = layer.in_features, layer.out_features, layer.packed.device
    else:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        in_features, out_features = weight.shape[::-1] if isinstance(layer, nn.Linear) else weight.shape
        dtype, device = weight.dtype, weight.device
    generator = torch.Generator().manual_seed(20_25)
    calls_each = reference_rows // num_rows + 2
    elements = calls = 0
    while elements < _ELEMENTS.get(dtype, 1 << 18) and calls < _MOST_CALLS:
        x = torch.randn(1, reference_rows, in_features, generator=generator)
        yield x.to(device, dtype)
        elements += reference_rows * out_features
        calls += calls_each
