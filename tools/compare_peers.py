"""Runs the same prompts through compspec and its peers, and prints one table.

    python tools/compare_peers.py -c configs/bench.yaml --spec-bench question.jsonl \\
        --vllm /venvs/vllm/bin/python --llama-cpp /venvs/llama/bin/python --openvino /venvs/openvino/bin/python \\
        --drafts vllm=3 --drafts llama-cpp=5,10 --concurrent 12 --rounds 3 --json peers.json --markdown peers.md

Every engine runs in a process of its own interpreter (tools/peers), gets the same token ids, made by compspec's
tokenizer and chat template, and the same number of threads. Only the process that is measured runs; the others are
stopped meanwhile. Decoding is greedy and ends at an end-of-text token or --max-tokens. Prefix caches are off, because
rounds repeat prompts. After a warm-up, rounds are interleaved and alternate in order; numbers are medians over rounds.
A peer that fails becomes a row that says so. transformers and vLLM run compspec's bf16 copy of the model, llama.cpp and
OpenVINO its GGUF file. The table goes to standard error. tools/peers/README.md says how to make the environments.
"""

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from compspec import LLM, CompspecError, load_config
from compspec.bench.machine import describe_machine, describe_versions
from compspec.bench.prompts import BenchPrompt, Question, encode_questions, read_questions
from compspec.config import EngineConfig
from compspec.errors import ConfigError, RequestError
from compspec.models.source import resolve_source
from peers.comparison import Comparison, Worker
from peers.protocol import Setup
from peers.summary import COLUMNS, Round, Side, cells, markdown, summarise

