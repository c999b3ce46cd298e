"""The law with the CUDA backend, on a CPU: whole engines over FlashInfer's own wrappers and a stand-in for its module.

All is fp32, and compared are tokens, ends and the bits of all log-probabilities. With a window, the order in which
FlashInfer's kernel sums keys moves with a row's place. Models with one are tested without that order, which leaves
all that is decided on the host; the last tests are about the order.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from compspec.attention.backend import AttentionPlan
from compspec.attention.flashinfer import FlashInferBackend
from compspec.batch import SCRATCH_BLOCK, Bucket
from compspec.engine import Engine
from compspec.errors import NumericsError
from compspec.request import Request
from compspec.runner import model_runner
from compspec.sampling.params import SamplingParams
from tests.flashinfer_interpreter import StandIn, installed
from tests.law import Scripted, empty, guess, make_engine, oracle, ragged, run, whole_outputs, wrong
from tests.tiny_models import tiny_model_folder

pytest.importorskip("flashinfer")

PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4, "min_p": 0.01}
GREEDY = SamplingParams(max_tokens=16, logprobs=2)
PARAMS = [
    GREEDY,
    GREEDY.model_copy(update={"temperature": 0.8, "seed": 3}),
    GREEDY.model_copy(update={**PENALTIES, "prompt_logprobs": 1}),
    GREEDY.model_copy(update={**PENALTIES, "temperature": 1.3, "seed": 4, "top_p": 0.9}),
]
# One token, and around the ends of one and of two chunks of 32.
LENGTHS = [1, 31, 32, 33, 63, 64, 65, 7]
# float64: without the order of tiles.
STATES = {"llama": torch.float32, "mistral": torch.float64, "gemma3_text": torch.float64}
# Two kinds of layers in one model, each with wrappers of its own.
MIXED = {"gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]}}


def make_prompt(length: int, seed: int) -> list[int]:
    """A phrase, repeated."""
    phrase = np.random.default_rng(seed).integers(3, 128, max(1, length // 3))
    return np.resize(phrase, length).tolist()


PROMPTS = [make_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
JOBS = [PARAMS[number % len(PARAMS)] for number in range(len(PROMPTS))]


@contextmanager
def engines_on_flashinfer(**options: Any) -> Iterator[StandIn]:
    """Inside, engines are made with the CUDA backend."""
    with installed(**options) as stand_in, pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "make_backend", lambda setup, wanted: FlashInferBackend(setup))
        yield stand_in


class Lab:
    """Engines over one tiny model, and the plain outputs to compare with, made once."""

    def __init__(self, folder: Path, cpu: Engine, cache: Path) -> None:
        self.cpu = cpu
        # Self-tests of another backend, or of another order of sums, say nothing of these.
        self.make = functools.partial(make_engine, folder, cache_dir=str(cache))
        self.plain = self.make()
        self.solo = [
            whole_outputs(run(self.plain, [prompt], params))[0] for prompt, params in zip(PROMPTS, JOBS, strict=True)
        ]
        self.truth = {tuple(prompt): tokens for prompt, (tokens, *_) in zip(PROMPTS, self.solo, strict=True)}

    def drafting(self, kind: str, k: int, **settings: Any) -> Engine:
        drafts: dict[str, Callable[[Request, int], list[int]]] = {
            "oracle": oracle(self.truth),
            "wrong": wrong(self.truth),
            "random": guess(k),
            "ragged": ragged(self.truth, k),
            "empty": empty,
        }
        proposer = Scripted(drafts[kind], k) if kind in drafts else None
        return self.make(proposer, speculative__method="ngram", speculative__num_draft_tokens=k, **settings)


@pytest.fixture(scope="module", params=STATES)
def lab(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tiny_model_folder(request.param, models, **MIXED.get(request.param, {}))
    cpu = make_engine(folder)
    with engines_on_flashinfer(state=STATES[request.param]):
        yield Lab(folder, cpu, tmp_path_factory.mktemp("cache"))


CASES = [
    ("ngram", 5),
    ("oracle", 7),
    ("wrong", 4),
    ("random", 6),
    ("empty", 3),
    *[("ragged", k) for k in range(1, 8)],
]


@pytest.mark.parametrize(("kind", "k"), CASES)
def test_drafts_never_change_the_output(lab: Lab, kind: str, k: int) -> None:
    """Greedy and sampled, with penalties and log-probabilities of prompts, more requests than fit at once."""
    engine = lab.drafting(kind, k)
    assert isinstance(engine.runner.attention, FlashInferBackend)
    assert whole_outputs(run(engine, PROMPTS, JOBS)) == lab.solo
    stats = engine.stats
    assert (stats.num_draft_tokens > 0) == (kind != "empty")
    if kind in ("ngram", "ragged"):
        assert stats.num_accepted_tokens > 0
    if kind == "oracle":
        assert stats.num_accepted_tokens == stats.num_draft_tokens


@pytest.mark.parametrize("lab", ["mistral"], indirect=True)
@pytest.mark.parametrize("max_num_seqs", [1, 6])
def test_other_batch_sizes_give_the_same_output(lab: Lab, max_num_seqs: int) -> None:
    engine = lab.drafting("ragged", 7, scheduler__max_num_seqs=max_num_seqs)
    assert whole_outputs(run(engine, PROMPTS, JOBS)) == lab.solo


@pytest.mark.parametrize("lab", ["llama", "gemma3_text"], indirect=True)
def test_each_draft_as_a_sequence_of_its_own_gives_the_same_output(lab: Lab) -> None:
    settings = {"speculative__scorer": "batch_expansion", "scheduler__max_num_seqs": 2, "numerics__decode_width": 4}
    prompts, jobs = PROMPTS[:4], JOBS[:4]
    plain = lab.make(**settings)
    solo = [whole_outputs(run(plain, [prompt], params))[0] for prompt, params in zip(prompts, jobs, strict=True)]
    engine = lab.drafting("ragged", 3, **settings)
    assert whole_outputs(run(engine, prompts, jobs)) == solo
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


def test_tokens_are_those_of_the_cpu_backend(lab: Lab) -> None:
    """fp32, so a difference would be a tie: the message says where, and how far apart the two best tokens are."""
    prompts = [make_prompt(length, seed=40 + length) for length in (1, 20, 32, 33, 50, 64, 90)]
    found, expected = run(lab.plain, prompts, GREEDY), run(lab.cpu, prompts, GREEDY)
    assert lab.cpu.runner.attention.name == "cpu"
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.logprobs is not None
        for place, (token, wanted) in enumerate(zip(one.output_token_ids, other.output_token_ids, strict=True)):
            best = sorted((entry.logprob for entry in one.logprobs[place].values()), reverse=True)
            assert token == wanted, f"prompt {number}, output {place}, margin {best[0] - best[1]:.2g}"


class Poison:
    """Fills what no request owns with large values, and what is no part of a request in block tables with junk.

    Keys may be as large as a float can be. The kernel sums the values that one of its warps masked altogether before
    it multiplies them by zero, so a few of them must not overflow. NaN never gets into the cache of a GPU.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rng = np.random.default_rng(0)
        self._plan = engine.runner.attention.plan
        self.num_replaced = 0
        engine.runner.attention.plan = self.plan

    def spread(self) -> None:
        """Over every slot without a token, before a step."""
        runner, size = self._engine.runner, self._engine.runner.block_size
        free = torch.ones(runner.num_blocks * size, dtype=torch.bool)
        for request in self._engine.scheduler.running:
            at = np.arange(request.num_computed_tokens)
            free[np.asarray(request.block_ids)[at // size] * size + at % size] = False
        for keys, values in zip(runner.k_caches, runner.v_caches, strict=True):
            sign = 1.0 if self._rng.random() < 0.5 else -1.0
            keys[free], values[free] = sign * 3e38, sign * 1e36

    def plan(self, bucket: Bucket, block_table: NDArray[np.int32], starts: NDArray[np.int64]) -> AttentionPlan:
        """Blocks of others where rows of padding look, and no blocks at all beyond."""
        table = block_table.copy()
        for row, start in enumerate(starts):
            seen = -(-(int(start) + bucket.query_len) // self._engine.runner.block_size)
            junk = (table[row] == SCRATCH_BLOCK) & (np.arange(table.shape[1]) < seen)
            table[row, junk] = self._rng.integers(1, self._engine.runner.num_blocks, int(junk.sum()))
            table[row, seen:] = 2**31 - 1
            self.num_replaced += int(junk.sum())
        return self._plan(bucket, table, starts)


def test_scratch_free_blocks_and_the_rest_of_block_tables_change_nothing(lab: Lab) -> None:
    engine = lab.drafting("ragged", 5)
    poison = Poison(engine)
    requests = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, JOBS, strict=True)]
    while engine.has_work:
        poison.spread()
        engine.step()
    assert whole_outputs(requests) == lab.solo
    assert poison.num_replaced > 20
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


def test_fast_numerics_keep_the_tokens(models: Path, tmp_path: Path) -> None:
    """Keys are split among blocks, so bits differ with the batch; in fp32 tokens do not."""
    folder = tiny_model_folder("llama", models)
    prompts = [make_prompt(length, seed=length) for length in (180, 150, 20, 33)]
    expected = [request.output_token_ids for request in run(make_engine(folder), prompts, GREEDY)]
    with engines_on_flashinfer(num_sm=16) as stand_in:
        plain = make_engine(folder, numerics__mode="fast", cache_dir=str(tmp_path))
        assert [run(plain, [prompt], GREEDY)[0].output_token_ids for prompt in prompts] == expected
        truth = dict(zip(map(tuple, prompts), expected, strict=True))
        for k in (1, 5):
            engine = make_engine(
                folder,
                Scripted(ragged(truth, k), k),
                numerics__mode="fast",
                speculative__num_draft_tokens=k,
                cache_dir=str(tmp_path),
            )
            assert [request.output_token_ids for request in run(engine, prompts, GREEDY)] == expected
        assert any(plan.num_blocks > plan.batch_size for plan in stand_in.plans if plan.uniform_q_len)
        assert all(plan.disable_split_kv is False for plan in stand_in.plans)


def test_the_self_test_finds_that_a_window_breaks_the_law(models: Path, tmp_path: Path) -> None:
    """The kernel's order of sums moves with a row's place in the window. `refusal` does not let it come to this."""
    with engines_on_flashinfer(), pytest.raises(NumericsError):
        make_engine(tiny_model_folder("mistral", models), cache_dir=str(tmp_path))


def test_the_self_test_goes_beyond_a_window_as_far_as_there_is_room(models: Path, tmp_path: Path) -> None:
    folder = tiny_model_folder("mistral", models, sliding_window=600, max_position_embeddings=640)
    with engines_on_flashinfer(), pytest.raises(NumericsError):
        make_engine(folder, cache_dir=str(tmp_path), numerics__prefill_chunk=256, scheduler__max_num_seqs=1)
