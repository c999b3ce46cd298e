"""The `compspec` command. The only module that prints."""

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from compspec.errors import CompspecError, ConfigError, RequestError, UnsupportedError

# torch and transformers take seconds to import; `--help` and `config schema` do without them.
if TYPE_CHECKING:
    from compspec.config import EngineConfig
    from compspec.jsonl import PromptLine
    from compspec.llm import LLM, Prompt, RequestOutput
    from compspec.sampling.params import SamplingParams

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Speculative decoding that never changes the output."
)
config_app = typer.Typer(no_args_is_help=True, help="The configuration.")
app.add_typer(config_app, name="config")
cache_app = typer.Typer(add_completion=False)
app.add_typer(cache_app, name="cache")

EXIT_DIFFERENT = 1
EXIT_ERROR = 2

_err = Console(stderr=True)
_out = Console()

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="YAML configuration file.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value; overrides the file. Repeatable.")
]
CacheDirOption = Annotated[Path | None, typer.Option("--dir", help="The folder; default: that of --config.")]
CacheConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file; default: $COMPSPEC_CACHE or ~/.cache/compspec.")
]


def main() -> None:
    """Entry point: errors of compspec are one line and exit code 2."""
    try:
        app()
    except (CompspecError, OSError) as error:  # what is left of OSError is the terminal's: a full disk, a closed pipe
        _err.print(f"[bold red]error:[/] {_escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(EXIT_ERROR)


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine does.")] = False,
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )


@app.command()
def generate(
    config: ConfigOption,
    set_: SetOption = None,
    prompt: Annotated[str | None, typer.Option(help="One prompt; its text streams to the terminal.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL file of prompts.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSONL file for results; a killed run resumes here.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run again without speculation and compare token by token.")
    ] = False,
    chat: Annotated[bool | None, typer.Option(help="Wrap text prompts in the chat template.")] = None,
) -> None:
    """Generate text, with statistics of the speculation."""
    from compspec.config import load_config, parse_overrides

    resolved = load_config(config, parse_overrides(set_ or []))
    if prompt is not None and prompts is not None:
        raise ConfigError("give --prompt or --prompts, not both")
    if output is not None and prompts is None:
        raise ConfigError("--output needs --prompts")
    use_chat = resolved.generate.chat if chat is None else chat
    if prompts is not None:
        _generate_batch(resolved, prompts, output, use_chat, check)
        return
    text = prompt if prompt is not None else resolved.generate.prompt
    if text is None:
        raise ConfigError("no prompt: give --prompt or --prompts, or set generate.prompt in the configuration")
    _generate_one(resolved, text, use_chat, check)


@app.command()
def bench(
    config: Annotated[list[Path], typer.Option("--config", "-c", help="YAML configuration file. Repeatable.")],
    prompts: Annotated[Path | None, typer.Option(help="JSONL file of prompts.")] = None,
    spec_bench: Annotated[Path | None, typer.Option(help="question.jsonl of Spec-Bench, or its folder.")] = None,
    chat: Annotated[bool | None, typer.Option(help="Wrap texts in the chat template; default for Spec-Bench.")] = None,
    ids: Annotated[str | None, typer.Option(help="81,121,...: those prompts; default: all, 12 of Spec-Bench.")] = None,
    limit: Annotated[int | None, typer.Option(help="The first so many prompts of the file.")] = None,
    set_: SetOption = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="section.key=value,value,...: one side for each value. Repeatable; sweeps multiply."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Default: the configuration's.")] = None,
    params: Annotated[str, typer.Option(help="JSON of sampling parameters.")] = "{}",
    concurrent: Annotated[str, typer.Option(help="Requests at a time, or all, which submits all at once.")] = "1",
    rounds: Annotated[int, typer.Option(min=1, help="All sides run in turns, so many times.")] = 3,
    warm_up: Annotated[bool, typer.Option(help="Run every side once before.")] = True,
    json_: Annotated[Path | None, typer.Option("--json", help="File for numbers and outputs; - prints them.")] = None,
    html: Annotated[Path | None, typer.Option(help="File for a report with charts (compspec[bench]).")] = None,
) -> None:
    """Measure configurations side by side, each against itself without drafts."""
    from compspec.bench.bench import BenchOptions, parse_concurrent, parse_params, run_bench
    from compspec.bench.outputs import check_outputs, write_output

    options = BenchOptions(
        configs=config,
        overrides=set_ or [],
        sweeps=sweep or [],
        prompts=prompts,
        spec_bench=spec_bench,
        ids=None if ids is None else [name.strip() for name in ids.split(",")],
        limit=limit,
        chat=chat,
        params=parse_params(params, max_tokens),
        concurrent=parse_concurrent(concurrent),
        rounds=rounds,
        warm_up=warm_up,
        command=["compspec", *sys.argv[1:]],
    )
    json_file = None if json_ is None or str(json_) == "-" else json_
    check_outputs(json_file, html)
    report = run_bench(options, lambda text: _err.print(text, style="dim", highlight=False, markup=False))
    _print_bench(report)
    text = json.dumps(report, indent=1, ensure_ascii=False)
    if json_file is not None:
        write_output(json_file, text)
    elif json_ is not None:
        print(text)
    if html is not None:
        from compspec.bench.report import html_report

        write_output(html, html_report(report))


