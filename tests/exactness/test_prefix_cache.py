"""Blocks that requests share: which, when, and that nobody can tell from an output."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compspec.engine import Engine
from compspec.request import Request
from compspec.sampling.params import SamplingParams
from tests.law import (
    Job,
    Solo,
    assert_same,
    assert_same_tokens,
    drafting,
    kv_of,
    make_engine,
    make_prompts,
    mixed_jobs,
    proposer_cases,
    proposing,
    ragged,
    run_jobs,
)

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
EVERYTHING = SamplingParams(
    max_tokens=16,
    temperature=0.7,
    seed=4,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.6,
    bad_words=((9,), (11, 12)),
    logprobs=2,
    prompt_logprobs=2,
)
TEXT = tuple(make_prompts(8, seed=9, longest=90)[7] * 60)[:120]


def cached(requests: list[Request]) -> list[int]:
    return [request.stats.num_cached_tokens for request in requests]


@pytest.mark.parametrize(
    ("settings", "unit"),
    [
        ({"cache__block_size": 16}, 32),
        ({"cache__block_size": 1}, 32),
        ({"cache__block_size": 64}, 64),
        ({"numerics__prefill_chunk": 48, "cache__block_size": 32}, 96),
        ({"numerics__prefill_chunk": 16, "cache__block_size": 4}, 16),
    ],
)
def test_exact_numerics_share_whole_chunks_of_prompts_in_whole_blocks(
    target: Path, settings: dict[str, Any], unit: int
) -> None:
    """At least one token is computed, and outputs are never shared: their bits are those of decode steps."""
    engine = make_engine(target, **settings)
    alone = Solo(target, **settings)
    for length in (16, 17, 32, 33, 64, 65, 97, 120):
        engine.reset()
        job = Job(TEXT[:length], EVERYTHING.model_copy(update={"max_tokens": 5}))
        requests = [run_jobs(engine, [job])[0] for _ in range(2)]
        assert cached(requests) == [0, (length - 1) // unit * unit]
        assert_same(requests, [job, job], alone)
    engine.reset()
    (first,) = run_jobs(engine, [Job(TEXT[:40], GREEDY.model_copy(update={"max_tokens": 60}))])
    (follow,) = run_jobs(engine, [Job(tuple(first.token_ids.tolist()), GREEDY)])
    assert cached([follow]) == [40 // unit * unit]


def test_fast_numerics_share_every_full_block_outputs_included(target: Path) -> None:
    """A follow-up of a conversation finds the answer before it."""
    settings = {"numerics__mode": "fast", "cache__block_size": 8}
    engine, solo = make_engine(target, speculative__method="ngram", **settings), Solo(target, **settings)
    (first,) = run_jobs(engine, [Job(TEXT[:21], GREEDY)])
    conversation = Job((*first.token_ids.tolist(), 9, 8, 7), GREEDY)
    follow = run_jobs(engine, [conversation])
    assert cached(follow) == [32]  # 21 + 16 tokens, of which the last is not computed: four blocks
    assert_same_tokens(follow, [conversation], solo)


@pytest.mark.parametrize("case", ["ngram", "draft_model", "layer_skip"])
def test_everything_is_reported_and_counted_alike_after_a_hit(target: Path, other: Path, solo: Solo, case: str) -> None:
    """P10 and prompt log-probabilities, bit for bit: rows whose keys and values were found are scored as well."""
    engine = make_engine(target, **proposing(case, target, other))
    run_jobs(engine, [Job(TEXT, GREEDY)])
    jobs = [
        Job((*TEXT[:shared], *range(3 + extra, 3 + 2 * extra)), EVERYTHING.model_copy(update={"seed": extra}))
        for shared in (32, 63, 64, 96)
        for extra in (1, 2, 31)
    ]
    requests = run_jobs(engine, jobs)
    assert_same(requests, jobs, solo)
    assert cached(requests) == [shared for shared in (32, 32, 64, 96) for _ in range(3)]
    for request in requests:
        assert [len(request.prompt_logprobs or ()), request.prompt_logprobs[:1]] == [request.num_prompt_tokens, [None]]


@pytest.mark.parametrize("case", ["draft_model", "draft_model: target", "chain: with a model", "layer_skip"])
def test_drafts_from_a_warm_cache_are_those_from_a_cold_one(target: Path, other: Path, case: str) -> None:
    """R4: a hit brings the draft model's keys and values as well; acceptance is equal, position by position."""
    jobs = [Job(TEXT[:length], params) for length in (33, 64, 65, 97, 120) for params in (GREEDY, EVERYTHING)]
    settings = proposing(case, target, other) | {"speculative__num_draft_tokens": 4}
    engine = make_engine(target, **settings)
    cold = []
    for job in jobs:
        engine.reset()
        cold += run_jobs(engine, [job])
    assert cached(cold) == [0] * len(jobs)
    engine.reset()
    run_jobs(engine, [Job(TEXT, GREEDY)])
    for job, before in zip(jobs, cold, strict=True):
        engine._proposer.reset()
        (warm,) = run_jobs(engine, [job])
        assert warm.stats.num_cached_tokens == (len(job.prompt) - 1) // 32 * 32 > 0
        assert warm.stats.drafted_per_position == before.stats.drafted_per_position
        assert warm.stats.accepted_per_position == before.stats.accepted_per_position
    assert sum(request.stats.num_accepted_tokens for request in cold) > 0


