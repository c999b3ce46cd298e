"""The CPU kernels inside models: patched in place, compiled, and in nested regions."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from compspec.kernels import linear
from compspec.kernels.packed import packs_bf16
from compspec.kernels.packing import Format
from compspec.models.linears import pack_linears, same_inputs


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).bfloat16().eval()


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, use_cache=False).logits


def test_parameters_and_ties_stay(llama: LlamaForCausalLM, cache_dir: Path) -> None:
    model = copy.deepcopy(llama)
    assert linear.use_linear_kernel(model, cache_dir) == 2 * 7 + 1
    assert linear.use_linear_kernel(model, cache_dir) == 0
    assert model.lm_head.weight is model.model.embed_tokens.weight
    state = model.state_dict()
    assert list(state) == list(llama.state_dict())
    assert all(torch.equal(state[name], value) for name, value in llama.state_dict().items())


def test_only_plain_bfloat16_layers(cache_dir: Path) -> None:
    class Special(nn.Linear):
        pass

    plain = nn.Linear(4, 4, dtype=torch.bfloat16)
    model = nn.Sequential(plain, nn.Linear(4, 4), Special(4, 4, dtype=torch.bfloat16))
    assert linear.use_linear_kernel(model, cache_dir) == 1
    assert isinstance(plain, nn.Linear)
    x = torch.randn(3, 4).bfloat16()
    assert torch.equal(plain(x), torch.ops.compspec.linear(x, plain.weight, plain.bias))


@pytest.fixture(params=["rows", *(form.name.lower() for form in Format)])
def patched(request: pytest.FixtureRequest, llama: LlamaForCausalLM, cache_dir: Path) -> LlamaForCausalLM:
    """The model on each of the kernels."""
    model = copy.deepcopy(llama)
    if request.param == "rows":
        linear.use_linear_kernel(model, cache_dir)
        return model
    if not packs_bf16():
        pytest.skip("needs a processor with bf16 instructions")
    with same_inputs(model) as groups:
        logits(model, some_tokens())
    assert pack_linears(model, groups, Format[request.param.upper()]) == 2 * 7 + 1
    return model


def some_tokens() -> Tensor:
    return torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(0))


def assert_close(found: Tensor, expected: Tensor, unpatched: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    assert (found - unpatched).float().norm() / unpatched.float().norm() < 0.2


def test_a_traced_model_agrees_with_the_unpatched_one(llama: LlamaForCausalLM, patched: LlamaForCausalLM) -> None:
    expected = logits(patched, some_tokens())
    traced = torch.compile(patched, fullgraph=True, dynamic=False, backend="aot_eager")
    assert_close(logits(traced, some_tokens()), expected, logits(llama, some_tokens()))


def test_nested_regions(llama: LlamaForCausalLM, patched: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, unpatched = logits(patched, some_tokens()), logits(llama, some_tokens())
    region = torch.compiler.nested_compile_region(LlamaDecoderLayer.forward)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", region)
    traced = torch.compile(patched, fullgraph=True, dynamic=False, backend="aot_eager")
    assert_close(logits(traced, some_tokens()), expected, unpatched)


def test_generated_code_calls_the_kernel(cache_dir: Path) -> None:
    # Small, for the C++ that inductor writes takes seconds to compile.
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(2)]
    linear.use_linear_kernel(nn.ModuleList(layers), cache_dir)

    @torch.compiler.nested_compile_region
    def region(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.ops.compspec.linear(x, weight, bias).relu()

    def function(x: Tensor) -> Tensor:
        for layer in layers:
            x = region(x, layer.weight, layer.bias)
        return layers[0](x)

    x = torch.randn(2, 5, 64).bfloat16()
    assert torch.equal(torch.compile(function, fullgraph=True, dynamic=False)(x), function(x))
