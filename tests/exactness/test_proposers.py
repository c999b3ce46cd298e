"""Whoever drafts, and whatever happens to a request meanwhile: its output is that of its solo run without drafts."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import compspec.proposers.proposer
from compspec import CapacityError
from compspec.batch import Batch, DraftTokens
from compspec.config import make_config
from compspec.engine import Engine
from compspec.models.loader import load_model
from compspec.request import Request
from compspec.runner.kv_cache import plan_memory
from compspec.sampling.params import SamplingParams
from tests.law import (
    Job,
    Solo,
    assert_same,
    assert_same_tokens,
    kv_of,
    make_engine,
    make_prompts,
    mixed_jobs,
    per_request_state,
    proposer_cases,
    proposing,
    run,
    run_disturbed,
    run_jobs,
    whole_outputs,
    with_noise,
    with_weak_end,
)
from tests.tiny_models import tiny_model_folder

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = GREEDY.model_copy(update={"temperature": 1.0, "seed": 3})
PENALISED = SAMPLED.model_copy(
    update={"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.5, "top_k": 30}
)
K = "speculative__num_draft_tokens"

# Shapes of the engine: solo runs have the same, but no drafts and no prefix cache.
SHAPES: dict[str, dict[str, Any]] = {
    "chunk 16, one at a time": {"numerics__prefill_chunk": 16, "scheduler__max_num_seqs": 1},
    "chunk 32": {},
    "chunk 48, width 16": {"numerics__prefill_chunk": 48, "numerics__decode_width": 16, "scheduler__max_num_seqs": 3},
    "chunk 64, many at a time": {"numerics__prefill_chunk": 64, "scheduler__max_num_seqs": 12},
    "bfloat16": {"model__dtype": "bfloat16"},
    "one width": {"numerics__plain_width": None, "scheduler__max_num_seqs": 2},
    "batch expansion": {"speculative__scorer": "batch_expansion"},
}

# Of what an output must not hang on: shape, and settings beside it.
SETUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "K 1": ("chunk 16, one at a time", {K: 1, "cache__block_size": 16}),
    "K 2, blocks of 1": ("chunk 32", {K: 2, "cache__block_size": 1}),
    "K 3, blocks of 4": ("chunk 64, many at a time", {K: 3, "cache__block_size": 4}),
    "K 4, no prefix cache": ("chunk 32", {K: 4, "cache__prefix_caching": False}),
    "K 5, bfloat16": ("bfloat16", {K: 5}),
    "K 6, blocks of 32": ("one width", {K: 6, "cache__block_size": 32}),
    "K 7, few blocks": ("chunk 32", {K: 7, "cache__num_blocks": 24, "cache__block_size": 4}),
    "K 15": ("chunk 48, width 16", {K: 15, "cache__block_size": 32}),
    "batch expansion": ("batch expansion", {K: 3}),
}


class Lab:
    """Solo runs by the engine's shape."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cache  # noqa: B019  # the lab lives as long as its module
    def solo(self, shape: str) -> Solo:
        return Solo(self._folder, **SHAPES[shape])


@pytest.fixture(scope="module")
def lab(target: Path) -> Lab:
    return Lab(target)


def chunk_of(settings: dict[str, Any]) -> int:
    return int(settings.get("numerics__prefill_chunk", 32))


def some_pairs() -> Iterator[Any]:
    """Every proposer with every setup; of these a third in the default run, each proposer and each setup among them."""
    for number, case in enumerate(proposer_cases()):
        for place, setup in enumerate(SETUPS):
            marks = [pytest.mark.slow] if (number + place) % 3 else []
            yield pytest.param(case, setup, marks=marks)


@pytest.mark.parametrize(("case", "setup"), list(some_pairs()))
def test_every_proposer_keeps_the_law(target: Path, other: Path, lab: Lab, case: str, setup: str) -> None:
    """With a cold prefix cache and a warm one, and with requests that are preempted between any two steps."""
    shape, more = SETUPS[setup]
    settings = {**SHAPES[shape], **more}
    solo = lab.solo(shape)
    sizes = {"longest": 50, "max_tokens": 30} if "few blocks" in setup else {"longest": 98}
    jobs = mixed_jobs(10, 1, chunk=chunk_of(settings), **sizes)
    engine = make_engine(target, **proposing(case, target, other), **settings)
    assert_same(run_jobs(engine, jobs), jobs, solo)
    if "few blocks" in setup:
        assert engine.stats.num_preemptions > 0, "the cache was large enough for all"
    assert_same(run_disturbed(engine, jobs, seed=len(case)), jobs, solo)
    stats = engine.stats
    assert (stats.num_draft_tokens > 0) == (case != "none")
    if setup not in ("K 1", "K 15") and case != "none":
        assert stats.num_accepted_tokens > 0, "nothing was accepted, so nothing was tested"
    if "few blocks" not in setup:
        assert (stats.num_cached_tokens > 0) == (setup != "K 4, no prefix cache")
    assert not any(per_request_state(engine).values()), per_request_state(engine)


