"""Running the same requests with and without speculation, and proposers that try to break the law."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compspec.batch import Batch, DraftTokens, ScheduledRequest
from compspec.config import make_config
from compspec.engine import Engine
from compspec.proposers.proposer import Proposer
from compspec.request import Request
from compspec.sampling.noise import DRAFT_STREAM, GumbelNoise, stream_salts
from compspec.sampling.params import SamplingParams

VOCAB = 128


def make_engine(folder: Path | str, proposer: Any = None, **overrides: Any) -> Engine:
    """An eager engine over a tiny model; `overrides` are dotted configuration keys with `__` for the dot."""
    settings: dict[str, Any] = {
        "model.source": str(folder),
        "model.device": "cpu",
        "compile.mode": "none",
        "scheduler.max_num_seqs": 4,
        "numerics.prefill_chunk": 32,
        "speculative.method": "none" if proposer is None else "ngram",
    }
    settings.update({name.replace("__", "."): value for name, value in overrides.items()})
    return Engine(make_config({}, settings), proposer=proposer)


def run(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Request]:
    """Runs all prompts together and returns their finished requests."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    requests = [engine.add_request(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
    while engine.has_work:
        engine.step()
    assert engine.pool.num_free == engine.pool.num_usable, "blocks leaked"
    return requests


def outputs(requests: Sequence[Request]) -> list[tuple[list[int], str]]:
    """What the law is about: tokens and why they ended."""
    return [(request.output_token_ids, str(request.finish_reason)) for request in requests]


def whole_outputs(requests: Sequence[Request]) -> list[tuple[Any, ...]]:
    """Everything that the law is about: tokens, how they ended, and log-probabilities, bit for bit."""
    return [
        (
            request.output_token_ids,
            str(request.finish_reason),
            request.stop_reason,
            request.error,
            request.logprobs,
            request.prompt_logprobs,
        )
        for request in requests
    ]


def make_prompts(count: int, seed: int = 0, longest: int = 90) -> list[list[int]]:
    """Prompts of mixed lengths, one token and one whole chunk among them, with repetition inside."""
    rng = np.random.default_rng(seed)
    lengths = [1, 32, 33, *rng.integers(2, longest, count)][:count]
    prompts = []
    for length in lengths:
        phrase = rng.integers(3, VOCAB, max(1, int(length) // 3))
        prompts.append(np.resize(phrase, int(length)).tolist())
    return prompts


class Scripted(Proposer):
    """A proposer whose drafts come from a function of (request, how many are allowed)."""

    def __init__(self, draft: Callable[[Request, int], list[int]], num_draft_tokens: int) -> None:
        self._draft = draft
        self._num_draft_tokens = num_draft_tokens

    def propose(self, batch: Batch) -> DraftTokens:
        drafts = [self._draft(entry.request, entry.max_draft_tokens) for entry in batch.scheduled]
        return DraftTokens.from_lists(drafts, self._num_draft_tokens)


def drafting(folder: Path | str, draft: Callable[[Request, int], list[int]], k: int, **settings: Any) -> Engine:
    """An engine whose drafts come from `draft`, at most `k` per step."""
    return make_engine(folder, Scripted(draft, k), speculative__num_draft_tokens=k, **settings)


def oracle(truth: dict[tuple[int, ...], list[int]]) -> Callable[[Request, int], list[int]]:
    """Knows the whole output of each prompt."""

    def draft(request: Request, most: int) -> list[int]:
        known = truth[tuple(request.token_ids[: request.num_prompt_tokens].tolist())]
        return known[request.num_output_tokens : request.num_output_tokens + most]

    return draft


def wrong(truth: dict[tuple[int, ...], list[int]]) -> Callable[[Request, int], list[int]]:
    """Knows the output and always drafts something else."""
    right = oracle(truth)
    return lambda request, most: [(token + 1) % VOCAB for token in right(request, most)]


def guess(seed: int) -> Callable[[Request, int], list[int]]:
    """Random tokens."""
    rng = np.random.default_rng(seed)
    return lambda request, most: rng.integers(0, VOCAB, most).tolist()


def ragged(truth: dict[tuple[int, ...], list[int]], seed: int) -> Callable[[Request, int], list[int]]:
    """A right beginning of random length and then random tokens, again of random length."""
    rng = np.random.default_rng(seed)
    right = oracle(truth)

    def draft(request: Request, most: int) -> list[int]:
        good = right(request, int(rng.integers(0, most + 1)))
        more = int(rng.integers(0, most - len(good) + 1))
        return good + rng.integers(0, VOCAB, more).tolist()

    return draft


def empty(request: Request, most: int) -> list[int]:
    """Drafts nothing."""
    return []


class SampledDrafts(Proposer):
    """A proposer that samples drafts from a distribution of its own and says which.

    Args:
        q: tokens so far -> [V] probabilities of the next draft.
    """

    def __init__(self, q: Callable[[Sequence[int]], Tensor], num_draft_tokens: int, *, vocab_size: int = VOCAB) -> None:
        self._q = q
        self._num_draft_tokens = num_draft_tokens
        self._vocab_size = vocab_size
        self._noise = GumbelNoise(vocab_size, torch.device("cpu"))

    def propose(self, batch: Batch) -> DraftTokens:
        probs = torch.zeros(len(batch.scheduled), self._num_draft_tokens, self._vocab_size)
        drafts = [self._draft(entry, probs[row]) for row, entry in enumerate(batch.scheduled)]
        made = DraftTokens.from_lists(drafts, self._num_draft_tokens)
        return replace(made, probs=probs)

    def _draft(self, entry: ScheduledRequest, probs: Tensor) -> list[int]:
        tokens = entry.request.token_ids.tolist()
        start = len(tokens)
        for place in range(entry.max_draft_tokens):
            q = self._q(tokens)
            at = [torch.tensor([number]) for number in (entry.request.seed, start + place, start)]
            noise = self._noise(at[0], at[1], stream_salts(DRAFT_STREAM, at[2]))[0]
            probs[place] = q
            tokens.append(int((q.log() + noise).argmax()))
        return tokens[start:]


def chi_square(counts: Tensor, probs: Tensor) -> tuple[float, float]:
    """Pearson's test of counts [C] against probabilities [C]; cells that expect fewer than five are taken together.

    Returns:
        The statistic, infinite for what cannot happen and did, and the chance of one as large (p-value).
    """
    counts, probs = counts.double(), probs.double()
    if bool((counts[probs == 0] > 0).any()):
        return math.inf, 0.0
    means = probs / probs.sum() * counts.sum()
    small = means < 5
    means = torch.cat([means[~small], means[small].sum()[None]])
    counts = torch.cat([counts[~small], counts[small].sum()[None]])
    counts, means = counts[means > 0], means[means > 0]
    return _with_chance(float(((counts - means) ** 2 / means).sum()), len(means) - 1)


def chi_square_of_two(first: Tensor, second: Tensor) -> tuple[float, float]:
    """The same for counts [C] of two samples of one size."""
    assert first.sum() == second.sum()
    both = (first + second).double()
    small = both < 10
    first, second, both = (
        torch.cat([each[~small].double(), each[small].sum()[None].double()]) for each in (first, second, both)
    )
    first, second, both = (each[both > 0] for each in (first, second, both))
    return _with_chance(float(((first - second) ** 2 / both).sum()), len(both) - 1)


def _with_chance(statistic: float, dof: int) -> tuple[float, float]:
    half = torch.tensor([dof / 2.0, statistic / 2.0], dtype=torch.float64)
    return statistic, float(torch.special.gammaincc(half[0], half[1]))
