"""Linear layers on packed weights: which ones, which together, and the model computes what it did."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compspec.config import ModelSection
from compspec.errors import ConfigError
from compspec.kernels.packed import PackedLinear, implementation
from compspec.kernels.packing import Format, Quantised, quantise, unpack
from compspec.models import linears
from compspec.models.linears import KnownWeights, pack_linears, same_inputs, use_kernels
from compspec.models.quiet import quiet_transformers
from compspec.models.self_check import relative_error
from tests.tiny_models import FAMILIES, tiny_config, tiny_model_folder
from tests.unit.models.paged import PagedRun

CPU = torch.device("cpu")

# Of the second layer, then the head; the first layer has the same.
GROUPS = {
    "llama": [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",), ("lm_head",)],
    "qwen2": [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",), ("lm_head",)],
    "gemma": [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",), ("lm_head",)],
    "phi3": [("qkv_proj",), ("o_proj",), ("gate_up_proj",), ("down_proj",), ("lm_head",)],
    "phi": [("q_proj", "k_proj", "v_proj"), ("dense",), ("fc1",), ("fc2",), ("lm_head",)],
    "gpt_neox": [("query_key_value",), ("dense",), ("dense_h_to_4h",), ("dense_4h_to_h",), ("lm_head",)],
    "gpt2": [("lm_head",)],
    "mixtral": [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("lm_head",)],
    "qwen2_moe": [
        ("q_proj", "k_proj", "v_proj"),
        ("o_proj",),
        ("gate_proj", "up_proj"),
        ("down_proj",),
        ("shared_expert_gate",),
        ("lm_head",),
    ],
}


@pytest.fixture(autouse=True)
def bf16_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch has to multiply what is packed."""
    monkeypatch.setattr(linears, "packs_bf16", lambda: True)


def tiny(family: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> nn.Module:
    with torch.random.fork_rng(), quiet_transformers():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **options), attn_implementation="eager")
    return model.to(dtype).eval().requires_grad_(False)


def tokens() -> Tensor:
    return torch.randint(0, 128, (1, 19), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=tokens(), use_cache=False).logits[0]


def groups_of(model: nn.Module) -> list[tuple[str, ...]]:
    with same_inputs(model) as groups:
        logits(model)
    return groups


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    return {name: part for name, part in model.named_modules() if isinstance(part, PackedLinear)}


def weight_of(layer: PackedLinear) -> Tensor:
    """What its packed weight stands for."""
    whole = unpack(layer.packed, layer.columns, layer.in_features, Format(layer.form))
    return whole[layer.first : layer.first + layer.out_features]


class Layers(nn.Module):
    """Three layers of one input; sizes and biases of all kinds."""

    def __init__(self, sizes: tuple[int, ...] = (70, 64, 96), biases: tuple[bool, ...] = (True, False, True)) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = (nn.Linear(40, size, bias=bias) for size, bias in zip(sizes, biases, strict=True))
        self.a, self.b, self.c = (layer.bfloat16().requires_grad_(False) for layer in made)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.a(x), self.b(x), self.c(x)]