@app.command()
def doctor(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Run a tiny model on the GPU; exit with 1 if it does not do what it should.")
    ] = False,
) -> None:
    """Say what this machine can do."""
    from rich.table import Table

    from compspec.doctor import examine, examine_gpu

    table = Table(title="compspec doctor", show_header=False)
    tried = examine_gpu() if gpu else []
    for item in [*examine(), *tried]:
        mark = {True: "[green]ok[/]", False: "[yellow]no[/]", None: ""}[item.good]
        table.add_row(item.name, mark, _escape(item.value))
    _out.print(table)
    if any(item.good is False for item in tried):
        raise typer.Exit(EXIT_DIFFERENT)


@config_app.command()
def schema() -> None:
    """Print the JSON schema of the configuration."""
    from compspec.config import EngineConfig

    print(json.dumps(EngineConfig.model_json_schema(), indent=2))


@cache_app.callback(invoke_without_command=True)
def cache(context: typer.Context) -> None:
    """What compspec keeps on disk: `show` (the default), `clear`."""
    if context.invoked_subcommand is None:
        cache_show()


@cache_app.command("show")
def cache_show(dir_: CacheDirOption = None, config: CacheConfigOption = None) -> None:
    """Say what is cached: size, number, last use."""
    from rich.table import Table

    from compspec.cache import chosen_inductor_folder, find, linked_kinds, summarise

    path = _cache_path(dir_, config)
    found = find(path)
    table = Table("kind", "what", title=f"cache: {_escape(str(path))}", title_justify="left")
    for title in ("size", "number", "last use"):
        table.add_column(title, justify="right")
    for row in summarise(found):
        table.add_row(row.kind, _escape(row.name), _size(row.num_bytes), str(row.number), _ago(row.used_at))
    if found:
        table.add_section()
        table.add_row("total", "", _size(sum(entry.num_bytes for entry in found)), str(len(found)), "")
        _out.print(table)
    else:
        _out.print(f"nothing is cached in {path}", highlight=False, markup=False, soft_wrap=True)
    notes = [f"{path / kind} is a link, which is not followed" for kind in linked_kinds(path)]
    inductor = chosen_inductor_folder()
    if inductor is not None:
        notes.append(
            f"code compiled by torch.compile goes to {inductor} ($TORCHINDUCTOR_CACHE_DIR); `cache clear` leaves it"
        )
    for note in notes:
        _out.print(note, highlight=False, markup=False, soft_wrap=True)


