"""Measures one configuration on a prompt file, and transformers beside it in the same run.

    python tools/bench.py -c configs/bench.yaml --prompts configs/prompts.jsonl
    python tools/bench.py -c configs/bench.yaml --spec-bench question.jsonl --transformers --json result.json

--spec-bench takes question.jsonl of github.com/hemingkx/Spec-Bench and runs 12 of its first turns through the chat
template. Decoding is greedy unless --params says otherwise; prompts run one at a time unless --concurrent is given.
Every engine is warmed up first; rounds are interleaved and alternate in order, medians are over rounds. Decode speed
leaves the prompt and the first step out. The table goes to standard error, the JSON to standard output and to --json.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from compspec import LLM, CompspecError, SamplingParams, load_config
from compspec.config import parse_overrides
from compspec.jsonl import read_prompts

# Writing, coding, summarisation, extraction and retrieval: from where drafts never fit to where they fit best.
SPEC_BENCH_IDS = (81, 121, 122, 131, 161, 241, 242, 243, 321, 401, 481, 482)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A tokenised prompt."""

    id: str
    category: str
    token_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Round:
    """One pass over all prompts.

    Attributes:
        outputs: tokens by prompt id.
        decode_tokens, decode_s: tokens after those of each output's first step, and the seconds they took.
        prefill_tokens, prefill_s: prompt tokens, and the seconds until the first token.
        detail: what only compspec reports.
    """

    outputs: dict[str, list[int]]
    decode_tokens: int
    decode_s: float
    prefill_tokens: int
    prefill_s: float
    detail: dict[str, float]


def main() -> None:
    """Entry point."""
    args = _arguments()
    console = Console(stderr=True)
    config = load_config(args.config, parse_overrides(args.set or []))
    started = time.perf_counter()
    llm = LLM(config)
    start_up_s = time.perf_counter() - started
    jobs = read_jobs(llm, args.prompts, args.spec_bench)
    params = SamplingParams(**{"max_tokens": args.max_tokens, **json.loads(args.params)})
    sides: dict[str, Callable[[], Round]] = {
        "compspec": lambda: _run_compspec(llm, jobs, params, args.concurrent),
        "compspec plain": lambda: _run_compspec(
            llm, jobs, params.model_copy(update={"speculative": False}), args.concurrent
        ),
    }
    if args.transformers:
        sides |= _transformers_sides(llm, jobs, args.max_tokens, config.speculative.num_draft_tokens)
    if args.warm_up:
        for side in sides.values():
            side()
    rounds: dict[str, list[Round]] = {name: [] for name in sides}
    for index in range(args.rounds):
        for name in list(sides)[:: 1 if index % 2 == 0 else -1]:
            rounds[name].append(sides[name]())
    report: dict[str, Any] = {
        "machine": describe_machine(),
        "config": config.model_dump(mode="json"),
        "prompts": len(jobs),
        "prompt_tokens": sum(len(job.token_ids) for job in jobs),
        "max_tokens": args.max_tokens,
        "rounds": args.rounds,
        "start_up_s": start_up_s,
        "compile_s": llm.stats.compile_s,
        "compiled_buckets": llm.stats.num_compiled_buckets,
        "recompilations": llm.stats.num_recompilations,
        "eager_steps": llm.stats.num_eager_steps,
        "sides": {name: _summary(many) for name, many in rounds.items()},
        "identical_outputs": {
            "compspec": _identical(rounds, "compspec", "compspec plain"),
        },
    }
    if args.transformers:
        report["identical_outputs"]["transformers"] = _identical(rounds, "transformers n-gram", "transformers")
    _print(console, report)
    print(json.dumps(report, indent=2))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", type=Path, required=True)
    parser.add_argument("--set", action="append", help="section.key=value")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path, help="JSONL as for compspec generate")
    source.add_argument("--spec-bench", type=Path, help="question.jsonl of Spec-Bench, or its folder")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--params", default="{}", help="JSON of sampling parameters, for compspec's sides")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrent", action="store_true", help="submit all prompts at once")
    parser.add_argument("--transformers", action="store_true", help="run transformers eager beside it")
    parser.add_argument("--no-warm-up", dest="warm_up", action="store_false")
    parser.add_argument("--json", type=Path)
    args: argparse.Namespace = parser.parse_args()
    return args


def read_jobs(llm: LLM, prompts: Path | None, spec_bench: Path | None) -> list[Job]:
    """The prompts of a JSONL file, or 12 of Spec-Bench's."""
    if prompts is not None:
        jobs = []
        for line in read_prompts(prompts):
            if line.prompt_token_ids is not None:
                ids = line.prompt_token_ids
            else:
                ids = llm.chat_token_ids(line.messages) if line.messages else llm.encode(line.prompt or "")
            jobs.append(Job(id=line.id, category="", token_ids=ids))
        return jobs
    assert spec_bench is not None
    path = spec_bench / "question.jsonl" if spec_bench.is_dir() else spec_bench
    lines = path.read_text(encoding="utf-8").splitlines()
    questions = {question["question_id"]: question for question in map(json.loads, lines)}
    jobs = []
    for number in SPEC_BENCH_IDS:
        message = {"role": "user", "content": questions[number]["turns"][0]}
        ids = llm.chat_token_ids([message])
        jobs.append(Job(id=str(number), category=questions[number]["category"], token_ids=ids))
    return jobs


