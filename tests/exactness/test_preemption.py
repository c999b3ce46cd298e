"""A request may lose its blocks between any two steps: what it computes again has the bits that it had."""

from pathlib import Path

import pytest
import torch

from compspec.batch import Batch, DraftTokens, Scores
from compspec.engine import Engine
from compspec.request import FinishReason, Request
from compspec.sampling.params import SamplingParams
from tests.law import (
    Job,
    Solo,
    assert_same,
    kv_of,
    make_engine,
    mixed_jobs,
    outputs,
    per_request_state,
    proposer_cases,
    proposing,
    run_jobs,
)

SAMPLED = SamplingParams(max_tokens=20, temperature=1.0, seed=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
PENALISED = SAMPLED.model_copy(
    update={"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7, "temperature": 0.3}
)
PROMPT = (*range(3, 60), *range(20, 40))  # 77 tokens: with chunks of 32 the last is short


def run_preempting_at(engine: Engine, job: Job, step: int, again: int | None = None) -> Request:
    """Runs one request, which is preempted after that many steps, and maybe again after so many more."""
    request = engine.add_request(job.prompt, job.params)
    count = 0
    points = {step} if again is None else {step, step + again}
    while engine.has_work:
        engine.step()
        count += 1
        if count in points and request.finish_reason is None:
            held = len(request.block_ids)
            free = engine.pool.num_free
            assert engine.preempt(request.request_id)
            assert engine.pool.num_free == free + held > free
            assert not engine.preempt(request.request_id), "it does not run any more"
            assert per_request_state(engine)["held blocks"] == 0
    return request


@pytest.mark.parametrize(
    ("case", "prefix_caching"),
    [("none", False), ("ngram", True), ("draft_model", False), ("draft_model", True), ("layer_skip", True)],
)
def test_a_preemption_after_any_step_changes_nothing(
    target: Path, other: Path, solo: Solo, case: str, prefix_caching: bool
) -> None:
    """R3, P10: in the middle of the prompt and of the output, twice, with penalties and all log-probabilities."""
    engine = make_engine(target, **proposing(case, target, other), cache__prefix_caching=prefix_caching)
    job = Job(PROMPT, PENALISED)
    (undisturbed,) = run_jobs(engine, [job])
    num_steps = 2 + undisturbed.stats.num_steps
    for step in range(1, num_steps):
        engine.reset()
        request = run_preempting_at(engine, job, step, again=step % 4 or None)
        assert_same([request], [job], solo)
        assert request.stats.num_preemptions >= 1
        assert request.stats.num_steps >= undisturbed.stats.num_steps


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["none", "ngram", "layer_skip"])
def test_keys_and_values_computed_again_have_the_same_bits(target: Path, other: Path, case: str, dtype: str) -> None:
    """A prompt in the same chunks, an output in decode steps: else later tokens would differ now and then."""
    job = Job(PROMPT[:40], SAMPLED.model_copy(update={"max_tokens": 30}))
    settings = proposing(case, target, other) | {"cache__prefix_caching": False, "model__dtype": dtype}
    engine = make_engine(target, **settings)

    def until(num_output_tokens: int, preempted: bool) -> Request:
        request = engine.add_request(job.prompt, job.params)
        while request.num_output_tokens < num_output_tokens:
            engine.step()
        if preempted:
            assert engine.preempt(request.request_id)
            engine.pool.allocate(3)  # it gets other blocks than before
            before = request.num_output_tokens
            while request.num_output_tokens == before:
                engine.step()
        return request

    first = until(18, preempted=False)
    num_tokens = first.num_computed_tokens
    wanted = kv_of(engine.runner, first.block_ids, num_tokens)
    engine.abort(first.request_id)
    second = until(18, preempted=True)
    assert second.num_computed_tokens >= num_tokens
    assert kv_of(engine.runner, second.block_ids, num_tokens).equal(wanted)


def test_an_output_is_computed_again_in_decode_steps_and_a_prompt_in_its_chunks(target: Path) -> None:
    """Whether or not this machine's kernels would give the same bits for other shapes."""
    engine = make_engine(target, speculative__method="ngram", cache__prefix_caching=False)
    score, shapes = engine._scorer.score, []

    def watched(batch: Batch, drafts: DraftTokens) -> Scores:
        (entry,) = batch.scheduled
        shapes.append((batch.is_prefill, entry.num_computed_tokens, entry.num_new_tokens))
        return score(batch, drafts)

    engine._scorer.score = watched  # type: ignore[method-assign]
    request = engine.add_request(PROMPT, SAMPLED)
    while request.num_output_tokens < 12:
        engine.step()
    shapes.clear()
    known = request.num_tokens
    assert engine.preempt(request.request_id)
    while request.num_tokens == known:
        engine.step()
    assert shapes[:3] == [(True, 0, 32), (True, 32, 32), (True, 64, 13)]
    replayed = [(False, start, min(8, known - start)) for start in range(len(PROMPT), known, 8)]
    assert shapes[3:] == replayed


def test_what_is_counted_for_penalties_is_read_anew_in_a_slot_that_was_left(target: Path) -> None:
    """P10: a request goes on elsewhere and comes back to its first slot, where nobody has sampled meanwhile."""
    engine = make_engine(target, scheduler__max_num_seqs=2, cache__prefix_caching=False)
    job = Job(PROMPT[:20], PENALISED)
    request = engine.add_request(job.prompt, job.params)

    def decode(count: int) -> None:
        before = request.num_output_tokens
        while request.num_output_tokens < before + count:
            engine.step()

    decode(5)
    first_slot = request.slot
    mate = engine.add_request(PROMPT, SAMPLED)
    engine.step()
    for one in (request, mate):
        assert engine.preempt(one.request_id)
    engine.step()
    engine.abort(mate.request_id)
    assert request.slot != first_slot
    decode(5)
    earlier = engine.add_request(PROMPT, SAMPLED.model_copy(update={"priority": -1}))
    assert engine.preempt(request.request_id)
    engine.step()
    assert request.slot == first_slot
    stale = engine._metadata._slots[first_slot]
    assert (stale.request, stale.num_counted < request.num_tokens) == (request, True)
    decode(3)
    counts = torch.bincount(torch.tensor(request.output_token_ids), minlength=128)
    assert engine._metadata._output_counts[first_slot].equal(counts.int())
    engine.abort(earlier.request_id)
    while engine.has_work:
        engine.step()
    assert_same([request], [job], Solo(target, scheduler__max_num_seqs=2))


@pytest.mark.parametrize("step", range(1, 7))
def test_prompt_logprobs_survive_a_preemption_inside_the_prompt(target: Path, solo: Solo, step: int) -> None:
    """None is lost, none is reported twice; with others beside it, so that chunks and decode steps take turns."""
    engine = make_engine(target, speculative__method="ngram")
    jobs = [Job(PROMPT, SAMPLED), Job(PROMPT[:50][::-1], SAMPLED), Job(PROMPT[:5], SAMPLED)]
    requests = [engine.add_request(job.prompt, job.params) for job in jobs]
    for _ in range(step):
        engine.step()
    preempted = [engine.preempt(request.request_id) for request in requests]
    assert any(preempted)
    while engine.has_work:
        engine.step()
    assert_same(requests, jobs, solo)
    assert [len(request.prompt_logprobs or ()) for request in requests] == [len(job.prompt) for job in jobs]


@pytest.mark.parametrize("case", proposer_cases())
def test_a_cache_too_small_for_all_preempts_the_youngest_and_changes_nothing(
    target: Path, other: Path, solo: Solo, case: str
) -> None:
    """The first never gives way, and everybody ends."""
    params = SAMPLED.model_copy(update={"max_tokens": 40, "prompt_logprobs": None})
    jobs = [Job(PROMPT[number : number + 9], params) for number in range(6)]
    engine = make_engine(target, **proposing(case, target, other), cache__num_blocks=24, cache__block_size=4)
    requests = run_jobs(engine, jobs)
    assert_same(requests, jobs, solo)
    assert requests[0].stats.num_preemptions == 0
    assert engine.stats.num_preemptions == sum(request.stats.num_preemptions for request in requests) > 0
    assert not any(per_request_state(engine).values())


def test_a_smaller_priority_number_goes_first_and_changes_no_output(target: Path, solo: Solo) -> None:
    params = SAMPLED.model_copy(update={"max_tokens": 40})
    jobs = [Job(PROMPT[n : n + 9], params.model_copy(update={"priority": -n})) for n in range(5)]
    engine = make_engine(target, speculative__method="ngram", cache__num_blocks=24, cache__block_size=4)
    requests = run_jobs(engine, jobs)
    assert_same(requests, jobs, solo)
    assert requests[4].stats.num_preemptions == 0
    assert sum(request.stats.num_preemptions for request in requests) > 0


def test_preempting_what_does_not_run_is_refused(target: Path) -> None:
    engine = make_engine(target, scheduler__max_num_seqs=1)
    runs, waits = (engine.add_request(PROMPT[:9], SAMPLED) for _ in range(2))
    assert not engine.preempt(runs.request_id), "no step was made yet"
    engine.step()
    assert engine.preempt(runs.request_id)
    assert not engine.preempt(waits.request_id)
    assert not engine.preempt("unknown")
    while engine.has_work:
        engine.step()
    assert not engine.preempt(runs.request_id)
    assert waits.stats.num_preemptions == 0
    assert outputs([runs]) == outputs([waits])


@pytest.mark.parametrize("case", ["none", "suffix", "draft_model", "layer_skip", "chain: with a model"])
def test_an_abort_in_any_state_frees_everything_at_once(target: Path, other: Path, solo: Solo, case: str) -> None:
    """R10: while it waits, in the prompt, decoding, preempted, replaying; the others go on."""
    engine = make_engine(target, **proposing(case, target, other), scheduler__max_num_seqs=2)
    job, mate = Job(PROMPT, SAMPLED), Job(PROMPT[:40], PENALISED)
    for steps in (0, 1, 3, 6, 9):
        for preempted in (False, True):
            requests = [engine.add_request(one.prompt, one.params) for one in (job, mate, job)]
            for _ in range(steps):
                engine.step()
            if preempted:
                engine.preempt(requests[0].request_id)
                engine.step()
            for doomed in [request for request in requests[::2] if request.finish_reason is None]:
                delta = engine.abort(doomed.request_id)
                assert delta is not None
                assert doomed.finish_reason == FinishReason.ABORT
                assert doomed.block_ids == []
            held = len(set(requests[1].block_ids))
            assert engine.pool.num_free == engine.pool.num_usable - held
            sizes = per_request_state(engine)
            assert all(size <= 1 for name, size in sizes.items() if name != "held blocks"), sizes
            while engine.has_work:
                engine.step()
            assert_same(requests[1:2], [mate], solo)
            assert not any(per_request_state(engine).values())


def test_mixed_requests_in_the_smallest_cache_keep_the_law(target: Path, solo: Solo) -> None:
    """With plenty, and with the fewest blocks that hold one request."""
    jobs = mixed_jobs(9, 8, longest=66, max_tokens=24)
    num_preemptions = []
    for num_blocks in (90, 24):
        engine = make_engine(target, speculative__method="ngram", cache__num_blocks=num_blocks, cache__block_size=4)
        assert_same(run_jobs(engine, jobs), jobs, solo)
        num_preemptions.append(engine.stats.num_preemptions)
    assert num_preemptions[0] == 0 < max(num_preemptions)
