"""tools/compare_peers.py with peers of a few lines: good ones get rows of numbers, broken ones a row that says why."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from rich.console import Console

TOOLS = Path(__file__).parents[2] / "tools"
if str(TOOLS) not in sys.path:
    sys.path.append(str(TOOLS))

import compare_peers  # noqa: E402
from compspec.errors import CompspecError, ConfigError  # noqa: E402
from peers import comparison, process, protocol, summary  # noqa: E402
from tests.tiny_models import tiny_model_folder, tiny_tokenizer  # noqa: E402

SETUP: protocol.Setup = {
    "model": "folder",
    "gguf": None,
    "config": None,
    "max_model_len": 64,
    "max_num_seqs": 1,
    "eos_token_ids": [2],
    "num_threads": 1,
    "num_drafts": [],
    "max_ngram": 3,
}

GOOD = """
from peers.protocol import Clock, serve
class Fake:
    version, settings, can_batch = "fake 1", "none", True
    def __init__(self, setup):
        print("chatter of a library")
        assert setup["num_drafts"] == [0, 4]
    def run(self, task):
        outputs = []
        for prompt in task["prompts"]:
            clock = Clock()
            clock.tick(1)
            # Drafts change every output but the first prompt's, and so does a run at once.
            tokens = [prompt[0]] * task["max_tokens"]
            if prompt[0] > 1:
                tokens[-1] += task["num_drafts"]
            outputs.append(clock.stop(tokens + [99] * (task["concurrency"] - 1)))
        return outputs
serve(Fake)
"""
CRASHES_AT_LOAD = """
from peers.protocol import serve
def load(setup):
    raise RuntimeError("no such\\nmodel")
serve(load)
"""
DIES_IN_THE_MIDDLE = """
import os, signal
from peers.protocol import serve
class Fake:
    version, settings, can_batch, runs = "fake 1", "none", False, 0
    def __init__(self, setup): pass
    def run(self, task):
        self.runs += 1
        if self.runs == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return [{"token_ids": [1, 2], "num_first": 1, "first_s": 1.0, "total_s": 2.0} for _ in task["prompts"]]
