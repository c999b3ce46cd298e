"""Every sampling parameter holds on every row: outputs are those of solo runs, and keep what the parameter promises."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compspec.batch import Batch, DraftTokens, Scores, StepOutput
from compspec.engine import Engine
from compspec.errors import RequestError
from compspec.models.quiet import quiet_transformers
from compspec.request import FinishReason, Request
from compspec.sampling.metadata import SamplingMetadata
from compspec.sampling.params import SamplingParams
from compspec.sampling.sampler import Sampled
from tests.law import VOCAB, drafting, guess, make_engine, oracle, ragged, run, whole_outputs, wrong

MAX_TOKENS = 16
FREE = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": 3}
KS = (1, 3, 5, 7)
Truth = dict[tuple[int, ...], list[int]]
Draft = Callable[[Request, int], list[int]]


def make_prompt(number: int) -> list[int]:
    """A prompt of its own for each number, so that an output is known by its prompt; with repetition inside."""
    rng = np.random.default_rng(number)
    phrase = [3 + number, *rng.integers(3, VOCAB, 5).tolist()]
    return np.resize(phrase, (7, 16, 40, 12, 33)[number % 5]).tolist()


def repeated(truth: Truth) -> Draft:
    """One token over and over: the right next one."""
    right = oracle(truth)
    return lambda request, most: right(request, 1) * most


def outputs_of(requests: Sequence[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


@dataclass(frozen=True)
class Row:
    """One sampled row: what it had seen, the model's logits, those it was sampled from, and its token."""

    prompt: tuple[int, ...]
    seen: tuple[int, ...]
    raw: Tensor
    logits: Tensor
    token: int
    num_drafts: int
    depth: int


def watch(engine: Engine) -> list[Row]:
    """Collects every row that the engine samples, those of rejected drafts included."""
    rows: list[Row] = []
    kept: list[Scores] = []
    score, verify = engine._scorer.score, engine._verifier.verify

    def scoring(batch: Batch, drafts: DraftTokens) -> Scores:
        kept[:] = [score(batch, drafts)]
        return kept[0]

    def verifying(sampled: Sampled, metadata: SamplingMetadata, batch: Batch, drafts: DraftTokens) -> StepOutput:
        for index, entry in enumerate(batch.scheduled):
            tokens = entry.request.token_ids.tolist()
            prompt = tuple(tokens[: entry.request.num_prompt_tokens])
            drafted = drafts.token_ids[index, : drafts.num_draft_tokens[index]].tolist()
            for depth in range(len(drafted) + 1 if entry.samples else 0):
                row = metadata.row_starts[index] + depth
                rows.append(
                    Row(
                        prompt=prompt,
                        seen=tuple(tokens[len(prompt) :] + drafted[:depth]),
                        raw=kept[0].logits[kept[0].first_row[index] + depth].float().clone(),
                        logits=sampled.logits[row].clone(),
                        token=int(sampled.token_ids[row]),
                        num_drafts=len(drafted),
                        depth=depth,
                    )
                )
        return verify(sampled, metadata, batch, drafts)

    engine._scorer.score, engine._verifier.verify = scoring, verifying
    return rows


def penalised(raw: Tensor, prompt: Sequence[int], seen: Sequence[int], params: SamplingParams) -> Tensor:
    """Bias and the three penalties by their definitions, the repetition penalty by transformers."""
    logits = raw.clone()
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    ids = torch.tensor([[*prompt, *seen]])
    logits = RepetitionPenaltyLogitsProcessor(penalty=params.repetition_penalty)(ids, logits[None])[0]
    for token, count in Counter(seen).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


# --- Each parameter, alone and together ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A parameter: its values for a prompt whose free output is known, and what it promises of an output."""

    name: str
    values: Callable[[list[int]], dict[str, Any]]
    holds: Callable[[list[int], list[int], dict[str, Any]], bool] = lambda prompt, output, values: True
    base: Callable[[], dict[str, Any]] = dict


