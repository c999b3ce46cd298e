"""Reported log-probabilities are the model's own: transformers' numbers, and the same bits however they come about."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compspec.engine import Engine
from compspec.errors import RequestError
from compspec.models.quiet import quiet_transformers
from compspec.request import Request, TokenLogprobs
from compspec.sampling.params import SamplingParams
from tests.law import VOCAB, Scripted, make_engine, oracle, ragged, run, whole_outputs
from tests.tiny_models import tiny_model_folder

TOLERANCE = 1e-4
MAX_TOKENS = 12
FREE = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=3)
SHAPED = {
    "greedy": {},
    "hot": {"temperature": 2.0, "seed": 1},
    "cold": {"temperature": 0.1, "seed": 1},
    "penalties": {"frequency_penalty": 2.0, "presence_penalty": -1.0, "repetition_penalty": 1.5},
    "bias": {"logit_bias": dict.fromkeys(range(0, VOCAB, 2), -100.0)},
    "filters": {"temperature": 1.5, "seed": 2, "top_k": 5, "top_p": 0.8, "min_p": 0.05},
    "bans": {"bad_words": tuple((token,) for token in range(60)), "allowed_token_ids": tuple(range(50, 90))},
    "in place": {"logits_processors": (lambda token_ids, logits: logits.fill_(0.0),)},
}


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """A prompt of its own for each length."""
    rng = np.random.default_rng([length, seed])
    return np.resize(rng.integers(3, VOCAB, 11), length).tolist()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def recomputed(model: Any, token_ids: Sequence[int]) -> Tensor:
    """[n, V]: row i is the distribution of the token after token i."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([list(token_ids)])).logits[0]
    return logits.double().log_softmax(-1)


def check_entry(entry: TokenLogprobs, token: int, count: int, row: Tensor) -> None:
    """One place against transformers: the token first, then the `count` most likely ones in order."""
    assert next(iter(entry)) == token
    listed = {each.rank: (found, each.logprob) for found, each in entry.items()}
    own = entry[token]
    assert sorted(listed) == sorted({own.rank, *range(1, count + 1)})
    assert len(entry) == count + (own.rank > count), "the token stands outside the list, or the list is not whole"
    for found, each in entry.items():
        assert abs(each.logprob - float(row[found])) < TOLERANCE
        # Where others are as near as the tolerance, either order is right.
        more, close = row > row[found] + 2 * TOLERANCE, row > row[found] - 2 * TOLERANCE
        assert int(more.sum()) + 1 <= each.rank <= int(close.sum())
    ordered = [listed[rank][1] for rank in sorted(listed)]
    assert ordered == sorted(ordered, reverse=True)


def check_output(request: Request, model: Any) -> None:
    count = request.params.logprobs
    assert count is not None and request.logprobs is not None
    assert len(request.logprobs) == request.num_output_tokens
    rows = recomputed(model, request.token_ids.tolist())[request.num_prompt_tokens - 1 :]
    for token, entry, row in zip(request.output_token_ids, request.logprobs, rows[:-1], strict=True):
        check_entry(entry, token, count, row)


def check_prompt(request: Request, model: Any) -> None:
    count, found = request.params.prompt_logprobs, request.prompt_logprobs
    prompt = request.token_ids[: request.num_prompt_tokens].tolist()
    assert count is not None and found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    for token, entry, row in zip(prompt[1:], found[1:], recomputed(model, prompt)[:-1], strict=True):
        assert entry is not None
        check_entry(entry, token, count, row)


