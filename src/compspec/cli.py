"""The `compspec` command. The only module that prints."""

import json
import logging
import sys
from collections.abc import Iterator, Sequence
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

EXIT_DIFFERENT = 1
EXIT_ERROR = 2

_err = Console(stderr=True)
_out = Console()

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="YAML configuration file.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value; overrides the file. Repeatable.")
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
    table.add_row("after start-up", f"{stats.num_recompilations} recompilations, {stats.num_eager_steps} eager steps")
    if llm.engine.runner.uses_graphs:
        table.add_row(
            "CUDA graphs",
            f"{stats.num_cuda_graphs} captured, {stats.num_cuda_graph_skips} left out, "
            f"{stats.num_cuda_graph_rerecordings} captured after start-up",
        )
    _err.print(table)


@contextmanager
def _progress_bar(total: int) -> Iterator[Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_err) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda: bar.advance(task)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