def no_bad_word(prompt: list[int], output: list[int], values: dict[str, Any]) -> bool:
    """No bad word ends in the output; the prompt may hold what it likes."""
    text = prompt + output
    ends = range(len(prompt) + 1, len(text) + 1)
    return not any(text[max(0, end - len(word)) : end] == list(word) for word in values["bad_words"] for end in ends)


def no_early_end(prompt: list[int], output: list[int], values: dict[str, Any]) -> bool:
    least = values["min_tokens"]
    return len(output) >= least and not set(output[:least]) & set(values["stop_token_ids"])


def never_twice(token_ids: list[int], logits: Tensor) -> Tensor:
    """Forbids the last three tokens, and a class of tokens that the whole context chooses."""
    logits[token_ids[-3:]] = float("-inf")
    logits[sum(token_ids) % 7 :: 7] -= 3.0
    return logits


def asks_for(wanted: Sequence[int]) -> Callable[[list[int], Tensor], Tensor]:
    """A processor that wants some tokens before all others."""

    def ask(token_ids: list[int], logits: Tensor) -> Tensor:
        logits[list(wanted)] = logits[list(wanted)].clamp(min=-1e3) + 2e3
        return logits

    return ask


def distinct_neighbours(prompt: list[int], output: list[int], values: dict[str, Any]) -> bool:
    text = prompt + output
    return all(text[at] not in text[max(0, at - 3) : at] for at in range(len(prompt), len(text)))


def hot() -> dict[str, Any]:
    return {"temperature": 2.0}


def words_of(free: list[int]) -> tuple[tuple[int, ...], ...]:
    """Bad words of one to four tokens that the free output holds, and one that runs through it all."""
    return ((free[1],), tuple(free[2:4]), tuple(free[5:8]), tuple(free[8:12]), tuple(free[4:6]))


CASES = [
    Case("frequency +2", lambda free: {"frequency_penalty": 2.0}),
    Case("frequency -2", lambda free: {"frequency_penalty": -2.0}),
    Case("presence +2", lambda free: {"presence_penalty": 2.0}),
    Case("repetition 1.05, T=0.1", lambda free: {"repetition_penalty": 1.05}, base=lambda: {"temperature": 0.1}),
    Case("repetition 2", lambda free: {"repetition_penalty": 2.0}),
    Case("repetition 0.8, T=2", lambda free: {"repetition_penalty": 0.8}, base=hot),
    Case(
        "bias -100",
        lambda free: {"logit_bias": dict.fromkeys(free[::2], -100.0)},
        lambda prompt, output, values: not set(output) & set(values["logit_bias"]),
    ),
    Case(
        "bias +100, T=2",
        lambda free: {"logit_bias": {free[0]: 100.0, free[1]: 100.0}},
        lambda prompt, output, values: set(output) <= set(values["logit_bias"]),
        hot,
    ),
    Case("min_p", lambda free: {"min_p": 0.4}, base=hot),
    Case("top_p", lambda free: {"top_p": 0.5}, base=hot),
    Case("top_k", lambda free: {"top_k": 3}, base=hot),
    Case("bad words", lambda free: {"bad_words": words_of(free)}, no_bad_word),
    Case("bad words, T=2", lambda free: {"bad_words": words_of(free)}, no_bad_word, hot),
    Case(
        "allowed tokens",
        lambda free: {"allowed_token_ids": (*range(60, 70), *free[:2])},
        lambda prompt, output, values: set(output) <= set(values["allowed_token_ids"]),
    ),
    Case(
        "allowed tokens, T=2",
        lambda free: {"allowed_token_ids": (100, 20, 127, 0)},
        lambda prompt, output, values: set(output) <= set(values["allowed_token_ids"]),
        hot,
    ),
    Case("processor", lambda free: {"logits_processors": (never_twice,)}, distinct_neighbours),
    Case("processor, T=2", lambda free: {"logits_processors": (never_twice,)}, distinct_neighbours, hot),
    Case(
        "min_tokens",
        lambda free: {"min_tokens": 9, "stop_token_ids": tuple(free)},
        no_early_end,
        lambda: {"ignore_eos": False},
    ),
    Case(
        "processor that asks for what is forbidden",
        lambda free: {
            "logits_processors": (asks_for(free),),
            "bad_words": ((free[0],), (free[1], free[2]), (free[2], free[1])),
            "min_tokens": 6,
            "stop_token_ids": (free[3], free[4]),
            "allowed_token_ids": (*free[:6], *range(100, 128)),
        },
        lambda prompt, output, values: (
            no_bad_word(prompt, output, values)
            and no_early_end(prompt, output, values)
            and set(output) <= set(values["allowed_token_ids"])
        ),
        hot,
    ),
    Case(
        "all",
        lambda free: {
            "frequency_penalty": 0.7,
            "presence_penalty": -0.4,
            "repetition_penalty": 1.3,
            "logit_bias": {free[0]: 4.0, free[3]: -100.0, 7: 2.5},
            "bad_words": words_of(free)[1:],
            "logits_processors": (never_twice,),
            "min_tokens": 5,
            "stop_token_ids": tuple(free[4:6]),
            "top_k": 30,
            "top_p": 0.95,
            "min_p": 0.01,
        },
        lambda *given: no_bad_word(*given) and no_early_end(*given) and distinct_neighbours(*given),
        lambda: {"temperature": 0.9},
    ),
]
PROMPTS_PER_CASE = 2


