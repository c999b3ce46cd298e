"""Weights that torchao quantises. CUDA's int4 kernel is played by plain torch; all else runs as it would there."""

import copy
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from transformers import AutoModelForCausalLM

from compspec import SamplingParams
from compspec.config import ModelSection
from compspec.errors import ConfigError
from compspec.models import loader
from compspec.models.adapter import weight_bytes
from compspec.models.linears import same_inputs, use_kernels
from compspec.models.quiet import quiet_transformers
from compspec.models.self_check import relative_error
from compspec.models.torchao import TorchaoLinear, quantise_by_torchao
from compspec.runner import linear_test
from compspec.runner.compiled import mark_regions
from tests.law import make_engine, make_prompts, outputs, run
from tests.tiny_models import tiny_config, tiny_model_folder

torchao = pytest.importorskip("torchao")

CUDA = torch.device("cuda")
INT8, INT4 = "Int8Tensor", "Int4TilePackedTo4dTensor"


def pack(weight: Tensor, inner_k_tiles: int) -> Tensor:
    """[N, K / 2] uint8, two weights each, in the shape of CUDA's tiles and an order of its own."""
    rows, half = weight.shape
    tiles = rows // 8, half // (inner_k_tiles * 8), 32, inner_k_tiles // 2
    return weight.contiguous().view(torch.int32).reshape(tiles)


def multiply(x: Tensor, packed: Tensor, group_size: int, scale_and_zero: Tensor) -> Tensor:
    """[M, K] by what `pack` made of [N, K]; scale_and_zero [K / group, N, 2]."""
    pairs = packed.reshape(packed.shape[0] * 8, -1).view(torch.uint8)
    values = torch.stack([pairs >> 4, pairs & 15], dim=-1).flatten(1).unflatten(1, (-1, group_size))
    scale, zero = scale_and_zero.float().transpose(0, 1).unsqueeze(-1).unbind(2)
    weight = ((values.float() - 8) * scale + zero).flatten(1)
    return (x.float() @ weight.t()).to(x.dtype)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that has the operators of a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    library = torch.library.Library("aten", "IMPL")
    library.impl("_convert_weight_to_int4pack", pack, "CPU")
    library.impl("_weight_int4pack_mm", multiply, "CPU")
    yield
    library._destroy()


def tiny(dtype: torch.dtype = torch.bfloat16, **options: Any) -> nn.Module:
    config = tiny_config("llama", **{"tie_word_embeddings": True, **options})
    with torch.random.fork_rng(), quiet_transformers():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.to(dtype).eval().requires_grad_(False)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    tokens = torch.randint(0, 128, (1, 19), generator=torch.Generator().manual_seed(0))
    return model(input_ids=tokens, use_cache=False).logits[0]


def use(model: nn.Module, quantization: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> str:
    with same_inputs(model) as groups:
        logits(model)
    section = ModelSection(source="somewhere", quantization=quantization, **options)
    return use_kernels(model, groups, section, dtype, CUDA)


def kinds(model: nn.Module) -> dict[str, str]:
    """The type of the weight of each linear layer."""
    return {
        name: type(part.weight).__name__ if isinstance(part, TorchaoLinear) else "plain"
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear)
    }


@pytest.mark.parametrize(("quantization", "least", "most"), [("int8", 0.001, 0.05), ("int4", 0.02, 0.3)])
def test_the_model_says_nearly_the_same(quantization: str, least: float, most: float) -> None:
    model = tiny()
    expected = logits(model)
    assert use(model, quantization) == f"{quantization}:torchao-{torchao.__version__}"
    found = kinds(model)
    assert found.pop("lm_head") == INT8
    assert len(found) == 2 * 7
    # The keys and values of this model are 32 wide.
    few = {name for name in found if name.endswith(("k_proj", "v_proj"))}
    assert {found[name] for name in few} == {"plain"}
    assert {found[name] for name in found.keys() - few} == {INT8 if quantization == "int8" else INT4}
    assert least < relative_error(logits(model), expected) < most


def test_a_layer_with_a_bias_and_uneven_sizes_is_close() -> None:
    layer = nn.Linear(96, 68, dtype=torch.bfloat16).requires_grad_(False)
    nn.init.constant_(layer.bias, 3.0)
    x = torch.randn(1, 5, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    for quantization, tolerance in (("int8", 0.02), ("int4", 0.1)):
        model = nn.ModuleDict({"a": copy.deepcopy(layer)})
        quantise_by_torchao(model, ["a"], quantization)
        out = model["a"](x)
        assert out.dtype == torch.bfloat16
        assert out.shape == (1, 5, 68)
        assert relative_error(out[0] - 3, layer(x)[0] - 3) < tolerance


def test_int8_multiplies_with_the_whole_weight() -> None:
    """Not with integers and then by the scales, which a compiler takes for something slower."""
    model = nn.ModuleDict({"a": nn.Linear(96, 64, dtype=torch.bfloat16)}).requires_grad_(False)
    quantise_by_torchao(model, ["a"], "int8")
    layer = model["a"]
    x = torch.randn(1, 40, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(layer(x), F.linear(x, layer.weight.dequantize(), layer.bias))
    assert not torch.equal(layer(x), F.linear(x, layer.weight, layer.bias)), "the two can be told apart"


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_tied_input_embedding_keeps_its_weight(quantization: str) -> None:
    model = tiny()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before = model.model.embed_tokens.weight.clone()
    use(model, quantization)
    kept = model.model.embed_tokens.weight
    assert type(kept) is nn.Parameter
    assert torch.equal(kept, before)
    assert kinds(model)["lm_head"] == INT8


def test_weights_are_counted_as_they_are_held() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)})
    quantise_by_torchao(model, ["a"], "int8")
    parts = dict(model["a"].named_buffers())
    assert parts["qdata"].nbytes == 64 * 96
    assert weight_bytes(model) == sum(part.nbytes for part in parts.values()) < 64 * 96 * 1.5


