"""Running the same requests with and without speculation, and proposers that try to break the law."""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from compspec.batch import Batch, DraftTokens, ScheduledRequest
from compspec.config import make_config
from compspec.engine import Engine
from compspec.proposers.proposer import Proposer, names
from compspec.request import FinishReason, Request
from compspec.runner.model_runner import ModelRunner
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
        "speculative.adaptive": False,  # how much is drafted must not hang on times
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


TARGET, OTHER = "the target", "another model"

PROPOSERS: dict[str, dict[str, dict[str, Any]]] = {
    "none": {"": {}},
    "ngram": {"": {}},
    "suffix": {"": {}, "without store": {"max_store_tokens": 0}},
    "draft_model": {"": {"model": OTHER}, "target": {"model": TARGET}, "short": {"model": OTHER, "max_model_len": 56}},
    "layer_skip": {"": {"num_layers": 1}},
    "chain": {
        "": {"proposers": ["suffix", "ngram"]},
        "with a model": {
            "proposers": [{"method": "suffix", "min_match": 3}, {"method": "draft_model", "model": OTHER}]
        },
        "with layers": {
            "proposers": [{"method": "ngram", "prompt_lookup_min": 3}, {"method": "layer_skip", "num_layers": 1}]
        },
    },
}
"""Of each proposer the options that tests of the law run it with."""


def proposer_cases(*leave_out: str) -> list[str]:
    """Every proposer that the folder holds, once for each of its rows in `PROPOSERS`; `name` or `name: row`."""
    cases = []
    for name in names():
        rows = PROPOSERS.get(name, {"": {}}) if name not in leave_out else {}
        cases += [f"{name}: {row}" if row else name for row in rows]
    return cases


def proposing(case: str, target: Path | str, other: Path | str) -> dict[str, Any]:
    """The settings of `make_engine` for one of `proposer_cases`."""
    name, _, row = case.partition(": ")
    assert name in PROPOSERS, f"proposer '{name}' is new: add a row with its options to PROPOSERS in tests/law.py"
    folders = {TARGET: str(target), OTHER: str(other)}

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(each) for key, each in value.items()}
        if isinstance(value, list):
            return [filled(each) for each in value]
        return folders.get(value, value) if isinstance(value, str) else value

    return {
        "speculative__method": name,
        **{f"speculative__{key}": filled(v) for key, v in PROPOSERS[name][row].items()},
    }


@dataclass(frozen=True)
class Job:
    """A prompt and its parameters."""

    prompt: tuple[int, ...]
    params: SamplingParams

    def with_params(self, **changes: Any) -> "Job":
        return replace(self, params=self.params.model_copy(update=changes))


def mixed_jobs(
    count: int, seed: int, *, chunk: int = 32, max_tokens: int = 16, longest: int = 110, vocab: int = VOCAB
) -> list[Job]:
    """Requests of every kind. Their prompts share beginnings and end around the chunk; all are seeded."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(2):
        phrase = rng.integers(3, vocab, int(rng.integers(5, 30)))
        texts.append(np.concatenate([np.resize(phrase, longest // 2), rng.integers(3, vocab, longest)])[:longest])
    around = [1, 2, *(chunk * times + delta for times in (1, 2, 3) for delta in (-1, 0, 1)), longest]
    lengths = [length for length in around if length <= longest]
    jobs = []
    for number in range(count):
        length = lengths[number % len(lengths)]
        prompt = texts[number % len(texts)][:length].copy()
        if rng.random() < 0.3:  # another end than the text's own
            prompt[int(rng.integers(0, length)) :] = int(rng.integers(3, vocab))
        jobs.append(Job(tuple(prompt.tolist()), mixed_params(rng, max_tokens, vocab)))
    return jobs


def mixed_params(rng: np.random.Generator, max_tokens: int, vocab: int = VOCAB) -> SamplingParams:
    """Some parameters of every kind; most of them are left out most of the time."""

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(3, vocab, count).tolist())

    return SamplingParams(
        max_tokens=pick(max_tokens, max_tokens, max_tokens - 3, 2, 1),
        temperature=pick(0.0, 0.0, 0.5, 1.0, 2.0),
        seed=int(rng.integers(0, 99)),
        top_k=pick(0, 0, 0, 5, 40),
        top_p=pick(1.0, 1.0, 0.9),
        min_p=pick(0.0, 0.0, 0.05),
        repetition_penalty=pick(1.0, 1.0, 1.3, 0.8),
        presence_penalty=pick(0.0, 0.0, 0.6),
        frequency_penalty=pick(0.0, 0.0, 0.5, -1.5),
        logit_bias=pick(None, None, dict.fromkeys(some(4), 2.5)),
        bad_words=pick((), (), (some(1), some(1), some(2), some(3))),
        allowed_token_ids=pick(None, None, None, None, tuple(range(3, vocab, 2))),
        stop_token_ids=pick((), (), some(3)),
        ignore_eos=pick(True, True, False),
        min_tokens=pick(0, 0, 1),
        logprobs=pick(None, None, 0, 3),
        prompt_logprobs=pick(None, None, None, 0, 2),
        speculative=pick(None, None, None, None, False, 1),
        priority=pick(0, 0, 0, -1, 2),
    )


class Solo:
    """Outputs of requests that run alone, without speculation, prefix cache or preemption; each is made once."""

    def __init__(self, folder: Path | str, **settings: Any) -> None:
        self.engine = make_engine(folder, cache__prefix_caching=False, **settings)
        self._known: dict[Job, tuple[Any, ...]] = {}

    def __call__(self, job: Job) -> tuple[Any, ...]:
        """See `whole_outputs`."""
        key = job.with_params(speculative=None, priority=0, cache_salt=None)
        if key not in self._known:
            (self._known[key],) = whole_outputs(run(self.engine, [job.prompt], job.params))
        return self._known[key]

    def all(self, jobs: Sequence[Job]) -> list[tuple[Any, ...]]:
        return [self(job) for job in jobs]


def run_jobs(engine: Engine, jobs: Sequence[Job]) -> list[Request]:
    """Runs all together."""
    return run(engine, [job.prompt for job in jobs], [job.params for job in jobs])


def run_disturbed(
    engine: Engine, jobs: Sequence[Job], seed: int, *, preempt: float = 0.4, most: int = 40, at_once: int = 4
) -> list[Request]:
    """Runs jobs that arrive a few at a time; after any step any of those that run may be preempted."""
    rng = np.random.default_rng(seed)
    requests: list[Request] = []
    num_preempted = 0
    while engine.has_work or len(requests) < len(jobs):
        for job in jobs[len(requests) : len(requests) + int(rng.integers(0, at_once))]:
            requests.append(engine.add_request(job.prompt, job.params))
        engine.step()
        running = engine.scheduler.running
        if running and num_preempted < most and rng.random() < preempt:
            num_preempted += engine.preempt(running[int(rng.integers(len(running)))].request_id)
    assert engine.pool.num_free == engine.pool.num_usable, "blocks leaked"
    assert num_preempted > 0, "nothing was preempted"
    assert sum(request.stats.num_preemptions for request in requests) >= num_preempted
    return requests


def assert_same(found: Sequence[Request], jobs: Sequence[Job], solo: Solo) -> None:
    """Every output is the solo run's, bit for bit; says which request differs first, and how."""
    for job, request in zip(jobs, found, strict=True):
        assert request.finish_reason not in (None, FinishReason.ABORT)
        (one,) = whole_outputs([request])
        assert one == solo(job), f"prompt of {len(job.prompt)} tokens, {job.params}, {request.stats}"