@dataclass(frozen=True)
class Job:
    """A prompt under a case, and its solo run."""

    case: Case
    prompt: list[int]
    values: dict[str, Any]
    params: SamplingParams
    free: list[int]
    solo: tuple[Any, ...]


@pytest.fixture(scope="module")
def jobs(plain: Engine) -> list[Job]:
    found = []
    for number in range(len(CASES) * PROMPTS_PER_CASE):
        case, prompt = CASES[number // PROMPTS_PER_CASE], make_prompt(number)
        base = {**FREE, **case.base()}
        (free,) = outputs_of(run(plain, [prompt], SamplingParams(**base)))
        values = case.values((free * MAX_TOKENS)[:MAX_TOKENS])
        params = SamplingParams(**{**base, **values})
        found.append(Job(case, prompt, values, params, free, whole_outputs(run(plain, [prompt], params))[0]))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_parameter_changes_the_output_and_keeps_its_promise(jobs: list[Job], case: Case) -> None:
    """Plain decoding; the law then carries the promise over to speculation."""
    mine = [job for job in jobs if job.case is case]
    for job in mine:
        assert case.holds(job.prompt, job.solo[0], job.values)
        assert job.solo[1] == "length" or "stop_token_ids" in job.values
    assert any(job.solo[0] != job.free for job in mine), "the parameter made no difference"


@pytest.mark.parametrize(
    ("kind", "k"),
    [
        *itertools.product(("oracle", "ragged", "repeated", "unconstrained"), KS),
        *itertools.product(("wrong", "random"), (3, 7)),
    ],
)
def test_every_parameter_equals_its_solo_run_whatever_is_drafted(
    folder: Path, jobs: list[Job], kind: str, k: int
) -> None:
    """All cases at once, so that each batch holds several kinds of parameters."""
    truth = {tuple(job.prompt): job.solo[0] for job in jobs}
    draft = {
        "oracle": oracle(truth),
        "wrong": wrong(truth),
        "random": guess(k),
        "ragged": ragged(truth, k),
        "repeated": repeated(truth),
        # What would come without the parameter: full of forbidden tokens, and of words that drafts complete.
        "unconstrained": oracle({tuple(job.prompt): job.free for job in jobs}),
    }[kind]
    engine = drafting(folder, draft, k)
    requests = run(engine, [job.prompt for job in jobs], [job.params for job in jobs])
    for job, found in zip(jobs, whole_outputs(requests), strict=True):
        assert found == job.solo, job.case.name
        assert job.case.holds(job.prompt, found[0], job.values), job.case.name
    stats = engine.stats
    assert stats.num_draft_tokens > 100
    if kind == "oracle":
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    if kind == "wrong":
        assert stats.num_accepted_tokens == 0
    if kind in ("ragged", "repeated", "unconstrained") and k > 1:
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("counts", [(0, 3, 0, 1), (3, 0, 1, 0)])
def test_a_batch_with_some_and_no_drafts_and_different_parameters_equals_solo_runs(
    folder: Path, jobs: list[Job], counts: tuple[int, ...]
) -> None:
    """Ragged counts, the same in every step, with every case beside every other one."""
    truth = {tuple(job.prompt): job.solo[0] for job in jobs}
    order = np.random.default_rng(0).permutation(len(jobs))
    for first in range(0, len(order) - 3, 4):
        chosen = [jobs[index] for index in order[first : first + 4]]
        number = {tuple(job.prompt): count for job, count in zip(chosen, counts, strict=True)}

        def draft(request: Request, most: int, number: dict[tuple[int, ...], int] = number) -> list[int]:
            prompt = tuple(request.token_ids[: request.num_prompt_tokens].tolist())
            right = oracle(truth)(request, min(most, number[prompt]))
            # The last of three is wrong: accepted and rejected drafts in one window.
            return [*right[:2], *((token + 1) % VOCAB for token in right[2:])]

        engine = drafting(folder, draft, 3)
        requests = run(engine, [job.prompt for job in chosen], [job.params for job in chosen])
        assert whole_outputs(requests) == [job.solo for job in chosen]
        assert any(request.stats.num_draft_tokens for request in requests)


@pytest.mark.parametrize("k", [0, 1, 5])
def test_a_bad_word_may_begin_in_the_prompt(folder: Path, plain: Engine, k: int) -> None:
    """Its last token is forbidden from the first output token on; where the beginning differs, nothing is."""
    prompt = make_prompt(1)
    (free,) = outputs_of(run(plain, [prompt], SamplingParams(**FREE)))
    engine = drafting(folder, oracle({tuple(prompt): free}), k) if k else plain
    for length in (1, 2, 5):
        for place in (0, 1, 2):
            text = prompt + free[:place]
            before, odd = text[len(text) - length :], [text[-length] ^ 1, *text[len(text) - length + 1 :]]
            (output,) = outputs_of(run(engine, [prompt], SamplingParams(**FREE, bad_words=((*before, free[place]),))))
            assert output[place] != free[place]
            assert output[:place] == free[:place]
            (output,) = outputs_of(run(engine, [prompt], SamplingParams(**FREE, bad_words=((*odd, free[place]),))))
            assert output[: place + 1] == free[: place + 1]
    whole = (*prompt, free[0])
    for word, is_banned in ((whole, True), ((5, *whole), False)):
        (output,) = outputs_of(run(engine, [prompt], SamplingParams(**FREE, bad_words=(word,))))
        assert (output[0] != free[0]) == is_banned


# --- Penalties see exactly what a row has seen --------------------------------------------------------------------

STICKY = [
    {"frequency_penalty": 2.0},
    {"frequency_penalty": 0.5, "presence_penalty": 1.0},
    {"frequency_penalty": -1.0, "repetition_penalty": 1.7},
    {"presence_penalty": 2.0, "repetition_penalty": 0.6},
    {"repetition_penalty": 1.2},
]


@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("values", STICKY, ids=str)
def test_each_row_is_penalised_for_exactly_the_drafts_before_it(folder: Path, values: dict[str, Any], k: int) -> None:
    """Windows of one token over and over, of two tokens in turns, and of token 0, against the definition by row."""
    params = SamplingParams(**FREE, **values, logit_bias={50: 9.0, 0: 6.0})

    def draft(request: Request, most: int) -> list[int]:
        turn = request.num_output_tokens % 4
        return [([50], [50, 0], [0], [50, 50, 9])[turn][place % (1, 2, 1, 3)[turn]] for place in range(most)]

    engine = drafting(folder, draft, k)
    rows = watch(engine)
    run(engine, [make_prompt(1), [50, 50, 0, 9], [9] * 20], params)
    assert {row.depth for row in rows} == set(range(k + 1))
    assert any(row.seen.count(50) >= 2 for row in rows)
    for row in rows:
        expected = penalised(row.raw, row.prompt, row.seen, params)
        torch.testing.assert_close(row.logits, expected, atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("values", STICKY[:3], ids=str)
def test_a_token_that_penalties_wear_out_ends_where_step_by_step_transformers_ends_it(
    folder: Path, values: dict[str, Any]
) -> None:
    """A biased token repeats until its penalty outweighs the bias; drafts repeat it beyond that point."""
    params = SamplingParams(**FREE, **values, logit_bias={50: 5.0, 77: 4.5})
    prompts = [make_prompt(number) for number in range(4)]
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    expected = []
    for prompt in prompts:
        seen: list[int] = []
        while len(seen) < MAX_TOKENS:
            with torch.no_grad():
                raw = model(input_ids=torch.tensor([[*prompt, *seen]])).logits[0, -1]
            seen.append(int(penalised(raw, prompt, seen, params).argmax()))
        expected.append(seen)
    assert any(50 in output for output in expected)
    for k in (0, 1, 3, 7):
        engine = drafting(folder, lambda request, most: [50] * most, k) if k else make_engine(folder)
        assert outputs_of(run(engine, prompts, params)) == expected


@pytest.mark.parametrize("k", [0, 1, 5])
def test_a_prompt_of_the_penalised_word_counts_for_the_repetition_penalty_alone(folder: Path, k: int) -> None:
    """From the first token on; presence and frequency start with the output."""
    word, other = 60, 61
    prompt = [word] * 20

    def first_row(**values: Any) -> Row:
        engine = drafting(folder, lambda request, most: [word] * most, k) if k else make_engine(folder)
        rows = watch(engine)
        run(engine, [prompt], SamplingParams(**FREE, **values))
        assert rows[0].seen == ()
        return rows[0]

    untouched = first_row(presence_penalty=2.0, frequency_penalty=2.0)
    assert torch.equal(untouched.logits, untouched.raw)
    row = first_row(repetition_penalty=4.0, presence_penalty=2.0, frequency_penalty=2.0)
    factor = 0.25 if row.raw[word] > 0 else 4.0
    assert row.logits[word] == row.raw[word] * factor
    assert torch.equal(row.logits[other:], row.raw[other:])
    assert torch.equal(row.logits[:word], row.raw[:word])


def test_a_prompt_of_the_penalised_word_equals_solo_and_differs_from_no_penalty(folder: Path, plain: Engine) -> None:
    prompts = [[60] * 20, [60], [60, 61] * 8, [5] * 33]
    for values in ({"repetition_penalty": 1.8}, {"presence_penalty": -2.0}, {"frequency_penalty": 2.0}):
        params = SamplingParams(**FREE, **values)
        solo = [outputs_of(run(plain, [prompt], params))[0] for prompt in prompts]
        assert solo != [outputs_of(run(plain, [prompt], SamplingParams(**FREE)))[0] for prompt in prompts]
        for k in (1, 5):
            engine = drafting(folder, lambda request, most: [int(request.token_ids[0])] * most, k)
            assert outputs_of(run(engine, prompts, params)) == solo


@pytest.mark.parametrize("every", [1, 2, 5])
def test_metadata_that_was_lost_is_loaded_again_as_it_was(folder: Path, jobs: list[Job], every: int) -> None:
    """As when a request loses its slot between two steps, whichever."""
    engine = drafting(folder, ragged({tuple(job.prompt): job.solo[0] for job in jobs}, 1), 5)
    requests = [engine.add_request(job.prompt, job.params) for job in jobs]
    step = 0
    while engine.has_work:
        engine.step()
        step += 1
        if step % every == 0:
            slots = engine._metadata._slots
            slots[:] = [None] * len(slots)
            engine._metadata._output_counts.fill_(77)
            engine._metadata._prompt_mask.fill_(True)
    assert whole_outputs(requests) == [job.solo for job in jobs]


# --- Filters -------------------------------------------------------------------------------------------------------

FILTERS = [
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.02},
    {"top_k": 1},
    {},
]


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.0])
def test_the_filtered_distribution_is_the_one_of_plain_sampling_and_of_transformers(
    folder: Path, plain: Engine, temperature: float
) -> None:
    """Bit for bit between rows of a window and plain rows; against the filters of transformers by definition."""
    prompts = [make_prompt(number) for number in range(len(FILTERS))]
    params = [SamplingParams(**FREE, temperature=temperature, **values) for values in FILTERS]
    rows = watch(plain)
    truth = {tuple(p): outputs_of(run(plain, [p], each))[0] for p, each in zip(prompts, params, strict=True)}
    plain_rows = {(row.prompt, row.seen): row for row in rows}
    for prompt, values in zip(prompts, FILTERS, strict=True):
        warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        if "top_k" in values:
            warpers.append(TopKLogitsWarper(values["top_k"]))
        if "top_p" in values:
            warpers.append(TopPLogitsWarper(values["top_p"]))
        if "min_p" in values:
            warpers.append(MinPLogitsWarper(values["min_p"]))
        for row in plain_rows.values():
            if row.prompt == tuple(prompt):
                expected = warpers(torch.tensor([[0]]), row.raw[None])[0]
                assert torch.equal(row.logits.isinf(), expected.isinf())
                torch.testing.assert_close(row.logits.softmax(-1), expected.softmax(-1), atol=1e-6, rtol=0)
    for k in (1, 7):
        engine = drafting(folder, ragged(truth, k), k)
        found = watch(engine)
        run(engine, prompts, params)
        both = [(row, plain_rows[row.prompt, row.seen]) for row in found if (row.prompt, row.seen) in plain_rows]
        assert {(row.prompt, row.seen) for row, _ in both} == plain_rows.keys()
        assert any(row.depth for row, _ in both)
        assert all(torch.equal(row.logits, same.logits) for row, same in both)


