"""Aborts and preemptions that come from inside a step: a callback's, or a stream that is collected at any moment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compspec.batch import Batch, DraftTokens, StepOutput
from compspec.engine import Engine
from compspec.proposers.proposer import Proposer
from compspec.request import FinishReason, Request
from compspec.sampling.params import SamplingParams
from tests.law import make_engine, make_prompts, outputs, per_request_state, proposing, run

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = make_prompts(4, seed=3)


class Interrupting(Proposer):
    """Drafts nothing; does something at each of the moments at which a proposer is called."""

    def __init__(self, moment: str, act: Callable[[Batch], None]) -> None:
        self._moment, self._act = moment, act

    def _at(self, moment: str, batch: Batch) -> None:
        if moment == self._moment:
            self._act(batch)

    def prefill(self, batch: Batch) -> None:
        self._at("prefill", batch)

    def propose(self, batch: Batch) -> DraftTokens:
        self._at("propose", batch)
        return DraftTokens.from_lists([[] for _ in batch.scheduled], 5)

    def observe(self, batch: Batch, output: StepOutput) -> None:
        self._at("observe", batch)


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    assert engine.pool.num_free == engine.pool.num_usable, "blocks leaked"
    assert not any(per_request_state(engine).values())


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("moment", ["prefill", "propose", "observe"])
def test_an_abort_at_any_moment_of_a_step_takes_that_request_alone(target: Path, moment: str, numerics: str) -> None:
    truth = outputs(run(make_engine(target, numerics__mode=numerics), PROMPTS, GREEDY))
    seen: list[Any] = []

    def act(batch: Batch) -> None:
        if doomed.num_output_tokens >= (0 if moment == "prefill" else 3) and not seen:
            seen.append(engine.abort(doomed.request_id))
            assert engine.abort(doomed.request_id) is None, "once"

    engine = make_engine(target, Interrupting(moment, act), numerics__mode=numerics, cache__block_size=4)
    requests = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    doomed = requests[1]
    finish(engine)
    assert seen[0].finish_reason is doomed.finish_reason is FinishReason.ABORT
    assert doomed.output_token_ids == truth[1][0][: doomed.num_output_tokens]
    assert [outputs([one])[0] for one in requests if one is not doomed] == [truth[0], *truth[2:]]


@pytest.mark.parametrize("moment", ["prefill", "propose", "observe"])
def test_a_preemption_at_any_moment_of_a_step_changes_nothing(target: Path, moment: str) -> None:
    truth = outputs(run(make_engine(target), PROMPTS, GREEDY))
    asked: list[bool] = []

    def act(batch: Batch) -> None:
        if len(asked) < 6:
            asked.append(engine.preempt(batch.scheduled[-1].request.request_id))

    engine = make_engine(target, Interrupting(moment, act), cache__block_size=4)
    requests = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    finish(engine)
    assert sum(request.stats.num_preemptions for request in requests) == sum(asked) == 6
    assert outputs(requests) == truth


@pytest.mark.parametrize("case", ["ngram", "draft_model", "layer_skip"])
@pytest.mark.parametrize("what", ["abort", "preempt"])
def test_a_processor_can_abort_or_preempt_its_own_request(target: Path, other: Path, case: str, what: str) -> None:
    """Where a model drafts, it is called before the target has run."""
    (truth,) = outputs(run(make_engine(target), PROMPTS[:1], GREEDY))
    calls = 0

    def processor(token_ids: list[int], logits: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            getattr(engine, what)(request.request_id)
        return logits

    engine = make_engine(target, **proposing(case, target, other), cache__block_size=4)
    params = GREEDY.model_copy(update={"logits_processors": (processor,), "prompt_logprobs": 1})
    request = engine.add_request(PROMPTS[0], params)
    finish(engine)
    if what == "abort":
        assert request.finish_reason is FinishReason.ABORT
        assert request.output_token_ids == truth[0][: request.num_output_tokens] != truth[0]
    else:
        assert request.stats.num_preemptions == 1
        assert outputs([request]) == [truth]


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize("victim", ["own", "earlier", "later"])
@pytest.mark.parametrize("at", [1, 4, 5, 12])
def test_a_check_for_stop_texts_can_abort_any_request(target: Path, numerics: str, victim: str, at: int) -> None:
    """Its own, one whose part of the step is applied already (finished perhaps), or one that is still to come."""
    truth = outputs(run(make_engine(target, numerics__mode=numerics), PROMPTS[:3], GREEDY))
    deltas: list[Any] = []
    told = 0

    def check(token: int) -> str | None:
        nonlocal told
        told += 1
        if told == at:
            deltas.append(engine.abort(doomed.request_id))
        return None

    engine = make_engine(target, numerics__mode=numerics, cache__block_size=4)
    requests: list[Request] = []
    for index, prompt in enumerate(PROMPTS[:3]):
        requests.append(engine.add_request(prompt, GREEDY, end_check=check if index == 1 else None))
    doomed = requests[{"earlier": 0, "own": 1, "later": 2}[victim]]
    finish(engine)
    if deltas[0] is None:  # it had just ended
        assert doomed.finish_reason is FinishReason.LENGTH
        assert outputs(requests) == truth
        return
    index = requests.index(doomed)
    assert doomed.finish_reason is FinishReason.ABORT
    assert doomed.output_token_ids == truth[index][0][: doomed.num_output_tokens]
    assert [outputs([one])[0] for one in requests if one is not doomed] == [*truth[:index], *truth[index + 1 :]]


def test_a_request_that_has_ended_in_this_very_step_is_not_aborted_any_more(target: Path) -> None:
    """Its end is told with the step."""
    aborts: list[Any] = []

    def check(token: int) -> str | None:
        if first.finish_reason is not None and not aborts:
            aborts.append(engine.abort(first.request_id))
        return None

    engine = make_engine(target)
    first = engine.add_request(PROMPTS[0], GREEDY.model_copy(update={"max_tokens": 6}))
    engine.add_request(PROMPTS[1], GREEDY, end_check=check)
    ends = []
    while engine.has_work:
        ends += [delta.request.request_id for delta in engine.step() if delta.finish_reason is not None]
    assert aborts == [None]
    assert first.finish_reason is FinishReason.LENGTH
    assert ends[0] == first.request_id
    assert engine.num_aborts == 0


@pytest.mark.parametrize("case", ["ngram", "suffix", "draft_model", "layer_skip", "chain: with a model"])
@pytest.mark.parametrize("where", ["_scorer.score", "_proposer.observe", "_metadata.commit", "scheduler.update"])
def test_a_step_that_was_interrupted_is_made_up_for(
    target: Path, other: Path, case: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C: the same step comes again, with the same tokens."""
    truth = outputs(run(make_engine(target), PROMPTS, GREEDY))
    engine = make_engine(target, **proposing(case, target, other), cache__block_size=4)
    owner, name = where.split(".")
    part, calls = getattr(engine, owner), 0
    whole = getattr(part, name)

    def interrupted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 4 == 0:
            if name in ("observe", "commit"):
                whole(*given)  # it got that far
            raise KeyboardInterrupt
        return whole(*given)

    monkeypatch.setattr(part, name, interrupted)
    requests = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
    with torch.no_grad():
        for _ in range(200):
            if not engine.has_work:
                break
            try:
                engine.step()
            except KeyboardInterrupt:
                continue
    assert calls >= 8
    assert outputs(requests) == truth
    assert engine.pool.num_free == engine.pool.num_usable
