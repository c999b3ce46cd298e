"""tools/gpu_check.py without a GPU: all of its code but that for CUDA runs, and no failure is lost."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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


def test_a_section_that_fails_is_reported_and_the_next_one_runs(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(machine: object, report: object) -> None:
        raise RuntimeError("no such kernel")

    def works(machine: object, report: object) -> None:
        report.add("done", "yes", True)  # type: ignore[attr-defined]

    monkeypatch.setattr(tool, "SECTIONS", {"first": (breaks, 1), "long": (works, 1e9), "last": (works, 1)})
    output = tmp_path / "result.json"
    report = tool.Report(output)
    tool.run_sections(tool.Machine(device=torch.device("cpu"), dry=True), report, ["first", "long", "last"], 100)
    rows = [(row["section"], row["name"], row["good"]) for row in json.loads(output.read_text())["rows"]]
    assert rows == [("first", "stopped", False), ("long", "not run", False), ("last", "done", True)]
    assert "no such kernel" in report.rows[0].value and "Traceback" in report.rows[0].data["traceback"]


def test_a_difference_is_shown_with_its_place_and_margin(tool: ModuleType) -> None:
    machine = tool.Machine(device=torch.device("cpu"), dry=True)
    prompts, params = tool._requests(machine)
    engine = tool.Engine(
        machine.config(scheduler__max_num_seqs=8, cache__num_blocks=200), loaded=tool._law_model(machine)
    )
    wanted = tool._run(engine, prompts, params)
    other = tool._run(engine, prompts, params)
    other[2].token_ids[other[2].num_prompt_tokens + 4] += 1
    report = tool.Report(None)
    tool._compare_outputs(report, "same", wanted, wanted, bits=True)
    tool._compare_outputs(report, "other", wanted, other, bits=True)
    assert [row.good for row in report.rows] == [True, False]
    (place,) = report.rows[1].data["different"]
    assert (place["request"], place["position"]) == (2, 4) and 0 <= place["margin"] < 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip() == "there is no GPU that torch can use; --dry-run runs the same code on the CPU"
