"""The sampler: every row as its request would be sampled alone, whatever a request asks for and whatever breaks."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compspec.request import Request
from compspec.sampling.metadata import GROUP_ROWS, MetadataState, SamplingMetadata
from compspec.sampling.noise import GumbelNoise
from compspec.sampling.params import SamplingParams
from compspec.sampling.sampler import NO_TOKEN, Sampled, Sampler
from tests.unit.fakes import decode, draft, make_metadata, make_request, prefill, same_bits, scores, step_scores

CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")


def new_sampler(vocab_size: int, tokenizer_vocab_size: int | None = None) -> Sampler:
    return Sampler(GumbelNoise(vocab_size, CPU), tokenizer_vocab_size)


def silent(seeds: Tensor, positions: Tensor, salts: Tensor) -> Tensor:
    """Noise that is 0 everywhere: only ties decide."""
    return torch.zeros(len(seeds), 8)


def metadata_of(
    requests: Sequence[Request], drafts: Sequence[Sequence[int]], vocab_size: int, eos: Sequence[int] = ()
) -> SamplingMetadata:
    """Metadata of a decode step."""
    state = MetadataState(len(requests), vocab_size, CPU, max_model_len=64, eos_token_ids=eos)
    made = draft(*drafts)
    return state.build(decode(*requests), made, step_scores(made))


def sample(
    requests: Sequence[Request],
    drafts: Sequence[Sequence[int]],
    logits: Tensor,
    *,
    eos: Sequence[int] = (),
    tokenizer_vocab_size: int | None = None,
) -> Sampled:
    """Samples a decode step; `logits` are [R, K + 1, V]."""
    vocab_size = logits.shape[-1]
    metadata = metadata_of(requests, drafts, vocab_size, eos)
    return new_sampler(vocab_size, tokenizer_vocab_size).sample(scores(logits), metadata)


def random_logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tied", [[0, 1], [3, 5, 7], [6, 7], list(range(8))])
def test_the_lowest_id_of_equal_values_wins(tied: list[int], temperature: float) -> None:
    logits = torch.full((1, 3, 8), -1.0)
    logits[..., tied] = 2.0
    found = Sampler(silent).sample(scores(logits), make_metadata(3, temperature=temperature))
    assert found.token_ids.tolist() == [tied[0]] * 3


def test_the_lowest_id_wins_in_a_large_vocabulary_and_in_bfloat16() -> None:
    logits = torch.zeros(2, 8, 49_152, dtype=torch.bfloat16)
    logits[..., [4099, 31_000, 49_151]] = 1.0
    assert new_sampler(49_152).sample(scores(logits), make_metadata(16)).token_ids.tolist() == [4099] * 16


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_the_padded_vocabulary_is_never_sampled(temperature: float) -> None:
    """Whatever else is asked for: the padding holds the largest logits here."""
    params = {"temperature": temperature, "top_k": 12, "top_p": 0.99, "min_p": 1e-4, "frequency_penalty": -2.0}
    bias = dict.fromkeys(range(10, 16), 100.0)
    requests = [
        make_request(range(16), output=range(16), seed=seed, logit_bias=bias, **params, logits_processors=[lift])
        for seed in range(25)
    ]
    logits = torch.zeros(25, 8, 16)
    logits[..., 10:] = 50.0
    drafts = [[11] * 7] * 25
    assert int(sample(requests, drafts, logits, tokenizer_vocab_size=10).token_ids.max()) < 10
    assert int(sample(requests, drafts, logits).token_ids.max()) >= 10, "the padding was no temptation"


def lift(token_ids: list[int], logits: Tensor) -> Tensor:
    """A processor that allows everything again."""
    return logits.clamp(min=0.0) + torch.arange(len(logits))


def nudge(token_ids: list[int], logits: Tensor) -> Tensor:
    """A processor that depends on all it is given."""
    return logits * 0.9 + torch.sin(torch.arange(len(logits)) + float(sum(token_ids)))


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"frequency_penalty": -1.5, "repetition_penalty": 1.3},
    {"temperature": 1.3, "top_p": 0.8, "presence_penalty": 0.5},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.0, "top_p": 0.6, "min_p": 0.2, "top_k": 7, "repetition_penalty": 0.8},
    {"top_k": 1, "top_p": 0.1},
    {"logit_bias": {3: 5.0, 60: -3.0}, "presence_penalty": 1.0},
    {"bad_words": [[1], [2, 3], [0, 1, 2]], "temperature": 0.9},
    {"allowed_token_ids": [1, 2, 3, 50], "temperature": 1.0, "top_p": 0.7},
    {"min_tokens": 7, "stop_token_ids": [2, 4]},
    {"logits_processors": [nudge], "repetition_penalty": 1.2, "temperature": 0.8},
    {"logits_processors": [nudge, lift], "bad_words": [[5]]},
]


@pytest.mark.parametrize("trial", range(5))
def test_requests_of_every_kind_in_one_batch_equal_themselves_alone(trial: int) -> None:
    vocab_size, rows = 61, 6
    rng = np.random.default_rng(trial)
    requests = [
        make_request(
            rng.integers(0, 6, 5).tolist(), output=rng.integers(0, vocab_size, 4).tolist(), seed=seed, **params
        )
        for seed, params in enumerate(MIXED[index] for index in rng.permutation(len(MIXED)))
    ]
    drafts = [rng.integers(0, 6, int(rng.integers(0, rows))).tolist() for _ in requests]
    logits = random_logits(trial, len(requests), rows, vocab_size)

    def run(chosen: list[int]) -> list[tuple[list[int], Tensor]]:
        picked = [drafts[index] for index in chosen]
        own = logits[chosen, : max(map(len, picked)) + 1]
        found = sample([requests[index] for index in chosen], picked, own, eos=[7], tokenizer_vocab_size=57)
        counts = [len(each) + 1 for each in picked]
        assert found.failures == {}
        return list(zip(map(Tensor.tolist, found.token_ids.split(counts)), found.logits.split(counts), strict=True))

    everyone = list(range(len(requests)))
    together = run(everyone)
    for index, (tokens, chosen_from) in zip(everyone[::-1], run(everyone[::-1]), strict=True):
        assert tokens == together[index][0]
        assert same_bits(chosen_from, together[index][1])
    for index in everyone:
        ((tokens, chosen_from),) = run([index])
        assert tokens == together[index][0]
        assert same_bits(chosen_from, together[index][1])


VOCAB, EOS, PADDED = 10, (8, 1), 9


def by_definition(row: Tensor, tokens: list[int], num_prompt: int, params: SamplingParams) -> Tensor:
    """A row of raw logits as transformers would edit it after `tokens`, before the temperature."""
    ids, rows = torch.tensor([tokens]), row[None]
    if params.logit_bias:
        bias = {(token,): float(value) for token, value in params.logit_bias.items()}
        rows = SequenceBiasLogitsProcessor(bias)(ids, rows)
    (row,) = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, rows.clone())
    for token, count in Counter(tokens[num_prompt:]).items():
        row[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        row[token] -= np.float32(params.presence_penalty)
    for processor in params.logits_processors:
        row = processor(tokens, row)
    rows = row[None]
    if params.bad_words:
        rows = NoBadWordsLogitsProcessor([list(word) for word in params.bad_words])(ids, rows)
    ends = sorted({*params.stop_token_ids, *(() if params.ignore_eos else EOS)})
    if ends:
        rows = MinNewTokensLengthLogitsProcessor(num_prompt, params.min_tokens, ends)(ids, rows)
    allowed = torch.isin(torch.arange(VOCAB), torch.tensor(params.allowed_token_ids or range(VOCAB)))
    return rows[0].masked_fill(~allowed | (torch.arange(VOCAB) >= PADDED), -INF)


def filtered_by_definition(row: Tensor, params: SamplingParams) -> Tensor | None:
    """The row after temperature and filters; None where rounding decides which token is the last to stay."""
    rows = TemperatureLogitsWarper(params.temperature)(torch.zeros(1, 1), row[None])
    if params.top_k:
        rows = TopKLogitsWarper(params.top_k)(torch.zeros(1, 1), rows)
    if params.top_p < 1.0:
        ordered = rows.double().sort(descending=True).values
        masses = ordered.softmax(-1).cumsum(-1)[ordered > -INF][:-1]
        tied = bool((ordered[ordered > -INF].diff() == 0).any())
        if tied or bool(((masses - params.top_p).abs() < 1e-5).any()):
            return None
        rows = TopPLogitsWarper(params.top_p)(torch.zeros(1, 1), rows)
    if params.min_p:
        margins = (rows - rows.amax()).double() - params.log_min_p
        if bool((margins.abs() < 1e-5).any()):
            return None
        rows = MinPLogitsWarper(params.min_p)(torch.zeros(1, 1), rows)
    return rows[0]


few = st.integers(0, 3)
words = st.lists(st.one_of(st.lists(few, min_size=2, max_size=4), st.lists(few, min_size=1, max_size=1)), max_size=5)
ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5)
asked = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.7, 2.0]),
        "top_k": st.sampled_from([1, 3, VOCAB, 100]),
        "top_p": st.sampled_from([0.3, 0.9]),
        "min_p": st.sampled_from([0.1, 0.6]),
        "repetition_penalty": st.sampled_from([1.3, 0.5]),
        "presence_penalty": st.sampled_from([0.7, -1.1]),
        "frequency_penalty": st.sampled_from([0.4, -2.0]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -0.3, 2.0]), max_size=4),
        "bad_words": words,
        "allowed_token_ids": ids,
        "min_tokens": st.integers(0, 7),
        "stop_token_ids": ids,
        "ignore_eos": st.booleans(),
        "logits_processors": st.just([nudge]),
    },
)
tokens = st.lists(st.one_of(few, st.integers(0, VOCAB - 1)), max_size=5)
cases = st.lists(st.tuples(tokens.filter(bool), tokens, tokens, asked), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(cases, st.integers(0, 10_000))
def test_rows_equal_transformers_processors_on_the_explicit_token_list_of_each_row(case: list, seed: int) -> None:
    requests = [
        make_request(prompt, output=output, seed=seed + number, max_tokens=12, **params)
        for number, (prompt, output, _, params) in enumerate(case)
    ]
    drafts = [drafted for _, _, drafted, _ in case]
    logits = random_logits(seed, len(case), max(map(len, drafts)) + 1, VOCAB)
    found = sample(requests, drafts, logits, eos=EOS, tokenizer_vocab_size=PADDED)
    noise = GumbelNoise(VOCAB, CPU)
    row = 0
    for number, (prompt, output, drafted, _) in enumerate(case):
        params = requests[number].params
        for j in range(len(drafted) + 1):
            seen = prompt + output + drafted[:j]
            expected = by_definition(logits[number, j], seen, len(prompt), params)
            token = found.token_ids[row].item()
            if expected.max() == -INF:
                assert token == NO_TOKEN
            elif params.is_greedy:
                assert torch.equal(found.logits[row], expected), (number, j)
                assert token == expected.argmax()
            else:
                filtered = filtered_by_definition(expected, params)
                if filtered is not None:
                    assert torch.equal(found.logits[row], filtered), (number, j)
                    salt = torch.tensor([0])
                    drawn = noise(torch.tensor([seed + number]), torch.tensor([len(seen)]), salt)[0]
                    assert token == (filtered + drawn).argmax()
            row += 1


def test_the_row_of_a_prefill_is_edited_like_the_first_of_a_window() -> None:
    params: dict[str, Any] = {"logit_bias": {3: 4.0}, "repetition_penalty": 2.0, "bad_words": [[2, 5], [6]]}
    request = make_request([1, 3, 2], min_tokens=1, logits_processors=[nudge], **params)
    logits = random_logits(0, 1, 1, VOCAB)
    state = MetadataState(1, VOCAB, CPU, max_model_len=64, eos_token_ids=EOS)
    metadata = state.build(prefill(request, 0, 1, 2), draft([]), scores(logits))
    found = new_sampler(VOCAB, PADDED).sample(scores(logits), metadata)
    expected = by_definition(logits[0, 0], [1, 3, 2], 3, request.params)
    assert torch.equal(found.logits[0], expected)
    assert not expected[[1, 5, 6, 8]].isfinite().any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_callers_logits_are_never_changed(dtype: torch.dtype, temperature: float) -> None:
    everything: dict[str, Any] = {
        "logit_bias": {1: 1.0},
        "repetition_penalty": 2.0,
        "logits_processors": [lambda token_ids, logits: logits.fill_(1.0)],
        "bad_words": [[2]],
        "allowed_token_ids": [1, 2],
        "min_tokens": 9,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
    }
    logits = random_logits(1, 2, 3, VOCAB).to(dtype)
    before = logits.clone()
    requests = [make_request([1], temperature=temperature, **everything), make_request([1], temperature=temperature)]
    sample(requests, [[1, 1]] * 2, logits, eos=EOS, tokenizer_vocab_size=PADDED)
    assert torch.equal(logits, before)


def test_bfloat16_logits_are_sampled_as_their_float32_values() -> None:
    requests = [make_request([1], seed=3, repetition_penalty=1.3, **params) for params in ({}, {"temperature": 0.7})]
    logits = random_logits(2, 2, 4, VOCAB).bfloat16()
    half, full = (sample(requests, [[1, 2, 3]] * 2, each) for each in (logits, logits.float()))
    assert torch.equal(half.token_ids, full.token_ids)
    assert same_bits(half.logits, full.logits)


def test_bias_comes_before_the_penalties() -> None:
    request = make_request([1], logit_bias={1: 4.0}, repetition_penalty=2.0)
    assert sample([request], [[]], torch.full((1, 1, 3), -1.0)).logits.tolist() == [[-1.0, 1.5, -1.0]]


def test_processors_see_biased_and_penalised_logits_and_a_list_of_their_own() -> None:
    calls: list[tuple[list[int], Tensor]] = []

    def spy(token_ids: list[int], logits: Tensor) -> Tensor:
        calls.append((list(token_ids), logits.clone()))
        token_ids.clear()  # the list is the processor's own
        return logits.fill_(0.0)  # and so are the logits

    request = make_request(
        [1, 2], output=[3], logit_bias={4: 2.0}, presence_penalty=1.0, bad_words=[[5]], logits_processors=[spy, spy]
    )
    logits = random_logits(3, 2, 3, 7)
    metadata = metadata_of([make_request(), request], [[6, 6], [4, 4]], 7)
    sampler = new_sampler(7)
    first = sampler.sample(scores(logits), metadata)
    seen = [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 4]]
    assert [token_ids for token_ids, _ in calls] == [each for each in seen for _ in range(2)]
    for row in range(3):
        expected = logits[1, row].clone()
        expected[4] += 2.0
        expected[sorted({*seen[row][2:]})] -= 1.0
        assert torch.equal(calls[2 * row][1], expected), "forbidden tokens are not yet forbidden here"
        assert calls[2 * row + 1][1].tolist() == [0.0] * 7, "the second processor gets what the first returned"
    assert same_bits(first.logits[:3], logits[0]), "the neighbour was changed"
    assert same_bits(sampler.sample(scores(logits), metadata).logits, first.logits), "a second call saw other tokens"


RETURNS: dict[str, Callable[[list[int], Tensor], Tensor]] = {
    "large": lambda token_ids, logits: torch.full_like(logits, 1e30),
    "infinite": lambda token_ids, logits: torch.full_like(logits, INF),
    "lifted": lift,
    "in place": lambda token_ids, logits: logits.fill_(5.0),
    "expanded": lambda token_ids, logits: torch.tensor(3.0).expand(len(logits)),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("returns", RETURNS)
def test_what_is_forbidden_stays_forbidden_whatever_a_processor_returns(returns: str, temperature: float) -> None:
    request = make_request(
        [2, 3],
        temperature=temperature,
        bad_words=[[4], [3, 5]],
        min_tokens=1,
        allowed_token_ids=[1, 4, 5, 6, 8, 9],
        logits_processors=[RETURNS[returns]],
        logit_bias={4: 100.0, 0: 100.0},
    )
    found = sample([request], [[3]], random_logits(4, 1, 2, VOCAB), eos=EOS, tokenizer_vocab_size=PADDED)
    assert [(row > -INF).nonzero().flatten().tolist() for row in found.logits] == [[6], [1, 6, 8]]
    assert all(token in left for token, left in zip(found.token_ids.tolist(), ([6], [1, 6, 8]), strict=True))


class Picky:
    """A processor that is an object."""

    def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
        raise KeyError("no such token")


def raises(token_ids: list[int], logits: Tensor) -> Tensor:
    logits.fill_(9.0)
    raise RuntimeError("broken on purpose")


BROKEN: dict[str, tuple[Callable[[list[int], Tensor], Any], list[str]]] = {
    "raises": (raises, ["'raises'", "RuntimeError: broken on purpose"]),
    "object": (Picky(), ["'Picky'", "KeyError: 'no such token'"]),
    "partial": (partial(raises), ["'partial'", "RuntimeError"]),
    "None": (lambda token_ids, logits: None, ["must return", "NoneType"]),
    "list": (lambda token_ids, logits: logits.tolist(), ["must return", "list"]),
    "shape": (lambda token_ids, logits: logits[:-1], ["must return", f"[{VOCAB - 1}]"]),
    "more dimensions": (lambda token_ids, logits: logits[None], ["must return", f"[1, {VOCAB}]"]),
    "dtype": (lambda token_ids, logits: logits.double(), ["must return", "torch.float64"]),
    "half": (lambda token_ids, logits: logits.bfloat16(), ["must return", "torch.bfloat16"]),
    "numpy": (lambda token_ids, logits: logits.numpy(), ["must return", "ndarray"]),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", [*BROKEN, "NaN"])
def test_a_processor_that_breaks_costs_its_row_alone(name: str, temperature: float) -> None:
    broken, texts = BROKEN.get(name, (lambda token_ids, logits: torch.full_like(logits, NAN), []))

    def sometimes(token_ids: list[int], logits: Tensor) -> Tensor:
        return broken(token_ids, logits) if len(token_ids) == 4 else nudge(token_ids, logits)

    def run(*processors: Callable[[list[int], Tensor], Any]) -> Sampled:
        request = make_request([1, 2, 3], seed=5, temperature=temperature, top_p=0.9, logits_processors=processors)
        others = [make_request([1], seed=6, temperature=1.0), make_request([2], repetition_penalty=1.1)]
        return sample([others[0], request, others[1]], [[1], [5, 6], [7]], random_logits(5, 3, 3, VOCAB))

    sometimes.__name__ = getattr(broken, "__name__", type(broken).__name__)
    found, expected = run(sometimes), run(nudge)
    assert found.token_ids[3] == NO_TOKEN
    others = [row for row in range(len(found.token_ids)) if row != 3]
    assert torch.equal(found.token_ids[others], expected.token_ids[others])
    assert same_bits(found.logits[others], expected.logits[others])
    assert (expected.token_ids >= 0).all() and expected.failures == {}
    # Logits that are not numbers look the same whether a processor or the model made them.
    assert list(found.failures) == ([3] if texts else [])
    assert all(text in found.failures[3] for text in texts)


def test_a_processor_that_breaks_is_the_last_to_run_and_is_named() -> None:
    calls: list[str] = []

    def never(token_ids: list[int], logits: Tensor) -> Tensor:
        calls.append("never")
        return logits

    request = make_request([1], logits_processors=[nudge, raises, never])
    found = sample([request], [[]], random_logits(6, 1, 1, VOCAB))
    assert found.failures == {0: "logits processor 'raises' raised RuntimeError: broken on purpose"}
    assert (found.token_ids.tolist(), calls) == ([NO_TOKEN], [])


class UnspeakableError(Exception):
    """An error that has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


