"""Bad input: one line on the terminal, exit code 2, and nothing lost."""

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.tiny_models import tiny_model_folder


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.dtpe=float32", ["model.dtpe", "dtype", "source"]),
        ("modle.dtype=float32", ["modle", "model", "speculative"]),
        ("speculative.prompt_lookup_mx=2", ["prompt_lookup_mx", "prompt_lookup_max", "num_draft_tokens"]),
        ("speculative.method=ngrm", ["ngrm", "ngram", "none"]),
        ("speculative.prompt_lookup_min=9", ["prompt_lookup_min 9", "prompt_lookup_max 3"]),
        ("speculative.num_draft_tokens=8", ["num_draft_tokens is 8", "decode_width"]),
        ("speculative.num_draft_tokens=two", ["num_draft_tokens", "two"]),
        ("scheduler.max_num_seqs=0", ["max_num_seqs"]),
        ("scheduler.max_num_seqs=1000", ["max_num_seqs", "max_batched_tokens"]),
        ("compile.decode_buckets=[1,9]", ["decode_buckets", "9", "max_num_seqs"]),
        ("sampling.temperature=.nan", ["temperature", "finite"]),
        ("sampling.top_p=0", ["top_p"]),
        ("sampling.temprature=1", ["temprature", "temperature"]),
        ("sampling.logits_processors=[print]", ["logits_processors"]),
        ("sampling.n=2", ["n is 2", "temperature is 0"]),
        ("sampling.n=0", ["sampling", "'n'"]),
        ("sampling.stop=['']", ["stop"]),
        ("sampling.bad_words=[[]]", ["bad_words"]),
        ("sampling.bad_words=[[600]]", ["bad_words", "600", "512"]),
        ("sampling.logit_bias={600: 1}", ["logit_bias", "600", "512"]),
        ("sampling.allowed_token_ids=[600]", ["allowed_token_ids", "600", "512"]),
        ("sampling.stop_token_ids=[600]", ["stop token id 600", "512"]),
        ("sampling.logprobs=3", ["result lines", "--prompts"]),
        ("sampling.min_tokens=13", ["min_tokens 13", "max_tokens 12"]),
        ("sampling={min_tokens: 250, max_tokens: 250}", ["min_tokens is 250", "room for"]),
        ("sampling={allowed_token_ids: [9], bad_words: [[9]]}", ["leave no token"]),
        ("speculative.scorer=single", ["speculative.scorer", "multi_query", "batch_expansion"]),
        ("speculative.verifier=typical", ["speculative.verifier", "equality", "rejection"]),
        ("speculative.block_verification=true", ["block_verification", "verifier: rejection", "equality"]),
        ("cache.block_size=12", ["block_size", "power of two"]),
        ("cache.num_blocks=3", ["KV blocks", "cache.num_blocks"]),
        ("model.device=cuda:99", ["cuda"]),
        ("model.device=tpu", ["model.device"]),
        ("model.max_model_len=100000", ["max_model_len", "100000"]),
        ("model.source=no/such-model", ["no/such-model"]),
        ("model.source=package:no_such_package/x.gguf", ["no_such_package"]),
        ("nonsense", ["section.key=value"]),
    ],
)
def test_wrong_settings(compspec, config, override, words) -> None:
    result = compspec("generate", "-c", config, "--prompt", "to be or not to be " * 4, "--set", override)
    assert result.code == 2
    for word in words:
        assert word in result.error_line


def test_missing_and_malformed_configuration_files(compspec, tmp_path) -> None:
    missing = compspec("generate", "-c", tmp_path / "none.yaml", "--prompt", "x")
    assert missing.code == 2
    assert "none.yaml" in missing.error_line
    broken = tmp_path / "broken.yaml"
    broken.write_text("model: {source: [", encoding="utf-8")
    assert compspec("generate", "-c", broken, "--prompt", "x").code == 2
    code = tmp_path / "code.yaml"
    code.write_text("model: !!python/object/apply:os.system ['touch pwned']", encoding="utf-8")
    assert compspec("generate", "-c", code, "--prompt", "x").code == 2
    assert not Path("pwned").exists()


