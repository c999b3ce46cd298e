"""Where models are found, and what is refused before a weight is read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compspec.errors import ConfigError, ModelError, UnsupportedError
from compspec.models.source import resolve_source
from tests.tiny_models import tiny_model_folder, tiny_tokenizer


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package on the import path that must not be imported."""
    folder = tmp_path / "site" / "some_weights"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise SystemExit('the package was imported')")
    (folder / "small.Q8_0.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


class TestPackage:
    def test_a_file_is_found_without_importing_the_package(self, package):
        files = resolve_source("package:some_weights/small.Q8_0.gguf")
        assert files.gguf == package / "small.Q8_0.gguf"

    def test_a_folder_in_a_package_is_a_model(self, package, tmp_path, load):
        shutil.copytree(tiny_model_folder("llama", tmp_path), package / "tiny")
        assert load("package:some_weights/tiny").adapter.vocab_size == 128

    def test_a_missing_file_lists_what_is_there(self, package):
        with pytest.raises(ModelError, match=r"no such file; it has: small\.Q8_0\.gguf"):
            resolve_source("package:some_weights/other.gguf")

    def test_a_missing_package_is_named(self):
        with pytest.raises(ModelError, match=r"no Python package 'not_installed_here' is installed; pip install"):
            resolve_source("package:not_installed_here/model.gguf")

    @pytest.mark.parametrize("source", ["package:", "package:some_weights", "package:/model.gguf"])
    def test_a_malformed_name_says_the_form(self, package, source):
        with pytest.raises(ModelError, match=r"package:<import_name>/<file>"):
            resolve_source(source)

    def test_a_path_out_of_the_package_is_refused(self, package):
        with pytest.raises(ModelError, match=r"leaves the package's folder"):
            resolve_source("package:some_weights/../../x")


class TestHub:
    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch, tmp_path):
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def test_offline_and_not_cached_is_one_clear_line(self):
        with pytest.raises(ModelError, match=r"'some-org/some-model'.*neither a folder.*cannot be reached") as caught:
            resolve_source("some-org/some-model")
        assert "\n" not in str(caught.value)

    def test_a_cached_model_is_used_offline(self, tmp_path, load):
        commit = "0123456789abcdef0123456789abcdef01234567"
        root = tmp_path / "hub" / "models--some-org--some-model"
        shutil.copytree(tiny_model_folder("llama", tmp_path), root / "snapshots" / commit)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(commit)
        assert load("some-org/some-model").adapter.max_model_len == 256


class TestFolder:
    @pytest.mark.parametrize("source", ["./nowhere", "/nowhere/at/all", "nowhere/model.gguf"])
    def test_a_missing_path_is_named(self, source):
        with pytest.raises(ModelError, match=f"'{source}' does not exist"):
            resolve_source(source)

    def test_a_folder_without_config_is_refused(self, tmp_path):
        (tmp_path / "a.gguf").touch()
        with pytest.raises(ModelError, match=r"no config\.json; name one of its GGUF files: a\.gguf"):
            resolve_source(str(tmp_path))

    def test_another_file_is_refused(self, llama):
        with pytest.raises(ModelError, match=r"name its folder"):
            resolve_source(str(llama / "config.json"))

    def test_a_revision_of_a_folder_is_refused(self, llama):
        with pytest.raises(ConfigError, match=r"not a hub id"):
            resolve_source(str(llama), revision="main")

    def test_a_lora_adapter_is_refused(self, llama):
        (llama / "adapter_config.json").write_text("{}")
        with pytest.raises(UnsupportedError, match=r"merge it"):
            resolve_source(str(llama))

    def test_a_broken_config_is_named(self, llama, load):
        (llama / "config.json").write_text("{")
        with pytest.raises(ModelError, match=r"cannot read .*config.json"):
            load(llama)


