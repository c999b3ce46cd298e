"""A chain: the first proposer with drafts wins, request by request, and every proposer is told everything."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from compspec.batch import Batch, DraftTokens, StepOutput
from compspec.config import EngineConfig
from compspec.errors import ConfigError
from compspec.models.adapter import ModelAdapter
from compspec.models.loader import LoadedModel
from compspec.proposers.chain import ChainProposer
from compspec.proposers.proposer import Proposer, Target, check_drafts, make_proposer
from compspec.request import FinishReason, Request
from compspec.runner.model_runner import ModelRunner
from tests.unit.fakes import draft, entry, make_request, prefill, step_output

VOCAB = 12


class FakeProposer(Proposer):
    """Proposes what it is told for each request id; notes its calls."""

    def __init__(self, drafts: dict[str, list[int]], *, k: int = 3, name: str = "", sampled: bool = False) -> None:
        self.drafts, self.k, self.name, self.sampled = drafts, k, name, sampled
        self.asked: list[list[str]] = []
        self.told: list[Any] = []
        self.computed = 0

    @property
    def runners(self) -> Sequence[ModelRunner]:
        return [cast(ModelRunner, f"runner {self.name}")]

    def load(self, loaded: LoadedModel, config: EngineConfig) -> Sequence[ModelAdapter]:
        self.told.append(("load", loaded, config))
        return [cast(ModelAdapter, f"adapter {self.name}")]

    def start(self, target: Target) -> None:
        self.told.append(("start", target))

    def prefill(self, batch: Batch) -> None:
        self.told.append(("prefill", batch))

    def propose(self, batch: Batch) -> DraftTokens:
        ids = [part.request.request_id for part in batch.scheduled]
        self.asked.append(ids)
        drafts = draft(*[self.drafts.get(name, []) for name in ids], k=self.k)
        if not self.sampled:
            return drafts
        return DraftTokens(
            token_ids=drafts.token_ids, num_draft_tokens=drafts.num_draft_tokens, probs=self.probs()[: len(ids)]
        )

    def probs(self) -> torch.Tensor:
        """[R, k, V], of which each row differs, those without drafts too."""
        return torch.arange(1, 1 + 4 * self.k * VOCAB, dtype=torch.float32).reshape(4, self.k, VOCAB)

    def observe(self, batch: Batch, output: StepOutput) -> None:
        self.told.append(("observe", batch, output))

    def forget(self, request: Request) -> None:
        self.told.append(("forget", request))

    def reset(self) -> None:
        self.told.append(("reset",))

    def num_computed_tokens(self, request: Request) -> int:
        return self.computed


def batch_of(*ids: str, max_drafts: int = 3) -> Batch:
    requests = [make_request(request_id=name) for name in ids]
    parts = [entry(request, slot, max_drafts=max_drafts) for slot, request in enumerate(requests)]
    return Batch(scheduled=tuple(parts), is_prefill=False)


def test_the_first_that_proposes_anything_wins_request_by_request() -> None:
    first = FakeProposer({"b": [1, 2]})
    second = FakeProposer({"a": [3], "b": [4, 5, 6], "d": [7, 8]})
    third = FakeProposer({"a": [9], "c": [10], "d": [9]})
    batch = batch_of("a", "b", "c", "d", "e")
    drafts = ChainProposer([first, second, third], 3).propose(batch)
    assert drafts.token_ids.tolist() == [[3, -1, -1], [1, 2, -1], [10, -1, -1], [7, 8, -1], [-1, -1, -1]]
    assert drafts.num_draft_tokens.tolist() == [1, 2, 1, 2, 0]
    assert drafts.probs is None
    check_drafts(batch, drafts, VOCAB)


def test_a_proposer_is_asked_about_requests_without_drafts_alone() -> None:
    proposers = [FakeProposer({"b": [1]}), FakeProposer({"a": [2], "c": [3]}), FakeProposer({})]
    chain = ChainProposer(proposers, 3)
    chain.propose(batch_of("a", "b", "c"))
    assert [proposer.asked for proposer in proposers] == [[["a", "b", "c"]], [["a", "c"]], []]


def test_the_batch_that_is_passed_on_differs_in_its_requests_alone() -> None:
    seen: list[Batch] = []

    class Watching(FakeProposer):
        def propose(self, batch: Batch) -> DraftTokens:
            seen.append(batch)
            return super().propose(batch)

    batch = batch_of("a", "b")
    batch = Batch(scheduled=batch.scheduled, is_prefill=False, preempted=(make_request(),))
    ChainProposer([FakeProposer({"a": [1]}), Watching({})], 3).propose(batch)
    assert seen == [Batch(scheduled=batch.scheduled[1:], is_prefill=False, preempted=batch.preempted)]
    assert seen[0].scheduled[0] is batch.scheduled[1]


def test_a_proposer_may_return_fewer_columns() -> None:
    drafts = ChainProposer([FakeProposer({"a": [1]}, k=1), FakeProposer({}, k=0)], 3).propose(batch_of("a", "b"))
    assert drafts.token_ids.tolist() == [[1, -1, -1], [-1, -1, -1]]


def test_probabilities_are_those_of_whoever_drafted_and_certain_for_chosen_drafts() -> None:
    certain = FakeProposer({"a": [5, 0]})
    sampled = FakeProposer({"c": [2, 3]}, k=2, sampled=True)
    last = FakeProposer({"b": [VOCAB - 1]})
    batch = batch_of("a", "b", "c", "d")
    drafts = ChainProposer([certain, sampled, last], 3).propose(batch)
    check_drafts(batch, drafts, VOCAB)
    expected = torch.zeros(4, 3, VOCAB)
    expected[0, 0, 5] = expected[0, 1, 0] = 1
    expected[1, 0, VOCAB - 1] = 1
    # Asked about b, c and d: its row 1.
    expected[2, :2] = sampled.probs()[1]
    assert drafts.probs is not None
    assert drafts.probs.dtype == torch.float32
    assert torch.equal(drafts.probs, expected)


def test_two_proposers_may_sample() -> None:
    one = FakeProposer({"a": [1]}, sampled=True)
    two = FakeProposer({"b": [2]}, sampled=True)
    probs = ChainProposer([one, two], 3).propose(batch_of("a", "b")).probs
    assert probs is not None
    assert torch.equal(probs[0], one.probs()[0])
    assert torch.equal(probs[1], two.probs()[0])


def test_probabilities_of_a_proposer_that_drafted_nothing_are_not_needed() -> None:
    drafts = ChainProposer([FakeProposer({}, sampled=True), FakeProposer({"a": [1]})], 3).propose(batch_of("a"))
    assert drafts.probs is None


def test_every_proposer_is_told_everything_in_order() -> None:
    proposers = [FakeProposer({"a": [1]}, name="1"), FakeProposer({}, name="2")]
    chain = ChainProposer(proposers, 3)
    loaded, config, target = cast(LoadedModel, "loaded"), cast(EngineConfig, "config"), cast(Target, "target")
    assert chain.load(loaded, config) == ["adapter 1", "adapter 2"]
    assert chain.runners == ["runner 1", "runner 2"]
    chain.start(target)
    request = make_request(request_id="a")
    chunk, batch, output = prefill(request, 0, 0, 3), batch_of("a"), step_output([1])
    chain.prefill(chunk)
    chain.propose(batch)
    chain.observe(batch, output)
    chain.forget(request)
    chain.reset()
    told = [
        ("load", loaded, config),
        ("start", target),
        ("prefill", chunk),
        ("observe", batch, output),
        ("forget", request),
        ("reset",),
    ]
    assert [proposer.told for proposer in proposers] == [told, told]


def test_blocks_are_complete_as_far_as_for_every_proposer() -> None:
    proposers = [FakeProposer({}), FakeProposer({}), FakeProposer({})]
    for proposer, computed in zip(proposers, (7, 4, 9), strict=True):
        proposer.computed = computed
    assert ChainProposer(proposers, 3).num_computed_tokens(make_request()) == 4


@pytest.mark.parametrize("kind", [list, tuple])
def test_an_entry_is_a_name_or_a_mapping_with_options(kind: type) -> None:
    entries = kind([{"method": "ngram", "prompt_lookup_min": 2}, "suffix"])
    chain = make_proposer("chain", {"proposers": entries}, 3)
    # One token alone repeats, which is too short for the first.
    request = make_request([1, 2, 3, 1])
    stored = make_request([9], output=[4, 5])
    stored.finish_reason = FinishReason.STOP
    chain.forget(stored)
    parts = (entry(request, 0, max_drafts=3), entry(make_request([1, 2, 1, 2]), 1, max_drafts=3))
    parts += (entry(make_request([4]), 2, max_drafts=3),)
    drafts = chain.propose(Batch(scheduled=parts, is_prefill=False))
    assert drafts.token_ids.tolist() == [[2, 3, 1], [1, 2, 1], [5, -1, -1]]


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_a_chain_of_one_proposes_what_it_alone_would(name: str) -> None:
    parts = tuple(entry(make_request([1, 2, 1, 2][:n]), n, max_drafts=3) for n in range(1, 5))
    batch = Batch(scheduled=parts, is_prefill=False)
    alone = make_proposer(name, {}, 3).propose(batch)
    chain = make_proposer("chain", {"proposers": [name]}, 3).propose(batch)
    assert chain.token_ids.tolist() == alone.token_ids.tolist()
    assert chain.num_draft_tokens.tolist() == alone.num_draft_tokens.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "proposers.*required"),
        ({"proposers": []}, "at least one proposer"),
        ({"proposers": "ngram"}, "must be a list"),
        ({"proposers": {"method": "ngram"}}, "must be a list"),
        ({"proposers": ["ngram", "ngrams"]}, "'ngrams' cannot be part of a chain; there are: .*ngram, .*suffix"),
        ({"proposers": ["ngram", "none"]}, "'none' cannot be part of a chain"),
        ({"proposers": [{"method": "chain", "proposers": ["ngram"]}]}, "'chain' cannot be part of a chain"),
        ({"proposers": [3]}, "a name or a mapping with a 'method', not 3"),
        ({"proposers": [{"prompt_lookup_max": 3}]}, "a name or a mapping with a 'method'"),
        ({"proposers": [{"method": 3}]}, "a name or a mapping with a 'method'"),
        ({"proposers": [{"method": "ngram", "num_draft_tokens": 3}]}, "'num_draft_tokens' holds for the whole chain"),
        (
            {"proposers": ["suffix", {"method": "ngram", "prompt_lookup_max": 0}]},
            r"speculative.proposers\[1\] \(ngram\): .*'prompt_lookup_max'",
        ),
        (
            {"proposers": ["suffix", {"method": "ngram", "lookup": 3}]},
            r"speculative.proposers\[1\] \(ngram\): unknown key .*'lookup'; valid are: .*prompt_lookup_max",
        ),
        ({"proposers": ["ngram"], "order": 1}, "unknown key for method chain .*'order'; valid are: .*proposers"),
    ],
)
def test_a_wrong_chain_is_a_config_error_of_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make_proposer("chain", options, 3)
    assert "\n" not in str(caught.value)