def unspeakable(token_ids: list[int], logits: Tensor) -> Tensor:
    raise UnspeakableError


@pytest.mark.parametrize(
    "processor",
    [
        unspeakable,
        lambda token_ids, logits: logits.to("meta"),
        lambda token_ids, logits: logits.to_sparse(),
    ],
)
def test_nothing_that_a_processor_does_ends_the_step(processor: Callable[[list[int], Tensor], Tensor]) -> None:
    found = sample([make_request([1], logits_processors=[processor])], [[]], random_logits(6, 1, 1, VOCAB))
    assert list(found.failures) == [0]


def test_a_failure_is_one_line() -> None:
    def breaks(token_ids: list[int], logits: Tensor) -> Tensor:
        raise ValueError("first\nsecond")

    found = sample([make_request([1], logits_processors=[breaks])], [[]], random_logits(6, 1, 1, VOCAB))
    assert "\n" not in found.failures[0]


def test_logits_that_a_processor_keeps_are_its_own() -> None:
    kept: list[Tensor] = []

    def hoard(token_ids: list[int], logits: Tensor) -> Tensor:
        for earlier in kept:
            earlier.fill_(NAN)
        kept.append(logits)
        return logits

    logits = random_logits(12, 1, 3, VOCAB)
    found = sample([make_request([1], logits_processors=[hoard])], [[1, 2]], logits)
    assert same_bits(found.logits, logits[0])


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.5, "top_k": 2},
    {"temperature": 2.0, "top_p": 0.5},
    {"temperature": 1.0, "min_p": 0.5},
    {"temperature": 1.0, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
    {"repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": -2.0, "logit_bias": {1: 100.0}},
]


