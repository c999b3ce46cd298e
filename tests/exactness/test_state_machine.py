"""Any sequence of engine operations keeps the law, and after each of them every part agrees with every other.

One engine per proposer serves all sequences: what one leaves behind must not show in the next.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from compspec.batch import SCRATCH_BLOCK
from compspec.engine import Engine
from compspec.request import Request
from tests.law import (
    VOCAB,
    Job,
    Solo,
    assert_same,
    assert_same_tokens,
    drafting,
    make_engine,
    mixed_params,
    per_request_state,
    proposing,
)

SHAPE = {"numerics__prefill_chunk": 16, "scheduler__max_num_seqs": 3}
FEW_BLOCKS = {"cache__block_size": 4, "cache__num_blocks": 30}
RNG = np.random.default_rng(12)
TEXTS = [np.resize(RNG.integers(3, VOCAB, size), 70).tolist() for size in (7, 40)]
LENGTHS = (50, 33, 32, 17, 5, 64)
JOB_PARAMS = [mixed_params(RNG, 12) for _ in range(24)]
CASES = ["ngram", "suffix", "draft_model", "layer_skip", "chain: with a model", "ragged", "draft_model, fast"]

jobs = st.builds(
    lambda text, length, tail, params, salt, priority: Job(
        (*TEXTS[text][: length - 1], TEXTS[text][length - 1] + tail),
        JOB_PARAMS[params].model_copy(update={"cache_salt": salt, "priority": priority}),
    ),
    text=st.sampled_from([0, 0, 1]),
    length=st.sampled_from(LENGTHS),
    tail=st.integers(0, 2),
    params=st.integers(0, len(JOB_PARAMS) - 1),
    salt=st.sampled_from([None, None, None, "a"]),
    priority=st.sampled_from([0, 0, 0, -1, 1]),
)


class Lab:
    """An engine, and what its requests give alone."""

    def __init__(self, case: str, target: Path, other: Path, solos: dict[str, Solo]) -> None:
        name, _, numerics = case.partition(", ")
        self.is_exact = not numerics
        shape: dict[str, Any] = {**SHAPE, "numerics__mode": numerics or "exact"}
        self.solo = solos.setdefault(numerics, Solo(target, **shape))
        self.known: dict[str, list[int]] = {}
        if name == "ragged":
            self.engine = drafting(target, self.draft, 5, **shape, **FEW_BLOCKS)
        else:
            self.engine = make_engine(target, **proposing(name, target, other), **shape, **FEW_BLOCKS)
        self.num_preemptions = 0
        self.num_cached_tokens = 0

    def draft(self, request: Request, most: int) -> list[int]:
        """A right beginning and a wrong end, both of lengths that the request's own state decides."""
        mix = 31 * request.num_tokens + request.seed
        right = self.known[request.request_id][request.num_output_tokens :][: mix % (most + 1)]
        return right + [(mix * place) % VOCAB for place in range(mix // 7 % (most - len(right) + 1))]


class Machine(RuleBasedStateMachine):
    """What a caller may do, in any order."""

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.lab = lab
        self.engine: Engine = lab.engine
        self.requests: list[Request] = []
        self.jobs: list[Job] = []
        self.aborted: set[str] = set()
        # Shadow records: which tokens a key stands for, and the bits of their keys and values.
        self.prefixes: dict[bytes, tuple[Any, ...]] = {}
        self.bits: dict[bytes, bytes] = {}

    @property
    def unfinished(self) -> list[Request]:
        return [request for request in self.requests if request.finish_reason is None]

    @precondition(lambda self: len(self.unfinished) < 6)
    @rule(job=jobs)
    def add(self, job: Job) -> None:
        request = self.engine.add_request(job.prompt, job.params)
        self.requests.append(request)
        self.jobs.append(job)
        self.lab.known[request.request_id] = self.lab.solo(job)[0]

    @precondition(lambda self: self.unfinished)
    @rule(count=st.sampled_from([2, 1, 3, 5]))
    def step(self, count: int) -> None:
        for _ in range(count):
            for delta in self.engine.step():
                request = delta.request
                if request.finish_reason is None:
                    slot = self.engine._metadata._slots[request.slot]
                    assert slot.request is request
                    assert slot.num_counted == request.num_tokens

    @precondition(lambda self: self.unfinished)
    @rule(which=st.integers(0, 5))
    def preempt(self, which: int) -> None:
        among = self.engine.scheduler.running or self.unfinished
        request = among[which % len(among)]
        was_running = request.slot is not None
        assert self.engine.preempt(request.request_id) == was_running

    @precondition(lambda self: len(self.unfinished) > 2)
    @rule(which=st.integers(0, 5))
    def abort(self, which: int) -> None:
        request = self.unfinished[which % len(self.unfinished)]
        assert self.engine.abort(request.request_id) is not None
        self.aborted.add(request.request_id)

    @precondition(lambda self: len(self.requests) > 7 and self.unfinished)
    @rule()
    def run_to_end(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                return
            self.engine.step()
        raise AssertionError("the requests do not come to an end")

    @invariant()
    def blocks_are_held_by_those_that_run(self) -> None:
        pool, running = self.engine.pool, self.engine.scheduler.running
        held = Counter(block for request in running for block in request.block_ids)
        assert [held[block] for block in range(pool.num_blocks)] == [
            pool.num_holders(block) for block in range(pool.num_blocks)
        ]
        assert set(pool._free) == set(range(1, pool.num_blocks)) - set(held)
        assert SCRATCH_BLOCK not in held
        for request in running:
            assert len(set(request.block_ids)) == len(request.block_ids)
            assert len(request.block_ids) >= pool.blocks_for(request.num_computed_tokens)
        for request in self.requests:
            assert request in running or request.block_ids == []

    @invariant()
    def slots_are_those_of_running_requests(self) -> None:
        scheduler = self.engine.scheduler
        taken = [request.slot for request in scheduler.running]
        assert sorted([*taken, *scheduler._free_slots]) == list(range(SHAPE["scheduler__max_num_seqs"]))
        assert {id(request) for request in [*scheduler.running, *scheduler.waiting]} == set(map(id, self.unfinished))
        for queue in (scheduler.running, scheduler.waiting):
            assert [request.rank for request in queue] == sorted(request.rank for request in queue)
        assert all(request.num_computed_tokens < request.num_tokens for request in self.unfinished)

    @invariant()
    def keys_stand_for_the_tokens_whose_keys_and_values_are_in_their_blocks(self) -> None:
        pool = self.engine.pool
        size = pool.block_size
        for request in self.requests:
            for index, key in enumerate(request.block_keys):
                prefix = (request.params.cache_salt, *request.token_ids[: (index + 1) * size].tolist())
                assert self.prefixes.setdefault(key, prefix) == prefix, "one key for two texts"
        assert pool._by_key == {key: block for block, key in enumerate(pool._keys) if key is not None}
        for key, block in pool._by_key.items():
            prefix = self.prefixes[key]
            if self.lab.is_exact:
                assert self.bits.setdefault(key, self.bits_of(block)) == self.bits_of(block), prefix
        for request in self.engine.scheduler.running:
            for index, block in enumerate(request.block_ids):
                key = pool._keys[block]
                if key is not None:
                    prefix = (request.params.cache_salt, *request.token_ids[: (index + 1) * size].tolist())
                    assert self.prefixes[key] == prefix, "a request holds another text's block"

    def bits_of(self, block: int) -> bytes:
        size = self.engine.pool.block_size
        rows = slice(block * size, (block + 1) * size)
        runners = {id(runner.k_caches[0]): runner for runner in self.engine._runners()}
        caches = [cache for each in runners.values() for cache in (*each.k_caches, *each.v_caches)]
        return b"".join(cache[rows].numpy().tobytes() for cache in caches)

    @invariant()
    def counted_tokens_are_those_of_the_requests(self) -> None:
        metadata = self.engine._metadata
        for request in self.engine.scheduler.running:
            slot = metadata._slots[request.slot]
            if slot is None or slot.request is not request or slot.num_counted != request.num_tokens:
                continue  # read anew before it is used
            if request.params.has_penalties:
                output = torch.tensor(request.output_token_ids, dtype=torch.int64)
                assert metadata._output_counts[request.slot].equal(torch.bincount(output, minlength=VOCAB).int())
                prompt = sorted(set(request.token_ids[: request.num_prompt_tokens].tolist()))
                assert metadata._prompt_mask[request.slot].nonzero().flatten().tolist() == prompt

    @invariant()
    def proposers_know_of_nobody_else_and_of_nothing_that_was_not_committed(self) -> None:
        unfinished = {request.request_id: request for request in self.unfinished}
        proposer = self.engine._proposer
        for one in (proposer, *getattr(proposer, "_proposers", ())):
            for number, num_valid in getattr(one, "_num_valid", {}).items():
                assert 0 <= num_valid <= unfinished[number].num_computed_tokens
            assert not getattr(one, "_num_written", {}), "between steps nothing is half known"
        for name, count in per_request_state(self.engine).items():
            assert count <= len(unfinished) or name == "held blocks", name

    def teardown(self) -> None:
        self.run_to_end()
        assert not any(per_request_state(self.engine).values())
        pairs = [
            (request, job)
            for request, job in zip(self.requests, self.jobs, strict=True)
            if request.request_id not in self.aborted
        ]
        if pairs:
            finished, their_jobs = zip(*pairs, strict=True)
            (assert_same if self.lab.is_exact else assert_same_tokens)(finished, their_jobs, self.lab.solo)
        self.lab.num_preemptions += sum(request.stats.num_preemptions for request in self.requests)
        self.lab.num_cached_tokens += sum(request.stats.num_cached_tokens for request in self.requests)
        self.engine.reset()
        assert self.engine.pool.num_keyed == 0


@pytest.fixture(scope="module")
def solos() -> dict[str, Solo]:
    """By numerics; filled as they are needed."""
    return {}


def explore(case: str, target: Path, other: Path, solos: dict[str, Solo], **options: Any) -> None:
    lab = Lab(case, target, other, solos)
    health = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        lambda: Machine(lab), settings=settings(deadline=None, suppress_health_check=health, **options)
    )
    stats = lab.engine.stats
    assert lab.num_preemptions > 10
    assert lab.num_cached_tokens > 100
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("case", CASES)
def test_any_sequence_of_operations_keeps_the_law(target: Path, other: Path, solos: dict[str, Solo], case: str) -> None:
    explore(case, target, other, solos, max_examples=12, stateful_step_count=30, derandomize=True, database=None)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_same_for_many_longer_sequences(target: Path, other: Path, solos: dict[str, Solo], case: str) -> None:
    explore(case, target, other, solos, max_examples=150, stateful_step_count=60, print_blob=True)
