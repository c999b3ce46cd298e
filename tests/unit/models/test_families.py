"""Every supported family computes over the paged cache what transformers computes without one."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from compspec.models.quiet import quiet_transformers
from tests.tiny_models import FAMILIES, tiny_model_folder
from tests.unit.models.paged import PagedRun

_LENGTHS = (43, 38)


def eager_logits(folder: Path, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    with quiet_transformers(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        return [model(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences]


def random_sequences(lengths: tuple[int, ...], vocab_size: int = 100) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocab_size, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_paged_logits_equal_those_of_eager_transformers(family, tmp_path, load):
    folder = tiny_model_folder(family, tmp_path)
    loaded = load(folder)
    sequences = random_sequences(_LENGTHS)
    paged = PagedRun(loaded.adapter, sequences).run()
    for ours, theirs in zip(paged, eager_logits(folder, sequences), strict=True):
        assert ours.shape == theirs.shape
        scale = float(theirs.std())
        torch.testing.assert_close(ours / scale, theirs / scale, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["mistral", "phi3", "gemma2", "gemma3_text", "exaone4"])
def test_sliding_layers_carry_their_window(family, tmp_path, load):
    windows = {layer.spec.window for layer in load(tiny_model_folder(family, tmp_path)).adapter.layers}
    assert 16 in windows
    assert windows <= {0, 16}


def test_softcap_and_scale_reach_the_layer_spec(tmp_path, load):
    adapter = load(tiny_model_folder("gemma2", tmp_path, attn_logit_softcapping=30.0, query_pre_attn_scalar=64)).adapter
    assert {(layer.spec.softcap, layer.spec.scale) for layer in adapter.layers} == {(30.0, 0.125)}


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_layers_are_found_in_every_family(family, tmp_path, load):
    adapter = load(tiny_model_folder(family, tmp_path)).adapter
    if family == "gptj":
        # Its blocks take two views of one tensor, which a compile region refuses.
        assert adapter.decoder_layer_classes == ()
        return
    (layer_class,) = adapter.decoder_layer_classes
    assert sum(isinstance(part, layer_class) for part in adapter.module.modules()) == len(adapter.layers) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_models_load_and_run(dtype, tmp_path, load):
    folder = tiny_model_folder("llama", tmp_path, dtype=dtype)
    adapter = load(folder).adapter
    sequences = random_sequences((20, 33))
    for ours, theirs in zip(PagedRun(adapter, sequences).run(), eager_logits(folder, sequences), strict=True):
        assert ours.dtype == getattr(torch, dtype)
        assert float((ours - theirs).float().norm() / theirs.float().norm()) < 0.05
