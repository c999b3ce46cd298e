"""The sampler: ties, padding, mixed batches, and the distribution it promises."""

import numpy as np
import pytest
import torch
from torch import Tensor

from compspec.sampling.metadata import MetadataState
from compspec.sampling.noise import GumbelNoise
from compspec.sampling.sampler import NOISE_ROWS, Sampler
from tests.unit.fakes import decode, draft, make_metadata, make_request

CPU = torch.device("cpu")


def new_sampler(vocab_size: int, tokenizer_vocab_size: int | None = None) -> Sampler:
    return Sampler(GumbelNoise(vocab_size, CPU), tokenizer_vocab_size)


def silent(seeds: Tensor, positions: Tensor) -> Tensor:
    """Noise that is 0 everywhere: only ties decide."""
    return torch.zeros(len(seeds), 8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tied", [[0, 1], [3, 5, 7], [6, 7], list(range(8))])
def test_the_lowest_id_of_equal_values_wins(tied: list[int], temperature: float) -> None:
    logits = torch.full((1, 3, 8), -1.0)
    logits[..., tied] = 2.0
    metadata = make_metadata(1, 3, temperature=torch.tensor([temperature]), any_noise=temperature > 0)
    assert Sampler(silent).sample(logits, metadata).tolist() == [[tied[0]] * 3]


def test_the_lowest_id_wins_in_a_large_vocabulary_and_in_bfloat16() -> None:
    logits = torch.zeros(2, 8, 49_152, dtype=torch.bfloat16)
    logits[..., [4099, 31_000, 49_151]] = 1.0
    assert new_sampler(49_152).sample(logits, make_metadata(2, 8)).tolist() == [[4099] * 8] * 2


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_the_padded_vocabulary_is_never_sampled(temperature: float) -> None:
    """Whatever else is asked for: the padding holds the largest logits here."""
    logits = torch.zeros(200, 1, 16)
    logits[..., 10:] = 50.0
    count = 200
    metadata = make_metadata(
        count,
        1,
        temperature=torch.full((count,), temperature),
        any_noise=temperature > 0,
        top_k=torch.full((count,), 12),
        max_top_k=12,
        top_p=torch.full((count,), 0.99),
        any_top_p=True,
        log_min_p=torch.full((count,), -9.0),
        any_min_p=True,
        prompt_mask=torch.ones(count, 16, dtype=torch.bool),
        output_counts=torch.ones(count, 16, dtype=torch.int32),
        frequency=torch.full((count,), -2.0),
    )
    before = logits.clone()
    found = new_sampler(16, 10).sample(logits, metadata)
    assert int(found.max()) < 10
    assert torch.equal(logits, before), "the caller's logits were changed"
    assert int(new_sampler(16).sample(logits, metadata).max()) >= 10, "the padding was no temptation"


MIXED = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"frequency_penalty": -1.5, "repetition_penalty": 1.3},
    {"temperature": 1.3, "top_p": 0.8, "presence_penalty": 0.5},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.0, "top_p": 0.6, "min_p": 0.2, "top_k": 7, "repetition_penalty": 0.8},
    {"top_k": 1, "top_p": 0.1},
]


@pytest.mark.parametrize("trial", range(5))
def test_requests_of_every_kind_in_one_batch_equal_themselves_alone(trial: int) -> None:
    vocab_size, rows = 61, 6
    rng = np.random.default_rng(trial)
    requests = [
        make_request(
            rng.integers(0, vocab_size, 5).tolist(), output=rng.integers(0, vocab_size, 4).tolist(), seed=seed, **params
        )
        for seed, params in enumerate(MIXED[index] for index in rng.permutation(len(MIXED)))
    ]
    drafts = [rng.integers(0, 9, int(rng.integers(0, rows))).tolist() for _ in requests]
    logits = torch.randn(len(requests) + 2, rows, vocab_size, generator=torch.Generator().manual_seed(trial)) * 2
    sampler = new_sampler(vocab_size, 57)

    def sample(chosen: list[int], padded: int, k: int) -> Tensor:
        batch = decode(*[requests[index] for index in chosen])
        state = MetadataState(len(requests), vocab_size, CPU)
        metadata = state.build(batch, draft(*[drafts[index] for index in chosen], k=k), padded, rows)
        own = logits[chosen + list(range(len(requests), len(requests) + padded - len(chosen)))]
        return sampler.sample(own, metadata)

    everyone = list(range(len(requests)))
    together = sample(everyone, len(requests) + 2, rows - 1)
    for index in everyone:
        assert sample([index], 1, len(drafts[index])).tolist()[0] == together[index].tolist()
    backwards = sample(everyone[::-1], len(requests), rows - 1)
    assert backwards.flip(0).tolist() == together[: len(requests)].tolist()


def test_noise_is_asked_for_in_calls_of_one_shape() -> None:
    calls = []

    def spy(seeds: Tensor, positions: Tensor) -> Tensor:
        calls.append((len(seeds), len(positions)))
        return torch.zeros(len(seeds), 8)

    metadata = make_metadata(3, 5, temperature=torch.tensor([1.0, 0.0, 1.0]), any_noise=True)
    Sampler(spy).sample(torch.zeros(3, 5, 8), metadata)
    assert calls == [(NOISE_ROWS, NOISE_ROWS)] * 2


def sample_many(logits: Tensor, count: int, **changes: object) -> np.ndarray:
    """How often each token comes out of `count` seeds at `NOISE_ROWS` positions each."""
    vocab_size = len(logits)
    metadata = make_metadata(count, NOISE_ROWS, **{"temperature": torch.ones(count), "any_noise": True, **changes})
    found = new_sampler(vocab_size).sample(logits.expand(count, NOISE_ROWS, vocab_size), metadata)
    return np.bincount(found.flatten().numpy(), minlength=vocab_size)


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """The chi-square statistic, as standard deviations from what is expected of it."""
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
    counts = sample_many(LOGITS, 1500)
    assert chi_square(counts, softmax(LOGITS)) < 4
    # The same test must see a small bias, or it proves nothing.
    assert chi_square(counts, softmax(LOGITS * 1.15)) > 4


def test_sampled_tokens_follow_temperature_and_top_k() -> None:
    count = 1500
    counts = sample_many(
        LOGITS,
        count,
        temperature=torch.full((count,), 1.5),
        top_k=torch.full((count,), 6),
        max_top_k=6,
    )
    kept = torch.full_like(LOGITS, float("-inf"))
    best = LOGITS.topk(6).indices
    kept[best] = LOGITS[best] / 1.5
    assert chi_square(counts, softmax(kept)) < 4
    assert chi_square(counts, softmax(kept * 1.5)) > 4


def test_neighbouring_positions_of_one_seed_are_drawn_independently() -> None:
    count = 1500
    metadata = make_metadata(count, NOISE_ROWS, temperature=torch.ones(count), any_noise=True)
    found = new_sampler(4).sample(torch.zeros(count, NOISE_ROWS, 4), metadata).numpy()
    pairs = np.bincount((found[:, :-1] * 4 + found[:, 1:]).ravel(), minlength=16)
    assert chi_square(pairs, np.full(16, 1 / 16)) < 4
