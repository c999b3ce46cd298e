"""The CPU kernel inside models: patched in place, compiled, and in nested regions."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from compspec.kernels import linear


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


def test_a_traced_model_agrees_with_the_unpatched_one(llama: LlamaForCausalLM, cache_dir: Path) -> None:
    model = copy.deepcopy(llama)
    linear.use_linear_kernel(model, cache_dir)
    tokens = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = logits(llama, tokens)
    torch.testing.assert_close(logits(model, tokens), expected, atol=0.02, rtol=0.02)
    traced = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(logits(traced, tokens), expected, atol=0.02, rtol=0.02)


def test_nested_regions(llama: LlamaForCausalLM, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(llama)
    linear.use_linear_kernel(model, cache_dir)
    tokens = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = logits(llama, tokens)
    region = torch.compiler.nested_compile_region(LlamaDecoderLayer.forward)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", region)
    traced = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(logits(traced, tokens), expected, atol=0.02, rtol=0.02)


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
