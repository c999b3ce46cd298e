"""Measures who drafts best for what: several proposers, fixed and adaptive numbers of drafts, by category of prompt.

    python tools/bench_proposers.py -c configs/bench.yaml --spec-bench question.jsonl --draft-model draft/

Prompts run one at a time, greedily. Each side has an engine of its own; for every prompt all sides run one after the
other, in an order that turns with the prompt, so that a slow spell of the machine meets all of them. Before each round
the engines forget what they have learned. Speed is of decoding, without the prompt and the first token. Outputs of all
sides are compared with those of the first. The table goes to standard error, JSON to --json.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import Job, describe_machine, read_jobs
from compspec import LLM, CompspecError, SamplingParams, load_config
from compspec.config import make_config, parse_overrides

MOST = 7


@dataclass(kw_only=True)
class Side:
    """One way to draft.

    Attributes:
        name: in the table.
        llm: its own, because a store of outputs would know a prompt from the other sides.
        speculative: of the requests: None, or at most so many drafts.
        seconds, tokens, steps: by category, one entry per prompt and round.
    """

    name: str
    llm: LLM
    speculative: int | None
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[str, list[int]] = field(default_factory=dict)

    def run(self, job: Job, max_tokens: int) -> None:
        """Generates for one prompt and keeps what it took."""
        params = SamplingParams(max_tokens=max_tokens, speculative=self.speculative)
        output = self.llm.generate([job.token_ids], params)[0]
        for category in (job.category, "all"):
            self.seconds[category].append(output.stats.decode_s)
            self.tokens[category].append(output.stats.num_decode_tokens)
            self.steps[category].append(output.stats.num_decode_steps)
        self.outputs[job.id] = output.token_ids

    def speed(self, category: str) -> float:
        """Tokens per second."""
        return sum(self.tokens[category]) / max(sum(self.seconds[category]), 1e-9)

    def acceptance(self, category: str) -> float:
        """Tokens per step."""
        return sum(self.tokens[category]) / max(sum(self.steps[category]), 1)


def main() -> None:
    """Entry point."""
    args = _arguments()
    console = Console(stderr=True, width=200)
    sides = _sides(args, console)
    jobs = read_jobs(sides[0].llm, args.prompts, args.spec_bench)
    for side in sides:  # the first steps of an engine are slower
        side.run(jobs[0], 8)
    for side in sides:
        for counts in (side.seconds, side.tokens, side.steps):
            counts.clear()
    for round_index in range(args.rounds):
        for side in sides:
            side.llm.engine.reset()
        for index, job in enumerate(jobs):
            turn = (index + round_index) % len(sides)
            for side in [*sides[turn:], *sides[:turn]][:: 1 if round_index % 2 == 0 else -1]:
                side.run(job, args.max_tokens)
            console.print(f"round {round_index + 1}, prompt {index + 1} of {len(jobs)}", highlight=False)
    categories = [*dict.fromkeys(job.category for job in jobs if job.category), "all"]
    _print(console, sides, categories)
    report = {
        "machine": describe_machine(),
        "rounds": args.rounds,
        "max_tokens": args.max_tokens,
        "sides": {side.name: _report(side, sides[0], categories) for side in sides},
    }
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", type=Path, required=True)
    parser.add_argument("--set", action="append", help="section.key=value")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path, help="JSONL as for compspec generate")
    source.add_argument("--spec-bench", type=Path, help="question.jsonl of Spec-Bench, or its folder")
    parser.add_argument("--methods", default="ngram,suffix,chain,layer_skip")
    parser.add_argument("--draft-model", type=Path, help="adds sides that draft with this model")
    parser.add_argument("--layers", type=int, help="of layer_skip")
    parser.add_argument("--fixed", default="1,3,5,7", help="numbers of drafts beside the adaptive one")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args: argparse.Namespace = parser.parse_args()
    return args


def _sides(args: argparse.Namespace, console: Console) -> list[Side]:
    base = load_config(args.config, parse_overrides(args.set or []))
    options: dict[str, dict[str, Any]] = {
        "ngram": {},
        "suffix": {},
        "chain": {"proposers": ["suffix", "ngram"]},
        "layer_skip": {} if args.layers is None else {"num_layers": args.layers},
    }
    methods = [name for name in args.methods.split(",") if name]
    if args.draft_model is not None:
        options["draft_model"] = {"model": str(args.draft_model)}
        methods.append("draft_model")

    def engine(name: str, **speculative: Any) -> LLM:
        data = {**base.model_dump(), "speculative": speculative}
        data["scheduler"]["max_num_seqs"] = 1
        console.print(f"starting {name}", highlight=False)
        return LLM(make_config(data))

    sides = [Side(name="none", llm=engine("none", method="none"), speculative=None)]
    for method in methods:
        common = {"method": method, "num_draft_tokens": MOST, **options[method]}
        for k in filter(None, args.fixed.split(",")):
            name = f"{method} {k}"
            sides.append(Side(name=name, llm=engine(name, adaptive=False, **common), speculative=int(k)))
        name = f"{method} adaptive"
        sides.append(Side(name=name, llm=engine(name, adaptive=True, **common), speculative=None))
    return sides


def _report(side: Side, first: Side, categories: Sequence[str]) -> dict[str, Any]:
    return {
        "tokens_per_s": {category: side.speed(category) for category in categories},
        "acceptance_length": {category: side.acceptance(category) for category in categories},
        "identical_outputs": sum(side.outputs[name] == first.outputs[name] for name in first.outputs),
        "median_prompt_s": statistics.median(side.seconds["all"]),
    }


def _print(console: Console, sides: Sequence[Side], categories: Sequence[str]) -> None:
    table = Table(title="decode tokens/s (tokens per step)")
    table.add_column("")
    for category in categories:
        table.add_column(category, justify="right")
    table.add_column("identical", justify="right")
    for side in sides:
        cells = [f"{side.speed(category):.1f} ({side.acceptance(category):.2f})" for category in categories]
        same = sum(side.outputs[name] == sides[0].outputs[name] for name in sides[0].outputs)
        table.add_row(side.name, *cells, f"{same} of {len(side.outputs)}")
    console.print(table)


if __name__ == "__main__":
    try:
        main()
    except CompspecError as error:
        raise SystemExit(f"error: {error}") from None
