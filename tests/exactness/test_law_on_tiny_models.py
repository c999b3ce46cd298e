"""Speculation never changes the output: tiny models, every proposer here, batch sizes, K, penalties, temperatures."""

import functools
from pathlib import Path

import pytest

from compspec.engine import Engine
from compspec.sampling.params import SamplingParams
from tests.law import Scripted, empty, guess, make_engine, make_prompts, oracle, outputs, ragged, run, wrong
from tests.tiny_models import tiny_model_folder

MAX_TOKENS = 24
NUMERICS = [("float32", "exact"), ("bfloat16", "exact"), ("float32", "fast")]
PENALTIES = {
    "none": {},
    "all": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "negative": {"frequency_penalty": -1.5, "repetition_penalty": 0.9},
}
TEMPERATURES = [0.0, 0.7, 2.0]


def params_for(temperature: float, penalty: str, seed: int = 11) -> SamplingParams:
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=seed, **PENALTIES[penalty])


class Lab:
    """Engines over one tiny model and the plain outputs to compare with, made once."""

    def __init__(self, folder: Path, dtype: str, numerics: str) -> None:
        self._make = functools.partial(make_engine, folder, model__dtype=dtype, numerics__mode=numerics)
        self._plain = self._make()
        self.prompts = make_prompts(12)
        self._solo: dict[SamplingParams, list[tuple[list[int], str]]] = {}

    def plain(self, params: SamplingParams) -> list[tuple[list[int], str]]:
        """Each prompt alone, without speculation."""
        if params not in self._solo:
            self._solo[params] = [outputs(run(self._plain, [prompt], params))[0] for prompt in self.prompts]
        return self._solo[params]

    def truth(self, params: SamplingParams) -> dict[tuple[int, ...], list[int]]:
        return {tuple(p): tokens for p, (tokens, _) in zip(self.prompts, self.plain(params), strict=True)}

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


@pytest.mark.parametrize("k", [1, 3, 5, 7])
@pytest.mark.parametrize("batch", [1, 4, 12])
def test_ngram_equals_plain(lab: Lab, k: int, batch: int) -> None:
    engine = lab.speculative(k, batch)
    for temperature in TEMPERATURES:
        for penalty in PENALTIES:
            params = params_for(temperature, penalty)
            got = run(engine, lab.prompts, params)
            assert outputs(got) == lab.plain(params), f"T={temperature} penalties={penalty}"
    assert engine.stats.num_accepted_tokens > 20, "nothing was accepted, so nothing was tested"
    assert engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens, "nothing was rejected"


@pytest.mark.parametrize("k", [1, 3, 5, 7])
@pytest.mark.parametrize("kind", ["oracle", "wrong", "random", "ragged", "empty"])
def test_adversarial_proposers_equal_plain(lab: Lab, k: int, kind: str) -> None:
    for temperature in TEMPERATURES:
        for penalty in PENALTIES:
            params = params_for(temperature, penalty)
            truth = lab.truth(params)
            draft = {
                "oracle": oracle(truth),
                "wrong": wrong(truth),
                "random": guess(k),
                "ragged": ragged(truth, k),
                "empty": empty,
            }[kind]
            engine = lab.speculative(k, 4, Scripted(draft, k))
            got = run(engine, lab.prompts[:6], params)
            assert outputs(got) == lab.plain(params)[:6], f"T={temperature} penalties={penalty}"
            stats = engine.stats
            assert (stats.num_draft_tokens > 0) == (kind != "empty")
            if kind == "oracle":
                assert stats.num_accepted_tokens == stats.num_draft_tokens
            if kind == "wrong":
                assert stats.num_accepted_tokens == 0


def test_requests_of_all_kinds_in_one_batch_equal_their_solo_runs(lab: Lab) -> None:
    each = [params_for(t, p, seed) for t in TEMPERATURES for p in PENALTIES for seed in (1, 2)][: len(lab.prompts)]
    engine = lab.speculative(5, 12)
    got = outputs(run(engine, lab.prompts, each))
    for index, params in enumerate(each):
        assert got[index] == lab.plain(params)[index]


def test_seeds_and_penalties_matter(lab: Lab) -> None:
    """The settings that the other tests vary do change the output."""
    found = {
        str(lab.plain(params))
        for params in [
            params_for(0.0, "none"),
            params_for(0.0, "all"),
            params_for(0.0, "negative"),
            params_for(0.7, "none"),
            params_for(2.0, "none"),
            params_for(2.0, "none", seed=12),
        ]
    }
    assert len(found) == 6