def test_no_kernel_is_chosen_by_timing() -> None:
    """Inductor does not take the settings that torchao recommends."""
    settings = torch._inductor.config
    for quantization in ("int8", "int4"):
        with settings.patch(coordinate_descent_tuning=False, force_fuse_int_mm_with_mul=False):
            use(tiny(), quantization)
            assert not settings.coordinate_descent_tuning
            assert not settings.force_fuse_int_mm_with_mul


@pytest.mark.parametrize(
    ("quantization", "dtype", "sizes", "message"),
    [
        ("int8", torch.float16, {}, "'int8', which computes in bfloat16 or float32.*float16"),
        ("int4", torch.float32, {}, "'int4', which on CUDA computes in bfloat16.*float32"),
        ("int4", torch.bfloat16, {"intermediate_size": 136}, r"multiples of 32; layer '.*down_proj' has 136, use int8"),
    ],
)
def test_what_does_not_fit_is_refused(
    quantization: str, dtype: torch.dtype, sizes: dict[str, int], message: str
) -> None:
    model = tiny(dtype, **sizes)
    with pytest.raises(ConfigError, match=message) as error:
        use(model, quantization, dtype)
    assert "\n" not in str(error.value)
    assert set(kinds(model).values()) == {"plain"}


def test_an_old_gpu_is_refused_for_int4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    with pytest.raises(ConfigError, match=r"needs compute capability 8\.0; this GPU has 7\.5"):
        use(tiny(), "int4")
    use(tiny(), "int8")


@pytest.mark.parametrize(("version", "message"), [(None, "newer: pip"), ("0.15.0", r"newer, not 0\.15\.0: pip")])
def test_a_missing_or_old_torchao_is_an_error_that_says_what_to_install(
    version: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        assert name == "torchao"
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    with pytest.raises(
        ConfigError, match=rf"'int8', which .* torchao 0\.16 or {message} install \"compspec\[quant\]\""
    ):
        use(tiny(), "int8")


def quantised(quantization: str) -> nn.Module:
    model = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)})
    quantise_by_torchao(model, ["a"], quantization)
    return model["a"]


def test_the_self_test_tells_kinds_of_weights_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_test, "_known", {})
    plain, int8, int4 = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16), quantised("int8"), quantised("int4")
    found = linear_test.products(nn.Sequential(plain, int8, int4, quantised("int4")))
    assert [kinds(nn.Sequential(one))["0"] for one in found] == ["plain", INT8, INT4]
    for layer in (plain, int8):
        assert not linear_test.rows_differ(layer, torch.bfloat16, 3, 24)
    right = TorchaoLinear.forward
    monkeypatch.setattr(TorchaoLinear, "forward", lambda layer, x: right(layer, x) * (1.01 if x.shape[1] == 3 else 1))
    assert linear_test.rows_differ(int4, torch.bfloat16, 3, 24), "not the answer for int8"


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a(x)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_blocks_compile_once_for_all(quantization: str) -> None:
    """A tensor subclass cannot enter a region, and what differs by layer would have each traced on its own."""
    model = Blocks().requires_grad_(False)
    quantise_by_torchao(model, [f"blocks.{index}.a" for index in range(4)], quantization)
    x = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = model(x)
    mark_regions(model, (Block,))
    backend = AotEagerAndRecordGraphs()
    with torch.no_grad():
        found = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(x)
    assert torch.equal(found, expected)
    (graph,) = backend.graphs
    assert sum(isinstance(part, torch.fx.GraphModule) for part in graph.children()) == 1


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_an_engine_keeps_the_law(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []

    def on_cuda(module: nn.Module, groups: Any, section: ModelSection, dtype: torch.dtype, *_: object) -> str:
        named.append(use_kernels(module, groups, section, dtype, CUDA))
        return named[-1]

    folder = tiny_model_folder("llama", tmp_path, dtype="bfloat16", tie_word_embeddings=True)
    settings = {"model__dtype": "bfloat16", "cache_dir": str(tmp_path)}
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = make_prompts(4)

    def engine(method: str, **more: Any) -> Any:
        return make_engine(folder, speculative__method=method, **settings, **more)

    plain = engine("none")
    monkeypatch.setattr(loader, "use_kernels", on_cuda)
    alone, speculating = (engine(method, model__quantization=quantization) for method in ("none", "ngram"))
    assert named == [f"{quantization}:torchao-{torchao.__version__}"] * 2
    assert alone.loaded.fingerprint != plain.loaded.fingerprint
    assert outputs(run(alone, prompts, params)) == outputs(run(speculating, prompts, params))
    assert speculating.stats.num_accepted_tokens > 0
