"""`compspec bench` from prompts to report, and what it refuses before anything runs."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from compspec import LLM
from compspec.bench import engines
from compspec.bench.engines import start_engines
from compspec.bench.measure import Job, run, top2_margin
from compspec.bench.prompts import BenchPrompt
from compspec.bench.sides import make_setups
from compspec.bench.summary import Metrics
from compspec.errors import CapacityError
from compspec.sampling.params import SamplingParams

ONCE = ("--rounds", 1, "--no-warm-up")


def test_a_sweep_gives_sides_that_agree_and_all_three_outputs(compspec, config, prompts, tmp_path) -> None:
    page, file = tmp_path / "report.html", tmp_path / "report.json"
    sweep = ("--sweep", "speculative.num_draft_tokens=1,3")
    result = compspec(
        "bench", "-c", config, "--prompts", prompts, *sweep, "--rounds", 2, "--json", file, "--html", page
    )
    assert result.code == 0, result.err
    assert result.out == ""
    for words in ("num_draft_tokens=1", "num_draft_tokens=3", "4 of 4", "round 2 of 2: plain"):
        assert words in result.err
    assert "num_draft_tokens=3" in page.read_text(encoding="utf-8")

    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["schema_version"] == 1
    assert report["command"][:2] == ["compspec", "bench"]
    assert report["settings"] == {"rounds": 2, "warm_up": True, "concurrent": 1, "params": {}}
    assert report["categories"] == ["all"]
    assert report["peak_memory"]["bytes"] > 2**20
    assert [engine["label"] for engine in report["engines"]] == ["num_draft_tokens=1", "num_draft_tokens=3"]
    plain, one, three = report["sides"]
    texts = [[output["token_ids"] for output in side["outputs"]] for side in report["sides"]]
    assert texts[0] == texts[1] == texts[2]
    for side, longest in ((plain, 0), (one, 1), (three, 3)):
        assert side["reference"] == "plain"
        assert side["num_identical"] == 4
        assert side["same_in_every_round"]
        assert len(side["drafted_per_position"]) == len(side["accepted_per_position"]) == longest
        all_ = side["metrics"]["all"]
        assert set(all_) == {field.name for field in dataclasses.fields(Metrics)}
        assert all(set(value) == {"median", "min", "max"} for name, value in all_.items() if "num" not in name)
        assert set(side["step_ms"]) == {"propose", "forward", "sample", "rest"}
        for output in side["outputs"]:
            counts = {len(output[name]) for name in ("token_ids", "pieces", "origins")}
            assert counts == {sum(tokens for _, tokens, _, _ in output["steps"])}
            assert output["origins"][0] == "f"
    kept = [sum(output["origins"].count("a") for output in side["outputs"]) for side in report["sides"]]
    assert kept == [sum(side["accepted_per_position"]) // 2 for side in report["sides"]], "two rounds, one of outputs"
    assert kept[0] == 0 < kept[1] < kept[2]
    assert three["metrics"]["all"]["acceptance_length"]["median"] > 1
    assert "".join(plain["outputs"][3]["pieces"]).strip("\ufffd") == (
        LLM.from_yaml(config).generate("the lazy dog")[0].text or ""
    ).strip("\ufffd")


def test_json_goes_to_standard_output_where_asked(compspec, config, prompts) -> None:
    result = compspec("bench", "-c", config, "--prompts", prompts, "--ids", "a", *ONCE, "--json", "-")
    report = json.loads(result.out)
    assert [side["label"] for side in report["sides"]] == ["plain", "ngram"]
    assert len(report["sides"][0]["outputs"]) == 1


def test_spec_bench_has_categories_and_goes_through_the_template(compspec, config, tmp_path) -> None:
    file = tmp_path / "question.jsonl"
    lines = [{"question_id": at, "category": ("qa", "rag")[at % 2], "turns": ["to be or not"]} for at in range(3)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    lengths = []
    for options in ((), ("--no-chat",)):
        result = compspec("bench", "-c", config, "--spec-bench", file, "--limit", 3, *options, *ONCE, "--json", "-")
        report = json.loads(result.out)
        assert report["categories"] == ["qa", "rag", "all"]
        assert report["sides"][1]["metrics"]["qa"]["num_requests"] == 2
        lengths.append(report["sides"][0]["outputs"][0]["num_prompt_tokens"])
    assert lengths[0] > lengths[1]
    assert "has no prompt with id '81'" in compspec("bench", "-c", config, "--spec-bench", file).error_line


def test_all_at_once_gives_the_same_outputs(compspec, config, prompts) -> None:
    reports = [
        json.loads(compspec("bench", "-c", config, "--prompts", prompts, *ONCE, "--concurrent", how, "--json", "-").out)
        for how in (1, 2, "all")
    ]
    outputs = [[one["token_ids"] for one in report["sides"][1]["outputs"]] for report in reports]
    assert outputs[0] == outputs[1] == outputs[2]


def test_the_prompt_s_own_parameters_win_over_those_of_the_command(compspec, config, prompts) -> None:
    options = ("--prompts", prompts, "--max-tokens", 7, "--params", '{"ignore_eos": true}')
    report = json.loads(compspec("bench", "-c", config, *options, *ONCE, "--json", "-").out)
    assert [len(one["token_ids"]) for one in report["sides"][0]["outputs"]] == [7, 7, 5, 7]
    assert report["settings"]["params"] == {"ignore_eos": True, "max_tokens": 7}


def test_stop_texts_end_outputs_here_too(compspec, config, prompts) -> None:
    found: list[dict] = []
    params: dict = {"max_tokens": 40}
    for _ in range(2):
        options = ("--prompts", prompts, "--ids", "a", "--params", json.dumps(params))
        report = json.loads(compspec("bench", "-c", config, *options, *ONCE, "--json", "-").out)
        found.append(report["sides"][1]["outputs"][0])
        params["stop"] = [next(piece for piece in found[0]["pieces"] if piece and "\ufffd" not in piece)]
    assert found[0]["finish_reason"] == "length"
    assert found[1]["finish_reason"] == "stop"
    assert len(found[1]["token_ids"]) < len(found[0]["token_ids"])


def test_the_ratio_test_s_sampled_outputs_are_not_compared(compspec, config, prompts) -> None:
    options = ("--set", "speculative.verifier=rejection", "--params", '{"temperature": 1.0}', "--set")
    options += ("speculative.adaptive=null",)
    report = json.loads(compspec("bench", "-c", config, "--prompts", prompts, *options, *ONCE, "--json", "-").out)
    assert report["sides"][1]["num_identical"] is None
    assert report["sides"][1]["differences"] == []


def test_the_margin_is_that_of_the_model_at_the_place(config) -> None:
    llm = LLM.from_yaml(config)
    prompt = BenchPrompt(id="a", category="", token_ids=[1, 5, 6, 7, 5, 6], params={})
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    output = llm.generate([prompt.token_ids], params.model_copy(update={"logprobs": 3}))[0]
    job = Job(prompt=prompt, params=params)
    first, second = sorted((one.logprob for one in output.logprobs[4].values()), reverse=True)[:2]
    assert top2_margin(llm, job, output.token_ids, 4) == pytest.approx(first - second)
    assert top2_margin(llm, job, output.token_ids, 6) is None
    assert top2_margin(llm, job, [0] * 6, 4) is None, "that output was another one"
    sampled = Job(prompt=prompt, params=params.model_copy(update={"temperature": 1.0}))
    assert top2_margin(llm, sampled, output.token_ids, 4) is None


def test_a_run_s_times_add_up(config) -> None:
    llm = LLM.from_yaml(config)
    jobs = [
        Job(
            prompt=BenchPrompt(id=str(at), category="", token_ids=[1, 5, 6, 7, 5, 6 + at], params={}),
            params=SamplingParams(max_tokens=9, ignore_eos=True),
        )
        for at in range(2)
    ]
    for concurrent in (1, None):
        record = run(llm, jobs, concurrent=concurrent)
        decode = record.decode
        parts = decode.propose_s + decode.forward_s + decode.sample_s + decode.rest_s
        prefill = sum(one.prefill_s for one in record.requests)
        assert parts + prefill <= record.wall_s
        assert all(0 < one.prefill_s <= one.steps[0].at_s for one in record.requests)
        num_steps = [len(one.steps) - 1 for one in record.requests]
        # Together they share steps, but those of the first while the other's prompt ran.
        assert decode.num_steps == sum(num_steps) if concurrent == 1 else max(num_steps) <= decode.num_steps
        for one in record.requests:
            times = [step.at_s for step in one.steps]
            assert times == sorted(times)
            assert times[-1] <= record.wall_s


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sweep", "speculative.num_draft_tokns=1"], "num_draft_tokns"),
        (["--sweep", "speculative.num_draft_tokens="], "a value is missing"),
        (["--sweep", "speculative.num_draft_tokens=2,2"], "the same configuration"),
        (["--concurrent", "0"], "--concurrent"),
        (["--concurrent", "4"], "scheduler.max_num_seqs = 3"),
        (["--params", "[]"], "--params takes a JSON object"),
        (["--params", '{"temprature": 1}'], "temprature"),
        (["--params", '{"max_tokens": 1}', "--max-tokens", "2"], "not both"),
        (["--params", '{"n": 2, "temperature": 1}'], "n is 2"),
        (["--ids", "a,nobody"], "nobody"),
        (["--limit", "9"], "has 4 prompts"),
        (["--json", "/nowhere/report.json"], "/nowhere/report.json"),
        (["--html", "/nowhere/report.html"], "/nowhere/report.html"),
        (["--json", "/tmp", "--html", "/tmp"], "the same file"),
        (["--spec-bench", "x.jsonl"], "one of the two"),
    ],
)
def test_what_is_wrong_is_said_before_an_engine_starts(compspec, config, prompts, options, words) -> None:
    result = compspec("bench", "-c", config, "--prompts", prompts, *options)
    assert result.code == 2
    assert words in result.error_line
    assert "starting" not in result.err


def test_a_prompt_that_is_too_long_is_named_with_its_configuration(compspec, config, prompts) -> None:
    result = compspec("bench", "-c", config, "--prompts", prompts, "--sweep", "model.max_model_len=64,9")
    for words in ("max_model_len=9", "prompt 'a'", "10 tokens"):
        assert words in result.error_line
    assert "warm-up" not in result.err


def test_a_cache_that_is_too_small_is_named(compspec, config, prompts) -> None:
    result = compspec("bench", "-c", config, "--prompts", prompts, "--set", "cache.num_blocks=2")
    for words in ("prompt 'a'", "cache.num_blocks"):
        assert words in result.error_line


def test_without_matplotlib_html_is_refused_at_once_and_the_rest_works(
    compspec, config, prompts, tmp_path, monkeypatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    result = compspec("bench", "-c", config, "--prompts", prompts, "--html", tmp_path / "r.html")
    assert "compspec[bench]" in result.error_line
    assert "starting" not in result.err
    assert compspec("bench", "-c", config, "--prompts", prompts, "--ids", "a", *ONCE).code == 0


def test_a_file_that_was_there_stays_until_the_report_is_written(compspec, config, prompts, tmp_path) -> None:
    file, other = tmp_path / "old.json", tmp_path / "new.json"
    file.write_text("old", encoding="utf-8")
    assert compspec("bench", "-c", config, "--prompts", prompts, "--json", file, "--ids", "x").code == 2
    assert file.read_text(encoding="utf-8") == "old"
    assert compspec("bench", "-c", config, "--prompts", prompts, "--json", other, "--ids", "x").code == 2
    assert not other.exists()


def test_engines_that_do_not_fit_together_are_refused(config, monkeypatch) -> None:
    setups = make_setups([config], [], ["speculative.num_draft_tokens=1,3"])
    held = iter([0, 2**50])
    monkeypatch.setattr(engines, "_held_bytes", lambda setup: next(held))
    with pytest.raises(CapacityError, match=r"'num_draft_tokens=3'.*1048576\.00 GiB.*fewer sides"):
        start_engines(setups, lambda text: None)


def test_no_memory_within_an_engine_names_the_side(config, monkeypatch) -> None:
    setups = make_setups([config], ["cache.num_blocks=100000000"], [])
    with pytest.raises(CapacityError, match=r"'ngram' does not fit.*cache\.num_blocks"):
        start_engines(setups, lambda text: None)


def test_the_file_of_a_config_is_named_when_it_is_missing(compspec, prompts, tmp_path: Path) -> None:
    result = compspec("bench", "-c", tmp_path / "none.yaml", "--prompts", prompts)
    assert "none.yaml" in result.error_line