@pytest.mark.parametrize("bad", [-INF, NAN])
@pytest.mark.parametrize("params", FILTERS)
def test_a_row_without_a_token_gives_none_and_its_neighbours_theirs(params: dict[str, Any], bad: float) -> None:
    request = make_request([1], output=[2], seed=4, **params)
    logits = random_logits(7, 1, 3, VOCAB)
    expected = sample([request], [[3, 4]], logits)
    logits[0, 1] = bad
    found = sample([request], [[3, 4]], logits)
    assert found.token_ids.tolist() == [expected.token_ids[0], NO_TOKEN, expected.token_ids[2]]
    assert found.failures == {}


@pytest.mark.parametrize("params", FILTERS)
def test_one_logit_that_is_not_a_number_gives_no_token(params: dict[str, Any]) -> None:
    logits = random_logits(8, 1, 1, VOCAB)
    logits[0, 0, 6] = NAN
    assert sample([make_request([1], **params)], [[]], logits).token_ids.tolist() == [NO_TOKEN]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [5], "bad_words": [[5]]},
        {"allowed_token_ids": [9]},
        {"allowed_token_ids": [1, 8], "min_tokens": 1},
        {"bad_words": [[token] for token in range(9)]},
        {"allowed_token_ids": [5, 6], "bad_words": [[3, 5], [2, 3, 6]]},
    ],
)
def test_a_row_in_which_nothing_is_allowed_gives_no_token(params: dict[str, Any], temperature: float) -> None:
    request = make_request([2, 3], temperature=temperature, **params)
    found = sample([request], [[]], random_logits(9, 1, 1, VOCAB), eos=EOS, tokenizer_vocab_size=PADDED)
    assert found.token_ids.tolist() == [NO_TOKEN]