# --- Processors ----------------------------------------------------------------------------------------------------


class Listener:
    """A processor that notes each context it sees, and then does what it likes with the list."""

    def __init__(self) -> None:
        self.contexts: list[tuple[int, ...]] = []

    def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
        self.contexts.append(tuple(token_ids))
        token_ids.clear()
        return logits


def test_processors_see_the_prompt_and_the_output_before_each_token_in_plain_runs(plain: Engine) -> None:
    for number in range(5):
        prompt, listener = make_prompt(number), Listener()
        processors = (listener, never_twice)
        (output,) = outputs_of(run(plain, [prompt], SamplingParams(**FREE, logits_processors=processors)))
        assert distinct_neighbours(prompt, output, {})
        assert listener.contexts == [(*prompt, *output[:place]) for place in range(MAX_TOKENS)]


@pytest.mark.parametrize("k", KS)
def test_processors_see_the_drafts_before_each_row_in_speculative_runs(folder: Path, plain: Engine, k: int) -> None:
    """Every row of every step, and so every context of the plain run."""
    prompts = [make_prompt(number) for number in range(5)]
    params = SamplingParams(**FREE, logits_processors=(never_twice,))
    truth = {tuple(prompt): outputs_of(run(plain, [prompt], params))[0] for prompt in prompts}
    draft, drafted = ragged(truth, k), {tuple(prompt): [] for prompt in prompts}

    def noted(request: Request, most: int) -> list[int]:
        found = draft(request, most)
        tokens = tuple(request.token_ids.tolist())
        drafted[tokens[: request.num_prompt_tokens]] += [(*tokens, *found[:row]) for row in range(len(found) + 1)]
        return found

    listeners = [Listener() for _ in prompts]
    each = [SamplingParams(**FREE, logits_processors=(listener, never_twice)) for listener in listeners]
    requests = run(drafting(folder, noted, k), prompts, each)
    for prompt, listener, request in zip(prompts, listeners, requests, strict=True):
        output = truth[tuple(prompt)]
        assert request.output_token_ids == output
        assert listener.contexts == [tuple(prompt), *drafted[tuple(prompt)]]
        assert {(*prompt, *output[:place]) for place in range(MAX_TOKENS)} <= set(listener.contexts)


