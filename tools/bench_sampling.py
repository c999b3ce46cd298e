"""Measures what sampling costs per step: the metadata layer, with penalties and without, greedy and with noise.

    python tools/bench_sampling.py --batch 1 12 64 --vocab 49152 151936

Requests have --prompt distinct prompt tokens, --output tokens of output and --drafts drafts; logits are random bf16.
Each side is timed in turn within every repetition; figures are medians in milliseconds, with the quartiles. "layer" is
what the metadata costs with penalties on, against the same step with penalties off. The table goes to standard error,
the JSON to standard output.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from compspec.batch import Batch, DraftTokens, ScheduledRequest, Scores, StepOutput
from compspec.request import Request
from compspec.runner.compiled import compile_noise
from compspec.sampling.metadata import MetadataState
from compspec.sampling.noise import GumbelNoise
from compspec.sampling.params import SamplingParams
from compspec.sampling.sampler import Sampler
from compspec.sampling.verifier import EqualityVerifier

SIDES: dict[str, dict[str, Any]] = {
    "greedy, no penalties": {},
    "greedy, all penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "T=0.8, no penalties": {"temperature": 0.8, "seed": 1},
    "T=0.8, all penalties": {
        "temperature": 0.8,
        "seed": 1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    },
}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 12, 64])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=500)
    parser.add_argument("--output", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    rows = []
    for vocab_size in args.vocab:
        for batch_size in args.batch:
            rows.append({"vocab": vocab_size, "batch": batch_size, **measure(vocab_size, batch_size, args)})
    table = Table(title=f"sampling, ms per step, {args.drafts} drafts, {torch.get_num_threads()} threads")
    names = list(SIDES)
    for column in ("vocabulary", "batch", *names, "penalty layer"):
        table.add_column(column, justify="right")
    for row in rows:
        layer = row[names[1]]["median"] - row[names[0]]["median"]
        cells = [f"{row[name]['median']:.2f} ({row[name]['low']:.2f}..{row[name]['high']:.2f})" for name in names]
        table.add_row(f"{row['vocab']}", f"{row['batch']}", *cells, f"{layer:.2f}")
    Console(stderr=True).print(table)
    print(json.dumps({"settings": vars(args), "rows": rows}, indent=2))


def measure(vocab_size: int, batch_size: int, args: argparse.Namespace) -> dict[str, Any]:
    """Medians and quartiles of every side, in ms, by name."""
    steps = {name: make_step(vocab_size, batch_size, params, args) for name, params in SIDES.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repetition in range(args.repeat + 2):
        for name in list(steps)[:: 1 if repetition % 2 else -1]:
            started = time.perf_counter()
            steps[name]()
            if repetition >= 2:
                times[name].append((time.perf_counter() - started) * 1e3)
    found = {}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        found[name] = {"median": median, "low": low, "high": high}
    return found


def make_step(
    vocab_size: int, batch_size: int, params: dict[str, Any], args: argparse.Namespace
) -> Callable[[], StepOutput]:
    """One step after the forward: metadata, sampling, verification, commit of what was kept to state and request."""
    device = torch.device(args.device)
    generator = torch.Generator().manual_seed(0)
    length = args.prompt + args.output
    state = MetadataState(batch_size, vocab_size, device, max_model_len=length + 10_000)
    noise = compile_noise(GumbelNoise(vocab_size, device), "default")
    sampler, verifier = Sampler(noise), EqualityVerifier()
    entries, drafts = [], []
    for slot in range(batch_size):
        tokens = torch.randperm(vocab_size, generator=generator)[: args.prompt].tolist()
        request = Request(str(slot), tokens, SamplingParams(max_tokens=10_000, **params), seed=slot, max_tokens=10_000)
        request.append(torch.randint(vocab_size, (args.output,), generator=generator).tolist())
        entries.append(
            ScheduledRequest(
                request=request,
                slot=slot,
                num_computed_tokens=length - 1,
                num_new_tokens=1,
                max_draft_tokens=args.drafts,
                samples=True,
            )
        )
        drafts.append(torch.randint(vocab_size, (args.drafts,), generator=generator).tolist())
    batch = Batch(scheduled=tuple(entries), is_prefill=False)
    proposed = DraftTokens.from_lists(drafts, args.drafts)
    logits = torch.randn(batch_size * (args.drafts + 1), vocab_size, generator=generator).bfloat16().to(device)
    scores = Scores(logits=logits, first_row=tuple(range(0, len(logits), args.drafts + 1)))

    def step() -> StepOutput:
        metadata = state.build(batch, proposed, scores)
        output = verifier.verify(sampler.sample(scores, metadata), metadata, batch, proposed)
        state.commit(batch, output)
        for entry, tokens in zip(batch.scheduled, output.token_ids, strict=True):
            entry.request.append(list(tokens))
        return output

    return step


if __name__ == "__main__":
    main()
