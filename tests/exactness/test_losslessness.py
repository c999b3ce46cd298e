"""Odd inputs, ties, odd vocabularies and perfect drafters: the output is the plain one, and drafts cost no token.

Ends and limits, the empty prompt among them, are in `test_ends_and_limits.py`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from torch import Tensor

from compspec.engine import Engine
from compspec.errors import RequestError
from compspec.request import Request
from compspec.sampling.params import SamplingParams
from tests.law import VOCAB, Scripted, drafting, make_engine, make_prompts, oracle, ragged, run, whole_outputs, wrong
from tests.tiny_models import tiny_model_folder, tiny_tokenizer

Draft = Callable[[Request, int], list[int]]
MAX_TOKENS = 20
FREE = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
HOT = FREE.model_copy(update={"temperature": 2.0, "seed": 5})
MIXED = [
    FREE,
    HOT,
    FREE.model_copy(update={"temperature": 1.0, "seed": 6, "repetition_penalty": 1.3, "top_p": 0.9}),
    FREE.model_copy(update={"frequency_penalty": 1.0, "logprobs": 2}),
]


def solo(plain: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[tuple[Any, ...]]:
    return [whole_outputs(run(plain, [prompt], each))[0] for prompt, each in zip(prompts, params, strict=True)]


def truth_of(prompts: Sequence[list[int]], found: Sequence[tuple[Any, ...]]) -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): tokens for prompt, (tokens, *_) in zip(prompts, found, strict=True)}


# --- Perfect and adversarial drafters -----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 4])
def test_drafts_of_the_target_itself_are_all_accepted(folder: Path, plain: Engine, temperature: float, k: int) -> None:
    """A second engine of the same model, seed and temperature continues whatever text stands there."""
    itself = make_engine(folder)

    def draft(request: Request, most: int) -> list[int]:
        if most == 0:
            return []
        params = request.params.model_copy(update={"max_tokens": most})
        return run(itself, [request.token_ids.tolist()], params)[0].output_token_ids

    prompts = make_prompts(4, seed=1)
    params = [FREE.model_copy(update={"temperature": temperature, "seed": seed}) for seed in range(4)]
    engine = drafting(folder, draft, k)
    requests = run(engine, prompts, params)
    assert whole_outputs(requests) == solo(plain, prompts, params)
    for request in requests:
        assert request.stats.num_draft_tokens == request.stats.num_accepted_tokens > 0
        assert request.stats.num_decode_steps == -(-(MAX_TOKENS - 1) // (k + 1)), "a step was not full"


def last_token(request: Request, most: int) -> list[int]:
    return [int(request.token_ids[-1])] * most


def whole_prompt(request: Request, most: int) -> list[int]:
    return request.token_ids[: request.num_prompt_tokens].tolist()[:most]


def adversaries(truth: dict[tuple[int, ...], list[int]]) -> dict[str, Draft]:
    """Drafters that are right in ways that tempt: too early, too late, for a while, now and then."""
    right = oracle(truth)

    def stale(request: Request, most: int) -> list[int]:
        """What was right a step ago."""
        known = truth[tuple(request.token_ids[: request.num_prompt_tokens].tolist())]
        return known[request.num_output_tokens - 1 :][:most]

    def early(request: Request, most: int) -> list[int]:
        """What will be right one token later."""
        return right(request, most + 1)[1 : most + 1]

    return {
        "last token": last_token,
        "right token over and over": lambda request, most: right(request, 1) * most,
        "right two in turns": lambda request, most: (right(request, 2) * most)[:most],
        "prompt": whole_prompt,
        "stale": stale,
        "early": early,
        "last draft wrong": lambda request, most: (
            [*right(request, most)[:-1], *wrong(truth)(request, most)[-1:]] if most else []
        ),
        "every other step": lambda request, most: right(request, most) if request.num_tokens % 2 else [],
        "zero": lambda request, most: [0] * most,
    }


@pytest.mark.parametrize("name", adversaries({}))
def test_tempting_drafts_change_nothing(folder: Path, plain: Engine, name: str) -> None:
    prompts, params = make_prompts(4, seed=2), MIXED
    expected = solo(plain, prompts, params)
    for k in (1, 6):
        engine = drafting(folder, adversaries(truth_of(prompts, expected))[name], k)
        assert whole_outputs(run(engine, prompts, params)) == expected
        assert engine.stats.num_draft_tokens > 20


@pytest.mark.parametrize("token", [0, 1, 2, 64, VOCAB - 1])
def test_a_prompt_of_one_token_is_decoded_like_any_other(folder: Path, plain: Engine, token: int) -> None:
    """The pad, begin and end tokens and the last id among them; drafts follow the very first output token."""
    params = [each.model_copy(update={"prompt_logprobs": 1}) for each in MIXED]
    expected = solo(plain, [[token]] * 4, params)
    assert all(len(tokens) == MAX_TOKENS for tokens, *_ in expected)
    for index, one in enumerate(params):
        engine = drafting(folder, ragged({(token,): expected[index][0]}, index), 5)
        assert whole_outputs(run(engine, [[token]], one)) == [expected[index]]
        assert engine.stats.num_accepted_tokens > 0
    engine = drafting(folder, last_token, 5)
    assert whole_outputs(run(engine, [[token]] * 4, params)) == expected


# --- How many drafts, and from where ------------------------------------------------------------------------------

NUM_DRAFTS = [*((k, "exact") for k in (*range(1, 10), 20)), *((k, "fast") for k in (1, 4, 60))]


@pytest.mark.parametrize(("k", "numerics"), NUM_DRAFTS)
def test_any_number_of_drafts_gives_the_same_output(folder: Path, plain: Engine, k: int, numerics: str) -> None:
    """Up to far more than the output has room for. In fp32 the width of a step leaves the tokens alone as well."""
    prompts = make_prompts(4, seed=4)
    # No log-probabilities: those of fast numerics, and of another width, differ in their last bits.
    params = [each.model_copy(update={"logprobs": None}) for each in MIXED]
    expected = solo(plain, prompts, params)
    width = max(8, k + 1)
    settings = {"numerics__mode": numerics, "numerics__decode_width": width, "scheduler__max_batched_tokens": 4096}
    truth = truth_of(prompts, expected)
    for kind, draft in (("oracle", oracle(truth)), ("ragged", ragged(truth, k))):
        engine = drafting(folder, draft, k, **settings)
        requests = run(engine, prompts, params)
        assert whole_outputs(requests) == expected
        assert engine.stats.num_accepted_tokens > 0
        if kind == "oracle":
            assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens
            full = -(-(MAX_TOKENS - 1) // (k + 1))
            assert {request.stats.num_decode_steps for request in requests} == {full}


@pytest.mark.parametrize("least", range(1, 9))
def test_any_lookup_window_gives_the_same_output(models: Path, least: int) -> None:
    """The window decides what is drafted, and how much of it is right, and nothing else."""
    folder = tiny_model_folder("llama", models, gain=0.8)
    prompts = [np.resize(prompt, 60).tolist() for prompt in make_prompts(4, seed=6, longest=30)]
    expected = solo(make_engine(folder), prompts, MIXED)
    for most in (least, 8):
        engine = make_engine(
            folder,
            speculative__method="ngram",
            speculative__prompt_lookup_min=least,
            speculative__prompt_lookup_max=most,
        )
        assert whole_outputs(run(engine, prompts, MIXED)) == expected
        assert engine.stats.num_accepted_tokens > 0


# --- Ties ---------------------------------------------------------------------------------------------------------


def with_head(models: Path, name: str, change: Callable[[Tensor], None], vocab_size: int = VOCAB) -> Path:
    """A llama whose output matrix is its own, changed in place."""
    folder = tiny_model_folder("llama", models / name, vocab_size=vocab_size, tie_word_embeddings=False)
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    change(weights["lm_head.weight"])
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    return folder


def twins(head: Tensor) -> None:
    """Token t + 64 is as likely as token t, always."""
    head[VOCAB // 2 :] = head[: VOCAB // 2]


def equal(head: Tensor) -> None:
    """All tokens are equally likely, always."""
    head[:] = 0.0


def rounded(token_ids: list[int], logits: Tensor) -> Tensor:
    """Few distinct values: ties in almost every row, the top included."""
    return (logits / 2).round()


def twin(truth: dict[tuple[int, ...], list[int]]) -> Draft:
    """Drafts the token that is exactly as likely as the right one."""
    right = oracle(truth)
    return lambda request, most: [(token + VOCAB // 2) % VOCAB for token in right(request, most)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_of_exact_ties_in_the_logits_the_lowest_id_wins_with_and_without_drafts(
    models: Path, dtype: str, numerics: str
) -> None:
    folder = with_head(models, "twins", twins)
    settings = {"model__dtype": dtype, "numerics__mode": numerics}
    plain = make_engine(folder, **settings)
    prompts = make_prompts(4, seed=7)
    found = [run(plain, [prompt], FREE.model_copy(update={"logprobs": 2}))[0] for prompt in prompts]
    truth = {}
    for prompt, request in zip(prompts, found, strict=True):
        truth[tuple(prompt)] = request.output_token_ids
        assert max(request.output_token_ids) < VOCAB // 2
        for token, entry in zip(request.output_token_ids, request.logprobs, strict=True):
            # In bf16 more than two may tie.
            assert min(entry) == token
            assert [each.rank for each in entry.values()] == [1, 2]
            assert len({each.logprob for each in entry.values()}) == 1, "the tie was not exact, or not at the top"
    assert len({token for tokens in truth.values() for token in tokens}) > 5
    for draft, is_right in ((twin(truth), False), (oracle(truth), True)):
        engine = drafting(folder, draft, 5, **settings)
        assert [request.output_token_ids for request in run(engine, prompts, FREE)] == list(truth.values())
        assert engine.stats.num_accepted_tokens == is_right * engine.stats.num_draft_tokens
        assert engine.stats.num_draft_tokens > 50


def test_where_all_tokens_are_equal_the_lowest_id_that_is_allowed_wins(models: Path) -> None:
    folder = with_head(models, "equal", equal)
    prompts = make_prompts(4, seed=7)
    each = [
        FREE,
        FREE.model_copy(update={"allowed_token_ids": (90, 17, 40)}),
        FREE.model_copy(update={"bad_words": ((0,), (1,), (2,))}),
        FREE.model_copy(update={"frequency_penalty": 0.5}),
    ]
    expected = [[0] * MAX_TOKENS, [17] * MAX_TOKENS, [3] * MAX_TOKENS, list(range(MAX_TOKENS))]
    drafters: list[Draft] = [
        lambda request, most: [0] * most,
        lambda request, most: [17, 0, 17][:most],
        oracle({tuple(prompt): tokens for prompt, tokens in zip(prompts, expected, strict=True)}),
    ]
    for engine in (make_engine(folder), *(drafting(folder, draft, 3) for draft in drafters)):
        assert [request.output_token_ids for request in run(engine, prompts, each)] == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ties_that_a_processor_makes_are_broken_alike_with_and_without_drafts(
    folder: Path, plain: Engine, temperature: float
) -> None:
    """With temperature the noise breaks them, among as many tokens as top_k leaves."""
    prompts = make_prompts(6, seed=8)
    values = {"logits_processors": (rounded,), "temperature": temperature, "seed": 3}
    params = [FREE.model_copy(update={**values, "top_k": top_k}) for top_k in (0, 1, 2, 3, 0, 1)]
    expected = solo(plain, prompts, params)
    truth = truth_of(prompts, expected)
    for draft in (ragged(truth, 1), wrong(truth), last_token):
        assert whole_outputs(run(drafting(folder, draft, 5), prompts, params)) == expected


# --- Vocabularies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [5, 131])
def test_a_vocabulary_of_any_size_keeps_the_law(models: Path, vocab_size: int) -> None:
    """Primes: no multiple of any block or vector. The last id and the first are sampled as well."""
    folder = tiny_model_folder("llama", models, vocab_size=vocab_size)
    rng = np.random.default_rng(vocab_size)
    prompts = [np.resize(rng.integers(0, vocab_size, 4), length).tolist() for length in (1, 13, 32, 40)]
    ends = FREE.model_copy(update={"temperature": 2.0, "seed": 1, "logit_bias": {0: 8.0, vocab_size - 1: 8.0}})
    params = [*MIXED[:3], ends]
    expected = solo(make_engine(folder), prompts, params)
    assert {0, vocab_size - 1} <= set(expected[3][0])
    assert all(0 <= token < vocab_size for tokens, *_ in expected for token in tokens)
    truth = truth_of(prompts, expected)

    def draft(request: Request, most: int) -> list[int]:
        right = oracle(truth)(request, most)
        return [*right[:2], *((token + 1) % vocab_size for token in right[2:])]

    for engine in (drafting(folder, draft, 5), make_engine(folder, speculative__method="ngram")):
        assert whole_outputs(run(engine, prompts, params)) == expected
    assert engine.stats.num_draft_tokens > 0


@pytest.fixture(scope="module")
def padded(models: Path) -> tuple[Path, int]:
    """A model whose rows beyond its tokenizer's vocabulary have by far the largest logits; and that vocabulary."""
    size, real = 320, 300

    def favour_padding(head: Tensor) -> None:
        head[real:] *= 30.0

    folder = with_head(models, "padded", favour_padding, size)
    return folder, len(tiny_tokenizer(folder, real))


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_padding_of_the_vocabulary_is_never_sampled(padded: tuple[Path, int], numerics: str) -> None:
    """Though it is the most likely, biased, asked for by a processor, hot, and drafted."""
    folder, real = padded
    pads = range(real, 320)

    def favour(token_ids: list[int], logits: Tensor) -> Tensor:
        logits[real:] = 1e9
        return logits

    plain = make_engine(folder, numerics__mode=numerics)
    assert real < plain.vocab_size == 320
    prompts = [[7, 8, 9], [5] * 40, [310, 319], [300]]
    bias = dict.fromkeys(pads, 100.0)
    changes: list[dict[str, Any]] = [
        {},
        {"logit_bias": bias, "temperature": 2.0, "seed": 1},
        {"logits_processors": (favour,), "temperature": 2.0, "seed": 2, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
        {"allowed_token_ids": (*pads, 11, 12, 13), "frequency_penalty": -2.0},
    ]
    params = [FREE.model_copy(update={**change, "logprobs": 1}) for change in changes]
    expected = solo(plain, prompts, params)
    assert all(token < real for tokens, *_ in expected for token in tokens)
    outside = [entry for _, _, _, _, logprobs, _ in expected for entry in logprobs if max(entry) >= real]
    assert len(outside) > 40, "the model does not favour its padding, so nothing was tested"
    for draft in (lambda request, most: [310] * most, ragged(truth_of(prompts, expected), 3)):
        engine = drafting(folder, draft, 5, numerics__mode=numerics)
        found = whole_outputs(run(engine, prompts, params))
        assert [each[:4] for each in found] == [each[:4] for each in expected]
        if numerics == "exact":
            assert found == expected
    with pytest.raises(RequestError, match="leave no token"):
        plain.add_request([5], FREE.model_copy(update={"allowed_token_ids": tuple(pads)}))


# --- Seeds --------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_with_any_drafter_batch_place_and_uptime(folder: Path, plain: Engine) -> None:
    """At temperature 2, where a single bit of noise at the wrong place would show."""
    prompts = make_prompts(5, seed=9)
    seeds = (0, 2**32, 2**63 - 1, 1, 1)
    params = [HOT.model_copy(update={"seed": seed}) for seed in seeds]
    expected = [tokens for tokens, *_ in solo(plain, prompts, params)]
    assert len(set(map(tuple, expected))) == len(expected)
    truth = dict(zip(map(tuple, prompts), expected, strict=True))
    proposers = [
        (oracle(truth), 1, 1),
        (ragged(truth, 4), 3, 4),
        (last_token, 7, 7),
        (None, 1, 4),
    ]
    rng = np.random.default_rng(3)
    for draft, k, max_num_seqs in proposers:
        proposer = None if draft is None else Scripted(draft, k)
        engine = make_engine(folder, proposer, speculative__num_draft_tokens=k, scheduler__max_num_seqs=max_num_seqs)
        for _ in range(2):  # the second time in an engine that has been in use
            order = rng.permutation(len(prompts))
            requests = run(engine, [prompts[at] for at in order], [params[at] for at in order])
            found = [request.output_token_ids for request in requests]
            assert found == [expected[at] for at in order], (k, max_num_seqs)


def test_seeds_prompts_and_positions_each_draw_noise_of_their_own(models: Path) -> None:
    """In a model without preferences only the noise is left, so that equal tokens would show a shared stream."""
    folder = with_head(models, "equal", equal)
    params = [HOT.model_copy(update={"seed": seed, "max_tokens": 64}) for seed in (0, 1, 2**31, 2**32, 2**62, 3)]
    tokens = np.array(
        [
            request.output_token_ids
            for request in run(make_engine(folder, scheduler__max_num_seqs=6), [[9, 9, 9]] * 6, params)
        ]
    )
    for one in range(6):
        assert len(np.unique(tokens[one])) > 25, "a stream repeats itself"
        for other in range(one):
            assert (tokens[one] == tokens[other]).sum() < 8
            assert (tokens[one, 1:] == tokens[other, :-1]).sum() < 8


def test_unseeded_requests_beside_seeded_ones_draw_anew_and_disturb_nothing(folder: Path, plain: Engine) -> None:
    """The drafter knows what the unseeded ones said last time, and is wrong."""
    prompts = make_prompts(4, seed=10)
    unseeded = HOT.model_copy(update={"seed": None})
    expected = solo(plain, prompts[::2], [HOT] * 2)
    truth = truth_of(prompts, solo(plain, prompts, [HOT, unseeded] * 2))
    engine = drafting(folder, oracle(truth), 5)
    seen = {tuple(truth[tuple(prompt)]) for prompt in prompts[1::2]}
    for _ in range(3):
        requests = run(engine, prompts, [HOT, unseeded] * 2)
        assert whole_outputs(requests[::2]) == expected
        assert all(request.stats.num_accepted_tokens == request.stats.num_draft_tokens for request in requests[::2])
        seen |= {tuple(request.output_token_ids) for request in requests[1::2]}
    assert len(seen) == 8, "an unseeded request repeated another one"
