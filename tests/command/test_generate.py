"""`compspec generate` on good input: text, statistics, batches, the check, resuming."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compspec import LLM, cli, load_config


def records(path: Path) -> dict[str, dict]:
    lines = path.read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    assert len({record["id"] for record in found}) == len(found), "a line is doubled"
    return {record["id"]: record for record in found}


def test_one_prompt_streams_its_text_and_ends_with_statistics(compspec, config) -> None:
    result = compspec("generate", "-c", config, "--prompt", "to be or not to be", "--check")
    assert result.code == 0
    text = LLM.from_yaml(config).generate("to be or not to be")[0].text
    assert result.out.rstrip("\n") == text.rstrip("\n")
    for word in (
        "decode speed",
        "acceptance length",
        "accepted by draft position",
        "checked",
    ):
        assert word in result.err


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("numerics=exact", "the same, token for token"),
        ("numerics.self_test=skip", "not proved to be the same"),
        ("numerics=fast", "up to floating-point near-ties"),
    ],
)
def test_the_last_line_claims_what_the_numerics_give(compspec, config, setting, words) -> None:
    result = compspec("generate", "-c", config, "--prompt", "x", "--set", setting)
    assert result.code == 0
    assert words in " ".join(result.err.split())


def test_without_a_compiler_the_error_says_what_to_do(config, tmp_path) -> None:
    command = [sys.executable, "-c", "from compspec.cli import main; main()", "generate", "-c", str(config)]
    command += ["--prompt", "x", "--set", "compile.mode=default"]
    nowhere = {"CXX": str(tmp_path / "no-compiler"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    environment = {**os.environ, **nowhere, "COMPSPEC_CACHE": str(tmp_path / "cache")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 2, result.stderr
    assert "compile.mode: none" in result.stderr
    assert "Traceback" not in result.stderr


def test_set_overrides_the_file_and_reaches_the_engine(compspec, config) -> None:
    result = compspec(
        "generate", "-c", config, "--prompt", "x", "--set", "speculative.method=none", "--set", "sampling.max_tokens=3"
    )
    assert result.code == 0
    assert "3 in 1 outputs" in result.err
    assert "draft position" not in result.err


def test_batch_writes_one_line_per_prompt(compspec, config, prompts, tmp_path) -> None:
    output = tmp_path / "out.jsonl"
    result = compspec("generate", "-c", config, "--prompts", prompts, "--output", output, "--check")
    assert result.code == 0
    found = records(output)
    assert set(found) == {"a", "b", "c", "3"}
    names = {"id", "key", "text", "token_ids", "finish_reason", "stop_reason", "stats"}
    assert all(set(record) == names for record in found.values())
    assert len(found["c"]["token_ids"]) <= 5
    llm = LLM.from_yaml(config)
    assert found["a"]["token_ids"] == llm.generate("to be or not to be, to be or")[0].token_ids
    assert found["b"]["token_ids"] == llm.chat([{"role": "user", "content": "the quick brown fox"}])[0].token_ids


def test_batch_without_output_prints_the_lines(compspec, config, prompts) -> None:
    result = compspec("generate", "-c", config, "--prompts", prompts)
    assert {json.loads(line)["id"] for line in result.out.splitlines()} == {"a", "b", "c", "3"}


def test_check_says_where_outputs_differ(compspec, config, monkeypatch) -> None:
    """A verifier that keeps a wrong draft is caught by --check."""
    from compspec.sampling.verifier import EqualityVerifier

    honest = EqualityVerifier.verify

    def lying(self, sampled, metadata, batch, drafts):
        if drafts.num_draft_tokens.any():
            sampled = dataclasses.replace(sampled, token_ids=(sampled.token_ids + 1) % 300)
        return honest(self, sampled, metadata, batch, drafts)

    monkeypatch.setattr(EqualityVerifier, "verify", lying)
    result = compspec("generate", "-c", config, "--prompt", "to be or not to be to be or", "--check")
    assert result.code == cli.EXIT_DIFFERENT
    assert "differs first at token" in result.err


SAMPLES = ["--set", "sampling.n=2", "--set", "sampling.temperature=1.0", "--set", "sampling.seed=5"]


def test_several_samples_are_printed_one_after_the_other(compspec, config) -> None:
    result = compspec("generate", "-c", config, "--prompt", "to be", *SAMPLES)
    assert result.code == 0
    llm = LLM.from_yaml(config, sampling={"n": 2, "temperature": 1.0, "seed": 5})
    first, second = (sample.text for sample in llm.generate("to be")[0].outputs)
    assert first != second
    assert result.out == f"--- sample 1 of 2\n{first}\n\n--- sample 2 of 2\n{second}\n\n"
    assert "24 in 2 outputs" in result.err


@pytest.mark.parametrize("seed", [5, "null"])
def test_check_compares_every_sample(compspec, config, seed) -> None:
    settings = [*SAMPLES, "--set", f"sampling.seed={seed}", "--set", "sampling.ignore_eos=true"]
    result = compspec("generate", "-c", config, "--prompt", "to be or not to be to be", *settings, "--check")
    assert result.code == 0
    assert "1 of 1 outputs (24 tokens) are equal" in " ".join(result.err.split())


def test_check_finds_a_difference_in_the_second_sample_alone(compspec, config, monkeypatch) -> None:
    generate = LLM.generate

    def lying(self, prompts, params, **options):
        outputs = generate(self, prompts, params, **options)
        if isinstance(params, list) and params[0].speculative is False:
            outputs[0].outputs[1].token_ids[3] += 1
        return outputs

    monkeypatch.setattr(LLM, "generate", lying)
    result = compspec("generate", "-c", config, "--prompt", "to be", *SAMPLES, "--check")
    assert result.code == cli.EXIT_DIFFERENT
    assert "prompt 0 differs first at token 3" in " ".join(result.err.split())


def test_a_batch_writes_samples_and_log_probabilities(compspec, config, tmp_path) -> None:
    prompts, output = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    params = {"n": 3, "temperature": 1.0, "logprobs": 1, "prompt_logprobs": 0, "stop": ["a", "e"], "max_tokens": 20}
    lines = [{"id": "many", "prompt": "to be", "params": params}, {"id": "one", "prompt": "to be"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    result = compspec("generate", "-c", config, "--prompts", prompts, "--output", output, "--check")
    assert result.code == 0, result.err
    assert "2 of 2 outputs" in " ".join(result.err.split())
    found = records(output)
    assert "samples" not in found["one"]
    many = found["many"]
    assert len(many["samples"]) == 3
    assert len({tuple(sample["token_ids"]) for sample in many["samples"]}) == 3
    assert {name: many[name] for name in many["samples"][0]} == many["samples"][0]
    for sample in many["samples"]:
        assert [next(iter(each)) for each in sample["logprobs"]] == [str(token) for token in sample["token_ids"]]
        assert not set("ae") & set(sample["text"])
        assert sample["stop_reason"] in ("a", "e", None)
    assert many["prompt_logprobs"][0] is None


def test_a_request_that_fails_is_said_in_its_record_and_in_one_line_for_one_prompt(compspec, config, tmp_path) -> None:
    """After token 9 no other is allowed, and 9 itself is forbidden then."""
    nothing_left = {"allowed_token_ids": [9], "bad_words": [[9, 9]]}
    prompts, output = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": "bad", "prompt": "to be", "params": nothing_left}, {"id": "good", "prompt": "to be"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    compspec("generate", "-c", config, "--prompts", prompts, "--output", output)
    found = records(output)
    assert (found["bad"]["finish_reason"], found["bad"]["token_ids"]) == ("error", [9])
    assert "no token can be sampled" in found["bad"]["error"]
    assert found["good"]["finish_reason"] == "length"
    assert "error" not in found["good"]
    settings = ["--set", "sampling.allowed_token_ids=[9]", "--set", "sampling.bad_words=[[9, 9]]"]
    result = compspec("generate", "-c", config, "--prompt", "to be", *settings)
    assert result.code == 2
    assert "no token can be sampled" in result.error_line


REJECTION = ["--set", "speculative.verifier=rejection"]


@pytest.mark.parametrize("more", [[], ["--set", "speculative.block_verification=true"]])
def test_the_rejection_verifier_is_named_where_it_samples(compspec, config, more) -> None:
    arguments = ["generate", "-c", config, "--prompt", "to be or not to be to be", *REJECTION, *more]
    sampled = compspec(*arguments, "--set", "sampling.temperature=1.0")
    assert sampled.code == 0
    words = " ".join(sampled.err.split())
    assert "distributed as without speculation" in words
    assert "speculative.verifier: rejection" in words
    assert "token for token" not in words
    assert "the same, token for token" in " ".join(compspec(*arguments).err.split())
    checked = compspec(*arguments, "--check")
    assert checked.code == 0
    assert "1 of 1 outputs" in " ".join(checked.err.split())


def test_batch_expansion_gives_the_same_text(compspec, config) -> None:
    arguments = ["generate", "-c", config, "--prompt", "to be or not to be to be"]
    expanded = compspec(*arguments, "--set", "speculative.scorer=batch_expansion", "--check")
    assert expanded.code == 0
    assert "1 of 1 outputs" in " ".join(expanded.err.split())
    assert expanded.out == compspec(*arguments).out


def test_stop_texts_and_bad_words_of_the_configuration_hold(compspec, config) -> None:
    arguments = ["generate", "-c", config, "--prompt", "to be or not to be", "--set", "sampling.temperature=1.0"]
    arguments += ["--set", "sampling.seed=5"]
    sampled = LLM.from_yaml(config, sampling={"temperature": 1.0, "seed": 5, "max_tokens": 12})
    free = sampled.generate("to be or not to be")[0]
    word = next(text for text in map(sampled.tokenizer.decode, free.token_ids[2:]) if text.strip().isalpha())
    assert word in free.text
    stopped = compspec(*arguments, "--set", f"sampling.stop={json.dumps(word)}", "--check")
    assert stopped.code == 0
    assert stopped.out == free.text[: free.text.index(word)] + "\n\n"
    banned = compspec(*arguments, "--set", f"sampling.bad_words=[{json.dumps(word)}]", "--check")
    assert banned.code == 0
    assert word not in banned.out


def test_finished_prompts_are_not_done_again(compspec, config, prompts, tmp_path) -> None:
    output = tmp_path / "out.jsonl"
    compspec("generate", "-c", config, "--prompts", prompts, "--output", output)
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    marked = lines[0].replace(b'"text": "', b'"text": "kept ')
    output.write_bytes(marked + lines[1][: len(lines[1]) // 2])
    result = compspec("generate", "-c", config, "--prompts", prompts, "--output", output)
    assert result.code == 0
    assert output.read_bytes().startswith(marked)
    again = records(output)
    before = {record["id"]: record for record in map(json.loads, lines)}
    assert set(again) == set(before)
    greedy = [name for name in before if name not in ("c", json.loads(lines[0])["id"])]
    assert [again[name]["token_ids"] for name in greedy] == [before[name]["token_ids"] for name in greedy]
    assert compspec("generate", "-c", config, "--prompts", prompts, "--output", output).code == 0
    assert records(output) == again


def test_a_killed_batch_resumes_without_loss(config, tmp_path) -> None:
    prompts, output = tmp_path / "many.jsonl", tmp_path / "out.jsonl"
    names = [f"p{index}" for index in range(120)]
    lines = [{"id": name, "prompt": f"to be or not {name}", "params": {"max_tokens": 40}} for name in names]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    command = [sys.executable, "-c", "from compspec.cli import main; main()"]
    command += ["generate", "-c", str(config), "--prompts", str(prompts), "--output", str(output)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
    deadline = time.monotonic() + 120
    while not (output.exists() and output.read_bytes().count(b"\n") >= 5):
        assert process.poll() is None, "finished before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    kept = [line for line in output.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    assert 5 <= len(kept) < len(names)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert output.read_bytes().startswith(b"".join(kept))
    assert set(records(output)) == set(names)


def test_schema_is_the_configuration(compspec) -> None:
    schema = json.loads(compspec("config", "schema").out)
    assert set(schema["properties"]) == set(load_config.__globals__["EngineConfig"].model_fields)


def test_doctor_reports_every_finding(compspec) -> None:
    result = compspec("doctor")
    assert result.code == 0
    for name in ("versions", "cpu", "gpu", "flashinfer", "compiler", "cache"):
        assert name in result.out


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["doctor", "--help"]])
def test_help_exits_with_0(compspec, arguments) -> None:
    assert compspec(*arguments).code == 0
