"""Measures what a decode step costs outside the model: microseconds of each phase, and what grows with the context.

    python tools/bench_host.py --requests 1 12 32 --context 100 4000 --method none ngram suffix

In the place of the forward stand logits that were drawn beforehand, with a vocabulary of the usual size. Prompts repeat
themselves, so that there is always something to draft, and `speculative.adaptive` is off, so that it always is. Figures
are medians over --steps decode steps, in microseconds, and need not add up to `host`, the step without the forward. The
table goes to standard error, the JSON to standard output. To compare two versions, run them in turn, each with its
`src` on PYTHONPATH.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from compspec.config import make_config
from compspec.engine import Engine
from compspec.runner.compiled import compile_noise
from compspec.sampling.noise import GumbelNoise
from compspec.sampling.params import SamplingParams

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 1},
    "top_p": {"temperature": 0.8, "seed": 1, "top_p": 0.95},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2},
}
METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "chain": {"method": "chain", "proposers": ["suffix", "ngram"]},
}
PERIOD = 61
"""Tokens after which a prompt repeats itself."""


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 12, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[100, 1000, 4000], help="prompt tokens")
    parser.add_argument("--method", nargs="+", choices=METHODS, default=["none", "ngram"])
    parser.add_argument("--sampling", nargs="+", choices=SAMPLING, default=["greedy", "top_p"])
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--vocab", type=int, default=49_152)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args.vocab, max(args.context) + 1024)
        for num_requests, method in itertools.product(args.requests, args.method):
            engine = make_engine(folder, num_requests, method, args)
            for context, sampling in itertools.product(args.context, args.sampling):
                case = {"requests": num_requests, "method": method, "context": context, "sampling": sampling}
                rows.append({**case, "us": measure(engine, num_requests, context, SAMPLING[sampling], args.steps)})
    print_table(rows)
    print(json.dumps({"settings": vars(args), "threads": torch.get_num_threads(), "rows": rows}, indent=2))


def make_model(folder: Path, vocab_size: int, max_model_len: int) -> None:
    """Saves a llama of one layer."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=max_model_len,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)


def make_engine(folder: str, num_requests: int, method: str, args: argparse.Namespace) -> Engine:
    """An engine for so many requests at once."""
    config = make_config(
        {
            "model": {"source": folder, "dtype": "bfloat16", "device": "cpu"},
            "speculative": {**METHODS[method], "num_draft_tokens": args.drafts, "adaptive": False},
            "scheduler": {"max_num_seqs": num_requests},
            "compile": {"mode": "none"},
            "numerics": {"self_test": "skip"},
            "cache": {"prefix_caching": False, "memory": 1.0},
        }
    )
    engine = Engine(config)
    runner = engine.runner
    for bucket in runner.buckets.all:
        logits = torch.randn(bucket.num_requests * bucket.num_logits, args.vocab).bfloat16()
        runner._steps[bucket] = lambda *inputs, logits=logits: logits
    engine._sampler._noise = compile_noise(GumbelNoise(args.vocab, torch.device("cpu")), "default")
    return engine


class Phases:
    """Times methods of objects by wrapping them; what one phase spends in another is not its own."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = 0.0

    def wrap(self, name: str, owner: Any, method: str) -> Callable[[], None]:
        """Times calls of `owner.method` as the phase `name`; returns what undoes it."""
        plain = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            started = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                took = time.perf_counter() - started
                self.seconds[name] += took - self._inner
                self._inner = outer + took

        setattr(owner, method, timed)
        return lambda: setattr(owner, method, plain)


def measure(
    engine: Engine, num_requests: int, context: int, params: dict[str, Any], num_steps: int
) -> dict[str, float]:
    """Medians of each phase in microseconds, by name; `host` is the step without the forward."""
    for index in range(num_requests):
        prompt = [3 + (index * 997 + place % PERIOD * 31) % 40_000 for place in range(context)]
        engine.add_request(prompt, SamplingParams(max_tokens=1000, ignore_eos=True, **params))
    while any(request.is_prefilling for request in [*engine.scheduler.waiting, *engine.scheduler.running]):
        engine.step()
    for _ in range(3):
        engine.step()
    phases = Phases()
    runner = engine.runner
    undo = [
        phases.wrap("schedule", engine.scheduler, "schedule"),
        phases.wrap("propose", engine, "_propose"),
        phases.wrap("score", engine._scorer, "score"),
        *(phases.wrap("fill", buffers, "fill") for buffers in runner._buffers.values()),
        phases.wrap("forward", runner, "_call"),
        phases.wrap("metadata", engine._metadata, "build"),
        phases.wrap("sample", engine._sampler, "sample"),
        phases.wrap("noise", engine._sampler, "_noise"),
        phases.wrap("verify", engine._verifier, "verify"),
        phases.wrap("commit", engine._metadata, "commit"),
        phases.wrap("update", engine.scheduler, "update"),
        phases.wrap("account", engine, "_account"),
        phases.wrap("rest", engine, "step"),
    ]
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(num_steps):
        phases.seconds.clear()
        engine.step()
        for name, seconds in phases.seconds.items():
            times[name].append(seconds * 1e6)
        times["host"].append((sum(phases.seconds.values()) - phases.seconds["forward"]) * 1e6)
    for each in undo:
        each()
    for request in [*engine.scheduler.running]:
        engine.abort(request.request_id)
    engine.reset()
    return {name: statistics.median(values) for name, values in times.items()}


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line per case, on standard error."""
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    table = Table(title=f"microseconds per decode step, {torch.get_num_threads()} threads")
    for column in ("requests", "method", "context", "sampling", *names):
        table.add_column(column, justify="right")
    for row in rows:
        figures = [f"{row['us'].get(name, 0.0):.0f}" for name in names]
        table.add_row(f"{row['requests']}", row["method"], f"{row['context']}", row["sampling"], *figures)
    Console(stderr=True, width=200).print(table)


if __name__ == "__main__":
    main()