def _run_compspec(llm: LLM, jobs: list[Job], params: SamplingParams, concurrent: bool) -> Round:
    llm.engine.reset()  # of what the last round left, this one would profit
    before = _counters(llm)
    prompts = [job.token_ids for job in jobs]
    groups = [prompts] if concurrent else [[prompt] for prompt in prompts]
    results = [output for group in groups for output in llm.generate(group, params)]
    spent = {name: value - before[name] for name, value in _counters(llm).items()}
    forwards = max(spent["num_forwards"], 1)
    return Round(
        outputs={job.id: output.token_ids for job, output in zip(jobs, results, strict=True)},
        decode_tokens=int(spent["num_decode_tokens"]),
        decode_s=spent["step_s"] - spent["prefill_s"],
        prefill_tokens=int(spent["prefill_tokens"]),
        prefill_s=spent["prefill_s"],
        detail={
            "acceptance_length": spent["num_decode_tokens"] / max(spent["num_decode_steps"], 1),
            "host_ms_per_step": (spent["step_s"] - spent["forward_s"]) / forwards * 1e3,
            "decode_ms_per_step": (spent["step_s"] - spent["prefill_s"])
            / max(forwards - spent["num_prefill_forwards"], 1)
            * 1e3,
        },
    )


def _counters(llm: LLM) -> dict[str, float]:
    names = (
        "num_forwards",
        "num_prefill_forwards",
        "num_decode_tokens",
        "num_decode_steps",
        "step_s",
        "forward_s",
        "prefill_s",
        "prefill_tokens",
    )
    return {name: getattr(llm.stats, name) for name in names}


def _transformers_sides(llm: LLM, jobs: list[Job], max_tokens: int, num_drafts: int) -> dict[str, Callable[[], Round]]:
    """transformers' own generate on the same weights, eager, plain and with prompt lookup."""
    import transformers

    adapter = llm.engine.loaded.adapter
    model = transformers.AutoModelForCausalLM.from_pretrained(
        llm.engine.loaded.folder, dtype=adapter.dtype, device_map={"": adapter.device}
    ).eval()
    ends = list(adapter.eos_token_ids)

    def run(**options: Any) -> Round:
        outputs: dict[str, list[int]] = {}
        decode_s = prefill_s = 0.0
        num_first = 0
        for job in jobs:
            clock = _TokenClock(len(job.token_ids))
            input_ids = torch.tensor([job.token_ids], device=adapter.device)
            started = time.perf_counter()
            with torch.inference_mode():
                tokens = model.generate(
                    input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    do_sample=False,
                    max_new_tokens=max_tokens,
                    eos_token_id=ends,
                    pad_token_id=ends[0] if ends else 0,
                    stopping_criteria=[clock],
                    **options,
                )
            ended = time.perf_counter()
            prefill_s += clock.first_at - started
            decode_s += ended - clock.first_at
            outputs[job.id] = tokens[0, len(job.token_ids) :].tolist()
            num_first += clock.num_first
        return Round(
            outputs=outputs,
            decode_tokens=sum(map(len, outputs.values())) - num_first,
            decode_s=decode_s,
            prefill_tokens=sum(len(job.token_ids) for job in jobs),
            prefill_s=prefill_s,
            detail={},
        )

    return {
        "transformers": lambda: run(),
        "transformers n-gram": lambda: run(prompt_lookup_num_tokens=num_drafts),
    }


class _TokenClock:
    """A stopping criterion that never stops; notes when the first step ended and how many tokens it gave."""

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self.first_at = 0.0
        self.num_first = 0

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        if self.first_at == 0.0:
            self.first_at = time.perf_counter()
            self.num_first = input_ids.shape[1] - self._prompt_length
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _summary(rounds: list[Round]) -> dict[str, Any]:
    decode = [one.decode_tokens / one.decode_s for one in rounds if one.decode_s > 0]
    prefill = [one.prefill_tokens / one.prefill_s for one in rounds if one.prefill_s > 0]
    names = rounds[0].detail
    return {
        "decode_tokens_per_s": statistics.median(decode),
        "decode_tokens_per_s_spread": [min(decode), max(decode)],
        "prefill_tokens_per_s": statistics.median(prefill),
        "output_tokens": sum(map(len, rounds[0].outputs.values())),
        **{name: statistics.median(one.detail[name] for one in rounds) for name in names},
    }


def _identical(rounds: dict[str, list[Round]], one: str, other: str) -> str:
    """How many outputs agree, token for token, in the worst round."""
    counts = []
    for a, b in zip(rounds[one], rounds[other], strict=True):
        counts.append(sum(a.outputs[name] == b.outputs[name] for name in a.outputs))
    return f"{min(counts)} of {len(rounds[one][0].outputs)}"


def describe_machine() -> dict[str, Any]:
    """What timings depend on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _print(console: Console, report: dict[str, Any]) -> None:
    table = Table(title=f"{report['prompts']} prompts, {report['max_tokens']} tokens each, {report['machine']['cpu']}")
    for column in ("", "decode tok/s", "min..max", "prefill tok/s", "acceptance", "ms/step", "host ms/step"):
        table.add_column(column, justify="right" if column else "left")
    for name, side in report["sides"].items():
        low, high = side["decode_tokens_per_s_spread"]
        own = [
            f"{side[key]:.2f}" if key in side else ""
            for key in ("acceptance_length", "decode_ms_per_step", "host_ms_per_step")
        ]
        decode, prefill = side["decode_tokens_per_s"], side["prefill_tokens_per_s"]
        table.add_row(name, f"{decode:.1f}", f"{low:.1f}..{high:.1f}", f"{prefill:.0f}", *own)
    console.print(table)
    console.print(f"identical with and without speculation: {report['identical_outputs']}", highlight=False)
    console.print(
        f"start-up {report['start_up_s']:.1f} s, of it {report['compile_s']:.1f} s for "
        f"{report['compiled_buckets']} buckets; {report['recompilations']} recompilations afterwards",
        highlight=False,
    )


if __name__ == "__main__":
    try:
        main()
    except CompspecError as error:
        raise SystemExit(f"error: {error}") from None