class TestWeights:
    def test_a_pickled_checkpoint_is_never_read(self, llama, load):
        weights = load_file(llama / "model.safetensors")
        (llama / "model.safetensors").unlink()
        torch.save(weights, llama / "pytorch_model.bin")
        with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model\.bin\)"):
            load(llama)

    def test_no_weights_are_named(self, llama, load):
        (llama / "model.safetensors").unlink()
        with pytest.raises(ModelError, match=r"no .safetensors weights"):
            load(llama)

    def test_missing_weights_are_named(self, llama, load, edit_weights):
        edit_weights(llama, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
        with pytest.raises(ModelError, match=r"lacks 1 of its weights: model\.layers\.1\.mlp\.up_proj\.weight"):
            load(llama)

    def test_weights_of_another_shape_are_named(self, llama, load, edit_weights):
        edit_weights(llama, lambda weights: weights.update({"model.norm.weight": torch.ones(7)}))
        with pytest.raises(ModelError, match=r"model\.norm\.weight") as caught:
            load(llama)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("keep", [0.0, 0.01, 0.9])
    def test_truncated_weights_are_named(self, keep, llama, load):
        path = llama / "model.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * keep)])
        with pytest.raises(ModelError, match=r"model\.safetensors' is corrupt or incomplete"):
            load(llama)

    def test_a_missing_shard_is_named(self, llama, load):
        weights = load_file(llama / "model.safetensors")
        (llama / "model.safetensors").unlink()
        names = sorted(weights)
        shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
        for shard, part in shards.items():
            save_file({name: weights[name] for name in part}, llama / shard, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: shard for shard, part in shards.items() for name in part}}
        (llama / "model.safetensors.index.json").write_text(json.dumps(index))
        assert load(llama).adapter.weight_bytes > 0
        (llama / "b.safetensors").unlink()
        with pytest.raises(ModelError, match=r"lacks weight file b\.safetensors"):
            load(llama)


class TestLoaded:
    def test_dtype_auto_is_the_checkpoints_and_an_explicit_one_wins(self, tmp_path, load):
        folder = tiny_model_folder("llama", tmp_path, dtype="bfloat16")
        assert load(folder).adapter.dtype == torch.bfloat16
        assert next(load(folder, dtype="float32").adapter.module.parameters()).dtype == torch.float32

    def test_tokenizer_is_loaded_where_there_is_one(self, llama, load):
        assert load(llama).tokenizer is None
        tiny_tokenizer(llama)
        tokenizer = load(llama).tokenizer
        text = 'Speculation never changes the output; "naïve" or not, 2 + 2 = 4.\n'
        assert tokenizer.decode(tokenizer.encode(text)) == text
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
        )
        assert chat == "<|user|>hi<|end|><|assistant|>"

    def test_another_tokenizer_can_be_named(self, llama, tmp_path, load):
        other = tmp_path / "tokenizer"
        tiny_tokenizer(other)
        assert load(llama, tokenizer=str(other)).tokenizer.eos_token == "<eos>"

    def test_a_missing_tokenizer_is_named(self, llama, load):
        with pytest.raises(ModelError, match=r"cannot load the tokenizer '/no/where'"):
            load(llama, tokenizer="/no/where")

    def test_fingerprint_follows_weights_and_dtype(self, tmp_path, load, edit_weights):
        folder = tiny_model_folder("llama", tmp_path)
        first = load(folder).fingerprint
        assert load(folder).fingerprint == first
        assert load(folder, dtype="bfloat16").fingerprint != first
        edit_weights(folder, lambda weights: weights["model.norm.weight"].mul_(2))
        assert load(folder).fingerprint != first

    def test_eos_ids_of_both_configs_are_kept(self, llama, load):
        (llama / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
        assert load(llama).adapter.eos_token_ids == (2, 5, 9)

    def test_tied_weights_count_once(self, tmp_path, load):
        tied = load(tiny_model_folder("llama", tmp_path, tie_word_embeddings=True)).adapter
        apart = load(tiny_model_folder("llama", tmp_path)).adapter
        assert apart.weight_bytes - tied.weight_bytes == 128 * 64 * 4

    def test_a_missing_cuda_device_is_a_config_error(self, llama, tmp_path):
        from compspec.config import ModelSection
        from compspec.models import load_model

        with pytest.raises(ConfigError, match=r"CUDA device"):
            load_model(ModelSection(source=str(llama), device="cuda:63"), tmp_path)

    def test_loading_is_silent(self, llama, load, capfd):
        load(llama)
        captured = capfd.readouterr()
        assert captured.out == captured.err == ""