PEERS = ("transformers", "vllm", "llama-cpp", "openvino")
_NAMES = {"transformers": "transformers", "vllm": "vLLM", "llama-cpp": "llama.cpp", "openvino": "OpenVINO GenAI"}
_NUM_DRAFTS = 5
_TABLE_WIDTH = 140  # where no terminal says how wide it is


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the workers are ended
    args = _arguments()
    console = Console(stderr=True, width=None if sys.stderr.isatty() else _TABLE_WIDTH)
    configs = {path: load_config(path) for path in args.config}
    _check(args, configs)
    drafts = _drafts(args.drafts)
    questions = read_questions(prompts=args.prompts, spec_bench=args.spec_bench, limit=args.limit)
    for path in (args.json, args.markdown):
        if path is not None:
            _check_writable(path)
    prompts, setup = _prepare(questions, configs, args)
    comparison = Comparison(
        prompts=[prompt.token_ids for prompt in prompts],
        max_tokens=args.max_tokens,
        concurrency=args.concurrent,
        rounds=args.rounds,
        num_threads=args.threads,
        log_folder=args.logs or Path(tempfile.mkdtemp(prefix="compare_peers-")),
        timeout_s=args.timeout,
    )
    comparison.log_folder.mkdir(parents=True, exist_ok=True)
    interpreters = {
        "transformers": sys.executable if args.transformers else None,
        "vllm": args.vllm,
        "llama-cpp": args.llama_cpp,
        "openvino": args.openvino,
    }
    workers = [_compspec_worker(path, config) for path, config in configs.items()]
    for peer, interpreter in interpreters.items():
        if interpreter is not None:
            workers += _peer_workers(peer, interpreter, drafts.get(peer, [_NUM_DRAFTS]))
    comparison.run(workers, setup, console)
    _report(prompts, workers, args, console)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", type=Path, action="append", required=True, help="of compspec; repeatable")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path, help="JSONL as for compspec generate, through the chat template")
    source.add_argument("--spec-bench", type=Path, help="question.jsonl of Spec-Bench, or its folder")
    parser.add_argument("--limit", type=int, help="the first so many prompts of the file")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter that has vLLM")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="interpreter that has llama-cpp-python")
    parser.add_argument("--openvino", metavar="PYTHON", help="interpreter that has openvino-genai")
    parser.add_argument("--no-transformers", dest="transformers", action="store_false")
    parser.add_argument(
        "--drafts", action="append", default=[], metavar="PEER=N,...", help=f"numbers of drafts; default {_NUM_DRAFTS}"
    )
    parser.add_argument("--max-ngram", type=int, default=3, help="longest n-gram that peers look up")
    parser.add_argument("--concurrent", type=int, metavar="N", help="also run so many requests at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds to load, or to run all prompts once")
    parser.add_argument("--logs", type=Path, help="folder for the peers' logs; default: a temporary one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


def _check(args: argparse.Namespace, configs: dict[Path, EngineConfig]) -> None:
    for name in ("rounds", "max_tokens", "max_ngram", "threads", "concurrent"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if len({path.stem for path in args.config}) < len(args.config):
        raise ConfigError("two configurations have the same file name, which is their name in the table")
    sources = {config.model.source for config in configs.values()}
    if len(sources) > 1:
        raise ConfigError(f"the configurations name several models: {', '.join(sorted(sources))}; give one model")
    for path, config in configs.items():
        if args.concurrent is not None and args.concurrent > config.scheduler.max_num_seqs:
            raise ConfigError(
                f"--concurrent is {args.concurrent}, but scheduler.max_num_seqs of '{path}' is "
                f"{config.scheduler.max_num_seqs}"
            )


def _drafts(words: Sequence[str]) -> dict[str, list[int]]:
    """Numbers of drafts by peer, from PEER=N,N.

    Raises:
        ConfigError: an unknown peer, or no positive numbers.
    """
    drafts: dict[str, list[int]] = {}
    for word in words:
        peer, _, numbers = word.partition("=")
        listed = numbers.split(",")
        if peer not in PEERS or not all(number.isdecimal() and int(number) > 0 for number in listed):
            raise ConfigError(f"--drafts is '{word}'; write PEER=N,... with PEER one of {', '.join(PEERS)}")
        if peer in drafts or len(set(listed)) < len(listed):
            raise ConfigError(f"--drafts '{word}' says something twice")
        drafts[peer] = list(map(int, listed))
    return drafts


def _prepare(
    questions: Sequence[Question], configs: dict[Path, EngineConfig], args: argparse.Namespace
) -> tuple[list[BenchPrompt], Setup]:
    """Tokenises the prompts and finds the model's files, with an engine that is not compiled."""
    lengths = [config.model.max_model_len for config in configs.values() if config.model.max_model_len is not None]
    section = next(iter(configs.values())).model
    llm = LLM(
        section.source,
        revision=section.revision,
        trust_remote_code=section.trust_remote_code,
        dtype="bfloat16",
        device="cpu",
        max_model_len=min(lengths, default=None),
        compile={"mode": "none"},
        numerics="fast",
    )
    prompts = encode_questions(questions, llm, chat=True)
    limit = llm.engine.max_model_len
    for prompt in prompts:
        if len(prompt.token_ids) + args.max_tokens > limit:
            raise RequestError(
                f"prompt '{prompt.id}' has {len(prompt.token_ids)} tokens, with --max-tokens {args.max_tokens} it does "
                f"not fit into {limit}"
            )
    files = resolve_source(section.source, revision=section.revision, trust_remote_code=section.trust_remote_code)
    setup: Setup = {
        "model": str(llm.engine.loaded.folder),
        "gguf": None if files.gguf is None else str(files.gguf),
        "config": None,
        "max_model_len": limit,
        "max_num_seqs": args.concurrent or 1,
        "eos_token_ids": list(llm.engine.loaded.adapter.eos_token_ids),
        "num_threads": args.threads,
        "num_drafts": [],
        "max_ngram": args.max_ngram,
    }
    return prompts, setup


def _check_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"cannot write '{path}': {error.strerror}") from None


def _compspec_worker(path: Path, config: EngineConfig) -> Worker:
    name, speculative = f"compspec {path.stem}", config.speculative
    sides = [Side(engine=name, num_drafts=0, speculation="none")]
    if speculative.max_draft_tokens:
        most = speculative.max_draft_tokens
        amount = f"up to {most}, adaptive" if speculative.is_adaptive else f"{most}"
        sides.append(Side(engine=name, num_drafts=most, speculation=f"{speculative.method}, {amount}"))
    return Worker(name=name, command=_command(sys.executable, "compspec"), sides=sides, config=path.resolve())


def _peer_workers(peer: str, interpreter: str, drafts: Sequence[int]) -> list[Worker]:
    """A worker with all sides of a peer; of vLLM one for each side, since an engine has one setting."""
    name = _NAMES[peer]
    sides = [Side(engine=name, num_drafts=0, speculation="none")]
    sides += [Side(engine=name, num_drafts=number, speculation=f"n-gram, {number}") for number in drafts]
    command = _command(interpreter, peer.replace("-", "_"))
    if peer == "vllm":
        return [Worker(name=f"{name} {side.num_drafts}", command=command, sides=[side]) for side in sides]
    return [Worker(name=name, command=command, sides=sides)]


def _command(interpreter: str, module: str) -> list[str]:
    return [interpreter, "-m", f"peers.{module}_worker"]


def _report(
    prompts: Sequence[BenchPrompt], workers: Sequence[Worker], args: argparse.Namespace, console: Console
) -> None:
    sides = [side for worker in workers for side in worker.sides]
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    numbers = summarise(sides, num_prompt_tokens)
    rows = [cells(one) for one in numbers]
    machine = describe_machine()
    title = (
        f"{len(prompts)} prompts ({num_prompt_tokens} tokens), {args.max_tokens} greedy tokens each, "
        f"{args.rounds} rounds, {args.threads} threads of {machine['cpu']}"
    )
    failures = dict.fromkeys(f"{side.engine} failed: {side.failure}" for side in sides if side.failure is not None)
    notes = [title, *failures, *_notes(workers, args)]
    table = Table(title=title)
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number < 2 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in notes[1:]:
        console.print(f"- {note}", highlight=False, soft_wrap=True)
    if args.markdown is not None:
        args.markdown.write_text(markdown(rows, notes), encoding="utf-8")
    if args.json is not None:
        report = {
            "command": shlex.join(sys.argv),
            "machine": machine,
            "versions": describe_versions(),
            "configs": {str(path): load_config(path).model_dump(mode="json") for path in args.config},
            "workers": {worker.name: worker.ready for worker in workers},
            "max_tokens": args.max_tokens,
            "concurrent": args.concurrent,
            "prompts": [{"id": one.id, "category": one.category, "token_ids": one.token_ids} for one in prompts],
            "sides": [
                {**one, "rounds": _raw(side.rounds), "concurrent": _raw(side.concurrent)}
                for one, side in zip(numbers, sides, strict=True)
            ],
        }
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


def _notes(workers: Sequence[Worker], args: argparse.Namespace) -> list[str]:
    """What the numbers mean, and the settings of each engine, once."""
    said = dict.fromkeys(
        f"{worker.sides[0].engine}: {worker.ready['version']}, {worker.ready['settings']}"
        for worker in workers
        if worker.ready
    )
    meaning = [
        "decode: tokens after each output's first step, by the time after it; prefill: prompt tokens by the time to "
        "the first token; medians over rounds, in which the sides take turns",
        "speed-up and same output: against the same engine without speculation",
    ]
    if args.concurrent is not None:
        meaning.append(
            f"at once: {args.concurrent} requests at a time, output tokens by the whole time, prompts included"
        )
    return [*meaning, *said]


def _raw(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    return [{"wall_s": one.wall_s, "outputs": one.outputs} for one in rounds]


if __name__ == "__main__":
    try:
        main()
    except CompspecError as error:
        raise SystemExit(f"error: {error}") from None