@pytest.mark.parametrize("case", ["draft_model", "layer_skip"])
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3", "mixtral", "gpt2", "opt"])
def test_models_that_draft_keep_the_law_in_every_family(models: Path, family: str, case: str) -> None:
    """Windows, experts, learned positions: with the model's own first layers, and with another model beside it."""
    folder = with_weak_end(tiny_model_folder(family, models))
    solo = Solo(folder)
    jobs = mixed_jobs(7, 2, longest=70)
    engine = make_engine(folder, **proposing(case, folder, with_noise(folder)), cache__block_size=4)
    assert_same(run_disturbed(engine, jobs, seed=1), jobs, solo)
    assert engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("case", proposer_cases())
def test_fast_numerics_keep_the_tokens_of_fp32(target: Path, other: Path, case: str) -> None:
    """Blocks of outputs are shared there too, and a prompt may be found whole after a preemption."""
    jobs = [job.with_params(logprobs=None, prompt_logprobs=None) for job in mixed_jobs(9, 3)]
    solo = Solo(target, numerics__mode="fast")
    engine = make_engine(target, **proposing(case, target, other), numerics__mode="fast", cache__block_size=4)
    assert_same_tokens(run_jobs(engine, jobs), jobs, solo)
    assert_same_tokens(run_disturbed(engine, jobs, seed=2), jobs, solo)


@pytest.mark.parametrize(("case", "block"), [(case, bool(at % 2)) for at, case in enumerate(proposer_cases("none"))])
def test_greedy_requests_keep_the_law_under_the_ratio_test(
    target: Path, other: Path, solo: Solo, case: str, block: bool
) -> None:
    greedy = [job.with_params(temperature=0.0) for job in mixed_jobs(7, 4, longest=70)]
    sampled = [job.with_params(temperature=1.0) for job in greedy]
    jobs = [job for pair in zip(greedy, sampled, strict=True) for job in pair]
    settings = {"speculative__verifier": "rejection", "speculative__block_verification": block}
    engine = make_engine(target, **proposing(case, target, other), **settings)
    requests = run_disturbed(engine, jobs, seed=3)
    assert_same(requests[::2], greedy, solo)
    assert engine.stats.num_accepted_tokens > 0


def test_a_proposer_without_a_row_of_options_is_told_to_get_one(monkeypatch: pytest.MonkeyPatch, target: Path) -> None:
    monkeypatch.setattr("tests.law.names", lambda: [*compspec.proposers.proposer.names(), "newcomer"])
    assert "newcomer" in proposer_cases()
    with pytest.raises(AssertionError, match=r"'newcomer' is new: add a row .* PROPOSERS"):
        proposing("newcomer", target, target)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("case", ["draft_model: target", "layer_skip"])
