"""A model's first layers compute what a model made of them alone computes, with the weights of the whole one."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compspec.errors import UnsupportedError
from compspec.models.first_layers import first_layers
from compspec.models.quiet import quiet_transformers
from tests.tiny_models import tiny_model_folder
from tests.unit.models.paged import PagedRun

FAMILIES_OF_A_KIND = ["llama", "gemma3_text", "gpt2", "gptj", "opt", "phi", "mixtral", "smollm3", "cohere", "gpt_neox"]
"""Interleaved windows and layers without positions, learned positions, parallel blocks, experts, norms with bias."""
NUM_LAYERS = 3


def folder_of(family: str, tmp: Path) -> Path:
    return tiny_model_folder(family, tmp, num_hidden_layers=NUM_LAYERS)


def eager(folder: Path) -> Any:
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def truncated(folder: Path, num_layers: int) -> Any:
    """A model of its own with fewer layers, and the weights that it has in common with the whole one."""
    whole = eager(folder)
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers = num_layers
    for name in ("layer_types", "no_rope_layers"):
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[:num_layers])
    with quiet_transformers():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    lacking, _ = model.load_state_dict(whole.state_dict(), strict=False)
    assert not lacking
    return model


@torch.no_grad()
def logits_of(model: Any, sequences: list[Tensor]) -> list[Tensor]:
    return [model(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences]


def some_sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 100, (length,), generator=generator) for length in (41, 37)]


def assert_equal_logits(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        scale = float(theirs.std())
        torch.testing.assert_close(ours / scale, theirs / scale, atol=2e-5, rtol=0)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("family", FAMILIES_OF_A_KIND)
def test_logits_are_those_of_a_model_that_has_these_layers_alone(family, num_layers, tmp_path, load):
    folder = folder_of(family, tmp_path)
    view = first_layers(load(folder).adapter, num_layers)
    sequences = some_sequences()
    expected = logits_of(truncated(folder, num_layers), sequences)
    assert_equal_logits(PagedRun(view, sequences).run(), expected)
    whole = logits_of(eager(folder), sequences)
    assert all(not torch.allclose(short, all_of, atol=1e-2) for short, all_of in zip(expected, whole, strict=True))


@pytest.mark.parametrize("family", FAMILIES_OF_A_KIND)
def test_the_whole_model_stays_as_it_is(family, tmp_path, load):
    folder = folder_of(family, tmp_path)
    adapter = load(folder).adapter
    config, modules = adapter.module.config.to_dict(), dict(adapter.module.named_modules())
    view = first_layers(adapter, 1)
    sequences = some_sequences()
    PagedRun(view, sequences).run()
    assert adapter.module.config.to_dict() == config
    assert adapter.config.num_hidden_layers == len(adapter.layers) == NUM_LAYERS
    now = dict(adapter.module.named_modules())
    assert list(now) == list(modules)
    assert all(now[name] is modules[name] for name in modules)
    assert_equal_logits(PagedRun(adapter, sequences).run(), logits_of(eager(folder), sequences))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_nothing_of_a_model_is_there_twice(family, tmp_path, load):
    adapter = load(folder_of(family, tmp_path)).adapter
    view = first_layers(adapter, 2)
    ours = {id(part) for part in (*adapter.module.parameters(), *adapter.module.buffers())}
    shared = [*view.module.parameters(), *view.module.buffers()]
    assert all(id(part) in ours for part in shared)
    assert view.weight_bytes < adapter.weight_bytes
    assert [layer.module for layer in view.layers] == [layer.module for layer in adapter.layers[:2]]
    assert all(ours is theirs for ours, theirs in zip(view.layers, adapter.layers, strict=False))
    assert adapter.module.get_output_embeddings() is view.module.get_output_embeddings()


def test_a_weight_that_changes_changes_in_both(tmp_path, load):
    adapter = load(folder_of("llama", tmp_path)).adapter
    view = first_layers(adapter, 1)
    sequences = some_sequences()
    before = PagedRun(view, sequences).run()
    with torch.no_grad():
        adapter.module.get_parameter("model.layers.0.mlp.down_proj.weight").mul_(2)
    assert not torch.allclose(PagedRun(view, sequences).run()[0], before[0])


def test_a_view_says_of_itself_what_it_is(tmp_path, load):
    adapter = load(folder_of("llama", tmp_path)).adapter
    view = first_layers(adapter, 2)
    assert view.config.num_hidden_layers == len(view.layers) == 2
    same = ("dtype", "device", "vocab_size", "max_model_len", "eos_token_ids", "decoder_layer_classes")
    assert [getattr(view, name) for name in same] == [getattr(adapter, name) for name in same]


@pytest.mark.parametrize("num_layers", [0, NUM_LAYERS, NUM_LAYERS + 1])
def test_no_layers_and_all_layers_are_our_bug(num_layers, tmp_path, load):
    adapter = load(folder_of("llama", tmp_path)).adapter
    with pytest.raises(AssertionError):
        first_layers(adapter, num_layers)


class _Layer(nn.Module):
    def __init__(self, *attention: nn.Module) -> None:
        super().__init__()
        self.attention = nn.ModuleList(attention)


def _attention() -> list[nn.Module]:
    return [nn.Identity() for _ in range(4)]


def _two_lists(a: list[nn.Module]) -> dict[str, nn.Module]:
    return {"first": nn.ModuleList(map(_Layer, a[:2])), "second": nn.ModuleList(map(_Layer, a[2:]))}


def _another_order(a: list[nn.Module]) -> dict[str, nn.Module]:
    return {"layers": nn.ModuleList(map(_Layer, [a[1], a[0], *a[2:]]))}


def _two_in_a_layer(a: list[nn.Module]) -> dict[str, nn.Module]:
    return {"layers": nn.ModuleList([_Layer(*a[:2]), _Layer(*a[2:])])}


def _one_list_too_long(a: list[nn.Module]) -> dict[str, nn.Module]:
    return {"layers": nn.ModuleList([*map(_Layer, a), _Layer()])}


def _empty_and_double(a: list[nn.Module]) -> dict[str, nn.Module]:
    return {"layers": nn.ModuleList([_Layer(a[0], a[1]), _Layer(), _Layer(a[2]), _Layer(a[3])])}


def _one_in_two_layers(a: list[nn.Module]) -> dict[str, nn.Module]:
    return {"layers": nn.ModuleList([_Layer(a[0], a[1]), *map(_Layer, a[1:])])}


def _no_list(a: list[nn.Module]) -> dict[str, nn.Module]:
    return {f"layer{number}": _Layer(each) for number, each in enumerate(a)}


@pytest.mark.parametrize(
    "parts",
    [_two_lists, _another_order, _two_in_a_layer, _one_list_too_long, _empty_and_double, _one_in_two_layers, _no_list],
)
def test_layers_that_are_not_one_list_with_one_attention_each_are_refused(parts):
    attention = _attention()
    module = nn.ModuleDict(parts(attention))
    adapter = SimpleNamespace(module=module, layers=[SimpleNamespace(module=each) for each in attention])
    with pytest.raises(UnsupportedError, match="decoder layers of ModuleDict are not one list"):
        first_layers(adapter, 2)