@pytest.mark.parametrize("params", FILTERS)
def test_minus_infinity_stays_minus_infinity(params: dict[str, Any]) -> None:
    logits = random_logits(10, 1, 3, VOCAB)
    logits[..., [1, 2, 4]] = -INF
    found = sample([make_request([1], output=[2], **params)], [[4, 1]], logits)
    assert (found.logits[:, [1, 2, 4]] == -INF).all()
    assert not found.logits.isnan().any()
    assert set(found.token_ids.tolist()).isdisjoint({1, 2, 4, NO_TOKEN})


def test_a_plus_infinite_logit_is_sampled() -> None:
    logits = random_logits(11, 1, 2, VOCAB)
    logits[0, :, 5] = INF
    for temperature in (0.0, 1.0):
        assert sample([make_request([1], temperature=temperature)], [[1]], logits).token_ids.tolist() == [5, 5]


def test_a_step_without_rows_samples_nothing() -> None:
    state = MetadataState(1, VOCAB, CPU, max_model_len=64)
    logits = torch.zeros(1, 1, VOCAB)
    request = make_request(range(9), temperature=1.0, repetition_penalty=2.0)
    found = new_sampler(VOCAB).sample(scores(logits), state.build(prefill(request, 0, 0, 4), draft([]), scores(logits)))
    assert found.token_ids.tolist() == []