def test_processors_run_in_order_and_may_return_a_new_tensor(folder: Path, plain: Engine) -> None:
    """Adding then scaling is not scaling then adding; in place and out of place are the same."""

    def add(token_ids: list[int], logits: Tensor) -> Tensor:
        return logits + torch.arange(VOCAB) * 0.2

    def scale_(token_ids: list[int], logits: Tensor) -> Tensor:
        return logits.mul_(-1.0)

    prompts = [make_prompt(number) for number in range(4)]
    found = {}
    for name, processors in {"add, scale": (add, scale_), "scale, add": (scale_, add)}.items():
        params = SamplingParams(**FREE, temperature=1.0, logits_processors=processors)
        found[name] = [outputs_of(run(plain, [prompt], params))[0] for prompt in prompts]
        engine = drafting(folder, ragged(dict(zip(map(tuple, prompts), found[name], strict=True)), 1), 5)
        assert outputs_of(run(engine, prompts, params)) == found[name]
    assert max(map(max, found["add, scale"])) < max(map(max, found["scale, add"]))


class Poisoned:
    """A processor that fails in some contexts."""

    def __init__(self, contexts: set[tuple[int, ...]], fault: Callable[[Tensor], Any]) -> None:
        self.contexts = contexts
        self.fault = fault
        self.num_failures = 0

    def __call__(self, token_ids: list[int], logits: Tensor) -> Any:
        if tuple(token_ids) not in self.contexts:
            return logits
        self.num_failures += 1
        return self.fault(logits)