serve(Fake)
"""
PRINTS_JUNK = "import sys\nprint('Loading weights: 100%', flush=True)\nsys.stdin.read()\n"
SHORT_ANSWER = """
import sys, json
sys.stdin.readline()
print(json.dumps({"ready": {"version": "fake", "settings": "", "can_batch": False}}), flush=True)
sys.stdin.readline()
print(json.dumps({"outputs": [], "wall_s": 1.0}), flush=True)
sys.stdin.readline()
"""
NEVER_READY = "import sys\nprint('{}', flush=True)\nsys.stdin.read()\n"
LEAVES = "import sys\nsys.stdin.readline()\nsys.exit(3)\n"
HANGS = "import time\ntime.sleep(60)\n"


def worker(name: str, code: str) -> comparison.Worker:
    sides = [summary.Side(engine=name, num_drafts=number, speculation=str(number)) for number in (0, 4)]
    return comparison.Worker(name=name, command=[sys.executable, "-c", code], sides=sides)


def compare(
    tmp_path: Path, *workers: comparison.Worker, timeout_s: float = 30.0, concurrency: int | None = None
) -> None:
    asked = comparison.Comparison(
        prompts=[[1, 5], [7]],
        max_tokens=3,
        concurrency=concurrency,
        rounds=2,
        num_threads=1,
        log_folder=tmp_path,
        timeout_s=timeout_s,
    )
    asked.run(workers, SETUP, Console(quiet=True))


def test_a_good_peer_has_all_rounds_of_all_its_sides_and_chatter_is_kept_out(tmp_path: Path) -> None:
    good = worker("good one", GOOD)
    compare(tmp_path, good, concurrency=2)
    plain, drafting = good.sides
    assert [side.failure for side in good.sides] == [None, None]
    assert [len(side.rounds) for side in good.sides] == [len(side.concurrent) for side in good.sides] == [2, 2]
    assert [one["token_ids"] for one in plain.rounds[0].outputs] == [[1, 1, 1], [7, 7, 7]]
    assert [one["token_ids"] for one in drafting.rounds[1].outputs] == [[1, 1, 1], [7, 7, 11]]
    assert [one["token_ids"] for one in plain.concurrent[0].outputs] == [[1, 1, 1, 99], [7, 7, 7, 99]]
    assert summary.count_identical(drafting, plain) == 1
    assert (tmp_path / "good-one.log").read_text() == "chatter of a library\n"
    assert good.ready == {"version": "fake 1", "settings": "none", "can_batch": True}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (CRASHES_AT_LOAD, "RuntimeError: no such model"),
        (DIES_IN_THE_MIDDLE, "was killed by SIGKILL"),
        (PRINTS_JUNK, r"answered b'Loading weights: 100%\n', which is no JSON object"),
        (SHORT_ANSWER, "its answer does not hold 2 outputs"),
        (NEVER_READY, "its first answer is not that it is ready"),
        (LEAVES, "ended with status 3"),
    ],
)
def test_a_broken_peer_is_a_row_that_says_why_and_the_others_go_on(tmp_path: Path, code: str, reason: str) -> None:
    broken, good = worker("broken", code), worker("good", GOOD)
    compare(tmp_path, broken, good)
    for side in broken.sides:
        assert side.failure == f"{reason}; its log: {tmp_path / 'broken.log'}"
    assert [len(side.rounds) for side in good.sides] == [2, 2]
    numbers = summary.summarise([*broken.sides, *good.sides], 3)
    assert [row[2] == "failed" for row in map(summary.cells, numbers)] == [True, True, False, False]


def test_a_peer_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_END_TIMEOUT_S", 0.1)
    hung = worker("hung", HANGS)
    compare(tmp_path, hung, timeout_s=0.5)
    assert hung.sides[0].failure == f"no answer within 0.5 s; its log: {tmp_path / 'hung.log'}"


def test_an_interpreter_that_is_not_there_is_a_failure_of_that_peer_alone(tmp_path: Path) -> None:
    absent, good = worker("absent", ""), worker("good", GOOD)
    absent.command = ["/nowhere/python"]
    compare(tmp_path, absent, good)
    assert absent.sides[0].failure is not None
    assert absent.sides[0].failure.startswith("cannot run '/nowhere/python': No such file or directory")
    assert len(good.sides[0].rounds) == 2


def states(group: int) -> list[str]:
    """The states of a process group's members, as /proc has them."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            found.append(fields[0])
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come to that")