def test_rows_are_read_where_the_scores_have_them() -> None:
    """In between stands junk."""
    logits = torch.full((9, 8), NAN)
    logits[[1, 2, 7]] = torch.eye(8)[[4, 5, 6]]
    found = Sampler(silent).sample(
        scores(logits[None]), make_metadata(3, rows=torch.tensor([1, 2, 7]), row_starts=(0, 2, 3))
    )
    assert found.token_ids.tolist() == [4, 5, 6]


def test_noise_is_asked_for_in_calls_of_the_shapes_that_exist_with_the_targets_own_salt() -> None:
    calls = []

    def spy(seeds: Tensor, positions: Tensor, salts: Tensor) -> Tensor:
        calls.append((len(seeds), len(positions), salts.tolist()))
        return torch.zeros(len(seeds), 8)

    temperature = torch.tensor([1.0] * 5 + [0.0] * 5 + [1.0] * 5)
    Sampler(spy).sample(scores(torch.zeros(3, 5, 8)), make_metadata(15, temperature=temperature))
    sizes = [GROUP_ROWS, 1, 1]
    assert calls == [(size, size, [0] * size) for size in sizes]


def sample_many(logits: Tensor, count: int, **changes: object) -> np.ndarray:
    """The tokens of `count` seeds at eight positions each, [count, 8]."""
    num_rows = count * 8
    places = {"seeds": torch.arange(num_rows) // 8, "positions": torch.arange(num_rows) % 8}
    metadata = make_metadata(num_rows, **{"temperature": 1.0, **places, **changes})
    found = new_sampler(len(logits)).sample(scores(logits.expand(1, num_rows, -1)), metadata)
    return found.token_ids.view(count, 8).numpy()


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """The chi-square statistic of drawn tokens, as standard deviations from what is expected of it."""
    counts = np.bincount(tokens.ravel(), minlength=len(probabilities))
    possible = probabilities > 0
    assert counts[~possible].sum() == 0, "an impossible token was sampled"
    expected = probabilities[possible] * counts.sum()
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = possible.sum() - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


LOGITS = torch.randn(24, generator=torch.Generator().manual_seed(6))


def softmax(logits: Tensor) -> np.ndarray:
    return logits.double().softmax(-1).numpy()


def test_sampled_tokens_are_distributed_as_the_softmax() -> None:
    found = sample_many(LOGITS, 700)
    assert chi_square(found, softmax(LOGITS)) < 4
    # The same test must see a small bias, or it proves nothing.
    assert chi_square(found, softmax(LOGITS * 1.15)) > 4


def test_sampled_tokens_follow_temperature_and_top_k() -> None:
    found = sample_many(LOGITS, 700, temperature=1.5, top_k=6)
    kept = torch.full_like(LOGITS, -INF)
    best = LOGITS.topk(6).indices
    kept[best] = LOGITS[best] / 1.5
    assert chi_square(found, softmax(kept)) < 4
    assert chi_square(found, softmax(kept * 1.5)) > 4


def test_the_logits_handed_over_are_the_distribution_that_was_sampled() -> None:
    places = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "log_min_p": -2.0}
    (chosen_from,) = new_sampler(24).sample(scores(LOGITS[None, None]), make_metadata(1, **places)).logits
    assert 1 < chosen_from.isfinite().sum() < 9
    assert chi_square(sample_many(LOGITS, 700, **places), softmax(chosen_from)) < 4


def test_neighbouring_positions_of_one_seed_are_drawn_independently() -> None:
    found = sample_many(torch.zeros(4), 700)
    assert chi_square(found[:, :-1] * 4 + found[:, 1:], np.full(16, 1 / 16)) < 4