def assert_same_tokens(found: Sequence[Request], jobs: Sequence[Job], solo: Solo) -> None:
    """For fast numerics: the tokens are the solo run's; else shows where, and the margin of the two likeliest there."""
    for job, request in zip(jobs, found, strict=True):
        tokens, reason = solo(job)[:2]
        if (request.output_token_ids, str(request.finish_reason)) == (tokens, reason):
            continue
        pairs = enumerate(zip(request.output_token_ids, tokens, strict=False))
        at = next(
            (place for place, (ours, theirs) in pairs if ours != theirs), min(len(tokens), request.num_output_tokens)
        )
        top = list(solo(job.with_params(logprobs=2))[4][min(at, len(tokens) - 1)].items())[-2:]
        margin = top[0][1].logprob - top[1][1].logprob
        raise AssertionError(f"{request.output_token_ids} is not {tokens}; at {at}, where the top-2 margin is {margin}")


def kv_of(runner: ModelRunner, block_ids: Sequence[int], num_tokens: int) -> Tensor:
    """Keys and values that a model has of the first tokens of a request, [layers, 2, num_tokens, Hkv * D]; a copy."""
    at = torch.arange(num_tokens)
    slots = torch.tensor(block_ids)[at // runner.block_size] * runner.block_size + at % runner.block_size
    pairs = zip(runner.k_caches, runner.v_caches, strict=True)
    return torch.stack([torch.stack([k[slots].flatten(1), v[slots].flatten(1)]) for k, v in pairs])


def per_request_state(engine: Engine) -> dict[str, int]:
    """How many requests each part of the engine knows something of; none, where no request is unfinished."""
    sizes: dict[str, int] = {
        "engine": len(engine._requests),
        "held blocks": engine.pool.num_usable - engine.pool.num_free,
    }
    lengths = getattr(engine, "_draft_lengths", None)
    if lengths is not None:
        sizes["draft lengths"] = len(lengths._states)
    proposers = [engine._proposer, *getattr(engine._proposer, "_proposers", ())]
    for proposer in proposers:
        for name, value in vars(proposer).items():
            if isinstance(value, dict):
                sizes[f"{type(proposer).__name__}.{name}"] = len(value)
    return sizes


def with_weak_end(folder: Path, share: float = 0.15) -> Path:
    """A copy of a model whose last layer adds little, so that its first layers draft well."""
    config = json.loads((folder / "config.json").read_text())
    last = f".{config.get('num_hidden_layers', config.get('n_layer')) - 1}."
    ends = ("o_proj", "down_proj", "c_proj", "out_proj", "fc2", "w2")

    def change(name: str, weight: Tensor) -> Tensor:
        return weight * share if last in name and any(end in name for end in ends) else weight

    return changed_copy(folder, f"weak-{share}", change)


def with_noise(folder: Path, share: float = 0.12, seed: int = 5) -> Path:
    """A copy of a model with noise on its matrices, so that it often agrees with the first, and often not."""
    generator = torch.Generator().manual_seed(seed)

    def change(name: str, weight: Tensor) -> Tensor:
        if weight.dim() < 2 or weight.std() == 0:
            return weight
        noise = torch.randn(weight.shape, generator=generator) * (weight.float().std() * share)
        return (weight.float() + noise).to(weight.dtype)

    return changed_copy(folder, f"noise-{share}-{seed}", change)


def changed_copy(folder: Path, suffix: str, change: Callable[[str, Tensor], Tensor]) -> Path:
    """Saves a model with other weights beside it."""
    to = folder.with_name(f"{folder.name}-{suffix}")
    if not to.exists():
        weights = load_file(folder / "model.safetensors")
        shutil.copytree(folder, to)
        changed = {name: change(name, weight).contiguous() for name, weight in sorted(weights.items())}
        save_file(changed, to / "model.safetensors", metadata={"format": "pt"})
    return to