FORKS = """
import subprocess, sys
from peers.protocol import serve
class Fake:
    version, settings, can_batch = "fake 1", "none", False
    def __init__(self, setup):
        self.child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
serve(Fake)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_an_idle_worker_is_stopped_with_all_that_it_started_and_ends_with_it(tmp_path: Path) -> None:
    environment = process.worker_environment(1)
    idle = process.WorkerProcess([sys.executable, "-c", FORKS], environment, tmp_path / "log", 30.0)
    try:
        idle.start(SETUP)
        group = idle._process.pid
        wait_for(lambda: states(group) == ["T", "T"])
    finally:
        idle.close()
    wait_for(lambda: states(group) == [])


DRIVER = f"""
import sys, time
from pathlib import Path
sys.path.append({str(TOOLS)!r})
from peers.process import WorkerProcess, worker_environment
worker = WorkerProcess([sys.executable, "-c", {FORKS!r}], worker_environment(1), Path(sys.argv[1]), 30.0)
worker.start({SETUP!r})
print(worker._process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_workers_do_not_outlive_a_driver_that_is_killed(tmp_path: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    with driver:
        group = int(driver.stdout.readline())
        wait_for(lambda: states(group) == ["T", "T"])
        driver.kill()
    try:
        wait_for(lambda: set(states(group)) <= {"Z"})
    finally:
        if states(group):
            os.killpg(group, signal.SIGKILL)


def round_of(*outputs: tuple[list[int], int, float, float], wall_s: float) -> summary.Round:
    listed: list[protocol.Output] = [
        {"token_ids": ids, "num_first": num_first, "first_s": first_s, "total_s": total_s}
        for ids, num_first, first_s, total_s in outputs
    ]
    return summary.Round(outputs=listed, wall_s=wall_s)


def fixed_sides() -> list[summary.Side]:
    plain = summary.Side(engine="one", num_drafts=0, speculation="none")
    drafting = summary.Side(engine="one", num_drafts=5, speculation="n-gram, 5")
    # 2 + 3 tokens after the first step in 1 + 4 s; the prompts' 30 tokens in 2 + 1 s.
    plain.rounds = [
        round_of(([1, 2, 3], 1, 2.0, 3.0), ([4, 5, 6, 7], 1, 1.0, 5.0), wall_s=8.0),
        round_of(([1, 2, 3], 1, 1.0, 1.5), ([4, 5, 6, 7], 1, 0.5, 2.5), wall_s=4.0),
    ]
    # Two tokens came with the first step of the first output.
    drafting.rounds = [
        round_of(([1, 2, 3], 2, 2.0, 2.5), ([4, 5, 6, 7], 1, 1.0, 2.5), wall_s=5.0),
        round_of(([1, 2, 3], 2, 2.0, 2.5), ([4, 5, 6, 8], 1, 1.0, 2.5), wall_s=5.0),
    ]
    plain.concurrent = [round_of(([1, 2, 3], 1, 1.0, 2.0), ([4, 5, 6, 7], 1, 1.0, 2.0), wall_s=2.0)]
    return [plain, drafting]


def test_numbers_of_fixed_records() -> None:
    plain, drafting = summary.summarise(fixed_sides(), 30)
    assert plain["decode_tokens_per_s"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert plain["prefill_tokens_per_s"] == {"median": 15.0, "min": 10.0, "max": 20.0}
    assert plain["throughput_tokens_per_s"] == {"median": 3.5, "min": 3.5, "max": 3.5}
    assert plain["speed_up"] is plain["num_identical"] is None
    assert drafting["decode_tokens_per_s"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert drafting["speed_up"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert drafting["throughput_tokens_per_s"] is None
    assert (drafting["num_identical"], drafting["num_outputs"], drafting["num_output_tokens"]) == (1, 2, 7)


def test_rows_and_markdown() -> None:
    rows = [summary.cells(one) for one in summary.summarise(fixed_sides(), 30)]
    assert rows == [
        ["one", "none", "1.5", "1.0..2.0", "-", "15", "4", "-"],
        ["one", "n-gram, 5", "2.0", "2.0..2.0", "1.50", "10", "-", "1 of 2"],
    ]
    text = summary.markdown([["a|b", *["-"] * 7]], ["a note"]).splitlines()
    assert [line.replace("\\|", "").count("|") for line in text[:3]] == [9, 9, 9]
    assert text[2].startswith("| a\\|b | - |")
    assert text[3:] == ["", "- a note"]


def test_a_side_whose_plain_side_failed_is_compared_with_nothing() -> None:
    plain, drafting = fixed_sides()
    plain.failure = "crashed"
    numbers = summary.summarise([plain, drafting], 30)[1]
    assert numbers["decode_tokens_per_s"]["median"] == 2.0
    assert numbers["speed_up"] is numbers["num_identical"] is None


@pytest.mark.parametrize("word", ["sglang=3", "vllm", "vllm=", "vllm=0", "vllm=3,x", "vllm=3,3", "vllm=-1"])
def test_bad_numbers_of_drafts_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="--drafts"):
        compare_peers._drafts([word])


def test_each_peer_has_its_own_numbers_of_drafts_and_vllm_a_worker_for_each() -> None:
    drafts = compare_peers._drafts(["vllm=3,7", "llama-cpp=10"])
    assert drafts == {"vllm": [3, 7], "llama-cpp": [10]}
    many = compare_peers._peer_workers("vllm", "python", drafts["vllm"])
    assert [[side.num_drafts for side in one.sides] for one in many] == [[0], [3], [7]]
    assert len({one.name for one in many}) == 3  # of their log files
    (single,) = compare_peers._peer_workers("llama-cpp", "python", drafts["llama-cpp"])
    assert [side.num_drafts for side in single.sides] == [0, 10]
    assert all((TOOLS / "peers" / f"{one.command[2].partition('.')[2]}.py").is_file() for one in [*many, single])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tiny_model_folder("llama", tmp_path / "model", vocab_size=512)
    tiny_tokenizer(folder)
    path = tmp_path / "tiny.yaml"
    settings = {
        "model": {"source": str(folder), "device": "cpu", "max_model_len": 64},
        "speculative": {"method": "ngram", "num_draft_tokens": 3, "adaptive": False},
        "compile": {"mode": "none"},
        "scheduler": {"max_num_seqs": 2},
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def run_main(monkeypatch: pytest.MonkeyPatch, config: Path, *words: str) -> None:
    prompts = config.with_name("prompts.jsonl")
    lines = [{"id": "a", "prompt_token_ids": [3, 4, 5, 3, 4]}, {"id": "b", "prompt_token_ids": [6, 7]}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(sys, "argv", ["x", "-c", str(config), "--prompts", str(prompts), "--no-transformers", *words])
    compare_peers.main()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "0"], "--rounds is 0"),
        (["--concurrent", "3"], "scheduler.max_num_seqs of .* is 2"),
        (["-c", "elsewhere/tiny.yaml"], "same file name"),
        (["--json", "/proc/nowhere/result.json"], "cannot write '/proc/nowhere/result.json'"),
        (["--max-tokens", "60"], "prompt 'a' has 5 tokens, with --max-tokens 60 it does not fit into 64"),
    ],
)
def test_bad_input_is_one_line_before_anything_runs(
    words: list[str], message: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tiny.yaml").write_text(config.read_text())
    monkeypatch.setattr(compare_peers.Comparison, "run", lambda *_: pytest.fail("it ran"))
    with pytest.raises(CompspecError, match=message) as caught:
        run_main(monkeypatch, config, *words)
    assert "\n" not in str(caught.value)


def test_compspec_beside_a_peer_that_is_not_there(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "out" / "a.json"), "--markdown", str(tmp_path / "out" / "a.md")]
    counts = ["--concurrent", "2", "--rounds", "1", "--max-tokens", "8", "--threads", "1"]
    run_main(monkeypatch, config, "--vllm", "/nowhere/python", "--logs", str(tmp_path / "logs"), *counts, *files)
    report = json.loads((tmp_path / "out" / "a.json").read_text())
    plain, drafting, *absent = report["sides"]
    assert [one["failure"] is None for one in report["sides"]] == [True, True, False, False]
    assert (drafting["num_identical"], drafting["num_outputs"], drafting["num_output_tokens"]) == (2, 2, 16)
    assert plain["throughput_tokens_per_s"]["median"] > 0
    (single,), (both,) = plain["rounds"], plain["concurrent"]
    assert [one["token_ids"] for one in single["outputs"]] == [one["token_ids"] for one in both["outputs"]]
    assert [prompt["id"] for prompt in report["prompts"]] == ["a", "b"]
    text = (tmp_path / "out" / "a.md").read_text()
    assert "| compspec tiny | ngram, 3 |" in text
    assert "| vLLM | n-gram, 5 | failed |" in text
    assert f"- vLLM failed: {absent[1]['failure']}" in text
    assert "cannot run '/nowhere/python'" in capsys.readouterr().err.replace("\n", " ")


def test_workers_import_nothing_of_compspec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their interpreters do not have it."""
    blocked: dict[str, ModuleType | None] = {"compspec": None}
    code = f"import sys; sys.modules.update({blocked!r}); import peers.protocol"
    done = subprocess.run([sys.executable, "-c", code], env=process.worker_environment(1), capture_output=True)
    assert done.returncode == 0, done.stderr
    for path in (TOOLS / "peers").glob("*_worker.py"):
        assert ("compspec" in path.read_text().replace("peers.compspec", "")) == (path.name == "compspec_worker.py")