@cache_app.command("clear")
def cache_clear(
    kinds: Annotated[list[str] | None, typer.Argument(metavar="[KIND]...", help="Default: all.")] = None,
    older_than: Annotated[
        float | None, typer.Option("--older-than", min=0, help="Only what was not used for so many days.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dir_: CacheDirOption = None,
    config: CacheConfigOption = None,
) -> None:
    """Remove what is cached; it is made again when it is needed. Nothing else in the folder is touched."""
    from compspec.cache import find, remove, select

    path = _cache_path(dir_, config)
    chosen = select(find(path), kinds or [], older_than)
    ready = [entry for entry in chosen if not entry.may_be_at_work]
    if len(ready) < len(chosen):
        _err.print(f"{len(chosen) - len(ready)} stay: written just now, perhaps by a process at work", highlight=False)
    if not ready:
        _out.print(f"nothing to remove in {path}", highlight=False, markup=False, soft_wrap=True)
        return
    size = _size(sum(entry.num_bytes for entry in ready))
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"{size} in '{path}' would be removed, and there is no terminal to ask; give --yes")
        if not typer.confirm(f"Remove {size} ({len(ready)} entries) from {path}?", err=True):
            return
    removed = remove(ready)
    said = f"removed {_size(removed.num_bytes)} ({removed.num_entries} entries) from {path}"
    _out.print(said, highlight=False, markup=False, soft_wrap=True)
    if removed.failures:
        raise ConfigError(f"{len(removed.failures)} entries are still there; {removed.failures[0]}")


def _cache_path(folder: Path | None, config: Path | None) -> Path:
    """The cache folder that the options name."""
    from compspec.config import default_cache_path, load_config

    if folder is not None and config is not None:
        raise ConfigError("give --dir or --config, not both")
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"there is no folder '{folder}'")
    return folder or (load_config(config).cache_path if config is not None else default_cache_path())


def _size(num_bytes: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.1f} {unit}"
    return f"{num_bytes} bytes"