def test_every_draft_of_the_target_itself_is_accepted(
    models: Path, target: Path, case: str, k: int, params: SamplingParams
) -> None:
    """L1. In a batch, after preemptions, and for prompts that the prefix cache has; or where the last layer adds
    nothing, so that the first is the target."""
    if case == "layer_skip":
        target = with_weak_end(tiny_model_folder("llama", models), share=0.0)
    engine = make_engine(target, **proposing(case, target, target), **{K: k})
    jobs = [Job(tuple(prompt), params) for prompt in make_prompts(8, seed=2)]
    for requests in (run_jobs(engine, jobs), run_disturbed(engine, jobs, seed=4, preempt=0.2)):
        for request in requests:
            stats = request.stats
            assert stats.num_draft_tokens == stats.num_accepted_tokens > 0
            if not stats.num_preemptions:
                assert stats.num_decode_steps == -(-(params.max_tokens - 1) // (k + 1))


@pytest.mark.parametrize("case", proposer_cases())
def test_a_prompt_of_one_token_is_like_any_other(target: Path, other: Path, solo: Solo, case: str) -> None:
    """L2."""
    jobs = [Job((token,), params) for token in (0, 2, 64, 127) for params in (GREEDY, PENALISED)]
    engine = make_engine(target, **proposing(case, target, other))
    assert_same(run_disturbed(engine, jobs, seed=5), jobs, solo)


@pytest.mark.parametrize("length", [40, 49, 55, 56, 57, 80])
@pytest.mark.parametrize("limit", ["its own context", "an option"])
def test_a_shorter_draft_model_stops_drafting_and_says_so(models: Path, limit: str, length: int) -> None:
    """E6: at the first position, in the middle, and before the request began."""
    target = tiny_model_folder("llama", models)
    settings: dict[str, Any] = {"speculative__model": str(target), "speculative__max_model_len": 56}
    if limit == "its own context":
        settings = {"speculative__model": str(tiny_model_folder("llama", models, max_position_embeddings=56))}
    engine = make_engine(target, speculative__method="draft_model", **settings)
    job = Job(tuple(make_prompts(8, seed=6, longest=90)[7] * 90)[:length], GREEDY)
    (alone,) = Solo(target).all([job])
    short, request = run_jobs(engine, [Job((5, 6, 7), GREEDY), job])
    assert whole_outputs([request]) == [alone]
    assert short.stats.speculation_off_because is None
    assert request.stats.speculation_off_because == "the draft model's context is 56 tokens"
    # A draft follows each of the context's tokens, the last one included; all are right.
    assert request.stats.num_accepted_tokens == request.stats.num_draft_tokens
    assert (request.stats.num_draft_tokens > 0) == (length + 1 <= 56)
    assert_same(run_disturbed(engine, [job] * 3, seed=6, at_once=2), [job] * 3, Solo(target))


class Watched:
    """Stands for a proposer and checks what the engine hands it, and what it has after each step."""

    def __init__(self, engine: Engine) -> None:
        self.num_prefills = self.num_proposals = 0
        self._proposer = proposer = engine._proposer
        self._prefill, self._propose = proposer.prefill, proposer.propose
        proposer.prefill, proposer.propose = self.prefill, self.propose  # type: ignore[method-assign]

    def prefill(self, batch: Batch) -> None:
        assert batch.is_prefill
        assert all(entry.max_draft_tokens == 0 for entry in batch.scheduled)
        self.num_prefills += 1
        self._prefill(batch)

    def propose(self, batch: Batch) -> DraftTokens:
        assert not batch.is_prefill
        self.num_proposals += 1
        drafts = self._propose(batch)
        for row, entry in enumerate(batch.scheduled):
            is_behind = entry.num_computed_tokens < entry.request.num_tokens - 1
            assert not (is_behind and drafts.num_draft_tokens[row]), "drafts for tokens that are known already"
        return drafts


@pytest.mark.parametrize("case", proposer_cases("none"))
def test_prompt_chunks_and_replayed_steps_are_never_drafted_for(target: Path, other: Path, case: str) -> None:
    """R2: a chunk samples where the prompt ends alone, and nothing is proposed for it."""
    engine = make_engine(target, **proposing(case, target, other), numerics__prefill_chunk=16)
    watched = Watched(engine)
    requests = run_disturbed(engine, [Job(tuple(range(3, 70)), GREEDY)] * 4, seed=7)
    assert watched.num_prefills > 5
    assert watched.num_proposals > 5
    assert all(request.stats.num_steps == 1 + request.stats.num_decode_steps for request in requests)


@pytest.mark.parametrize("case", ["draft_model", "layer_skip", "chain: with a model", "suffix"])
def test_no_padding_reaches_an_embedding(target: Path, other: Path, solo: Solo, case: str) -> None:
    """R6: fewer drafts than K, none at all, and requests without speculation in the same step."""
    engine = make_engine(target, **proposing(case, target, other), **{K: 7})
    seen: list[int] = []
    for runner in engine._runners():
        module = next(part for part in runner.adapter.module.modules() if isinstance(part, torch.nn.Embedding))
        module.register_forward_pre_hook(lambda _, args: seen.extend([int(args[0].min()), int(args[0].max())]))
    jobs = [Job((9, 8, 7), GREEDY.model_copy(update={"speculative": k, "max_tokens": 8})) for k in (False, 1, 2, None)]
    assert_same(run_jobs(engine, jobs), jobs, solo)
    assert min(seen) >= 0
    assert max(seen) < 128


@pytest.mark.parametrize("case", proposer_cases("none"))
def test_steps_that_accept_nothing_change_nothing(target: Path, other: Path, solo: Solo, case: str) -> None:
    """R1: the drafts are replaced by ones that are never right."""
    job = Job(tuple(range(3, 40)), GREEDY)
    truth = solo(job)[0]
    engine = make_engine(target, **proposing(case, target, other))
    propose = engine._proposer.propose

    def spoiled(batch: Batch) -> DraftTokens:
        drafts = propose(batch)
        token_ids = drafts.token_ids.copy()
        for row, entry in enumerate(batch.scheduled):
            done = entry.request.num_output_tokens
            for place in range(int(drafts.num_draft_tokens[row])):
                token_ids[row, place] = (truth[done + place] + 1) % 128
        return DraftTokens(token_ids=token_ids, num_draft_tokens=drafts.num_draft_tokens)

    engine._proposer.propose = spoiled  # type: ignore[method-assign]
    (request,) = run_jobs(engine, [job])
    assert_same([request], [job], solo)
    assert request.stats.num_accepted_tokens == 0 < request.stats.num_draft_tokens
    assert request.stats.num_decode_steps == 23


@pytest.mark.parametrize("case", ["draft_model", "draft_model: target", "layer_skip", "ngram", "suffix: without store"])
def test_ten_requests_in_a_row_are_drafted_for_as_the_first(target: Path, other: Path, case: str) -> None:
    """R7: with or without the blocks of the one before, and whatever other request came between."""
    engine = make_engine(target, **proposing(case, target, other))
    job = Job(tuple(make_prompts(8, seed=2)[6]), GREEDY)
    found = []
    for number in range(10):
        (request,) = run_jobs(engine, [job])
        found.append((request.stats.num_draft_tokens, request.stats.accepted_per_position))
        run_jobs(engine, mixed_jobs(2, number))
    assert found == [found[0]] * 10
    assert sum(found[0][1]) > 0


def test_a_store_of_outputs_drafts_better_each_time_and_no_output_changes(target: Path, solo: Solo) -> None:
    """R7 for what remembers outputs on purpose."""
    engine = make_engine(target, speculative__method="suffix")
    job = Job(tuple(make_prompts(8, seed=2)[6]), SAMPLED)
    steps = []
    for _ in range(3):
        (request,) = run_jobs(engine, [job])
        assert_same([request], [job], solo)
        steps.append(request.stats.num_decode_steps)
    assert steps[0] > steps[1] >= steps[2]


def drafter_lengths(engine: Engine) -> dict[str, int]:
    proposers = [engine._proposer, *getattr(engine._proposer, "_proposers", ())]
    return next(proposer._num_valid for proposer in proposers if hasattr(proposer, "_num_valid"))


def stepped(engine: Engine, jobs: list[Job], seed: int | None) -> Iterator[list[Request]]:
    """Runs jobs; yields those that run after each step. With a seed, preempts some."""
    rng = np.random.default_rng(seed)
    requests = [engine.add_request(job.prompt, job.params) for job in jobs]
    while engine.has_work:
        engine.step()
        yield [request for request in requests if request.slot is not None]
        running = engine.scheduler.running
        if seed is not None and running and rng.random() < 0.15:
            assert engine.preempt(running[int(rng.integers(len(running)))].request_id)


@pytest.mark.parametrize("disturbed", [False, True])
@pytest.mark.parametrize("case", ["draft_model", "draft_model: target", "chain: with a model"])
def test_what_a_draft_model_holds_is_what_it_would_compute(
    target: Path, other: Path, case: str, disturbed: bool
) -> None:
    """R9: after each step it is valid for no more than was committed, at most one short, and right to the last bit but
    for rounding; R5: whatever chunks, windows, hits and preemptions it was made in."""
    model = target if case.endswith("target") else other
    engine = make_engine(target, **proposing(case, target, other), numerics__prefill_chunk=16)
    whole = make_engine(model, numerics__prefill_chunk=256, cache__prefix_caching=False)
    (runner,) = engine._proposer.runners
    params = [GREEDY, PENALISED, SAMPLED, GREEDY.model_copy(update={"speculative": 2})]
    jobs = [Job(job.prompt, params[number % 4]) for number, job in enumerate(mixed_jobs(7, 5, chunk=16, longest=60))]
    num_compared = num_behind = 0
    for number, running in enumerate(stepped(engine, [*jobs, *jobs], 8 if disturbed else None)):
        lengths = drafter_lengths(engine)
        assert set(lengths) <= {request.request_id for request in running}
        for request in running:
            num_valid = lengths.get(request.request_id, 0)
            assert num_valid <= max(request.num_computed_tokens, request.num_prompt_tokens), "more than was committed"
            if request.num_output_tokens > 1 and not request.is_behind and not case.startswith("chain"):
                behind = request.num_tokens - 1 - num_valid
                num_behind += behind == 1
                assert behind <= 1 or request.stats.num_preemptions or request.num_output_tokens == 24
            if number % 4 == 0 and num_valid:
                mine = kv_of(runner, request.block_ids, num_valid)
                again = whole.add_request(request.token_ids[:num_valid].tolist(), SamplingParams(max_tokens=1))
                blocks = whole.pool.allocate(0)
                whole.scheduler._admit()
                while again.finish_reason is None:
                    whole.scheduler._reserve(again, num_valid, [])
                    blocks = again.block_ids
                    whole.step()
                torch.testing.assert_close(mine, kv_of(whole.runner, blocks, num_valid), atol=2e-4, rtol=1e-3)
                num_compared += 1
    assert num_compared > 10
    assert num_behind > 0 or case.startswith("chain")
    assert (engine.stats.num_preemptions > 0) == disturbed


def config_of(target: Path, **settings: Any) -> Any:
    base = {"model.source": str(target), "model.device": "cpu", "compile.mode": "none"}
    return make_config({}, {**base, **{name.replace("__", "."): value for name, value in settings.items()}})


def test_the_memory_budget_counts_the_draft_model(models: Path, target: Path, other: Path) -> None:
    """M1: its weights, and its keys and values in every block; an error names the knob."""
    config = config_of(target)
    loaded, draft = (load_model(config_of(each).model, config.cache_path).adapter for each in (target, other))
    alone = plan_memory(config, [loaded], 256, 2**32)
    both = plan_memory(config, [loaded, draft], 256, 2**32)
    assert both.weight_bytes == loaded.weight_bytes + draft.weight_bytes > alone.weight_bytes > 0
    assert both.block_bytes == 2 * alone.block_bytes
    token_bytes = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, their size, fp32
    assert alone.block_bytes == 16 * token_bytes
    # One request of 256 tokens, in GiB: as much as one model needs, but not two.
    memory = 17 * 16 * token_bytes / 2**30
    make_engine(target, cache__memory=memory)
    with pytest.raises(CapacityError, match=r"cache\.memory"):
        make_engine(target, **proposing("draft_model", target, other), cache__memory=memory)
    engine = make_engine(target, **proposing("draft_model", target, other), cache__memory=2 * memory)
    assert engine.runner.num_blocks == 17 == engine._proposer.runners[0].num_blocks
    assert make_engine(target, **proposing("layer_skip", target, other), cache__memory=memory).runner.num_blocks == 17
    with pytest.raises(CapacityError, match=r"lower cache\.num_blocks"):
        make_engine(target, **proposing("draft_model", target, other), cache__num_blocks=2**31)


def test_layers_that_draft_take_no_memory_of_their_own(target: Path, other: Path) -> None:
    engine = make_engine(target, **proposing("layer_skip", target, other))
    (runner,) = engine._proposer.runners
    assert [cache.data_ptr() for cache in runner.k_caches] == [engine.runner.k_caches[0].data_ptr()]
    own = {parameter.data_ptr() for parameter in runner.adapter.module.parameters()}
    assert own < {parameter.data_ptr() for parameter in engine.runner.adapter.module.parameters()}


@pytest.mark.parametrize("case", ["ngram", "suffix", "chain"])
def test_lookups_in_a_prompt_of_50000_tokens_work(target: Path, other: Path, case: str) -> None:
    """M2; how long they take is for a benchmark."""
    proposer = make_engine(target, **proposing(case, target, other))._proposer
    text = np.random.default_rng(0).integers(0, 128, 50_000).tolist()
    text[-3:] = text[100:103]
    request = Request("0", text, GREEDY, seed=0, max_tokens=8)
    entry = compspec.batch.ScheduledRequest(
        request=request, slot=0, num_computed_tokens=49_999, num_new_tokens=1, max_draft_tokens=4, samples=True
    )
    drafts = proposer.propose(Batch(scheduled=(entry,), is_prefill=False))
    count = int(drafts.num_draft_tokens[0])
    assert count > 0
    assert drafts.token_ids[0, :count].tolist() == text[103 : 103 + count]


def test_what_cannot_be_speculated_says_why(target: Path, other: Path) -> None:
    """M4."""
    ask = GREEDY.model_copy(update={"speculative": False, "max_tokens": 4})
    (request,) = run(make_engine(target), [[5, 6]], GREEDY)
    assert request.stats.speculation_off_because == "speculative.method is none"
    for case in proposer_cases("none"):
        engine = make_engine(target, **proposing(case, target, other))
        refused, drafted = run(engine, [[5, 6], [5, 6]], [ask, GREEDY])
        assert refused.stats.speculation_off_because == "the request asked for none"
        assert drafted.stats.speculation_off_because is None
        assert refused.stats.num_draft_tokens == 0
