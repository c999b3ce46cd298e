"""An engine in use for long: memory and acceptance stay, and nothing of ended requests is left (R8, R10).

`pytest -m slow -s tests/exactness/test_soak.py` prints the numbers.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from compspec.engine import Engine
from compspec.request import FinishReason, Request
from compspec.sampling.params import SamplingParams
from tests.law import VOCAB, Job, Solo, assert_same, make_engine, per_request_state, proposing

NUM_KINDS = 40
MAX_STORE_TOKENS = 2000


def kinds(seed: int = 0) -> list[Job]:
    """Requests that come again and again: few prompts, so that there is something to remember."""
    rng = np.random.default_rng(seed)
    beginnings = [rng.integers(3, VOCAB, 64).tolist() for _ in range(4)]
    jobs = []
    for number in range(NUM_KINDS):
        prompt = [*beginnings[number % 4][: (0, 32, 64)[number % 3]], *rng.integers(3, VOCAB, 1 + number % 9).tolist()]
        params = SamplingParams(
            max_tokens=6 + number % 19,
            temperature=(0.0, 1.0)[number % 2],
            seed=number,
            frequency_penalty=(0.0, 0.5)[number % 5 == 0],
            logprobs=(None, 1)[number % 7 == 0],
            ignore_eos=True,
        )
        jobs.append(Job(tuple(prompt), params))
    return jobs


@dataclass
class Soak:
    """What was seen while requests arrived at random.

    Attributes:
        accepted: per finished request, its drafts accepted and made.
        rss_bytes: after every tenth request.
    """

    jobs: list[Job] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    accepted: list[tuple[int, int]] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    num_aborted: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0


def soak(engine: Engine, count: int, solo: Solo, *, keep: bool, seed: int = 1) -> Soak:
    """Runs `count` requests; one in ten is aborted. Outputs are compared as they come."""
    rng, seen, all_kinds, process = np.random.default_rng(seed), Soak(), kinds(), psutil.Process()
    running: dict[str, tuple[Request, Job, int]] = {}
    added = 0
    while added < count or engine.has_work:
        for _ in range(int(rng.poisson(0.25)) if added < count else 0):
            job = all_kinds[int(rng.integers(NUM_KINDS))]
            patience = int(rng.integers(0, 12)) if rng.random() < 0.1 else -1
            request = engine.add_request(job.prompt, job.params)
            running[request.request_id] = request, job, patience
            added += 1
            if keep:
                seen.requests.append(request)
            if added % 10 == 0:
                seen.rss_bytes.append(process.memory_info().rss)
        for delta in engine.step():
            if delta.finish_reason is None:
                continue
            request, job, _ = running.pop(delta.request.request_id)
            assert_same([request], [job], solo)
            seen.accepted.append((request.stats.num_accepted_tokens, request.stats.num_draft_tokens))
            seen.num_preemptions += request.stats.num_preemptions
            seen.num_cached_tokens += request.stats.num_cached_tokens
        for number, (request, job, patience) in list(running.items()):
            if patience == 0:
                assert engine.abort(number) is not None
                assert request.finish_reason == FinishReason.ABORT
                seen.num_aborted += 1
                del running[number]
            else:
                running[number] = request, job, patience - 1
    assert not running
    return seen


def assert_nothing_is_left(engine: Engine) -> None:
    assert not any(per_request_state(engine).values()), per_request_state(engine)
    scheduler, pool = engine.scheduler, engine.pool
    assert (scheduler.waiting, scheduler.running) == ([], [])
    assert len(scheduler._free_slots) == engine.config.scheduler.max_num_seqs
    assert pool.num_free == pool.num_usable == len(pool._free)
    assert not any(pool.num_holders(block) for block in range(pool.num_blocks))
    assert pool.num_keyed <= pool.num_usable
    assert len(engine._metadata._slots) == engine.config.scheduler.max_num_seqs
    for proposer in (engine._proposer, *getattr(engine._proposer, "_proposers", ())):
        store = getattr(proposer, "_store", None)
        assert store is None or store.num_tokens <= MAX_STORE_TOKENS


def small_engine(target: Path, other: Path, case: str, **settings: Any) -> Engine:
    options = proposing(case, target, other)
    if case == "suffix":
        options["speculative__max_store_tokens"] = MAX_STORE_TOKENS
    if case == "chain":
        options["speculative__proposers"] = [{"method": "suffix", "max_store_tokens": MAX_STORE_TOKENS}, "ngram"]
    if case == "chain: with a model":
        options["speculative__proposers"][0]["max_store_tokens"] = MAX_STORE_TOKENS
    return make_engine(target, **options, cache__num_blocks=30, cache__block_size=4, **settings)


@pytest.mark.parametrize("case", ["suffix", "draft_model", "layer_skip", "chain: with a model"])
def test_nothing_of_ended_requests_is_left(target: Path, other: Path, solo: Solo, case: str) -> None:
    """After aborts, preemptions and evictions; with drafts as many as pay, which keeps measurements per request."""
    engine = small_engine(target, other, case, speculative__adaptive=True)
    seen = soak(engine, 60, solo, keep=True)
    assert seen.num_aborted > 2
    assert seen.num_preemptions > 0
    assert seen.num_cached_tokens > 0
    assert_nothing_is_left(engine)
    assert all(request.slot is None and request.block_ids == [] for request in seen.requests)


def share(pairs: list[tuple[int, int]]) -> float:
    accepted, drafted = np.sum(pairs, axis=0)
    return float(accepted / drafted)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["chain", "suffix", "chain: with a model"])
def test_memory_and_acceptance_stay_flat_over_2000_requests(target: Path, other: Path, solo: Solo, case: str) -> None:
    """The last quarter against the second; the first fills the store, the caches and Python's own pools."""
    engine = small_engine(target, other, case)
    for job in kinds():
        solo(job)
    seen = soak(engine, 2000, solo, keep=False)
    assert_nothing_is_left(engine)
    quarter, number = len(seen.rss_bytes) // 4, len(seen.accepted) // 4
    before, after = (float(np.median(seen.rss_bytes[at : at + quarter])) for at in (quarter, 3 * quarter))
    early, late = share(seen.accepted[number : 2 * number]), share(seen.accepted[3 * number :])
    print(
        f"{case}: {len(seen.accepted)} requests finished, {seen.num_aborted} aborted, {seen.num_preemptions} "
        f"preemptions, {seen.num_cached_tokens} tokens found; resident {before / 2**20:.1f} -> {after / 2**20:.1f} "
        f"MiB; drafts accepted {early:.3f} -> {late:.3f}"
    )
    assert seen.num_preemptions > 100
    assert after - before < 4 * 2**20, f"{(after - before) / 2**20:.1f} MiB more"
    assert abs(late - early) < 0.08