def _ago(when: float) -> str:
    days = int((time.time() - when) // (24 * 3600))
    return "today" if days < 1 else "1 day ago" if days == 1 else f"{days} days ago"


def _generate_one(config: "EngineConfig", text: str, use_chat: bool, check: bool) -> None:
    params = _seeded(config.sampling)
    _refuse_check(config, check, [params])
    if params.logprobs is not None or params.prompt_logprobs is not None:
        raise ConfigError("log-probabilities are part of result lines; use --prompts, with --output or without")
    llm = _start(config)
    prompt = _encode(llm, text, use_chat)
    samples = _stream_one(llm, prompt, params) if params.n == 1 else _print_samples(llm, prompt, params)
    _print_statistics(llm)
    _conclude(llm, check, [prompt], [params], [samples])


def _refuse_check(config: "EngineConfig", check: bool, params: "Sequence[SamplingParams]") -> None:
    """The rejection verifier keeps no tokens that could be compared."""
    if check and config.speculative.verifier == "rejection" and not all(each.is_greedy for each in params):
        raise ConfigError(
            "--check compares tokens, and speculative.verifier: rejection keeps the distribution of sampled outputs, "
            "not their tokens; use verifier: equality, or temperature 0"
        )


def _stream_one(llm: "LLM", prompt: list[int], params: "SamplingParams") -> list[list[int]]:
    """Writes a text as it is made; returns its tokens, as the one sample there is."""
    token_ids: list[int] = []
    for chunk in llm.stream(prompt, params):
        token_ids += chunk.token_ids
        sys.stdout.write(chunk.text if llm.tokenizer is not None else " ".join(map(str, chunk.token_ids)) + " ")
        sys.stdout.flush()
        if chunk.error is not None:
            raise RequestError(chunk.error)
    sys.stdout.write("\n\n")
    sys.stdout.flush()
    return [token_ids]


def _print_samples(llm: "LLM", prompt: list[int], params: "SamplingParams") -> list[list[int]]:
    """Writes several samples one after the other; returns their tokens."""
    (output,) = llm.generate([prompt], params)
    for sample in output.outputs:
        text = sample.text if sample.text is not None else " ".join(map(str, sample.token_ids))
        sys.stdout.write(f"--- sample {sample.index + 1} of {params.n}\n{text}\n\n")
        if sample.error is not None:
            raise RequestError(sample.error)
    sys.stdout.flush()
    return [sample.token_ids for sample in output.outputs]


def _generate_batch(config: "EngineConfig", prompts: Path, output: Path | None, use_chat: bool, check: bool) -> None:
    from compspec.jsonl import ResultFile, read_prompts, request_key, result_record

    lines = read_prompts(prompts)
    asked = [line.sampling(config.sampling) for line in lines]
    _refuse_check(config, check, asked)
    keys = [request_key(line, params, config, use_chat) for line, params in zip(lines, asked, strict=True)]
    names = [line.id for line in lines]
    file = ResultFile(output, dict(zip(names, keys, strict=True))) if output is not None else None
    todo = [index for index, name in enumerate(names) if file is None or name not in file.finished]
    if len(todo) < len(lines):
        done = f"{len(lines) - len(todo)} of {len(lines)} prompts are finished in {output} and not done again"
        _err.print(done + (", nor checked" if check else ""), markup=False, soft_wrap=True)
    if not todo:
        return
    llm = _start(config)
    chosen = [_seeded(asked[index]) for index in todo]
    encoded = [_encode_line(llm, lines[index], asked[index], use_chat) for index in todo]
    with _progress_bar(len(todo)) as advance:

        def finished(index: int, result: "RequestOutput") -> None:
            record = result_record(lines[todo[index]], keys[todo[index]], result)
            if file is not None:
                file.write(record)
            else:
                print(json.dumps(record, ensure_ascii=False), flush=True)
            advance()

        outputs = llm.generate(encoded, chosen, on_finish=finished)
    if file is not None:
        file.close()
    _print_statistics(llm)
    _conclude(llm, check, encoded, chosen, [_token_ids(result) for result in outputs])
    failed = [names[index] for index, result in zip(todo, outputs, strict=True) if _errors(result)]
    if failed:
        raise RequestError(
            f"{len(failed)} of {len(todo)} prompts failed, the first is '{failed[0]}'; see their `error`"
        )


def _conclude(
    llm: "LLM",
    check: bool,
    prompts: "Sequence[Prompt]",
    params: "Sequence[SamplingParams]",
    speculative: Sequence[list[list[int]]],
) -> None:
    """The line that says how the output stands to that without speculation; with `check`, after comparing them."""
    numerics = llm.config.numerics
    if check:
        _check(llm, prompts, params, speculative)
    elif llm.config.speculative.verifier == "rejection" and not all(each.is_greedy for each in params):
        _err.print(
            "output: distributed as without speculation, but not the same tokens (speculative.verifier: rejection)",
            highlight=False,
        )
    elif numerics.mode == "exact" and numerics.self_test == "error":
        _err.print("output: the same, token for token, as without speculation (numerics: exact)", highlight=False)
    elif numerics.mode == "exact":
        _err.print(
            f"output: not proved to be the same as without speculation (numerics.self_test: {numerics.self_test})",
            highlight=False,
        )
    else:
        _err.print(
            "output: the same as without speculation up to floating-point near-ties (numerics: fast)", highlight=False
        )


def _check(
    llm: "LLM",
    prompts: "Sequence[Prompt]",
    params: "Sequence[SamplingParams]",
    speculative: Sequence[list[list[int]]],
) -> None:
    """Generates again without drafts and compares; exits with 1 at a difference."""
    plain_params = [each.model_copy(update={"speculative": False}) for each in params]
    plain = [_token_ids(result) for result in llm.generate(prompts, plain_params)]
    same = [a == b for a, b in zip(speculative, plain, strict=True)]
    if all(same):
        num_tokens = sum(len(sample) for samples in plain for sample in samples)
        _err.print(
            f"[green]checked:[/] {len(same)} of {len(same)} outputs ({num_tokens} tokens) "
            "are equal to those without speculation"
        )
        return
    index = same.index(False)
    one, other = next((a, b) for a, b in zip(speculative[index], plain[index], strict=True) if a != b)
    position = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    _err.print(
        f"[bold red]different:[/] {sum(same)} of {len(same)} outputs are equal; "
        f"prompt {index} differs first at token {position}"
    )
    raise typer.Exit(EXIT_DIFFERENT)


def _token_ids(output: "RequestOutput") -> list[list[int]]:
    """Of every sample."""
    return [sample.token_ids for sample in output.outputs]


def _errors(output: "RequestOutput") -> list[str]:
    return [sample.error for sample in output.outputs if sample.error is not None]


def _start(config: "EngineConfig") -> "LLM":
    """Loads and compiles, with a line per step on the terminal."""
    from compspec.llm import LLM

    def tell(name: str, seconds: float) -> None:
        _err.print(f"  {name}: {seconds:.1f} s", style="dim", highlight=False, markup=False)

    _err.print(f"starting {config.model.source}", style="dim", highlight=False, markup=False, soft_wrap=True)
    return LLM(config, progress=tell)


def _seeded(params: "SamplingParams") -> "SamplingParams":
    """Fixes the seed of a sampled request, so that it can be repeated for a check."""
    import secrets

    if params.is_greedy or params.seed is not None:
        return params
    return params.model_copy(update={"seed": secrets.randbits(62)})


def _encode(llm: "LLM", text: str, use_chat: bool) -> list[int]:
    return llm.chat_token_ids([{"role": "user", "content": text}]) if use_chat else llm.encode(text)


def _encode_line(llm: "LLM", line: "PromptLine", params: "SamplingParams", use_chat: bool) -> list[int]:
    """The token ids of a line of a prompt file; what is wrong with it is said with its id."""
    try:
        if line.prompt_token_ids is not None:
            token_ids = line.prompt_token_ids
        elif line.messages is not None:
            token_ids = llm.chat_token_ids(line.messages)
        else:
            assert line.prompt is not None
            token_ids = _encode(llm, line.prompt, use_chat)
        return llm.check_request(token_ids, params)
    except (RequestError, UnsupportedError) as error:
        raise type(error)(f"prompt '{line.id}': {error}") from None


def _print_statistics(llm: "LLM") -> None:
    from rich.table import Table

    stats = llm.stats
    table = Table(show_header=False, title="statistics", title_justify="left")
    table.add_row("output tokens", f"{stats.num_output_tokens} in {stats.num_requests} outputs")
    table.add_row("decode speed", f"{stats.decode_tokens_per_s:.1f} tokens/s")
    table.add_row("prefill speed", f"{stats.prefill_tokens_per_s:.1f} tokens/s")
    table.add_row("acceptance length", f"{stats.acceptance_length:.2f} tokens per step")
    if stats.num_draft_tokens:
        shares = "  ".join(f"{share:.0%}" for share in stats.acceptance_per_position)
        table.add_row("accepted by draft position", shares)
        table.add_row("drafts", f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} accepted")
    if stats.num_undrafted_steps:
        table.add_row(
            "not drafted",
            f"{stats.num_undrafted_steps} of {stats.num_decode_steps} steps, because it did not pay; "
            f"{stats.num_probes} probes",
        )
    if stats.num_cached_tokens:
        share = f"{stats.prefix_cache_hit_rate:.0%}"
        table.add_row("prefix cache", f"{stats.num_cached_tokens} of {stats.num_prompt_tokens} prompt tokens ({share})")
    if stats.num_preemptions:
        table.add_row("preemptions", f"{stats.num_preemptions}; more cache.memory would avoid them")
    table.add_row("start-up", f"{stats.compile_s:.1f} s for {stats.num_compiled_buckets} compiled buckets")
    if stats.first_token_at is not None:
        since_start = _process_age_s() - (time.perf_counter() - stats.first_token_at)
        table.add_row("first token", f"{since_start:.1f} s after the process started")
    table.add_row("after start-up", f"{stats.num_recompilations} recompilations, {stats.num_eager_steps} eager steps")
    if llm.engine.runner.uses_graphs:
        table.add_row(
            "CUDA graphs",
            f"{stats.num_cuda_graphs} captured, {stats.num_cuda_graph_skips} left out, "
            f"{stats.num_cuda_graph_rerecordings} captured after start-up",
        )
    _err.print(table)


def _print_bench(report: Mapping[str, Any]) -> None:
    from compspec.bench.table import notes, tables

    for table in tables(report):
        _err.print(table)
    for note in notes(report):
        _err.print(note, highlight=False, markup=False, soft_wrap=True)


def _process_age_s() -> float:
    """Seconds since this process started, imports and all."""
    import psutil

    created = psutil.Process().create_time()
    if hasattr(time, "CLOCK_BOOTTIME"):
        # Either of these two is off by up to a second, their difference is not.
        return time.clock_gettime(time.CLOCK_BOOTTIME) - (created - psutil.boot_time())
    return time.time() - created


@contextmanager
def _progress_bar(total: int) -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_err) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda: bar.advance(task)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
