"""A GGUF file is converted once; a damaged file or a killed conversion leaves nothing that looks complete."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compspec.errors import CompspecError, ModelError
from compspec.models import gguf as conversion
from compspec.models.gguf import convert_gguf
from tests.unit.models.tiny_gguf import write_tiny_gguf


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.Q8_0.gguf"
    write_tiny_gguf(path, tmp_path)
    return path


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir())


class TestConversion:
    @pytest.mark.parametrize(
        ("kind", "dtype"), [("Q8_0", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)]
    )
    def test_weights_survive_in_the_files_own_dtype(self, kind, dtype, tmp_path):
        weights = write_tiny_gguf(tmp_path / "tiny.gguf", tmp_path, kind)
        converted = load_file(convert_gguf(tmp_path / "tiny.gguf", None, tmp_path) / "model.safetensors")
        assert converted.keys() == weights.keys()
        for name, tensor in converted.items():
            assert tensor.dtype == dtype
            torch.testing.assert_close(tensor.float(), weights[name].float(), atol=2e-3, rtol=2e-2)

    def test_it_loads_with_tokenizer_and_chat_template(self, tiny, load):
        loaded = load(tiny)
        assert loaded.adapter.dtype == torch.bfloat16
        assert loaded.adapter.eos_token_ids == (2,)
        assert loaded.adapter.max_model_len == 256
        text = "to be or not, the lazy fox"
        assert loaded.tokenizer.decode(loaded.tokenizer.encode(text, add_special_tokens=False)) == text
        assert loaded.tokenizer.chat_template

    def test_an_explicit_dtype_wins(self, tiny, load):
        assert load(tiny, dtype="float32").adapter.dtype == torch.float32

    def test_the_second_start_reads_the_converted_folder(self, tiny, tmp_path, monkeypatch):
        first = convert_gguf(tiny, None, tmp_path)
        monkeypatch.setattr(conversion, "_convert", None)
        assert convert_gguf(tiny, None, tmp_path) == first

    def test_another_file_under_the_same_name_is_converted_anew(self, tiny, tmp_path):
        first = convert_gguf(tiny, None, tmp_path)
        with open(tiny, "r+b") as file:
            file.seek(-64, os.SEEK_END)
            file.write(bytes(64))
        assert convert_gguf(tiny, None, tmp_path) != first

    def test_it_is_silent_and_leaves_logging_as_it_was(self, tiny, tmp_path, capfd):
        from huggingface_hub.utils import are_progress_bars_disabled
        from transformers.utils import logging

        before = logging.get_verbosity(), logging.is_progress_bar_enabled(), are_progress_bars_disabled()
        convert_gguf(tiny, None, tmp_path)
        captured = capfd.readouterr()
        assert captured.out == captured.err == ""
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), are_progress_bars_disabled()) == before


class TestDamagedFiles:
    @pytest.mark.parametrize("keep", [0.001, 0.1, 0.5, 0.98])
    def test_a_truncated_file_is_named(self, keep, tiny, tmp_path):
        data = tiny.read_bytes()
        tiny.write_bytes(data[: int(len(data) * keep)])
        with pytest.raises(ModelError, match=r"tiny\.Q8_0\.gguf") as caught:
            convert_gguf(tiny, None, tmp_path / "cache")
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("start", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00"])
    def test_random_bytes_are_named(self, start, tmp_path):
        path = tmp_path / "noise.gguf"
        noise = torch.randint(256, (5000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        path.write_bytes(start + noise.numpy().tobytes())
        with pytest.raises(ModelError, match=r"noise\.gguf") as caught:
            convert_gguf(path, None, tmp_path / "cache")
        assert "\n" not in str(caught.value)

    def test_a_file_without_one_of_its_weights_is_refused(self, tmp_path):
        path = tmp_path / "partial.gguf"
        write_tiny_gguf(path, tmp_path, skip="model.layers.1.mlp.up_proj.weight")
        with pytest.raises(ModelError, match=r"partial\.gguf' lacks weights.*layers\.1\.mlp\.up_proj"):
            convert_gguf(path, None, tmp_path / "cache")
        assert folders(tmp_path / "cache") == []

    def test_a_cache_folder_that_cannot_be_written_is_named(self, tiny, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(ModelError, match=r"cannot write converted weights below .*cache_dir"):
            convert_gguf(tiny, None, tmp_path / "file")


class TestInterruption:
    def test_an_error_midway_leaves_nothing_and_the_next_call_succeeds(self, tiny, tmp_path, monkeypatch):
        from transformers import LlamaForCausalLM

        def full_disk(self: Any, into: Path) -> None:
            (Path(into) / "model.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(LlamaForCausalLM, "save_pretrained", full_disk)
            with pytest.raises(CompspecError, match=r"No space left"):
                convert_gguf(tiny, None, tmp_path)
        assert folders(tmp_path) == []
        assert (convert_gguf(tiny, None, tmp_path) / "model.safetensors").is_file()

    def test_a_killed_process_leaves_no_complete_folder(self, tiny, tmp_path):
        process = os.fork()
        if process == 0:
            # os._exit runs no finally clause, as a kill would not.
            conversion._publish = lambda *_: os._exit(9)  # type: ignore[assignment]
            try:
                convert_gguf(tiny, None, tmp_path)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
        (left,) = folders(tmp_path)
        assert conversion._TEMPORARY in left
        folder = convert_gguf(tiny, None, tmp_path)
        assert conversion._TEMPORARY not in folder.name
        assert folders(tmp_path) == sorted([left, folder.name])

    def test_leftovers_go_after_a_day(self, tiny, tmp_path):
        names = [f"x{conversion._TEMPORARY}{age}" for age in ("old", "new")]
        for name in names:
            (tmp_path / "models" / name).mkdir(parents=True)
        two_days_ago = time.time() - 2 * 24 * 3600
        os.utime(tmp_path / "models" / names[0], (two_days_ago, two_days_ago))
        convert_gguf(tiny, None, tmp_path)
        assert names[0] not in folders(tmp_path)
        assert names[1] in folders(tmp_path)

    def test_a_folder_without_the_final_mark_is_replaced(self, tiny, tmp_path):
        folder = convert_gguf(tiny, None, tmp_path)
        (folder / conversion._DONE).unlink()
        (folder / "model.safetensors").write_bytes(b"half")
        assert convert_gguf(tiny, None, tmp_path) == folder
        assert load_file(folder / "model.safetensors")

    def test_whoever_finishes_second_keeps_the_first_result(self, tiny, tmp_path, monkeypatch):
        publish = conversion._publish

        def late(temporary: Path, folder: Path) -> None:
            monkeypatch.setattr(conversion, "_publish", publish)
            assert convert_gguf(tiny, None, tmp_path) == folder
            (folder / "first").touch()
            publish(temporary, folder)

        monkeypatch.setattr(conversion, "_publish", late)
        folder = convert_gguf(tiny, None, tmp_path)
        assert (folder / "first").exists()
        assert folders(tmp_path) == [folder.name]
