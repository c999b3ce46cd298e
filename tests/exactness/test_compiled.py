"""The compiled runner: no compilation and no eager step after start-up, the same law, no copy of the KV cache."""

from pathlib import Path

import pytest
import torch

from compspec.attention.backend import in_force
from compspec.engine import Engine
from compspec.runner import compiled
from compspec.runner.inputs import Query
from compspec.sampling.params import SamplingParams
from tests.law import make_engine, make_prompts, outputs, run
from tests.tiny_models import tiny_model_folder

SAMPLED = SamplingParams(max_tokens=10, temperature=0.9, seed=5, repetition_penalty=1.2, top_p=0.9, top_k=40)
GREEDY = SamplingParams(max_tokens=10)


@pytest.fixture(scope="module")
def folder(models: Path) -> Path:
    return tiny_model_folder("llama", models)


@pytest.fixture(scope="module", params=[("bfloat16", "exact"), ("float32", "fast")], ids=lambda pair: "-".join(pair))
def engine(request: pytest.FixtureRequest, folder: Path) -> Engine:
    dtype, numerics = request.param
    return make_engine(
        folder,
        model__dtype=dtype,
        numerics__mode=numerics,
        speculative__method="ngram",
        speculative__num_draft_tokens=3,
        compile__mode="reduce-overhead",
        numerics__prefill_chunk=64,
        cache__num_blocks=600,
    )


def test_batches_that_shrink_and_grow_keep_the_law_and_never_compile(engine: Engine) -> None:
    """Requests come and go through every bucket; each equals its solo run without speculation."""
    prompts = make_prompts(9, longest=100)
    params = [SAMPLED if index % 2 else GREEDY for index in range(len(prompts))]
    params = [each.model_copy(update={"max_tokens": 4 + 3 * index}) for index, each in enumerate(params)]
    plain = [each.model_copy(update={"speculative": False}) for each in params]
    solo = [outputs(run(engine, [prompt], each))[0] for prompt, each in zip(prompts, plain, strict=True)]
    before = engine.stats.num_accepted_tokens
    assert outputs(run(engine, prompts, params)) == solo
    assert outputs(run(engine, prompts[::-1], params[::-1])) == solo[::-1]
    stats = engine.stats
    assert stats.num_accepted_tokens > before
    assert stats.num_compiled_buckets == len(engine.runner.buckets.all) >= 4
    assert stats.num_recompilations == 0
    assert stats.num_eager_steps == 0


def test_a_call_that_would_compile_again_is_an_error(engine: Engine) -> None:
    """The guard that makes the counters above trustworthy."""
    bucket = engine.runner.buckets.decode[0]
    step = engine.runner._steps[bucket]
    buffers = engine.runner._buffers[bucket]
    inputs, host = buffers.fill([]), (buffers.block_table, buffers.starts)
    wrong = (inputs[0].repeat(1, 3), inputs[1].repeat(1, 3), *inputs[2:])
    plan = in_force(engine.runner.attention.plan(bucket, *host))
    with plan, compiled.no_recompilation("default"), torch.no_grad(), pytest.raises(RuntimeError, match="recompile"):
        step(*wrong)


def test_compiled_logits_are_those_of_the_eager_model(engine: Engine, folder: Path) -> None:
    dtype = str(engine.loaded.adapter.dtype).removeprefix("torch.")
    eager = make_engine(folder, model__dtype=dtype, speculative__method="none", numerics__prefill_chunk=64)
    query = [Query(token_ids=make_prompts(3)[2], start=0, block_ids=[1, 2, 3, 4, 5])]
    found = []
    for one in (engine, eager):
        bucket = one.runner.buckets.select(1, 40, is_prefill=True)
        found.append(one.runner.run(bucket, query)[0].float())
    tolerance = 1e-5 if dtype == "float32" else 0.05
    scale = found[1].abs().max()
    assert (found[0] - found[1]).abs().max() <= tolerance * scale


def test_poisoned_scratch_and_free_blocks_change_nothing(engine: Engine) -> None:
    prompts = make_prompts(3)
    clean = outputs(run(engine, prompts, SAMPLED))
    engine.reset()  # no block is found by what it held
    for cache in (*engine.runner.k_caches, *engine.runner.v_caches):
        cache.fill_(float("nan"))
    assert outputs(run(engine, prompts, SAMPLED)) == clean


def test_writing_keys_copies_no_cache(engine: Engine) -> None:
    """The write is in place in the graph: the caches keep their storage, and no step allocates as much as one."""
    from torch.profiler import ProfilerActivity, profile

    pointers = [cache.data_ptr() for cache in engine.runner.k_caches]
    bucket = engine.runner.buckets.decode[0]
    query = [Query(token_ids=[5], start=0, block_ids=[1])]
    engine.runner.run(bucket, query)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        engine.runner.run(bucket, query)
    cache_bytes = engine.runner.k_caches[0].numel() * engine.runner.k_caches[0].element_size()
    largest = max(event.self_cpu_memory_usage for event in seen.events())
    assert largest < cache_bytes / 4
    assert [layer.module.compspec_k_cache.data_ptr() for layer in engine.loaded.adapter.layers] == pointers
    assert engine.runner.k_caches[0][engine.runner.block_size].abs().sum() > 0, "nothing was written"
