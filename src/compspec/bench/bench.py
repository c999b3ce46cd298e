"""The whole benchmark: from what was asked for to a report, a mapping that is JSON as it stands.

The report, `schema_version` 1 (a spread is `{"median", "min", "max"}` over the rounds, or null):

    command, date, machine, versions
    settings                rounds, warm_up, concurrent (null: all at once), params
    recompilations          after start-up, anything but 0 is a bug
    peak_memory             bytes, and `of` which memory
    categories              those of the prompts, "all" last
    engines                 label, config, chat, start_up_s, compile_s, num_compiled_buckets, memory_bytes (what
                            it added to those of the process)
    sides                   one for each engine with drafts, and the plain ones that they are compared with:
        label, engine, method, speculative, reference
        metrics             by category: the fields of `summary.Metrics`
        step_ms             propose, forward, sample, rest: a decode step's milliseconds; null without decode steps
        drafted_per_position, accepted_per_position
        num_eager_steps     forwards without a compiled shape, all rounds
        same_in_every_round whether its outputs were
        num_identical       outputs that were those of the reference in every round; null where they need not be
        differences         the fields of `summary.Difference`, and margin: by how much the log-probability of the
                            likeliest token exceeds that of the second there, null where it cannot be told
        outputs             of the first round: prompt_id, category, num_prompt_tokens, finish_reason, token_ids,
                            pieces (text of each token), origins (a letter for each token, see `records.Origin`),
                            steps ([seconds since submission, tokens, drafts verified, drafts kept] each)
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compspec.bench.engines import Started, peak_memory, start_engines
from compspec.bench.machine import describe_machine, describe_versions
from compspec.bench.measure import Job, Tell, run_rounds, text_pieces, top2_margin
from compspec.bench.prompts import Question, encode_questions, read_questions
from compspec.bench.records import RequestRecord, RunRecord, origins
from compspec.bench.sides import Setup, Side, make_setups, make_sides
from compspec.bench.summary import ALL, Difference, acceptance_per_position, differences, metrics, step_times_ms
from compspec.config import EngineConfig
from compspec.errors import CompspecError, ConfigError, RequestError
from compspec.llm import LLM
from compspec.runner import compiled
from compspec.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What was asked for; see `compspec bench --help`.

    Attributes:
        configs, overrides, sweeps: see `make_setups`.
        prompts, spec_bench, ids, limit: see `read_questions`.
        chat: wrap texts in the chat template; None: for Spec-Bench, or as the configuration's `generate.chat` says.
        params: sampling parameters over those of the configurations.
        concurrent: requests at a time; None: all at once.
    """

    configs: Sequence[Path]
    overrides: Sequence[str] = ()
    sweeps: Sequence[str] = ()
    prompts: Path | None = None
    spec_bench: Path | None = None
    ids: Sequence[str] | None = None
    limit: int | None = None
    chat: bool | None = None
    params: Mapping[str, Any]
    concurrent: int | None = 1
    rounds: int = 3
    warm_up: bool = True
    command: Sequence[str] = ()


