"""The law, as one property: whatever requests meet in a batch, each output is that of its solo run without drafts.

A case draws prompts, parameters of every kind, who drafts and how much, batch mates, arrival order and who gives up.
What forbids or ends something is aimed at the output that the request would have without it, so that it takes effect.
Compared are tokens, how they ended, text, and the bits of all log-probabilities.
"""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from compspec.detokenizer import Detokenizer, OutputText
from compspec.engine import Engine
from compspec.errors import RequestError
from compspec.request import Request
from compspec.sampling.params import SamplingParams
from tests.law import Scripted, make_engine, whole_outputs
from tests.tiny_models import tiny_model_folder, tiny_tokenizer

VOCAB = 320  # the tokenizer has fewer, so the last rows are padding
MAX_DRAFTS = (5, 7, 2, 5, 7, 1)
KINDS = ("ragged", "oracle", "ragged", "oracle", "ngram", "repeat", "wrong", "empty")


def push_away_last(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Depends on the last token."""
    logits[token_ids[-1]] -= 4.0
    return logits


def depends_on_all(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Depends on every token."""
    return logits + 2.0 * torch.cos(torch.arange(len(logits)) * float(sum(token_ids) % 97))


def fails_sometimes(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Raises in some contexts."""
    if sum(token_ids[-3:]) % 11 == 0:
        raise ValueError("not here")
    return logits


PROCESSORS = [(push_away_last,), (depends_on_all, push_away_last), (fails_sometimes,)]


@dataclass(frozen=True)
class Job:
    """A request, when it arrives (in steps of the engine), and after how many steps its caller gives up.

    Attributes:
        aims: (what, where, how many tokens): parameters that are made from the output at that place.
    """

    prompt: list[int]
    params: SamplingParams
    aims: list[tuple[str, int, int]]
    arrives: int
    aborted_after: int | None


@dataclass(frozen=True)
class Case:
    """A batch and its drafter."""

    jobs: list[Job]
    num_drafts: int
    kind: str
    noise: int


def sometimes(strategy: st.SearchStrategy[Any], default: Any, weight: int = 3) -> st.SearchStrategy[Any]:
    """Mostly the default, so that mixes of a few parameters are common."""
    return st.one_of(*[st.just(default)] * weight, strategy)


@st.composite
def params(draw: st.DrawFn, alphabet: list[int]) -> SamplingParams:
    some = st.sampled_from(alphabet)
    max_tokens = draw(st.sampled_from([14, 12, 12, 14, 9, 5, 2, 1]))
    values = {
        "max_tokens": max_tokens,
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.0])),
        "seed": draw(st.sampled_from([0, 7, 2**63 - 1])),
        "top_k": draw(sometimes(st.sampled_from([1, 3, 40, 10_000]), 0)),
        "top_p": draw(sometimes(st.sampled_from([0.2, 0.9, 0.999]), 1.0)),
        "min_p": draw(sometimes(st.sampled_from([0.02, 0.5, 1.0]), 0.0)),
        "repetition_penalty": draw(sometimes(st.sampled_from([0.7, 1.05, 1.5, 30.0]), 1.0)),
        "presence_penalty": draw(sometimes(st.sampled_from([-2.0, 0.4, 2.0]), 0.0)),
        "frequency_penalty": draw(sometimes(st.sampled_from([-2.0, 0.3, 2.0]), 0.0)),
        "logit_bias": draw(
            sometimes(st.dictionaries(some, st.sampled_from([-100.0, -2.0, 1.5, 6.0]), max_size=4), None)
        ),
        "allowed_token_ids": draw(sometimes(st.just(tuple(alphabet)), None, weight=1)),
        "min_tokens": draw(sometimes(st.integers(0, max_tokens), 0)),
        "ignore_eos": draw(st.sampled_from([True, True, False])),
        "logits_processors": draw(sometimes(st.sampled_from(PROCESSORS), (), weight=5)),
        "logprobs": draw(sometimes(st.integers(0, 4), None)),
        "prompt_logprobs": draw(sometimes(st.integers(0, 2), None, weight=6)),
        "speculative": draw(sometimes(st.sampled_from([False, 1, 3, 99]), None, weight=5)),
    }
    return SamplingParams(**values)


aims = st.tuples(
    st.sampled_from(["bad_words", "stop", "bad_words", "stop_token_ids", "min_tokens", "bad_words", "logit_bias"]),
    st.sampled_from([4, 7, 2, 9, 1, 0, 3, 6, 11, 13]),
    st.sampled_from([2, 3, 1, 2]),
)


def aimed(job: Job, output: list[int], tokenizer: Any) -> Job:
    """The job with the parameters that its aims make of the output it has without them."""
    changes: dict[str, Any] = {"bad_words": (), "stop_token_ids": (), "stop": ()}
    for what, where, length in job.aims if output else []:
        place = where % len(output)
        tokens = tuple(output[place : place + length])
        text = tokenizer.decode(tokens, skip_special_tokens=True).strip("\ufffd")
        if what == "bad_words":
            changes[what] += (tokens,)
        elif what == "stop_token_ids":
            changes[what] += tokens[-1:]
        elif what == "stop" and text:
            changes[what] += (text[-2:],)
        elif what == "logit_bias":
            changes[what] = {**(job.params.logit_bias or {}), tokens[0]: -3.0}
        elif what == "min_tokens":
            changes[what] = min(place + length, job.params.max_tokens)
    return replace(job, params=job.params.model_copy(update=changes))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    alphabet = draw(st.lists(st.integers(2, VOCAB - 25), min_size=3, max_size=14, unique=True))
    jobs = []
    for _ in range(draw(st.integers(1, 5))):
        phrase = draw(st.lists(st.sampled_from(alphabet), min_size=1, max_size=12))
        length = draw(st.sampled_from([1, 2, len(phrase), 2 * len(phrase), 15, 16, 17, 32, 33, 50]))
        jobs.append(
            Job(
                prompt=(phrase * length)[:length],
                params=draw(params(alphabet)),
                aims=draw(st.lists(aims, min_size=draw(st.integers(0, 3)), max_size=5)),
                arrives=draw(st.integers(0, 6)),
                aborted_after=draw(sometimes(st.integers(0, 8), None, weight=8)),
            )
        )
    return Case(
        jobs=jobs,
        num_drafts=draw(st.sampled_from(MAX_DRAFTS)),
        kind=draw(st.sampled_from(KINDS)),
        noise=draw(st.integers(0, 2**16)),
    )


class Lab:
    """Engines over one tiny model, made once and used for every case: they must not remember."""

    def __init__(self, folder: Path, tokenizer: Any, dtype: str) -> None:
        self.tokenizer = tokenizer
        self._make = functools.partial(make_engine, folder, model__dtype=dtype, scheduler__max_num_seqs=3)
        self._plain = self._make()
        self._num_cases = 0

    @functools.cache  # noqa: B019  # the lab lives as long as its module
    def _speculative(self, num_drafts: int, ngram: bool) -> tuple[Engine, Scripted | None]:
        proposer = None if ngram else Scripted(lambda request, most: [], num_drafts)
        engine = self._make(
            proposer, speculative__method="ngram", speculative__num_draft_tokens=num_drafts, cache__num_blocks=40
        )
        return engine, proposer

    def _add(self, engine: Engine, job: Job) -> tuple[Request, OutputText]:
        text = OutputText(Detokenizer(self.tokenizer, job.prompt), job.params.stop, job.params.min_tokens)
        return engine.add_request(job.prompt, job.params, end_check=text.push), text

    def solo(self, job: Job) -> tuple[Any, ...]:
        """One job alone, without drafts."""
        request, text = self._add(self._plain, job)
        while self._plain.has_work:
            self._plain.step()
        text.finish()
        return *whole_outputs([request])[0], text.take()

    def together(self, case: Case, truth: list[list[int]]) -> list[tuple[Any, ...] | None]:
        """All jobs of a case, as they arrive; None where one was aborted."""
        engine, proposer = self._speculative(case.num_drafts, case.kind == "ngram")
        known: dict[str, list[int]] = {}
        if proposer is not None:
            proposer._draft = functools.partial(draft_tokens, case, known)
        running: dict[int, tuple[Request, OutputText]] = {}
        for step in range(1000):
            for index, job in enumerate(case.jobs):
                if job.arrives == step:
                    running[index] = self._add(engine, job)
                    known[running[index][0].request_id] = truth[index]
                if job.aborted_after is not None and job.arrives + job.aborted_after == step:
                    engine.abort(running[index][0].request_id)
            engine.step()
            if len(running) == len(case.jobs) and not engine.has_work:
                break
        assert engine.pool.num_free == engine.pool.num_usable, "blocks leaked"
        event("accepted drafts", bool(sum(request.stats.num_accepted_tokens for request, _ in running.values())))
        results: list[tuple[Any, ...] | None] = []
        for index in range(len(case.jobs)):
            request, text = running[index]
            text.finish()
            was_aborted = request.finish_reason == "abort"
            results.append(None if was_aborted else (*whole_outputs([request])[0], text.take()))
        return results


def draft_tokens(case: Case, known: dict[str, list[int]], request: Request, most: int) -> list[int]:
    """What an adversary drafts; a pure function of the request's state."""
    right = known[request.request_id][request.num_output_tokens :][:most]
    mix = case.noise + 31 * request.num_tokens
    if case.kind == "oracle":
        return right
    if case.kind == "wrong":
        return [(token + 1) % VOCAB for token in right]
    if case.kind == "ragged":
        good = right[: mix % (most + 1)]
        return good + [(mix * (place + 3)) % VOCAB for place in range((mix // 7) % (most - len(good) + 1))]
    if case.kind == "repeat":
        return [int(request.token_ids[-1 - mix % 2 if request.num_tokens > 1 else -1])] * most
    return []


@pytest.fixture(scope="module", params=[("llama", "bfloat16"), ("llama", "float32"), ("gemma3_text", "bfloat16")])
def lab(request: pytest.FixtureRequest, models: Path) -> Lab:
    family, dtype = request.param
    folder = tiny_model_folder(family, models, vocab_size=VOCAB)
    return Lab(folder, tiny_tokenizer(folder, 300), dtype)


def check(lab: Lab, case: Case) -> None:
    jobs, solo = [], []
    for job in case.jobs:
        free = lab.solo(replace(job, params=job.params.model_copy(update={"min_tokens": 0})))
        jobs.append(aimed(job, free[0], lab.tokenizer))
        try:
            solo.append(lab.solo(jobs[-1]))
        except RequestError:  # nothing is left to sample; other tests look at these
            assume(False)
    together = lab.together(replace(case, jobs=jobs), [tokens for tokens, *_ in solo])
    for alone, found in zip(solo, together, strict=True):
        assert found is None or found == alone


relaxed = functools.partial(
    settings,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


@relaxed(max_examples=170, derandomize=True)
@given(case=cases())
def test_every_request_of_any_batch_equals_its_solo_run_without_drafts(lab: Lab, case: Case) -> None:
    check(lab, case)


@pytest.mark.slow
@relaxed(max_examples=1700, print_blob=True)
@given(case=cases())
def test_the_same_in_ten_times_as_many_cases(lab: Lab, case: Case) -> None:
    check(lab, case)
