"""Speculation never changes the output: tiny models, every proposer here, batch sizes, K, penalties, temperatures."""

import functools
import itertools
from pathlib import Path

import pytest

from compspec.engine import Engine
from compspec.request import Request
from compspec.sampling.params import SamplingParams
from tests.law import Scripted, empty, guess, make_engine, make_prompts, oracle, outputs, ragged, run, wrong
from tests.tiny_models import tiny_model_folder

MAX_TOKENS = 24
NUMERICS = [("float32", "exact"), ("bfloat16", "exact"), ("float32", "fast")]
PENALTIES = {
    "none": {},
    "all": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4, "top_k": 20, "min_p": 0.01},
    "negative": {"frequency_penalty": -1.5, "repetition_penalty": 0.9, "top_p": 0.9},
}
TEMPERATURES = [0.0, 0.7, 2.0]


def params_for(temperature: float, penalty: str, seed: int = 11) -> SamplingParams:
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=seed, **PENALTIES[penalty])


JOBS = [
    (prompt, params_for(temperature, penalty, seed))
    for prompt, (temperature, penalty, seed) in zip(
        make_prompts(18), itertools.product(TEMPERATURES, PENALTIES, (11, 12)), strict=True
    )
]
PROMPTS = [prompt for prompt, _ in JOBS]
PARAMS = [params for _, params in JOBS]


class Lab:
    """Engines over one tiny model, and the plain outputs to compare with, made once."""

    def __init__(self, folder: Path, dtype: str, numerics: str) -> None:
        self._make = functools.partial(make_engine, folder, model__dtype=dtype, numerics__mode=numerics)
        self._plain = self._make()
        self.solo = self.solo_with(4)
        self.truth = {tuple(prompt): tokens for prompt, (tokens, _) in zip(PROMPTS, self.solo, strict=True)}

    @functools.cache  # noqa: B019  # as many entries as batch sizes, and the lab lives as long as the module
    def solo_with(self, max_num_seqs: int) -> list[tuple[list[int], str]]:
        """Each job alone in an engine of that size: its largest shape may be the one whose bits all others have."""
        plain = self._plain if max_num_seqs == 4 else self._make(scheduler__max_num_seqs=max_num_seqs)
        return [outputs(run(plain, [prompt], params))[0] for prompt, params in JOBS]

    def plain(self, prompt: list[int], params: SamplingParams) -> list[Request]:
        """One request alone, without speculation."""
        return run(self._plain, [prompt], params)

    def speculative(self, k: int, batch: int, proposer: Scripted | None = None) -> Engine:
        return self._make(
            proposer,
            speculative__method="ngram",
            speculative__num_draft_tokens=k,
            scheduler__max_num_seqs=batch,
        )


@pytest.fixture(scope="module", params=NUMERICS, ids=lambda pair: "-".join(pair))
def lab(request: pytest.FixtureRequest, models: Path) -> Lab:
    dtype, numerics = request.param
    return Lab(tiny_model_folder("llama", models), dtype, numerics)


@pytest.mark.parametrize("batch", [1, 4, 12])
@pytest.mark.parametrize("k", [1, 3, 5, 7])
def test_ngram_equals_plain(lab: Lab, k: int, batch: int) -> None:
    engine = lab.speculative(k, batch)
    assert outputs(run(engine, PROMPTS, PARAMS)) == lab.solo_with(batch)
    assert engine.stats.num_accepted_tokens > 20, "nothing was accepted, so nothing was tested"
    assert engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens, "nothing was rejected"


@pytest.mark.parametrize("kind", ["oracle", "wrong", "random", "ragged", "empty"])
@pytest.mark.parametrize("k", [1, 3, 5, 7])
def test_adversarial_proposers_equal_plain(lab: Lab, k: int, kind: str) -> None:
    draft = {
        "oracle": oracle(lab.truth),
        "wrong": wrong(lab.truth),
        "random": guess(k),
        "ragged": ragged(lab.truth, k),
        "empty": empty,
    }[kind]
    engine = lab.speculative(k, 4, Scripted(draft, k))
    assert outputs(run(engine, PROMPTS, PARAMS)) == lab.solo
    stats = engine.stats
    assert (stats.num_draft_tokens > 0) == (kind != "empty")
    if kind == "oracle":
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    if kind == "wrong":
        assert stats.num_accepted_tokens == 0
    if kind == "ragged":
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_seeds_temperatures_and_penalties_matter(lab: Lab) -> None:
    """The settings that the other tests vary do change the output."""
    some = PROMPTS[4:8]

    def tokens(temperature: float, penalty: str, seed: int = 11) -> str:
        params = params_for(temperature, penalty, seed)
        return str([outputs(lab.plain(prompt, params)) for prompt in some])

    found = [tokens(temperature, penalty) for temperature in TEMPERATURES for penalty in PENALTIES]
    assert len({*found, tokens(2.0, "none", seed=12)}) == len(TEMPERATURES) * len(PENALTIES) + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gemma2", "gemma3_text", "mistral", "gpt2"])
def test_experts_windows_and_soft_caps_keep_the_law(models: Path, family: str, dtype: str) -> None:
    """Families whose layers could make a row depend on its neighbours, beside llama above."""
    folder = tiny_model_folder(family, models)
    plain = make_engine(folder, model__dtype=dtype)
    solo = [outputs(run(plain, [prompt], params))[0] for prompt, params in JOBS[::2]]
    for k in (2, 7):
        drafter = make_engine(folder, model__dtype=dtype, speculative__method="ngram", speculative__num_draft_tokens=k)
        assert outputs(run(drafter, PROMPTS[::2], PARAMS[::2])) == solo
        assert drafter.stats.num_accepted_tokens > 0