def run_bench(options: BenchOptions, tell: Tell = lambda text: None) -> dict[str, Any]:
    """Runs a benchmark.

    Args:
        tell: told what begins.

    Raises:
        CompspecError: one of its kinds; all that can be known before an engine starts is said before.
    """
    questions = read_questions(
        prompts=options.prompts, spec_bench=options.spec_bench, ids=options.ids, limit=options.limit
    )
    setups = make_setups(options.configs, options.overrides, options.sweeps)
    params = [_params(questions, setup, options.params) for setup in setups]
    _check_concurrency(options.concurrent, setups)
    sides = make_sides(setups)
    engines = start_engines(setups, tell)
    jobs = [_jobs(questions, engine, each, options) for engine, each in zip(engines, params, strict=True)]
    compiled_at_start = compiled.num_compilations()
    records = run_rounds(
        sides,
        [engine.llm for engine in engines],
        jobs,
        rounds=options.rounds,
        warm_up=options.warm_up,
        concurrent=options.concurrent,
        tell=tell,
    )
    recompilations = compiled.num_compilations() - compiled_at_start
    categories = [*dict.fromkeys(question.category for question in questions if question.category), ALL]
    peak_bytes, peak_of = peak_memory(engines)
    by_label = {side.label: side for side in sides}
    return {
        "schema_version": 1,
        "command": list(options.command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "settings": {
            "rounds": options.rounds,
            "warm_up": options.warm_up,
            "concurrent": options.concurrent,
            "params": dict(options.params),
        },
        "recompilations": recompilations,
        "peak_memory": {"bytes": peak_bytes, "of": peak_of},
        "categories": categories,
        "engines": [_engine(engine, _use_chat(options, engine.setup.config)) for engine in engines],
        "sides": [_side(side, by_label[side.reference], records, engines, jobs, categories) for side in sides],
    }


def parse_params(text: str, max_tokens: int | None) -> dict[str, Any]:
    """Reads --params, a JSON object, and adds --max-tokens.

    Raises:
        RequestError: it is none, or both say how many tokens.
    """
    try:
        params = json.loads(text)
    except (ValueError, RecursionError):
        params = None
    if not isinstance(params, dict):
        raise RequestError(f"--params takes a JSON object of sampling parameters, given: '{text}'")
    if max_tokens is None:
        return params
    if "max_tokens" in params:
        raise RequestError("give --max-tokens, or max_tokens in --params, not both")
    return {**params, "max_tokens": max_tokens}


def parse_concurrent(text: str) -> int | None:
    """Reads --concurrent: a number, or None for `all`.

    Raises:
        ConfigError: it is neither.
    """
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--concurrent takes a number from 1, or all; given: '{text}'")
    return int(text)


def _params(questions: Sequence[Question], setup: Setup, extra: Mapping[str, Any]) -> list[SamplingParams]:
    """Each prompt's parameters: the configuration's, over them those of the command, then the prompt's own."""
    try:
        common = SamplingParams(**{**setup.config.sampling.model_dump(), **extra})
    except RequestError as error:
        raise RequestError(f"sampling parameters with '{setup.label}': {error}") from None
    found = []
    for index, question in enumerate(questions):
        one = question.line.sampling(common)
        if one.n != 1:
            raise RequestError(f"prompt '{question.line.id}': n is {one.n}, a benchmark makes one sample per prompt")
        # Sampled outputs can be compared only if both sides have the same seed.
        seeded = one.is_greedy or one.seed is not None
        found.append(one if seeded else one.model_copy(update={"seed": index}))
    return found


def _check_concurrency(concurrent: int | None, setups: Sequence[Setup]) -> None:
    for setup in setups:
        slots = setup.config.scheduler.max_num_seqs
        if concurrent is not None and concurrent > slots:
            raise ConfigError(
                f"--concurrent {concurrent} is more than scheduler.max_num_seqs = {slots} of '{setup.label}'; raise "
                "that, or take --concurrent all, which submits all at once and lets them wait"
            )


def _use_chat(options: BenchOptions, config: EngineConfig) -> bool:
    if options.chat is not None:
        return options.chat
    return options.spec_bench is not None or config.generate.chat


def _jobs(
    questions: Sequence[Question], engine: Started, params: Sequence[SamplingParams], options: BenchOptions
) -> list[Job]:
    """The prompts in the tokens of an engine's model; whatever it could not run is refused here."""
    try:
        prompts = encode_questions(questions, engine.llm, chat=_use_chat(options, engine.setup.config))
        for prompt, each in zip(prompts, params, strict=True):
            try:
                engine.llm.check_request(prompt.token_ids, each)
            except CompspecError as error:
                raise type(error)(f"prompt '{prompt.id}': {error}") from None
    except CompspecError as error:
        raise type(error)(f"'{engine.setup.label}': {error}") from None
    return [Job(prompt=prompt, params=each) for prompt, each in zip(prompts, params, strict=True)]


def _engine(engine: Started, chat: bool) -> dict[str, Any]:
    stats = engine.llm.stats
    return {
        "label": engine.setup.label,
        "config": engine.setup.config.model_dump(mode="json"),
        "chat": chat,
        "start_up_s": engine.start_up_s,
        "compile_s": stats.compile_s,
        "num_compiled_buckets": stats.num_compiled_buckets,
        "memory_bytes": engine.memory_bytes,
    }


def _side(
    side: Side,
    reference: Side,
    records: Mapping[str, Sequence[RunRecord]],
    engines: Sequence[Started],
    jobs: Sequence[Sequence[Job]],
    categories: Sequence[str],
) -> dict[str, Any]:
    engine, asked = engines[side.setup], jobs[side.setup]
    runs, references = records[side.label], records[reference.label]
    drafted, accepted = acceptance_per_position(runs)
    differ = differences(runs, references)
    speculative = engine.setup.config.speculative
    # The ratio test keeps the distribution of sampled outputs, not their tokens.
    comparable = speculative.verifier == "equality" or all(job.params.is_greedy for job in asked)
    return {
        "label": side.label,
        "engine": engine.setup.label,
        "method": speculative.method if side.speculative else "none",
        "speculative": side.speculative,
        "reference": side.reference,
        "metrics": {name: asdict(metrics(runs, references, name)) for name in categories},
        "step_ms": step_times_ms(runs),
        "drafted_per_position": drafted,
        "accepted_per_position": accepted,
        "num_eager_steps": sum(run.num_eager_steps for run in runs),
        "same_in_every_round": not differences(runs, [runs[0]] * len(runs)),
        "num_identical": len(asked) - len(differ) if comparable else None,
        "differences": [
            _difference(each, engines[reference.setup].llm, jobs[reference.setup], references[each.round])
            for each in differ
            if comparable
        ],
        "outputs": [_output(one, job, engine) for one, job in zip(runs[0].requests, asked, strict=True)],
    }


def _difference(difference: Difference, llm: LLM, jobs: Sequence[Job], reference: RunRecord) -> dict[str, Any]:
    index = next(at for at, job in enumerate(jobs) if job.prompt.id == difference.prompt_id)
    margin = top2_margin(llm, jobs[index], reference.requests[index].token_ids, difference.position)
    return {**asdict(difference), "margin": margin}


def _output(record: RequestRecord, job: Job, engine: Started) -> dict[str, Any]:
    return {
        "prompt_id": record.prompt_id,
        "category": record.category,
        "num_prompt_tokens": record.num_prompt_tokens,
        "finish_reason": record.finish_reason,
        "token_ids": list(record.token_ids),
        "pieces": text_pieces(engine.llm, job.prompt.token_ids, record.token_ids),
        "origins": "".join(origins(record.steps)),
        "steps": [
            [step.at_s, step.num_tokens, step.num_draft_tokens, step.num_accepted_tokens] for step in record.steps
        ],
    }