@pytest.mark.parametrize("speculative", [None, False])
def test_a_request_that_is_not_drafted_for_leaves_a_whole_prompt_for_others(
    target: Path, speculative: bool | None
) -> None:
    """R4: its blocks are found by requests that are drafted for, so the draft model follows every prompt."""
    engine = make_engine(target, **proposing("draft_model", target, target))
    run_jobs(engine, [Job(TEXT, GREEDY.model_copy(update={"speculative": speculative}))])
    (request,) = run_jobs(engine, [Job((*TEXT[:96], 5, 6), GREEDY)])
    assert cached([request]) == [96]
    runner = engine._proposer.runners[0]
    again = engine.add_request((*TEXT[:96], 7), GREEDY)
    engine.step()
    torch.testing.assert_close(
        kv_of(runner, again.block_ids, 97), kv_of(*prefilled(target, again)), atol=2e-4, rtol=1e-3
    )
    engine.abort(again.request_id)


def prefilled(folder: Path, request: Request) -> tuple[Any, list[int], int]:
    """A runner of a model that has computed all tokens of a request's prompt at once, and where."""
    engine = make_engine(folder, numerics__prefill_chunk=256, cache__prefix_caching=False)
    same = engine.add_request(request.token_ids[: request.num_prompt_tokens].tolist(), GREEDY)
    engine.step()
    return engine.runner, same.block_ids, request.num_prompt_tokens


@pytest.mark.parametrize("chunk", [16, 32, 48, 128])
def test_a_draft_model_s_prompt_in_chunks_is_its_prompt_at_once(target: Path, other: Path, chunk: int) -> None:
    """R5: keys and values, and the drafts that follow."""
    found = []
    for size in (chunk, 128):
        engine = make_engine(target, **proposing("draft_model", target, other), numerics__prefill_chunk=size)
        request = engine.add_request(TEXT, GREEDY)
        while request.num_output_tokens == 0:
            engine.step()
        kv = kv_of(engine._proposer.runners[0], request.block_ids, len(TEXT))
        while engine.has_work:
            engine.step()
        found.append((kv, request.stats.accepted_per_position, request.stats.num_draft_tokens))
    (chunked, *acceptance), (whole, *expected) = found
    torch.testing.assert_close(chunked, whole, atol=2e-4, rtol=1e-3)
    assert acceptance == expected
    assert chunk != 128 or chunked.equal(whole)


