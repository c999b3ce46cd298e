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

from compspec.sampling import transforms
from tests.unit.fakes import same_bits

VOCAB = 11
NO_IDS = torch.zeros(1, 1, dtype=torch.int64)


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def random_logits(seed: int, *shape: int) -> Tensor:
    """Logits with zeros, both signs, and tokens that are masked already."""
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3
    flat = logits.view(-1)
    flat[:: max(7, len(flat) // 5)] = 0.0
    flat[3 :: max(11, len(flat) // 4)] = float("-inf")
    return logits


def state_of(prompts: list[list[int]], outputs: list[list[int]], vocab_size: int = VOCAB) -> tuple[Tensor, Tensor]:
    """The prompt mask and output counts of a batch."""
    mask = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
    counts = torch.zeros(len(prompts), vocab_size, dtype=torch.int32)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        mask[row, prompt] = True
        for token in output:
            counts[row, token] += 1
    return mask, counts


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
        "num_rows": st.integers(1, 7),
        "seed": st.integers(0, 1000),
    }
)


@settings(max_examples=150, deadline=None)
@given(cases)
def test_penalties_of_row_j_see_prompt_outputs_and_the_first_j_drafts(case: dict) -> None:
    requests, num_rows = case["requests"], case["num_rows"]
    prompts, outputs, drafts, values = map(list, zip(*requests, strict=True))
    k = max(map(len, drafts))
    padded = torch.tensor([row + [-1] * (k - len(row)) for row in drafts], dtype=torch.int64).view(len(requests), k)
    mask, counts = state_of(prompts, outputs)
    logits = random_logits(case["seed"], len(requests), num_rows, VOCAB)
    before = logits.clone()
    found = transforms.apply_penalties(
        logits,
        prompt_mask=mask,
        output_counts=counts,
        draft_token_ids=padded,
        repetition=floats(*[each[0] for each in values]),
        presence=floats(*[each[1] for each in values]),
        frequency=floats(*[each[2] for each in values]),
    )
    assert same_bits(logits, before), "the caller's logits were changed"
    for r in range(len(requests)):
        for j in range(num_rows):
            expected = by_definition(logits[r, j], prompts[r], outputs[r] + drafts[r][:j], *values[r])
            assert torch.equal(found[r, j], expected), (r, j)


def test_repetition_counts_the_prompt_and_presence_and_frequency_do_not() -> None:
    logits = torch.ones(1, 1, 4)
    mask, counts = state_of([[1]], [[2, 2]], 4)
    found = transforms.apply_penalties(
        logits,
        prompt_mask=mask,
        output_counts=counts,
        draft_token_ids=torch.empty(1, 0, dtype=torch.int64),
        repetition=floats(2.0),
        presence=floats(0.25),
        frequency=floats(0.5),
    )
    assert found.flatten().tolist() == [1.0, 0.5, 0.5 - 2 * 0.5 - 0.25, 1.0]


def test_temperature_divides_and_leaves_greedy_requests_alone() -> None:
    logits = random_logits(0, 3, 2, VOCAB)
    found = transforms.apply_temperature(logits, floats(0.0, 0.7, 2.0))
    assert same_bits(found[0], logits[0])
    assert same_bits(found[1], logits[1] / floats(0.7))
    assert same_bits(found[2], logits[2] / 2)


TOP_K = torch.tensor([0, 1, 3, 40, VOCAB])


def test_top_k_equals_transformers_on_each_row_ties_included() -> None:
    logits = random_logits(1, 5, 3, VOCAB).round()  # rounding makes ties
    found = transforms.apply_top_k(logits, TOP_K, 40)
    for r, k in enumerate(TOP_K.tolist()):
        for row in range(3):
            expected = TopKLogitsWarper(k)(NO_IDS, logits[r, row][None])[0] if k else logits[r, row]
            assert same_bits(found[r, row], expected), (k, row)


def test_top_k_keeps_every_tie_at_the_kth_place() -> None:
    logits = floats(1.0, 3.0, 2.0, 2.0, 2.0, 0.0).view(1, 1, -1)
    kept = transforms.apply_top_k(logits, torch.tensor([2]), 2).isfinite().flatten()
    assert kept.tolist() == [False, True, True, True, True, False]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.floats(0.01, 0.999), min_size=2, max_size=4))