def some_x(rows: int = 5) -> Tensor:
    return torch.randn(1, rows, 40, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("family", GROUPS)
def test_layers_with_one_input_are_found_together(family: str) -> None:
    groups = groups_of(tiny(family))
    expected = GROUPS[family]
    *layer, head = expected
    assert [tuple(name.rpartition(".")[2] for name in group) for group in groups] == [*layer, *layer, head]
    assert all(len({name.rpartition(".")[0] for name in group}) == 1 for group in groups), "of one parent"


def test_only_the_same_tensor_in_turn_to_layers_of_one_parent_makes_a_group() -> None:
    class Special(nn.Linear):
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
            self.special = Special(4, 4)
            self.other = nn.ModuleDict({"e": nn.Linear(4, 4)})

        def forward(self, x: Tensor) -> None:
            self.a(x), self.b(input=x), self.special(x)
            self.c(x.clone())
            self.d(x)
            self.other["e"](x)
            self.a(x)

    model = Model()
    with same_inputs(model) as groups:
        model(torch.zeros(1, 4))
    assert groups == [("a", "b"), ("c",), ("d",), ("other.e",), ("a",)]
    model(torch.zeros(1, 4))
    assert len(groups) == 5, "it listens no longer"


@pytest.mark.parametrize("wanted", Format)
def test_a_group_has_one_weight_and_each_layer_its_part(wanted: Format) -> None:
    model = Layers()
    before = copy.deepcopy(model)
    assert pack_linears(model, [("a", "b", "c")], wanted) == 3
    layers = packed_layers(model)
    assert list(layers) == ["a", "b", "c"]
    assert {layer.form for layer in layers.values()} == {wanted}
    assert len({layer.packed.data_ptr() for layer in layers.values()}) == 1
    assert [(layer.first, layer.out_features, layer.columns) for layer in layers.values()] == [
        (0, 70, 256),
        (96, 64, 256),
        (160, 96, 256),
    ]
    for name, layer in layers.items():
        weight = before.get_submodule(name).weight
        held = weight.float() if wanted is Format.BF16 else quantise(weight, wanted).dequantise()[:, :40]
        assert torch.equal(weight_of(layer), held)
    for ours, theirs in zip(model(some_x()), before(some_x()), strict=True):
        assert ours.shape == theirs.shape
        error = (ours - theirs).float().norm() / theirs.float().norm()
        assert error < {Format.BF16: 0.005, Format.INT8: 0.02, Format.INT4: 0.15}[wanted]


def test_layers_without_a_bias_have_none() -> None:
    model = Layers(biases=(False, False, False))
    pack_linears(model, [("a", "b"), ("c",)], Format.BF16)
    assert all(layer.bias is None for layer in packed_layers(model).values())


def test_a_layer_alone_is_not_padded() -> None:
    model = Layers()
    pack_linears(model, [("a",)], Format.INT8)
    assert (model.a.columns, model.a.out_features, model.a.first) == (70, 70, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_of_a_few_outputs_are_not_quantised(dtype: torch.dtype) -> None:
    model = Layers(sizes=(64, 63, 1)).to(dtype)
    before = copy.deepcopy(model)
    kept_weights = dtype == torch.bfloat16  # packed as they are
    assert pack_linears(model, [("a", "b", "c")], Format.INT4) == (3 if kept_weights else 1)
    assert model.a.form == Format.INT4
    for name in ("b", "c"):
        layer = model.get_submodule(name)
        if kept_weights:
            assert layer.form == Format.BF16
            assert torch.equal(weight_of(layer), before.get_submodule(name).weight.float())
        else:
            assert torch.equal(layer.weight, before.get_submodule(name).weight)


def test_what_cannot_be_replaced_stays() -> None:
    class Special(nn.Linear):
        pass

    model = Layers()
    model.a = Special(40, 64).bfloat16()
    model.b = nn.Linear(40, 64)  # float32
    special, wide = model.a, model.b
    assert pack_linears(model, [("a", "b", "c")], Format.BF16) == 1
    assert model.a is special
    assert model.b is wide
    assert isinstance(model.c, PackedLinear)
    unnamed = Layers()
    assert pack_linears(unnamed, [("c",)], Format.INT8) == 1
    assert type(unnamed.a) is nn.Linear


@pytest.mark.parametrize("groups", [[("a",), ("b",), ("a",)], [("a", "b", "a")], [("a", "a")]])
def test_a_layer_that_runs_twice_is_right_both_times(groups: list[tuple[str, ...]]) -> None:
    model = Layers(sizes=(40, 64, 32))
    before = copy.deepcopy(model)
    pack_linears(model, groups, Format.BF16)
    assert isinstance(model.a, PackedLinear)
    torch.testing.assert_close(model.a(model.a(some_x())), before.a(before.a(some_x())), atol=0.01, rtol=0.02)


def test_a_tensor_that_changes_in_place_between_two_layers() -> None:
    """They look as if they had one input; each multiplies what it gets."""

    class Changing(Layers):
        def forward(self, x: Tensor) -> list[Tensor]:
            x = x.clone()
            first = self.a(x)
            x.mul_(2)
            return [first, self.b(x)]

    model = Changing()
    before = copy.deepcopy(model)
    with same_inputs(model) as groups:
        model(some_x())
    assert groups == [("a", "b")]
    pack_linears(model, groups, Format.BF16)
    for ours, theirs in zip(model(some_x()), before(some_x()), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("wanted", Format)
def test_tied_embeddings_keep_their_weight_and_the_head_has_at_least_8_bits(wanted: Format) -> None:
    model: Any = tiny("llama", tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight
    assert model.lm_head.weight is embedding
    before, values = logits(model), embedding.clone()
    groups = groups_of(model)
    assert pack_linears(model, groups, wanted) == 2 * 7 + 1
    assert model.get_input_embeddings().weight is embedding
    assert torch.equal(embedding, values)
    assert model.lm_head.form == (Format.INT8 if wanted is Format.INT4 else wanted)
    assert model.model.layers[1].self_attn.q_proj.form == wanted
    assert relative_error(logits(model), before) < {Format.BF16: 0.02, Format.INT8: 0.06, Format.INT4: 0.5}[wanted]


def test_blocks_of_the_file_are_taken_over_unless_they_have_more_bits() -> None:
    def find(name: str, weight: Tensor) -> Quantised | None:
        asked.append(name)
        if name == "c":
            return None
        return quantise(weight * 2, Format.INT8 if name == "a" else Format.INT4)  # to be told from the weight's own

    for wanted, doubled in ((Format.INT8, {"a", "b"}), (Format.INT4, {"b"})):
        asked: list[str] = []
        model = Layers()
        before = copy.deepcopy(model)
        pack_linears(model, [("a", "b", "c")], wanted, KnownWeights(find_blocks=find))
        assert asked == ["a", "b", "c"]
        for name, layer in packed_layers(model).items():
            weight = before.get_submodule(name).weight.float()
            size = float((weight_of(layer) * weight).sum() / (weight * weight).sum())
            assert size == pytest.approx(2 if name in doubled else 1, abs=0.05)
        assert model.b.form == Format.INT4


@pytest.mark.parametrize("wanted", [Format.INT8, Format.INT4])
@pytest.mark.parametrize("value", [1e8, float("inf"), float("nan")])
def test_weights_beyond_a_float16_scale_are_refused(wanted: Format, value: float) -> None:
    model = Layers()
    model.b.weight[3, 5] = value
    with pytest.raises(ConfigError, match=r"layer 'b' has weights that are too large.*model\.quantization: none"):
        pack_linears(model, [("a", "b", "c")], wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_it_did(family: str, tmp_path: Path, load: Callable[..., Any]) -> None:
    """Through the loader and its self-check, over the paged cache: prefill, and decoding in windows."""
    folder = tiny_model_folder(family, tmp_path, dtype="bfloat16")
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(3, 100, (length,), generator=generator) for length in (20, 13)]

    def run(**options: Any) -> tuple[nn.Module, Tensor]:
        adapter = load(folder, **options).adapter
        return adapter.module, torch.cat(PagedRun(adapter, sequences).run())

    native, expected = run(cpu_linear="native")
    assert not packed_layers(native)
    num_linear = sum(type(part) is nn.Linear for part in native.modules())
    for options, tolerance in (({}, 0.02), ({"quantization": "int8"}, 0.08), ({"quantization": "int4"}, 0.5)):
        module, found = run(**options)
        assert len(packed_layers(module)) == num_linear
        error = relative_error(found, expected)
        assert error < tolerance, options
        assert (error > 0.001) == bool(options), "quantised or not"


def section(**options: Any) -> ModelSection:
    return ModelSection(source="somewhere", device="cpu", **options)


@pytest.mark.parametrize(
    ("options", "dtype", "device", "message"),
    [
        ({"quantization": "int8", "cpu_linear": "kernel"}, torch.bfloat16, "cuda", "torchao does on cuda.* is for cpu"),
        ({"quantization": "int8"}, torch.float16, "cuda", r"'int8', which computes in bfloat16 or float32.*float16"),
        ({"quantization": "int4"}, torch.float16, "cpu", r"'int4', which computes in bfloat16 or float32.*float16"),
        ({"quantization": "int4", "cpu_linear": "native"}, torch.bfloat16, "cpu", "cpu_linear: native leaves them out"),
        ({"cpu_linear": "kernel"}, torch.float32, "cpu", "'kernel', which is for bfloat16 on cpu.*float32"),
        ({"cpu_linear": "kernel"}, torch.bfloat16, "cuda", "'kernel', which is for bfloat16 on cpu.*cuda"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], dtype: torch.dtype, device: str, message: str) -> None:
    model = Layers()
    with pytest.raises(ConfigError, match=message) as error:
        use_kernels(model, [("a",)], section(**options), dtype, torch.device(device))
    assert "\n" not in str(error.value)
    assert not packed_layers(model)


def test_the_loader_refuses_what_does_not_fit(tmp_path: Path, load: Callable[..., Any]) -> None:
    folder = tiny_model_folder("llama", tmp_path)
    with pytest.raises(ConfigError, match="bfloat16 or float32"):
        load(folder, quantization="int8", dtype="float16")


@pytest.mark.parametrize(
    ("options", "dtype", "name", "layer"),
    [
        ({}, torch.bfloat16, "bf16:", PackedLinear),
        ({"cpu_linear": "kernel"}, torch.bfloat16, "bf16:", PackedLinear),
        ({"cpu_linear": "native"}, torch.bfloat16, "native", nn.Linear),
        ({}, torch.float32, "native", nn.Linear),
        ({"quantization": "int8"}, torch.float32, "int8:", PackedLinear),
        ({"quantization": "int4", "cpu_linear": "kernel"}, torch.bfloat16, "int4:", PackedLinear),
    ],
)
def test_what_multiplies_is_named(options: dict[str, Any], dtype: torch.dtype, name: str, layer: type) -> None:
    model = Layers().to(dtype)
    own = implementation() if name.endswith(":") else ""
    assert use_kernels(model, [("a",)], section(**options), dtype, CPU) == name + own
    assert type(model.a) is layer


def test_without_bf16_instructions_there_is_the_other_kernel_or_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linears, "packs_bf16", lambda: False)
    patched: list[nn.Module] = []
    monkeypatch.setattr(linears, "use_linear_kernel", lambda module: patched.append(module) or 3)
    for wanted, choice, name in ((True, "auto", "kernel"), (False, "auto", "native"), (False, "kernel", "kernel")):
        monkeypatch.setattr(linears, "is_wanted", lambda wanted=wanted: wanted)
        patched.clear()
        model = Layers()
        assert use_kernels(model, [("a",)], section(cpu_linear=choice), torch.bfloat16, CPU) == name
        assert patched == ([model] if name == "kernel" else [])
        assert not packed_layers(model)
    monkeypatch.setattr(linears, "use_linear_kernel", lambda module: 0)
    with pytest.raises(ConfigError, match="cannot be built here"):
        use_kernels(Layers(), [("a",)], section(cpu_linear="kernel"), torch.bfloat16, CPU)
