"""What cannot run is refused at load, with the reason."""

from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from compspec.errors import ConfigError, ModelError, UnsupportedError
from tests.tiny_models import tiny_model_folder

_REASONS = {
    "bloom": "BloomForCausalLM .* attention is not built on transformers' attention interface",
    "mpt": "MptForCausalLM .* attention is not built on transformers' attention interface",
    "stablelm": "StableLmForCausalLM .* drop the extra arguments",
    "nemotron": "NemotronForCausalLM .* drop the extra arguments",
    "falcon": "FalconForCausalLM .* no attention function but its own",
    "lfm2": r"Lfm2ForCausalLM .* \(conv\)",
    "gpt_oss": "GptOssForCausalLM .* needs s_aux",
    "deepseek_v3": "DeepseekV3ForCausalLM .* multi-head latent attention",
    "mamba": "MambaForCausalLM .* recurrent",
    "bert": "BertLMHeadModel .* not causal",
}


@pytest.mark.parametrize("family", _REASONS)
def test_a_family_that_cannot_run_is_refused_by_name(family, tmp_path, load):
    with pytest.raises(UnsupportedError, match=_REASONS[family]) as caught:
        load(tiny_model_folder(family, tmp_path))
    assert "\n" not in str(caught.value)


def test_encoder_decoder_models_are_refused(tmp_path, load):
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(UnsupportedError, match=r"encoder-decoder"):
        load(tmp_path / "t5")


def test_multimodal_models_are_refused(llama, load, edit_config):
    edit_config(llama, model_type="llava", architectures=["LlavaForConditionalGeneration"], vision_config={})
    with pytest.raises(UnsupportedError, match=r"multimodal \(vision_config\)"):
        load(llama)


def test_an_encoder_checkpoint_is_refused(tmp_path, load, edit_config):
    folder = tiny_model_folder("llama", tmp_path)
    edit_config(folder, architectures=["LlamaForSequenceClassification"])
    with pytest.raises(UnsupportedError, match=r"LlamaForSequenceClassification .* no causal language model"):
        load(folder)


def test_an_unknown_model_type_is_refused(llama, load, edit_config):
    edit_config(llama, model_type="llama99")
    with pytest.raises(UnsupportedError, match=r"'llama99', which transformers .* does not know"):
        load(llama)


def test_remote_code_is_not_run_unless_asked_for(llama, load, edit_config):
    edit_config(llama, model_type="mine", auto_map={"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"})
    (llama / "mine.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(UnsupportedError, match=r"model\.trust_remote_code: true"):
        load(llama)


def test_remote_code_runs_where_it_is_allowed(llama, load, edit_config):
    edit_config(
        llama,
        model_type="mine",
        architectures=["MineForCausalLM"],
        auto_map={"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"},
    )
    (llama / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
        "class MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    adapter = load(llama, trust_remote_code=True).adapter
    assert type(adapter.module).__name__ == "MineForCausalLM"
    assert len(adapter.layers) == 2


class TestLength:
    def test_default_is_what_the_model_was_made_for(self, llama, load):
        assert load(llama).adapter.max_model_len == 256

    def test_a_shorter_one_is_taken(self, llama, load):
        assert load(llama, max_model_len=100).adapter.max_model_len == 100

    def test_a_longer_one_is_refused_with_both_numbers(self, llama, load):
        with pytest.raises(ConfigError, match=r"300.*256"):
            load(llama, max_model_len=300)


_ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", _ROPES)
class TestRopeThatChangesWithLength:
    def test_it_is_refused_past_the_length_where_it_changes(self, kind, tmp_path, load):
        folder = tiny_model_folder("llama", tmp_path, rope_parameters=_ROPES[kind])
        with pytest.raises(UnsupportedError, match=f"{kind} RoPE.*model.max_model_len to at most 64"):
            load(folder)

    def test_up_to_that_length_it_runs_and_is_exact(self, kind, tmp_path, load):
        from tests.unit.models.paged import PagedRun
        from tests.unit.models.test_families import eager_logits, random_sequences

        folder = tiny_model_folder("llama", tmp_path, rope_parameters=_ROPES[kind])
        adapter = load(folder, max_model_len=64).adapter
        sequences = random_sequences((63, 40))
        for ours, theirs in zip(PagedRun(adapter, sequences).run(), eager_logits(folder, sequences), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


class TestSelfCheck:
    """The check itself notices attention that is not ours or computes something else."""

    def test_attention_that_differs_from_eager_is_refused(self, llama, load, monkeypatch):
        from compspec.attention.sdpa import SdpaBackend

        right = SdpaBackend.paged_attention

        def no_scale(self: Any, *args: Any) -> torch.Tensor:
            return right(self, *args[:-3], 3.0, *args[-2:])

        monkeypatch.setattr(SdpaBackend, "paged_attention", no_scale)
        with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM .* computes something else"):
            load(llama)

    def test_sequences_that_mix_are_refused(self, llama, load, monkeypatch):
        from compspec.attention.sdpa import SdpaBackend

        right = SdpaBackend.paged_attention

        def first_table(self: Any, q: Any, k: Any, v: Any, table: Any, *rest: Any) -> torch.Tensor:
            return right(self, q, k, v, table[:1].expand_as(table), *rest)

        monkeypatch.setattr(SdpaBackend, "paged_attention", first_table)
        with pytest.raises(UnsupportedError, match=r"packed into one forward change each other"):
            load(llama)

    def test_a_layer_that_skips_our_function_is_counted(self, llama, load, monkeypatch):
        from transformers.models.llama import modeling_llama

        right = modeling_llama.LlamaAttention.forward

        def skips_second(self: Any, hidden_states: Any, *args: Any, **options: Any) -> Any:
            return (hidden_states, None) if self.layer_idx == 1 else right(self, hidden_states, *args, **options)

        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", skips_second)
        with pytest.raises(UnsupportedError, match=r"1 of its 2 layers"):
            load(llama)

    def test_a_window_that_config_and_layer_disagree_on_is_refused(self, tmp_path, load, monkeypatch):
        from compspec.models import probe

        monkeypatch.setattr(probe, "layer_options", lambda *_: (0.25, 17, 0.0))
        with pytest.raises(UnsupportedError, match=r"window of 17 tokens where its config says 16"):
            load(tiny_model_folder("mistral", tmp_path))

    def test_logits_that_are_not_finite_are_named(self, llama, load, edit_weights):
        edit_weights(llama, lambda weights: weights["model.norm.weight"].fill_(float("nan")))
        with pytest.raises(ModelError, match=r"not finite in torch\.float32"):
            load(llama)

    def test_it_leaves_our_attention_in_place(self, llama, load):
        module = load(llama).adapter.module
        assert module.config._attn_implementation == "compspec"
        assert AttentionInterface()["compspec"].__module__ == "compspec.attention.backend"