def test_shared_blocks_hold_the_bits_that_a_request_would_compute(target: Path, other: Path) -> None:
    """Of the target and of the draft model, after a hit on the first chunks."""
    engine = make_engine(target, **proposing("draft_model", target, other))
    runners = [engine.runner, *engine._proposer.runners]
    found = []
    for warm in (False, True):
        engine.reset()
        if warm:
            run_jobs(engine, [Job((*TEXT[:100], 3), GREEDY)])
        request = engine.add_request(TEXT, GREEDY)
        while request.num_output_tokens == 0:
            engine.step()
        assert request.stats.num_cached_tokens == (96 if warm else 0)
        found.append([kv_of(runner, request.block_ids, len(TEXT)) for runner in runners])
        engine.abort(request.request_id)
    for cold, warm_kv in zip(*found, strict=True):
        assert cold.equal(warm_kv)


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_only_accepted_tokens_enter_the_prefix_cache(target: Path, numerics: str) -> None:
    """L7: with drafts that are mostly wrong, what is found later stands for the tokens that were output."""
    settings: dict[str, Any] = {"numerics__mode": numerics, "cache__block_size": 4}
    solo = Solo(target, **settings)
    jobs = [Job(TEXT[:length], GREEDY.model_copy(update={"max_tokens": 33})) for length in (9, 30, 41)]
    truth = {job.prompt: solo(job)[0] for job in jobs}
    draft = ragged(truth, 1)
    engine = drafting(target, lambda request, most: draft(request, most) if most else [], 7, **settings)
    for request in run_jobs(engine, jobs):
        final = (request.num_prompt_tokens // 32 * 32 if numerics == "exact" else request.num_tokens) // 4
        assert request.num_kept_blocks <= final
        assert (request.num_kept_blocks > 3) == (numerics == "fast" or request.num_prompt_tokens >= 32)
    assert engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    for job in jobs:
        tokens = (*job.prompt, *truth[job.prompt])
        for cut in range(len(job.prompt), len(tokens), 5):
            follow = Job(tokens[:cut], GREEDY.model_copy(update={"max_tokens": 6, "speculative": False}))
            (request,) = run_jobs(engine, [follow])
            assert_same_tokens([request], [follow], solo)
            if numerics == "fast":
                assert request.stats.num_cached_tokens == (cut - 1) // 4 * 4


@pytest.mark.parametrize("case", proposer_cases())
def test_a_beginning_that_others_compute_is_found_while_they_run(
    target: Path, other: Path, solo: Solo, case: str
) -> None:
    """One computes each chunk, and those that wait for it take it over; blocks are held once for each of them."""
    engine = make_engine(target, **proposing(case, target, other))
    jobs = [Job((*TEXT[:96], number), EVERYTHING) for number in range(3, 7)]
    requests = [engine.add_request(job.prompt, job.params) for job in jobs]
    for _ in range(5):
        engine.step()
    shared = requests[0].block_ids[:6]
    assert all(request.block_ids[:6] == shared for request in requests if len(request.block_ids) >= 6)
    while engine.has_work:
        engine.step()
    assert_same(requests, jobs, solo)
    assert sum(cached(requests)) >= 2 * 96
    assert engine.pool.num_free == engine.pool.num_usable


def salted(length: int, salt: str | None) -> Job:
    return Job(TEXT[:length], EVERYTHING.model_copy(update={"cache_salt": salt}))


@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_requests_share_blocks_with_those_of_the_same_salt_alone(target: Path, numerics: str) -> None:
    """And no output depends on the salt."""
    engine, solo = make_engine(target, numerics__mode=numerics), Solo(target, numerics__mode=numerics)
    salts = [None, "a", "b", "\x00", "ä"]
    jobs = [salted(100, salt) for salt in salts]
    first = [run_jobs(engine, [job])[0] for job in jobs]
    assert cached(first) == [0] * len(salts)
    second = [run_jobs(engine, [job])[0] for job in jobs]
    assert all(count >= 96 for count in cached(second))
    if numerics == "exact":
        assert_same([*first, *second], [*jobs, *jobs], solo)
    together = make_engine(target, scheduler__max_num_seqs=4)
    requests = [together.add_request(job.prompt, job.params) for job in jobs[:4]]
    for _ in range(12):
        together.step()
        tables = [set(request.block_ids) for request in requests]
        assert sum(map(len, tables)) == len(set().union(*tables)), "two salts share a block"
    while together.has_work:
        together.step()
    assert cached(requests) == [0] * 4


def test_blocks_that_are_handed_out_again_are_not_found(target: Path, solo: Solo) -> None:
    """A cache so small that every request evicts another's blocks; the beginning of a prefix is kept longest."""
    engine = make_engine(target, speculative__method="ngram", cache__num_blocks=12)
    first, second = Job(TEXT[:100], EVERYTHING), Job(TEXT[:100][::-1], EVERYTHING)
    assert cached(run_jobs(engine, [first])) == [0]
    assert cached(run_jobs(engine, [second])) == [0]
    requests = run_jobs(engine, [first])
    assert cached(requests)[0] in (0, 32)
    assert_same(requests, [first], solo)
    assert engine.pool.num_keyed <= engine.pool.num_usable


def test_a_chunk_of_which_some_blocks_are_gone_is_computed_whole(target: Path, solo: Solo) -> None:
    """A chunk begun in the middle would have another shape."""
    engine = make_engine(target, cache__num_blocks=13, cache__block_size=4)
    first, second = (Job(prompt, GREEDY.model_copy(update={"max_tokens": 3})) for prompt in (TEXT[:33], TEXT[40:60]))
    (request,) = run_jobs(engine, [first])
    assert len(engine.pool.find(request.block_keys)) == 8
    run_jobs(engine, [second])
    assert 0 < len(engine.pool.find(request.block_keys)) < 8, "all or nothing was evicted"
    (again,) = run_jobs(engine, [first])
    assert cached([again]) == [0]
    assert_same([again], [first], solo)


def test_without_prefix_caching_nothing_is_found(target: Path) -> None:
    engine = make_engine(target, cache__prefix_caching=False)
    job = Job(TEXT, GREEDY)
    assert cached([run_jobs(engine, [job])[0] for _ in range(2)]) == [0, 0]
    assert engine.pool.num_keyed == 0


def test_the_hit_rate_counts_the_tokens_of_prompts(target: Path) -> None:
    engine = make_engine(target)
    for _ in range(2):
        run_jobs(engine, [Job(TEXT[:65], GREEDY)])
    assert engine.stats.num_cached_tokens == 64
    assert engine.stats.prefix_cache_hit_rate == 64 / 130
    # A request that resumes finds its own blocks; that is no hit of its prompt.
    engine.reset()
    request = engine.add_request(TEXT[:65], GREEDY)
    for _ in range(5):
        engine.step()
    assert engine.preempt(request.request_id)
    while engine.has_work:
        engine.step()
    assert request.stats.num_cached_tokens == 0


def num_prompt_forwards(engine: Engine, job: Job) -> int:
    before = engine.stats.num_prefill_forwards
    run_jobs(engine, [job])
    return engine.stats.num_prefill_forwards - before


def test_what_is_found_is_not_computed(target: Path) -> None:
    engine = make_engine(target)
    assert [num_prompt_forwards(engine, Job(TEXT[:97], GREEDY)) for _ in range(2)] == [4, 1]


def test_mixed_requests_with_shared_beginnings_and_salts_keep_the_law(target: Path, solo: Solo) -> None:
    engine = make_engine(target, speculative__method="suffix", cache__num_blocks=40)
    jobs = [job.with_params(cache_salt=("a", None, "b")[at % 3]) for at, job in enumerate(mixed_jobs(16, 5))]
    for _ in range(2):
        assert_same(run_jobs(engine, jobs), jobs, solo)
    assert engine.stats.num_cached_tokens > 0


def test_no_salt_can_pass_for_the_tokens_of_another_request(target: Path) -> None:
    """A salt whose bytes are those of somebody's first block must not lead into that request's chain."""
    first, other, shared, end = ([token] * 16 for token in (5, 9, 7, 3))
    salt = torch.tensor(first, dtype=torch.int32).numpy().tobytes().decode()
    engine = make_engine(target, numerics__prefill_chunk=16)
    salted = GREEDY.model_copy(update={"cache_salt": salt})
    jobs = [Job((*other, *shared, *end), salted), Job((*first, *other, *end), GREEDY)]
    run_jobs(engine, [Job((*first, *shared, *end), GREEDY)])
    run_jobs(engine, jobs[:1])
    (found,) = run_jobs(engine, jobs[1:])
    assert found.stats.num_cached_tokens == 16, "its first block alone is known"
    assert_same([found], jobs[1:], Solo(target))