def raises(logits: Tensor) -> Tensor:
    raise ZeroDivisionError("poison")


FAULTS = {
    "raises": raises,
    "returns nothing": lambda logits: None,
    "returns another shape": lambda logits: logits[:-1],
    "returns another type": lambda logits: logits.double(),
    "returns NaN": lambda logits: logits * float("nan"),
    "forbids all": lambda logits: logits.fill_(float("-inf")),
}


@pytest.mark.parametrize(("fault", "temperature"), [("raises", 0.0), *((fault, 1.0) for fault in FAULTS)])
def test_a_processor_that_fails_beyond_a_rejected_draft_changes_nothing(
    folder: Path, plain: Engine, fault: str, temperature: float
) -> None:
    prompts = [make_prompt(number) for number in range(4)]
    params = SamplingParams(**FREE, temperature=temperature)
    truth = {tuple(prompt): outputs_of(run(plain, [prompt], params))[0] for prompt in prompts}
    # Right, then wrong, then what would have been right: contexts that no plain run reaches.
    contexts: set[tuple[int, ...]] = set()

    def draft(request: Request, most: int) -> list[int]:
        right = oracle(truth)(request, most)
        bad = request.num_output_tokens % 3
        found = [(token + 1) % VOCAB if place == bad else token for place, token in enumerate(right)]
        tokens = request.token_ids.tolist()
        contexts.update((*tokens, *found[:row]) for row in range(bad + 1, len(found) + 1))
        return found

    poisoned = Poisoned(contexts, FAULTS[fault])
    engine = drafting(folder, draft, 5)
    requests = run(engine, prompts, params.model_copy(update={"logits_processors": (poisoned,)}))
    assert poisoned.num_failures > 10
    assert {tuple(prompt): output for prompt, output in zip(prompts, outputs_of(requests), strict=True)} == truth
    assert all(request.finish_reason == FinishReason.LENGTH and request.error is None for request in requests)