def test_top_p_equals_transformers_on_each_row(seed: int, top_p: list[float]) -> None:
    logits = torch.randn(len(top_p), 2, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    masses = logits.double().sort(-1, descending=True).values.softmax(-1).cumsum(-1)
    assume(bool(((masses - torch.tensor(top_p)[:, None, None]).abs() > 1e-5).all()))
    found = transforms.apply_top_p(logits, floats(*top_p))
    for r, p in enumerate(top_p):
        expected = TopPLogitsWarper(p)(NO_IDS, logits[r])
        assert same_bits(found[r], expected)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 4), (0.51, 5), (1e-9, 1), (0.99, 8)])
def test_top_p_takes_equal_tokens_in_the_order_of_their_ids(top_p: float, kept: int) -> None:
    found = transforms.apply_top_p(torch.zeros(1, 1, 8), floats(top_p)).isfinite().flatten()
    assert found.tolist() == [True] * kept + [False] * (8 - kept)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.floats(0.001, 0.999), min_size=2, max_size=4))
def test_min_p_equals_transformers_on_each_row(seed: int, min_p: list[float]) -> None:
    logits = torch.randn(len(min_p), 2, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    margin = (logits - logits.amax(-1, keepdim=True)).double() - torch.tensor(min_p).log()[:, None, None]
    assume(bool((margin.abs() > 1e-5).all()))
    found = transforms.apply_min_p(logits, floats(*min_p).log())
    for r, p in enumerate(min_p):
        assert same_bits(found[r], MinPLogitsWarper(p)(NO_IDS, logits[r]))


def test_min_p_one_keeps_all_that_are_as_likely_as_the_most_likely() -> None:
    logits = floats(2.0, 1.0, 2.0, -1.0).view(1, 1, -1)
    assert transforms.apply_min_p(logits, floats(0.0)).isfinite().flatten().tolist() == [True, False, True, False]


def penalise(logits: Tensor, rows: slice, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    mask = torch.randint(0, 2, (5, vocab_size), generator=generator).bool()
    counts = torch.randint(0, 3, (5, vocab_size), generator=generator, dtype=torch.int32)
    drafts = torch.randint(-1, 5, (5, 4), generator=generator)
    return transforms.apply_penalties(
        logits,
        prompt_mask=mask[rows],
        output_counts=counts[rows],
        draft_token_ids=drafts[rows],
        repetition=floats(1.0, 1.3, 0.7, 2.0, 1.1)[rows],
        presence=floats(0.0, 0.1, -0.3, 1.7, 0.0)[rows],
        frequency=floats(0.0, 0.3, -1.9, 0.0, 0.2)[rows],
    )


BATCHED: dict[str, Callable[[Tensor, slice], Tensor]] = {
    "penalties": lambda logits, rows: penalise(logits, rows, logits.shape[-1]),
    "temperature": lambda logits, rows: transforms.apply_temperature(logits, floats(0, 0.3, 0.7, 1, 3)[rows]),
    "top_k": lambda logits, rows: transforms.apply_top_k(logits, TOP_K[rows], int(TOP_K[rows].max())),
    "top_p": lambda logits, rows: transforms.apply_top_p(logits, floats(1.0, 0.1, 0.5, 0.9, 0.99)[rows]),
    "min_p": lambda logits, rows: transforms.apply_min_p(logits, floats(0.0, 0.01, 0.1, 0.5, 1.0)[rows].log()),
}


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("vocab_size", [VOCAB, 1003])
def test_a_request_in_a_batch_equals_the_request_alone_bit_for_bit(name: str, vocab_size: int) -> None:
    logits = random_logits(2, 5, 8, vocab_size)
    together = BATCHED[name](logits, slice(0, 5))
    for row in range(5):
        alone = BATCHED[name](logits[row : row + 1], slice(row, row + 1))
        assert same_bits(alone[0], together[row]), row


@pytest.mark.parametrize("name", [name for name in BATCHED if name != "penalties"])
def test_a_row_in_a_window_equals_the_row_alone_bit_for_bit(name: str) -> None:
    logits = random_logits(3, 5, 8, 1003)
    together = BATCHED[name](logits, slice(0, 5))
    for row in range(8):
        assert same_bits(BATCHED[name](logits[:, row : row + 1], slice(0, 5))[:, 0], together[:, row]), row


@pytest.mark.parametrize("name", BATCHED)
def test_a_request_that_asks_for_nothing_keeps_every_bit(name: str) -> None:
    """So a batch without such requests may skip the transform. Request 0 of each batch above asks for nothing."""
    logits = random_logits(4, 5, 8, 1003)
    logits[0, :, :5] = -0.0
    assert same_bits(BATCHED[name](logits, slice(0, 5))[0], logits[0])
    assert not same_bits(BATCHED[name](logits, slice(0, 5))[2], logits[2]), "the transform does nothing at all"
