"""Both scorers are one function: rows of one sequence, or each row a sequence of its own. Each keeps the law."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compspec.batch import Batch, DraftTokens, Scores
from compspec.engine import Engine
from compspec.request import Request
from compspec.sampling.params import SamplingParams
from tests.law import VOCAB, Scripted, make_engine, make_prompts, oracle, run, whole_outputs
from tests.tiny_models import tiny_model_folder

K = 5
MAX_TOKENS = 14
SCORERS = ("multi_query", "batch_expansion")
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=2)
HOT = GREEDY.model_copy(update={"temperature": 1.0, "seed": 7, "top_p": 0.9})
PENALISED = GREEDY.model_copy(update={"frequency_penalty": 0.8, "repetition_penalty": 1.3, "prompt_logprobs": 1})
PARAMS = [GREEDY, HOT, PENALISED]
Truth = dict[tuple[int, ...], list[int]]
Rows = dict[tuple[int, ...], Tensor]


def ragged_by_state(truth: Truth) -> Callable[[Request, int], list[int]]:
    """Right drafts and then wrong ones, how many of each a function of the request's tokens: alike in two engines."""
    right = oracle(truth)

    def draft(request: Request, most: int) -> list[int]:
        state = sum(request.token_ids.tolist())
        count = state % (most + 1)
        good = right(request, state // 7 % (count + 1))
        return good + [(state * (place + 3)) % VOCAB for place in range(count - len(good))]

    return draft


def watch(engine: Engine) -> Rows:
    """Collects the logits of every row that is scored, by the tokens it follows; drafts that fail included."""
    rows: Rows = {}
    score = engine._scorer.score

    def scoring(batch: Batch, drafts: DraftTokens) -> Scores:
        scores = score(batch, drafts)
        for index, entry in enumerate(batch.scheduled):
            end = entry.num_computed_tokens + entry.num_new_tokens
            drafted = drafts.token_ids[index, : drafts.num_draft_tokens[index]].tolist()
            for depth in range(len(drafted) + 1):
                seen = (*entry.request.token_ids[:end].tolist(), *drafted[:depth])
                rows[seen] = scores.logits[scores.first_row[index] + depth].float().clone()
        return scores

    engine._scorer.score = scoring
    return rows


def run_as_they_arrive(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Request]:
    """A new request every second step, so that prompt chunks and decode steps take turns."""
    requests = []
    for prompt, each in zip(prompts, params, strict=True):
        requests.append(engine.add_request(prompt, each))
        engine.step()
        engine.step()
    while engine.has_work:
        engine.step()
    assert engine.pool.num_free == engine.pool.num_usable
    return requests


def jobs() -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = make_prompts(9, seed=20)
    return prompts, [PARAMS[number % 3] for number in range(9)]


@pytest.mark.parametrize(
    ("family", "numerics"),
    [("llama", "exact"), ("mistral", "exact"), ("gemma2", "exact"), ("gpt2", "exact"), ("gemma2", "fast")],
)
def test_both_scorers_give_the_same_tokens_and_the_same_logits_for_every_row(
    models: Path, family: str, numerics: str
) -> None:
    """Ragged drafts, kept and not, with windows and soft caps, while other requests' prompts come in between."""
    folder = tiny_model_folder(family, models)
    prompts, params = jobs()
    settings = {"numerics__mode": numerics, "speculative__num_draft_tokens": K}
    plain = make_engine(folder, numerics__mode=numerics)
    solo = [run(plain, [prompt], each)[0].output_token_ids for prompt, each in zip(prompts, params, strict=True)]
    draft = ragged_by_state(dict(zip(map(tuple, prompts), solo, strict=True)))
    rows = {}
    for scorer in SCORERS:
        engine = make_engine(folder, Scripted(draft, K), speculative__scorer=scorer, **settings)
        rows[scorer] = watch(engine)
        requests = run_as_they_arrive(engine, prompts, params)
        assert [request.output_token_ids for request in requests] == solo
        assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
        assert engine.stats.num_prefill_forwards > len(prompts)
    multi_query, expanded = (rows[scorer] for scorer in SCORERS)
    assert multi_query.keys() == expanded.keys()
    assert len(multi_query) > 9 * MAX_TOKENS
    scale = torch.stack(list(multi_query.values())).abs().max()
    for seen, row in multi_query.items():
        assert (row - expanded[seen]).abs().max() <= 1e-4 * scale


@pytest.mark.parametrize(("family", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gemma2", "bfloat16")])
def test_batch_expansion_keeps_the_law_bit_for_bit(models: Path, family: str, dtype: str) -> None:
    """Against its own plain run: tokens and log-probabilities, in any batch, for any K and drafter."""
    folder = tiny_model_folder(family, models)
    prompts, params = jobs()
    settings: dict[str, Any] = {"model__dtype": dtype, "speculative__scorer": "batch_expansion"}
    plain = make_engine(folder, **settings)
    solo = [whole_outputs(run(plain, [prompt], each))[0] for prompt, each in zip(prompts, params, strict=True)]
    truth = {tuple(prompt): tokens for prompt, (tokens, *_) in zip(prompts, solo, strict=True)}
    for k in (2, 7):
        for proposer in (None, Scripted(ragged_by_state(truth), k)):
            engine = make_engine(
                folder, proposer, speculative__method="ngram", speculative__num_draft_tokens=k, **settings
            )
            assert whole_outputs(run_as_they_arrive(engine, prompts, params)) == solo
            assert engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("scorer", SCORERS)
def test_fast_numerics_keep_the_tokens_in_fp32(models: Path, scorer: str) -> None:
    folder = tiny_model_folder("llama", models)
    prompts, params = jobs()
    settings = {"numerics__mode": "fast", "speculative__scorer": scorer}
    plain = make_engine(folder, **settings)
    solo = [run(plain, [prompt], each)[0].output_token_ids for prompt, each in zip(prompts, params, strict=True)]
    for k in (1, 6):
        draft = ragged_by_state(dict(zip(map(tuple, prompts), solo, strict=True)))
        engine = make_engine(folder, Scripted(draft, k), speculative__num_draft_tokens=k, **settings)
        found = run_as_they_arrive(engine, prompts, params)
        assert [request.output_token_ids for request in found] == solo


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("max_num_seqs", [1, 5])
@pytest.mark.parametrize("scorer", SCORERS)
def test_the_widest_step_has_a_shape(models: Path, scorer: str, max_num_seqs: int, numerics: str) -> None:
    """Every slot taken and every draft made, in every step."""
    folder = tiny_model_folder("llama", models)
    prompts = make_prompts(max_num_seqs, seed=21, longest=20)
    plain = make_engine(folder, numerics__mode=numerics)
    solo = [run(plain, [prompt], GREEDY)[0].output_token_ids for prompt in prompts]
    engine = make_engine(
        folder,
        Scripted(lambda request, most: [5] * most, 7),
        speculative__num_draft_tokens=7,
        speculative__scorer=scorer,
        scheduler__max_num_seqs=max_num_seqs,
        numerics__mode=numerics,
    )
    rows = watch(engine)
    assert [request.output_token_ids for request in run(engine, prompts, GREEDY)] == solo
    assert len(rows) > 8 * max_num_seqs
    assert engine.stats.num_draft_tokens >= 7 * max_num_seqs