@pytest.mark.parametrize(("fault", "k"), [("raises", 1), *((fault, 5) for fault in FAULTS)])
def test_a_processor_that_fails_where_the_output_gets_ends_its_request_alone_at_the_solo_place(
    folder: Path, plain: Engine, fault: str, k: int
) -> None:
    """At each place of a window: the tokens before it stand, the error is the solo run's, neighbours go on."""
    prompts = [make_prompt(number) for number in range(4)]
    free = SamplingParams(**FREE, temperature=0.7, logprobs=1, frequency_penalty=0.5)
    alone = [run(plain, [prompt], free)[0] for prompt in prompts]
    truth = {tuple(p): request.output_token_ids for p, request in zip(prompts, alone, strict=True)}
    for place in (0, 3, MAX_TOKENS - 1):
        reached = (*prompts[0], *truth[tuple(prompts[0])][:place])
        doomed = free.model_copy(update={"logits_processors": (Poisoned({reached}, FAULTS[fault]),)})
        solo = whole_outputs(run(plain, [prompts[0]], doomed))
        assert solo[0][:3] == (truth[tuple(prompts[0])][:place], "error", None)
        assert len(solo[0][4]) == place
        engine = drafting(folder, oracle(truth), k)
        requests = run(engine, prompts, [doomed, free, free, free])
        assert whole_outputs(requests) == solo + whole_outputs(alone[1:])


