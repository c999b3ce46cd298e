"""tools/gpu_check.py without a GPU: all of its code but that for CUDA runs, and no failure is lost."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_check.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def test_the_dry_run_is_clean_and_runs_every_section(tmp_path: Path, tool: ModuleType) -> None:
    output = tmp_path / "result.json"
    words = [sys.executable, str(SCRIPT), "--dry-run", "--output", str(output)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    content = json.loads(output.read_text())
    assert list(content["seconds"]) == list(tool.SECTIONS)
    rows = content["rows"]
    assert {row["section"] for row in rows} == set(tool.SECTIONS)
    assert not [row for row in rows if row["good"] is False]
    judged = {row["section"] for row in rows if row["good"]}
    assert judged == {"noise", "attention", "graphs", "law, exact", "law, fast"}
    kept = next(row["value"] for row in rows if row["name"] == "right drafts: kept")
    assert kept.split(" of ")[0] == kept.split(" of ")[1] != "0"
    assert "0 failed" in done.stdout.splitlines()[-1]


def test_the_sections_fit_into_six_minutes(tool: ModuleType) -> None:
    assert sum(needed for _, needed in tool.SECTIONS.values()) <= 360


def test_a_section_that_fails_crashes_or_hangs_is_reported_and_the_next_one_runs(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(machine: object, report: Any) -> None:
        raise RuntimeError("no such kernel")

    def crashes(machine: object, report: Any) -> None:
        report.add("before", "seen", True)
        os.abort()

    def hangs(machine: object, report: Any) -> None:
        report.add("before", "seen", True)
        time.sleep(600)

    def works(machine: object, report: Any) -> None:
        report.add("done", "yes", True, number=3)

    sections = {
        "first": (breaks, 5),
        "crash": (crashes, 5),
        "hang": (hangs, 0.5),
        "long": (works, 1e9),
        "last": (works, 5),
    }
    monkeypatch.setattr(tool, "SECTIONS", sections)
    output = tmp_path / "result.json"
    report = tool.Report()
    tool.run_sections(tool.Machine(device=torch.device("cpu"), dry=True), report, list(sections), 100, output)
    rows = json.loads(output.read_text())["rows"]
    assert [(row["section"], row["name"], row["good"]) for row in rows] == [
        ("first", "stopped", False),
        ("crash", "before", True),
        ("crash", "stopped", False),
        ("hang", "before", True),
        ("hang", "stopped", False),
        ("long", "not run", False),
        ("last", "done", True),
    ]
    assert rows[0]["value"] == "RuntimeError: no such kernel" and "Traceback" in rows[0]["data"]["traceback"]
    assert "exit code -6" in rows[2]["value"] and "stopped after 1 s" in rows[4]["value"]
    assert rows[6]["data"] == {"number": 3}


def test_backends_that_did_not_run_are_no_success(tool: ModuleType) -> None:
    report = tool.Report()
    report.add("flashinfer exact bfloat16 D=64", "not run: not installed", detail=True, kind="flashinfer exact")
    report.add("varlen exact bfloat16 D=64", "not run: torch is too old", detail=True, kind="varlen exact")
    report.add("sdpa bfloat16 D=64", "...", True, detail=True, kind="sdpa", error=1e-3, independent=True)
    tool._summarise(report)
    assert [(row.name, row.good) for row in report.rows[3:]] == [
        ("flashinfer exact: 1 kinds", False),
        ("varlen exact: 1 kinds", None),
        ("sdpa", True),
    ]


def test_a_difference_is_shown_with_its_place_and_margin(tool: ModuleType) -> None:
    machine = tool.Machine(device=torch.device("cpu"), dry=True)
    prompts, params = tool._requests(machine)
    engine = tool.Engine(
        machine.config(scheduler__max_num_seqs=8, cache__num_blocks=200), loaded=tool._law_model(machine)
    )
    wanted = tool._run(engine, prompts, params)
    other = tool._run(engine, prompts, params)
    other[2].token_ids[other[2].num_prompt_tokens + 4] += 1
    chosen = other[3].logprobs[6]
    token = next(iter(chosen))
    chosen[token] = replace(chosen[token], logprob=chosen[token].logprob - 1e-3)
    report = tool.Report()
    tool._compare_outputs(report, "same", wanted, wanted, bits=True)
    tool._compare_outputs(report, "other", wanted, other, bits=True)
    assert [row.good for row in report.rows] == [True, False]
    places = report.rows[1].data["different"]
    assert [(one["request"], one["position"], one["is_token"]) for one in places] == [(2, 4, True), (3, 6, False)]
    assert all(0 <= one["margin"] < 20 for one in places)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip() == "there is no GPU that torch can use; --dry-run runs the same code on the CPU"
