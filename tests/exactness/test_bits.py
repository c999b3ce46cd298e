"""Exact numerics: a position has the same logits bit for bit, whatever was drafted, accepted or batched beside it."""

from pathlib import Path

import pytest
import torch

from compspec.batch import Batch, DraftTokens, Scores, StepOutput
from compspec.engine import Engine
from compspec.sampling.metadata import SamplingMetadata
from compspec.sampling.params import SamplingParams
from compspec.sampling.sampler import Sampled
from tests.law import make_engine, make_prompts, run
from tests.tiny_models import tiny_model_folder

Bits = dict[tuple[tuple[int, ...], int], torch.Tensor]


def record(engine: Engine) -> Bits:
    """Collects the logits row of every output token, by (prompt, position), as the engine runs."""
    rows: Bits = {}
    score, verify = engine._scorer.score, engine._verifier.verify
    kept: list[Scores] = []

    def scoring(batch: Batch, drafts: DraftTokens) -> Scores:
        kept[:] = [score(batch, drafts)]
        return kept[0]

    def verifying(sampled: Sampled, metadata: SamplingMetadata, batch: Batch, drafts: DraftTokens) -> StepOutput:
        output = verify(sampled, metadata, batch, drafts)
        for index, entry in enumerate(batch.scheduled):
            request = entry.request
            prompt = tuple(request.token_ids[: request.num_prompt_tokens].tolist())
            for row in range(len(output.token_ids[index])):
                place = kept[0].first_row[index] + row
                rows[prompt, request.num_tokens + row] = kept[0].logits[place].clone()
        return output

    engine._scorer.score, engine._verifier.verify = scoring, verifying
    return rows


@pytest.mark.parametrize("family", ["llama", "mistral", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_have_the_same_bits_for_any_drafts_and_batch(models: Path, dtype: str, family: str) -> None:
    folder = tiny_model_folder(family, models)
    prompts = make_prompts(6)
    params = SamplingParams(max_tokens=20, ignore_eos=True, frequency_penalty=0.2)
    plain = make_engine(folder, model__dtype=dtype)
    expected = record(plain)
    for prompt in prompts:
        run(plain, [prompt], params)
    assert len(expected) == 6 * 20
    for k in (1, 4, 7):
        engine = make_engine(folder, model__dtype=dtype, speculative__method="ngram", speculative__num_draft_tokens=k)
        found = record(engine)
        run(engine, prompts, params)
        assert engine.stats.num_accepted_tokens > 5
        assert found.keys() == expected.keys()
        different = [place for place in expected if not torch.equal(found[place], expected[place])]
        assert not different, f"{len(different)} rows differ, first at position {different[0][1]}"