# --- Refusals ------------------------------------------------------------------------------------------------------

NAN = float("nan")
REFUSED: list[dict[str, Any]] = [
    *({"repetition_penalty": value} for value in (0.0, -1.0, NAN, float("inf"))),
    *({"top_p": value} for value in (0.0, -0.1, 1.1, NAN)),
    *({"temperature": value} for value in (-0.1, NAN, float("inf"))),
    *({"min_p": value} for value in (-0.1, 1.1, NAN)),
    *({"frequency_penalty": value} for value in (2.1, -2.1, NAN)),
    *({"presence_penalty": value} for value in (2.1, -2.1, NAN)),
    {"top_k": -1},
    {"logit_bias": {5: 101.0}},
    {"logit_bias": {5: NAN}},
    {"logit_bias": {VOCAB: 1.0}},
    {"bad_words": [[VOCAB]]},
    {"bad_words": [[]]},
    {"bad_words": [[token] for token in range(VOCAB)]},
    {"allowed_token_ids": [VOCAB]},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [5], "bad_words": [[5]]},
    {"min_tokens": 17},
    {"min_tokens": 3, "allowed_token_ids": [5], "stop_token_ids": [5]},
    {"stop_token_ids": [VOCAB]},
    {"logprobs": VOCAB + 1},
    {"prompt_logprobs": VOCAB + 1},
    {"unknown": 1},
]


def test_refused_values_are_refused_at_submit_and_leave_the_others_alone(folder: Path, plain: Engine) -> None:
    prompts = [make_prompt(number) for number in range(3)]
    params = [SamplingParams(**FREE, frequency_penalty=0.6, temperature=temperature) for temperature in (0.0, 0.7, 1.5)]
    solo = [whole_outputs(run(plain, [p], each))[0] for p, each in zip(prompts, params, strict=True)]
    engine = make_engine(folder, speculative__method="ngram")

    def attempts() -> Iterator[None]:
        for values in REFUSED:
            with pytest.raises(RequestError) as caught:
                # Always the same id: one that was refused is free.
                engine.add_request([5, 6], SamplingParams(**{**FREE, "ignore_eos": False, **values}), "refused")
            assert "\n" not in str(caught.value)
            assert next(iter(values)).split("_")[0] in str(caught.value)
            yield

    refuse = attempts()
    requests = [engine.add_request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    while engine.has_work:
        next(refuse, None)
        engine.step()
    for _ in refuse:
        pass
    assert whole_outputs(requests) == solo
    assert not engine.has_work
    assert engine.pool.num_free == engine.pool.num_usable


def test_what_can_not_be_sampled_fails_its_own_request(folder: Path, plain: Engine) -> None:
    """Bad words of several tokens may leave nothing where they meet: an error there, not a forbidden token."""
    prompts = [make_prompt(number) for number in range(2)]
    stuck = SamplingParams(**FREE, allowed_token_ids=(5, 6), bad_words=((6, 6), (5, 5), (6, 5), (5, 6)))
    solo = whole_outputs(run(plain, [prompts[0]], stuck))
    assert len(solo[0][0]) == 1
    assert solo[0][1] == "error"
    free = SamplingParams(**FREE)
    other = whole_outputs(run(plain, [prompts[1]], free))
    engine = drafting(folder, lambda request, most: [5, 6, 5][:most], 3)
    assert whole_outputs(run(engine, prompts, [stuck, free])) == solo + other