# --- Output -------------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_transformers_with_and_without_speculation(
    folder: Path, plain: Engine, reference: Any
) -> None:
    """Whatever shapes the sampling: nothing but the model's own logits counts, and the bits are the solo run's."""
    prompts = [make_prompt(5 + 4 * number) for number in range(len(SHAPED))]
    params = [FREE.model_copy(update=values) for values in SHAPED.values()]
    requests = [run(plain, [prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    solo = whole_outputs(requests)
    truth = {tuple(prompt): tokens for prompt, (tokens, *_) in zip(prompts, solo, strict=True)}
    for k in (1, 3, 7):
        engine = make_engine(folder, Scripted(ragged(truth, k), k), speculative__num_draft_tokens=k)
        found = run(engine, prompts, params)
        assert engine.stats.num_accepted_tokens > 0
        assert whole_outputs(found) == solo
        requests += found
    for request in requests:
        check_output(request, reference)
    ranks = {entry[token].rank for r in requests for token, entry in zip(r.output_token_ids, r.logprobs, strict=True)}
    assert {1, 2} < ranks and max(ranks) > 20, "tokens inside and outside the list of the most likely"


@pytest.mark.parametrize("k", [0, 5])
def test_what_shapes_the_sampling_changes_no_bit_of_the_logprobs(folder: Path, k: int) -> None:
    """The same output, made to come by a processor, under every kind of parameter."""
    prompt = make_prompt(20)

    def forced(token_ids: list[int], logits: Tensor) -> Tensor:
        logits.fill_(float("-inf"))
        logits[wanted[len(token_ids) - len(prompt)] if len(token_ids) - len(prompt) < MAX_TOKENS else 0] = 1.0
        return logits

    (free,) = run(make_engine(folder), [prompt], FREE)
    wanted = free.output_token_ids
    draft = ragged({tuple(prompt): wanted}, 0)
    engine = make_engine(folder, Scripted(draft, k), speculative__num_draft_tokens=k) if k else make_engine(folder)
    for name, values in SHAPED.items():
        if name not in ("bans", "in place"):
            params = FREE.model_copy(update={**values, "logits_processors": (forced,)})
            (request,) = run(engine, [prompt], params)
            assert request.output_token_ids == wanted
            assert request.logprobs == free.logprobs, name


@pytest.mark.parametrize("count", [0, 1, 2, 7, VOCAB - 1, VOCAB])
def test_any_number_of_logprobs_changes_neither_tokens_nor_bits(
    folder: Path, plain: Engine, reference: Any, count: int
) -> None:
    """Zero reports the tokens alone; the whole vocabulary is allowed; a neighbour's number does not matter."""
    prompts = [make_prompt(9), make_prompt(40)]
    hot = FREE.model_copy(update={"temperature": 2.0, "seed": 1, "logprobs": VOCAB})
    whole = [run(plain, [prompt], hot)[0] for prompt in prompts]
    asked = hot.model_copy(update={"logprobs": count})
    other = hot.model_copy(update={"logprobs": None})
    engine = make_engine(folder, speculative__method="ngram")
    for found, silent in (run(engine, prompts, [asked, other]), run(engine, prompts, [other, asked])[::-1]):
        (reported,) = (each for each in whole if each.output_token_ids == found.output_token_ids)
        check_output(found, reference)
        assert silent.logprobs is None
        for entry, full in zip(found.logprobs, reported.logprobs, strict=True):
            assert entry.items() <= full.items()
    mixed = run(engine, prompts, [asked, hot])
    assert [request.output_token_ids for request in mixed] == [request.output_token_ids for request in whole]
    assert mixed[1].logprobs == whole[1].logprobs


def test_more_logprobs_than_tokens_are_refused(plain: Engine) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=f"{name} is 129, the vocabulary has 128"):
            plain.add_request([5], SamplingParams(**{name: VOCAB + 1}))


@pytest.mark.parametrize("end", ["token", "text", "length"])
@pytest.mark.parametrize("k", [0, 1, 5])
def test_wherever_an_output_ends_there_is_one_entry_for_each_token(folder: Path, end: str, k: int) -> None:
    """At each place of an accepted window; entries of what was cut away are gone, those before are untouched."""
    prompt = make_prompt(30)
    (free,) = run(make_engine(folder), [prompt], FREE)
    tokens = free.output_token_ids
    draft = oracle({tuple(prompt): tokens})
    engine = make_engine(folder, Scripted(draft, k), speculative__num_draft_tokens=k) if k else make_engine(folder)
    for place in range(MAX_TOKENS):
        token, params, check = tokens[place], FREE, None
        if end == "token":
            params = FREE.model_copy(update={"stop_token_ids": (token,)})
        elif end == "length":
            params = FREE.model_copy(update={"max_tokens": place + 1})
        else:
            check = {token: "stop"}.get
        request = engine.add_request(prompt, params, end_check=check)
        deltas = []
        while engine.has_work:
            deltas += engine.step()
        length = place + 1 if end == "length" else tokens.index(token) + 1
        assert request.output_token_ids == tokens[:length]
        assert request.logprobs == free.logprobs[:length]
        assert [entry for delta in deltas for entry in delta.logprobs] == free.logprobs[:length]
        assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)


def test_models_with_windows_and_soft_caps_report_transformers_numbers(models: Path) -> None:
    for family in ("mistral", "gemma2"):
        folder = tiny_model_folder(family, models)
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        params = FREE.model_copy(update={"prompt_logprobs": 2, "temperature": 1.0, "seed": 4})
        engine = make_engine(folder, speculative__method="ngram")
        for request in run(engine, [make_prompt(length) for length in (3, 40, 70)], params):
            check_output(request, model)
            check_prompt(request, model)


# --- Prompts ------------------------------------------------------------------------------------------------------

CHUNKS = {32: (1, 2, 31, 32, 33, 63, 64, 65, 97), 64: (15, 16, 17, 63, 64, 65, 80, 81)}


@pytest.mark.parametrize("chunk", CHUNKS)
def test_prompt_logprobs_are_those_of_transformers_whatever_the_chunks(
    folder: Path, reference: Any, chunk: int
) -> None:
    """Lengths around whole chunks and around the shorter last one; in any batch, for any drafts, the same bits."""
    prompts = [make_prompt(length) for length in CHUNKS[chunk]]
    params = FREE.model_copy(update={"prompt_logprobs": 2, "logprobs": 1})
    settings = {"numerics__prefill_chunk": chunk}
    plain = make_engine(folder, **settings)
    requests = [run(plain, [prompt], params)[0] for prompt in prompts]
    solo = whole_outputs(requests)
    for request in requests:
        check_prompt(request, reference)
        check_output(request, reference)
    for k in (1, 7):
        engine = make_engine(folder, speculative__method="ngram", speculative__num_draft_tokens=k, **settings)
        assert whole_outputs(run(engine, prompts, params)) == solo
    # Without: the same tokens and the same bits of the output's log-probabilities.
    without = params.model_copy(update={"prompt_logprobs": None})
    for engine in (plain, make_engine(folder, speculative__method="ngram", **settings)):
        silent = run(engine, prompts, without)
        assert [(r.output_token_ids, r.logprobs) for r in silent] == [
            (r.output_token_ids, r.logprobs) for r in requests
        ]
        assert all(request.prompt_logprobs is None for request in silent)


@pytest.mark.parametrize("scorer", ["multi_query", "batch_expansion"])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 5])
def test_prompt_logprobs_do_not_need_a_shape_that_divides_the_prompt(
    folder: Path, reference: Any, scorer: str, max_num_seqs: int
) -> None:
    """Rows go through the widest decode shape, which is wider or narrower than a chunk and no divisor of it."""
    engine = make_engine(
        folder,
        speculative__method="ngram",
        speculative__num_draft_tokens=4,
        speculative__scorer=scorer,
        scheduler__max_num_seqs=max_num_seqs,
        numerics__decode_width=7,
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    requests = run(engine, [make_prompt(length) for length in (1, 2, 8, 34, 50, 75)], params)
    for request in requests:
        check_prompt(request, reference)
        assert request.num_output_tokens == 1


def test_prompts_are_reported_while_others_decode_and_change_nothing_of_theirs(folder: Path, plain: Engine) -> None:
    """Requests with and without prompt log-probabilities arrive in the middle of each other's steps."""
    prompts = [make_prompt(length, seed=1) for length in (40, 65, 33, 70, 1, 90)]
    params = [
        FREE.model_copy(update={"prompt_logprobs": (None, 0, 3)[number % 3], "temperature": 1.0, "seed": number})
        for number in range(6)
    ]
    solo = [whole_outputs(run(plain, [prompt], each))[0] for prompt, each in zip(prompts, params, strict=True)]
    truth = {tuple(prompt): tokens for prompt, (tokens, *_) in zip(prompts, solo, strict=True)}
    engine = make_engine(folder, Scripted(ragged(truth, 2), 3), speculative__num_draft_tokens=3)
    requests = []
    for prompt, each in zip(prompts, params, strict=True):
        requests.append(engine.add_request(prompt, each))
        for _ in range(3):
            engine.step()
    while engine.has_work:
        engine.step()
    assert whole_outputs(requests) == solo
