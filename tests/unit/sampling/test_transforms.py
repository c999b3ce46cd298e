"""Logits transforms: each equals its published definition, row by row, and touches nothing that did not ask for it."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compspec.request import Request
from compspec.sampling import transforms
from compspec.sampling.metadata import MetadataState, Penalties
from tests.unit.fakes import decode, draft, make_request, same_bits, step_scores

VOCAB = 11
NO_IDS = torch.zeros(1, 1, dtype=torch.int64)
INF = float("inf")


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def random_logits(seed: int, *shape: int) -> Tensor:
    """Logits with zeros, both signs, and tokens that are masked already."""
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3
    flat = logits.view(-1)
    flat[:: max(7, len(flat) // 5)] = 0.0
    flat[3 :: max(11, len(flat) // 4)] = -INF
    return logits


def penalties_of(requests: list[Request], drafts: list[list[int]], k: int, vocab_size: int = VOCAB) -> Penalties | None:
    """The penalties of a decode step; the rows of the requests follow each other."""
    state = MetadataState(len(requests), vocab_size, torch.device("cpu"), max_model_len=64)
    made = draft(*drafts, k=k)
    return state.build(decode(*requests), made, step_scores(made)).penalties


def by_definition(
    logits: Tensor, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> Tensor:
    """One row penalised for an explicit list of tokens."""
    ids = torch.tensor([prompt + output])
    (row,) = RepetitionPenaltyLogitsProcessor(repetition)(ids, logits[None].clone())
    for token, count in Counter(output).items():
        row[token] -= np.float32(frequency) * np.float32(count)
        row[token] -= np.float32(presence)
    return row


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=7)
penalties = st.tuples(
    st.sampled_from([1.0, 1.3, 0.5, 4.0]),
    st.sampled_from([0.0, 0.7, -1.1, 2.0]),
    st.sampled_from([0.0, 0.4, -2.0, 1.9]),
)
cases = st.fixed_dictionaries(
    {
        "requests": st.lists(
            st.tuples(tokens.filter(bool), tokens, st.lists(st.integers(0, 3), max_size=5), penalties),
            min_size=1,
            max_size=4,
        ),
        "padding": st.integers(0, 2),
        "seed": st.integers(0, 1000),
    }
)


def penalised_request(prompt: list[int], output: list[int], values: tuple[float, float, float]) -> Request:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return make_request(prompt, output=output, **dict(zip(names, values, strict=True)))


@settings(max_examples=150, deadline=None)
@given(cases)
def test_penalties_of_row_j_see_prompt_outputs_and_the_first_j_drafts(case: dict) -> None:
    prompts, outputs, drafts, values = map(list, zip(*case["requests"], strict=True))
    requests = [penalised_request(*each) for each in zip(prompts, outputs, values, strict=True)]
    made = penalties_of(requests, drafts, max(map(len, drafts)) + case["padding"])
    logits = random_logits(case["seed"], sum(map(len, drafts)) + len(drafts), VOCAB)
    found = logits.clone()
    if made is not None:
        transforms.apply_penalties_(found, made)
    row = 0
    for prompt, output, drafted, strengths in case["requests"]:
        for j in range(len(drafted) + 1):
            assert torch.equal(found[row], by_definition(logits[row], prompt, output + drafted[:j], *strengths)), row
            row += 1


def test_repetition_counts_the_prompt_and_presence_and_frequency_do_not() -> None:
    logits = torch.ones(1, 4)
    made = penalties_of([penalised_request([1], [2, 2], (2.0, 0.25, 0.5))], [[]], 0, 4)
    assert made is not None
    transforms.apply_penalties_(logits, made)
    assert logits.flatten().tolist() == [1.0, 0.5, 0.5 - 2 * 0.5 - 0.25, 1.0]


def test_penalties_touch_no_token_that_does_not_occur() -> None:
    """Not even those whose bits arithmetic could change."""
    logits = torch.full((3, VOCAB), -0.0)
    logits[:, 7] = float("nan")
    found = logits.clone()
    made = penalties_of([penalised_request([1], [2], (1.5, 0.5, -0.5))], [[3, 4]], 2)
    assert made is not None
    transforms.apply_penalties_(found, made)
    untouched = [token for token in range(VOCAB) if token not in (1, 2, 3, 4)]
    assert same_bits(found[:, untouched], logits[:, untouched])


def test_bias_is_added_at_its_places_and_nowhere_else() -> None:
    logits = torch.full((2, 4), -0.0)
    logits[1, 3] = -INF
    transforms.add_bias_(logits, torch.tensor([1, 6, 7]), floats(1.5, -2.0, 100.0))
    expected = torch.full((2, 4), -0.0)
    expected[0, 1], expected[1, 2], expected[1, 3] = 1.5, -2.0, -INF
    assert same_bits(logits, expected)


def test_banned_places_are_minus_infinity_and_the_others_as_they_were() -> None:
    logits = random_logits(7, 2, 4)
    before = logits.clone()
    logits[0, 1] = float("nan")
    transforms.ban_(logits, torch.tensor([1, 7, 7]))
    expected = before.clone()
    expected[0, 1] = expected[1, 3] = -INF
    assert same_bits(logits, expected)


def test_all_but_the_allowed_tokens_are_minus_infinity() -> None:
    logits = random_logits(8, 3, VOCAB)
    before = logits.clone()
    transforms.allow_(logits[1:], torch.tensor([0, 9]))
    expected = torch.full_like(before, -INF)
    expected[0], expected[:, [0, 9]] = before[0], before[:, [0, 9]]
    assert same_bits(logits, expected)


TOP_K = torch.tensor([0, 1, 3, 40, VOCAB])


def test_top_k_equals_transformers_on_each_row_ties_included() -> None:
    for seed in range(5):
        logits = random_logits(seed, 5, VOCAB).round()  # rounding makes ties
        found = transforms.apply_top_k(logits, TOP_K, 40)
        for row, k in enumerate(TOP_K.tolist()):
            expected = TopKLogitsWarper(k)(NO_IDS, logits[row][None])[0] if k else logits[row]
            assert same_bits(found[row], expected), (seed, k)


def test_top_k_keeps_every_tie_at_the_kth_place() -> None:
    logits = floats(1.0, 3.0, 2.0, 2.0, 2.0, 0.0)[None]
    kept = transforms.apply_top_k(logits, torch.tensor([2]), 2).isfinite().flatten()
    assert kept.tolist() == [False, True, True, True, True, False]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.floats(0.01, 0.999), min_size=2, max_size=4))
def test_top_p_equals_transformers_on_each_row(seed: int, top_p: list[float]) -> None:
    logits = torch.randn(len(top_p), VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    masses = logits.double().sort(-1, descending=True).values.softmax(-1).cumsum(-1)
    assume(bool(((masses - torch.tensor(top_p)[:, None]).abs() > 1e-5).all()))
    found = transforms.apply_top_p(logits, floats(*top_p))
    for row, p in enumerate(top_p):
        assert same_bits(found[row], TopPLogitsWarper(p)(NO_IDS, logits[row][None])[0])


def adversarial_rows(vocab_size: int) -> Tensor:
    """Ties, both zeros, infinities, the smallest and the largest numbers, NaN of both signs; [9, V]."""
    rows = random_logits(9, 9, vocab_size) * 3
    rows[1] = rows[1].round()
    rows[2] = rows[2].bfloat16().float()
    rows[3, ::3], rows[3, 1::3] = 0.0, -0.0
    rows[4, 1::2] = -INF
    rows[5, ::2], rows[5, 1] = 1e-45, -1e-45
    rows[6, 0], rows[6, -1], rows[6, 1] = 3.4e38, INF, -3.4e38
    rows[7] = -INF
    rows[8, 2], rows[8, 3] = float("nan"), -float("nan")
    return rows


@pytest.mark.parametrize("vocab_size", [5, 128, 1003, 49152])
def test_both_ways_to_sort_give_the_same_order(vocab_size: int) -> None:
    rows = adversarial_rows(vocab_size)[:-1]
    (ordered, order), (host_ordered, host_order) = transforms._sort(rows), transforms._sort_on_host(rows)
    assert torch.equal(host_order, order)
    assert same_bits(host_ordered, ordered)


@pytest.mark.parametrize("top_p", [1e-7, 0.1, 0.5, 0.95, 1 - 2**-24, 1.0])
def test_top_p_keeps_the_same_bits_however_it_sorts(top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = adversarial_rows(1003)
    found = transforms.apply_top_p(rows, torch.full((len(rows),), top_p))
    monkeypatch.setattr(transforms, "_sort_on_host", transforms._sort)
    assert same_bits(found, transforms.apply_top_p(rows, torch.full((len(rows),), top_p)))


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 4), (0.51, 5), (1e-9, 1), (0.99, 8)])
def test_top_p_takes_equal_tokens_in_the_order_of_their_ids(top_p: float, kept: int) -> None:
    found = transforms.apply_top_p(torch.zeros(1, 8), floats(top_p)).isfinite().flatten()
    assert found.tolist() == [True] * kept + [False] * (8 - kept)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.floats(0.001, 0.999), min_size=2, max_size=4))
def test_min_p_equals_transformers_on_each_row(seed: int, min_p: list[float]) -> None:
    logits = torch.randn(len(min_p), VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    margin = (logits - logits.amax(-1, keepdim=True)).double() - torch.tensor(min_p).log()[:, None]
    assume(bool((margin.abs() > 1e-5).all()))
    found = transforms.apply_min_p(logits, floats(*min_p).log())
    for row, p in enumerate(min_p):
        assert same_bits(found[row], MinPLogitsWarper(p)(NO_IDS, logits[row][None])[0])


def test_min_p_one_keeps_all_that_are_as_likely_as_the_most_likely() -> None:
    logits = floats(2.0, 1.0, 2.0, -1.0)[None]
    assert transforms.apply_min_p(logits, floats(0.0)).isfinite().flatten().tolist() == [True, False, True, False]


def penalise(logits: Tensor, rows: slice) -> Tensor:
    """Some of five requests with three rows each: `logits` has those rows."""
    rng = np.random.default_rng(5)
    vocab_size = logits.shape[-1]
    drawn = [(rng.integers(0, vocab_size, 6).tolist(), rng.integers(0, 9, 4).tolist()) for _ in range(5)]
    values = [(1.0, 0.0, 0.0), (1.3, 0.1, 0.3), (0.7, -0.3, -1.9), (2.0, 1.7, 0.0), (1.1, 0.0, 0.2)]
    requests = [penalised_request(*each, value) for each, value in zip(drawn, values, strict=True)]
    drafts = [rng.integers(0, 5, 2).tolist() for _ in range(5)]
    made = penalties_of(requests[rows], drafts[rows], 2, vocab_size)
    found = logits.clone().view(-1, vocab_size)
    if made is not None:
        transforms.apply_penalties_(found, made)
    return found.view_as(logits)


FILTERS: dict[str, Callable[[Tensor, slice], Tensor]] = {
    "top_k": lambda logits, rows: transforms.apply_top_k(logits, TOP_K[rows], int(TOP_K[rows].max())),
    "top_p": lambda logits, rows: transforms.apply_top_p(logits, floats(1.0, 0.1, 0.5, 0.9, 0.99)[rows]),
    "min_p": lambda logits, rows: transforms.apply_min_p(logits, floats(0.0, 0.01, 0.1, 0.5, 1.0)[rows].log()),
}
BATCHED: dict[str, Callable[[Tensor, slice], Tensor]] = {"penalties": penalise, **FILTERS}


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("vocab_size", [VOCAB, 1003])
def test_one_in_a_batch_equals_itself_alone_bit_for_bit(name: str, vocab_size: int) -> None:
    """A row of the filters, a request with its rows of the penalties."""
    logits = random_logits(2, 5, *([3] if name == "penalties" else []), vocab_size)
    together = BATCHED[name](logits, slice(0, 5))
    for one in range(5):
        assert same_bits(BATCHED[name](logits[one : one + 1], slice(one, one + 1))[0], together[one]), one


@pytest.mark.parametrize("name", BATCHED)
def test_one_that_asks_for_nothing_keeps_every_bit(name: str) -> None:
    """So a batch without such rows may skip the transform. The first of each batch above asks for nothing."""
    logits = random_logits(4, 5, *([3] if name == "penalties" else []), 1003)
    logits[0, ..., :5] = -0.0
    found = BATCHED[name](logits, slice(0, 5))
    assert same_bits(found[0], logits[0])
    assert not same_bits(found[2], logits[2]), "the transform does nothing at all"


@pytest.mark.parametrize("name", FILTERS)
def test_filters_do_not_change_what_they_are_given(name: str) -> None:
    logits = random_logits(5, 5, VOCAB)
    before = logits.clone()
    FILTERS[name](logits, slice(0, 5))
    assert same_bits(logits, before)


@pytest.mark.parametrize("name", FILTERS)
def test_filters_leave_a_row_without_tokens_without_tokens(name: str) -> None:
    assert FILTERS[name](torch.full((5, VOCAB), -INF), slice(0, 5)).tolist() == [[-INF] * VOCAB] * 5
