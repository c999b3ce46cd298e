"""Products whose rows depend on how many there are, or on their place, are found, however rarely it shows."""

import pytest
import torch
from torch import Tensor, nn

from compspec.kernels.packed import PackedLinear
from compspec.kernels.packing import Format, pack_bf16, pack_quantised, quantise
from compspec.runner import linear_test
from compspec.runner.linear_test import products, rows_differ


class Faulty(nn.Linear):
    """One element in so many differs by one rounding in forwards of a given number of rows."""

    def __init__(self, rows: int, one_in: int, last_place: bool = False) -> None:
        super().__init__(64, 32, dtype=torch.bfloat16)
        self.rows, self.one_in, self.last_place = rows, one_in, last_place
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.einsum("brk,nk->brn", x.double(), self.weight.double()).bfloat16()
        if x.shape[1] == self.rows:
            hit = torch.randint(self.one_in, out.shape, generator=self.generator) == 0
            hit[:, : -1 if self.last_place else 0] = False
            out = torch.where(hit, out * 1.01, out)
        return out


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_test, "_known", {})


@pytest.mark.parametrize("rows", [2, 3, 8])
def test_one_element_in_25_000_is_found(rows: int) -> None:
    assert rows_differ(Faulty(rows, 25_000), torch.bfloat16, rows, 24)


@pytest.mark.parametrize("rows", [2, 7, 24])
def test_rows_that_agree_pass(rows: int) -> None:
    assert not rows_differ(Faulty(99, 1), torch.bfloat16, rows, 24)


def test_a_row_that_depends_on_its_place_in_the_largest_forward_is_found() -> None:
    assert rows_differ(Faulty(24, 1000, last_place=True), torch.bfloat16, 24, 24)


def test_an_answer_is_kept_for_layers_of_the_same_kind() -> None:
    assert not rows_differ(Faulty(99, 1), torch.bfloat16, 2, 24)
    assert not rows_differ(Faulty(2, 1), torch.bfloat16, 2, 24), "asked again"
    assert rows_differ(Faulty(4, 1), torch.bfloat16, 4, 24), "another number of rows is another question"


def test_one_layer_of_each_kind_is_tested() -> None:
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(
        nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 4), nn.LayerNorm(8), Conv1D(8, 8)
    )
    assert len(products(model)) == 4
    assert not rows_differ(model[5], torch.float32, 24, 24)


def packed_layer(
    form: Format, first: int = 0, *, columns: int = 64, in_features: int = 96, bias: bool = False
) -> nn.Module:
    weight = torch.randn(columns, in_features, generator=torch.Generator().manual_seed(0))
    return PackedLinear(
        pack_bf16(weight.bfloat16()) if form is Format.BF16 else pack_quantised(quantise(weight, form)),
        torch.zeros(columns) if bias else None,
        in_features=in_features,
        columns=columns,
        first=first,
        out_features=32,
        form=form,
    )


def test_packed_layers_of_each_kind_are_tested() -> None:
    layers = [packed_layer(form) for form in Format]
    same = [packed_layer(Format.INT8, first=32), packed_layer(Format.INT4)]
    others = [
        packed_layer(Format.INT8, bias=True),
        packed_layer(Format.INT8, columns=96),
        packed_layer(Format.INT8, in_features=64),
    ]
    model = nn.Sequential(*layers, *same, *others)
    assert len(products(model)) == len(layers) + len(others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", Format)
def test_packed_layers_pass(form: Format, dtype: torch.dtype) -> None:
    if form is Format.BF16 and dtype != torch.bfloat16:
        return
    assert not rows_differ(packed_layer(form), dtype, 3, 24)


@pytest.mark.parametrize("form", Format)
def test_a_kernel_that_rounds_rows_of_another_number_otherwise_is_found(
    form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = PackedLinear.forward

    def wrong(layer: PackedLinear, x: Tensor) -> Tensor:
        out = right(layer, x)
        return out * (1 + 2.0**-7) if x.shape[1] == 3 else out

    monkeypatch.setattr(PackedLinear, "forward", wrong)
    assert rows_differ(packed_layer(form), torch.bfloat16, 3, 24)
    assert not rows_differ(packed_layer(form), torch.bfloat16, 4, 24)