def test_prompts_that_are_empty_or_too_long(compspec, config) -> None:
    empty = compspec("generate", "-c", config, "--prompt", "")
    assert empty.code == 2
    assert "empty" in empty.error_line
    long = compspec("generate", "-c", config, "--prompt", "zq" * 300)
    assert long.code == 2
    assert "256" in long.error_line
    assert "600" in long.error_line
    assert compspec("generate", "-c", config).code == 2


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '{"id": 1}',
        '{"prompt": "a", "prompt_token_ids": [1]}',
        '{"prompt": 5}',
        '{"promt": "a"}',
        '{"prompt": "a", "params": {"top_p": 2}}',
        '{"prompt_token_ids": [1, 99999]}',
        '{"prompt_token_ids": ["x"]}',
        '{"prompt_token_ids": []}',
        '{"prompt": "a", "params": {"n": 2}}',
        '{"prompt": "a", "params": {"stop": [""]}}',
        '{"prompt": "a", "params": {"bad_words": [[600]]}}',
        '{"prompt": "a", "params": {"allowed_token_ids": [9], "bad_words": [[9]]}}',
        '{"prompt": "a", "params": {"logprobs": 513}}',
        '{"prompt": "a", "params": {"logits_processors": ["print"]}}',
        '{"prompt": "a", "id": "ok"}',
    ],
)
def test_a_wrong_line_is_refused_before_anything_runs(compspec, config, tmp_path, line) -> None:
    prompts, output = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "fine", "id": "ok"}\n' + line + "\n", encoding="utf-8")
    result = compspec("generate", "-c", config, "--prompts", prompts, "--output", output)
    assert result.code == 2
    assert result.error_line
    assert not output.exists() or output.read_bytes() == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line_and_exit_code_2(compspec, config, prompts) -> None:
    result = compspec("generate", "-c", config, "--prompts", prompts, "--output", "/dev/full")
    assert result.code == 2
    assert "/dev/full" in result.error_line


def test_a_disk_that_fills_up_keeps_what_was_finished(compspec, config, prompts, tmp_path) -> None:
    """The kernel refuses to let the file grow; finished lines stay, and a second run completes the file."""
    output = tmp_path / "out.jsonl"
    compspec("generate", "-c", config, "--prompts", prompts, "--output", output)
    whole = output.read_bytes()
    limit = len(whole) * 3 // 5
    output.unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write fails with an error instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        result = compspec("generate", "-c", config, "--prompts", prompts, "--output", output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert result.code == 2
    assert "are kept" in result.error_line
    kept = output.read_bytes()
    assert 0 < kept.count(b"\n") < 4
    assert kept.endswith(b"\n")
    assert compspec("generate", "-c", config, "--prompts", prompts, "--output", output).code == 0
    again = output.read_bytes()
    assert again.startswith(kept)
    assert again.count(b"\n") == 4


def test_an_output_file_of_something_else_is_not_touched(compspec, config, prompts, tmp_path) -> None:
    output = tmp_path / "precious.txt"
    output.write_text("my diary\n", encoding="utf-8")
    result = compspec("generate", "-c", config, "--prompts", prompts, "--output", output)
    assert result.code == 2
    assert output.read_text(encoding="utf-8") == "my diary\n"


def test_models_that_cannot_be_trusted(compspec, config, text_model, tmp_path) -> None:
    pickled = tmp_path / "pickled"
    shutil.copytree(text_model, pickled)
    (pickled / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(1)}, pickled / "pytorch_model.bin")
    result = compspec("generate", "-c", config, "--prompt", "x", "--set", f"model.source={pickled}")
    assert result.code == 2
    assert "pickle" in result.error_line

    cut = tmp_path / "cut"
    shutil.copytree(text_model, cut)
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert compspec("generate", "-c", config, "--prompt", "x", "--set", f"model.source={cut}").code == 2

    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"GGUF" + bytes(range(200)))
    result = compspec("generate", "-c", config, "--prompt", "x", "--set", f"model.source={gguf}")
    assert result.code == 2
    assert "broken.gguf" in result.error_line

    custom = tmp_path / "custom"
    shutil.copytree(text_model, custom)
    described = json.loads((custom / "config.json").read_text(encoding="utf-8"))
    described |= {"model_type": "mine", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (custom / "config.json").write_text(json.dumps(described), encoding="utf-8")
    (custom / "code.py").write_text("import pathlib; pathlib.Path('ran').touch()", encoding="utf-8")
    result = compspec("generate", "-c", config, "--prompt", "x", "--set", f"model.source={custom}")
    assert result.code == 2
    assert "trust_remote_code" in result.error_line
    assert not Path("ran").exists()


def test_a_family_that_is_not_supported_is_named(compspec, config, tmp_path) -> None:
    folder = tiny_model_folder("bloom", tmp_path)
    result = compspec("generate", "-c", config, "--prompt", "x", "--set", f"model.source={folder}")
    assert result.code == 2
    assert "Bloom" in result.error_line


def test_check_is_refused_where_tokens_cannot_be_compared(compspec, config, tmp_path) -> None:
    """By the configuration or by one line of a prompt file; nothing has run or been written then."""
    rejection = ["--set", "speculative.verifier=rejection", "--check"]
    hot = ["--set", "sampling.temperature=1.0"]
    result = compspec("generate", "-c", config, "--prompt", "x", *rejection, *hot)
    assert result.code == 2
    assert all(word in result.error_line for word in ("--check", "verifier: rejection", "temperature 0"))
    assert "starting" not in result.err
    prompts, output = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x", "params": {"temperature": 1.0}}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    result = compspec("generate", "-c", config, "--prompts", prompts, "--output", output, *rejection)
    assert result.code == 2
    assert "--check" in result.error_line
    assert not output.exists()
    prompts.write_text(json.dumps({"prompt": "x", "params": {"temperature": 0.0}}) + "\n", encoding="utf-8")
    assert compspec("generate", "-c", config, "--prompts", prompts, *rejection, *hot).code == 0
