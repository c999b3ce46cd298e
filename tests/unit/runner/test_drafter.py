"""A drafter's tokens are those that the target's sampler would choose from the draft model's logits, one by one."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compspec.batch import Scores
from compspec.config import make_config
from compspec.request import Request
from compspec.runner.buckets import Buckets
from compspec.runner.drafter import Drafted, Drafter, draft_tokens
from compspec.sampling.metadata import MetadataState
from compspec.sampling.noise import DRAFT_STREAM, TARGET_STREAM, GumbelNoise
from compspec.sampling.sampler import NO_TOKEN, Sampled, Sampler
from tests.unit.fakes import decode, draft, make_request
from tests.unit.runner.fake_model import FakeModelRunner, fake_adapter, logits_after

VOCAB = 12
CPU = torch.device("cpu")
SAMPLER = Sampler(GumbelNoise(VOCAB, CPU))


def new_state() -> MetadataState:
    return MetadataState(4, VOCAB, CPU, max_model_len=80, eos_token_ids=(10, 11))


class Drafting:
    """A drafter and requests whose tokens before the last the draft model has computed, but for the last `behind`."""

    def __init__(
        self, requests: Sequence[Request], *, vocab_size: int = VOCAB, behind: Sequence[int] = (), stream: int = 0
    ) -> None:
        config = make_config({}, {"model.source": "x", "scheduler.max_num_seqs": 4, "cache.block_size": 4})
        buckets = Buckets.of_draft(config, has_prompts=False)
        self.runner = FakeModelRunner(fake_adapter(vocab_size), config, 80, buckets=buckets)
        self.requests = requests
        self.entries = decode(*requests).scheduled
        for number, request in enumerate(requests):
            request.block_ids = [1 + number + 4 * place for place in range(20)]
        behind = behind or [0] * len(requests)
        self.starts = [request.num_tokens - 1 - more for request, more in zip(requests, behind, strict=True)]
        for request, start in zip(requests, self.starts, strict=True):
            self.runner.store(request, start)
        self._drafter = Drafter(self.runner, VOCAB, new_state(), SAMPLER, stream)  # type: ignore[arg-type]
        self._stream = stream

    def draft(self, counts: Sequence[int]) -> Drafted:
        return self._drafter.draft(self.entries, self.starts, counts)

    def window(self, tokens: Sequence[Sequence[int]]) -> tuple[Sampled, tuple[int, ...]]:
        """All rows of the windows at once, by the rules of the target: row j after j drafts."""
        rows = [
            self._row([*request.token_ids.tolist(), *own[:depth]])
            for request, own in zip(self.requests, tokens, strict=True)
            for depth in range(len(own) + 1)
        ]
        batch, drafts = decode(*self.requests), draft(*tokens)
        first = [sum(len(own) + 1 for own in tokens[:number]) for number in range(len(tokens))]
        scores = Scores(logits=torch.stack(rows), first_row=tuple(first))
        metadata = new_state().build(batch, drafts, scores)
        return SAMPLER.sample(scores, metadata, self._stream), metadata.row_starts

    def _row(self, tokens: list[int]) -> Tensor:
        row = torch.full((VOCAB,), float("-inf"))
        own = logits_after(tokens, self.runner.adapter.vocab_size)[:VOCAB]
        row[: len(own)] = own
        return row

    def check(self, drafted: Drafted, counts: Sequence[int]) -> None:
        """Each draft is the sampler's choice after those before it; nothing follows a row without a choice."""
        sampled, row_starts = self.window(drafted.tokens)
        for number, tokens in enumerate(drafted.tokens):
            chosen = sampled.token_ids[row_starts[number] : row_starts[number + 1]].tolist()
            assert chosen[: len(tokens)] == tokens
            assert len(tokens) <= counts[number]
            ended = len(tokens) < counts[number]
            assert not ended or chosen[len(tokens)] == NO_TOKEN, "a draft is missing"
            assert drafted.num_forwards[number] == len(tokens) + ended


def sum_processor(token_ids: list[int], logits: Tensor) -> Tensor:
    """Depends on every token before the row."""
    logits[sum(token_ids) % VOCAB] += 3
    return logits


def picky_processor(token_ids: list[int], logits: Tensor) -> Tensor:
    """Leaves nothing after some token sequences."""
    return logits if sum(token_ids) % 3 else torch.full_like(logits, float("-inf"))


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.8]),
        "top_k": st.sampled_from([0, 3]),
        "top_p": st.sampled_from([1.0, 0.7]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "seed": st.integers(0, 5),
        "repetition_penalty": st.sampled_from([1.0, 1.8]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 2.0]),
        "logit_bias": st.sampled_from([None, {1: 2.0, 5: -3.0}]),
        "bad_words": st.sampled_from([(), ((3,), (1, 2), (5, 1), (1, 5, 4), (2, 2))]),
        "allowed_token_ids": st.sampled_from([None, None, (1, 2, 5, 10)]),
        "min_tokens": st.sampled_from([0, 3, 6]),
        "stop_token_ids": st.sampled_from([(), (5,)]),
        "logits_processors": st.sampled_from([(), (sum_processor,), (sum_processor, picky_processor)]),
    }
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
REQUESTS = st.lists(st.tuples(TOKENS, TOKENS, PARAMS, st.integers(0, 5), st.booleans()), min_size=1, max_size=4)


def made(specs: list[tuple[list[int], list[int], dict[str, Any], int, bool]]) -> tuple[list[Request], list[int], Any]:
    requests = [make_request(prompt, output=output, **params) for prompt, output, params, _, _ in specs]
    return requests, [count for *_, count, _ in specs], [int(behind) for *_, behind in specs]


@settings(max_examples=250, deadline=None)
@given(REQUESTS, st.sampled_from([TARGET_STREAM, DRAFT_STREAM]), st.sampled_from([VOCAB - 4, VOCAB, VOCAB + 5]))
def test_each_draft_is_what_the_sampler_chooses_after_the_drafts_before_it(
    specs: list[Any], stream: int, vocab_size: int
) -> None:
    requests, counts, behind = made(specs)
    drafting = Drafting(requests, vocab_size=vocab_size, behind=behind, stream=stream)
    drafting.check(drafting.draft(counts), counts)


@settings(max_examples=100, deadline=None)
@given(REQUESTS)
def test_the_distribution_of_each_sampled_draft_stands_in_its_place(specs: list[Any]) -> None:
    """In a batch with a request in front that is not drafted for."""
    requests, counts, behind = made(specs)
    drafting = Drafting(requests, behind=behind, stream=DRAFT_STREAM)
    drafted = drafting.draft(counts)
    rows = [number + 1 for number in range(len(requests))]
    made_of = draft_tokens(drafted, rows, len(requests) + 1, 6)
    assert made_of.token_ids.shape == (len(requests) + 1, 6)
    assert made_of.num_draft_tokens.tolist() == [0, *map(len, drafted.tokens)]
    if max(counts) == 0:
        assert made_of.probs is None
        return
    assert made_of.probs is not None and made_of.probs.dtype == torch.float32
    assert made_of.probs.shape == (len(requests) + 1, 6, VOCAB)
    sampled, row_starts = drafting.window(drafted.tokens)
    for number, tokens in enumerate(drafted.tokens):
        first = row_starts[number]
        expected = sampled.logits[first : first + len(tokens)].softmax(-1)
        torch.testing.assert_close(made_of.probs[number + 1, : len(tokens)], expected, rtol=0, atol=0)
        own = torch.tensor(tokens, dtype=torch.int64)
        assert bool((made_of.probs[number + 1, : len(tokens)].gather(1, own[:, None]) > 0).all())
    assert not made_of.probs[0].any()


def test_drafts_that_share_the_targets_noise_need_no_distributions() -> None:
    drafting = Drafting([make_request(temperature=1.0)])
    drafted = drafting.draft([3])
    assert drafted.probs == []
    assert draft_tokens(drafted, [0], 1, 3).probs is None


def test_streams_have_noise_of_their_own() -> None:
    requests = [make_request([number], temperature=1.0) for number in range(4)]
    shared = Drafting(requests, stream=TARGET_STREAM).draft([5] * 4)
    own = Drafting(requests, stream=DRAFT_STREAM).draft([5] * 4)
    assert shared.tokens != own.tokens


def test_one_forward_per_draft_runs_the_newest_token_alone_in_the_smallest_shape() -> None:
    requests = [make_request([3] * length, output=[4, 5]) for length in (2, 3, 4)]
    drafting = Drafting(requests, behind=[0, 1, 0])
    drafted = drafting.draft([3, 1, 0])
    found = [
        (str(bucket), [(query.token_ids, query.start, query.writes) for query in queries])
        for bucket, queries in drafting.runner.calls
    ]
    first, _, _ = drafted.tokens
    assert found == [
        ("decode 4x2", [([5], 3, True), ([4, 5], 3, True)]),
        ("decode 1x2", [(first[:1], 4, True)]),
        ("decode 1x2", [(first[1:2], 5, True)]),
    ]
    assert [len(tokens) for tokens in drafted.tokens] == drafted.num_forwards == [3, 1, 0]
    assert all(
        query.block_ids == request.block_ids
        for _, queries in drafting.runner.calls
        for query, request in zip(queries, requests, strict=False)
    )


def test_where_nothing_is_asked_for_nothing_runs() -> None:
    drafting = Drafting([make_request()])
    assert drafting.draft([0]) == Drafted(tokens=[[]], num_forwards=[0], probs=[])
    assert Drafting([]).draft([]) == Drafted(tokens=[], num_forwards=[], probs=[])
    assert drafting.runner.calls == []


def test_a_row_without_a_token_ends_its_requests_drafts_alone() -> None:
    def fails_at_7(token_ids: list[int], logits: Tensor) -> Tensor:
        if len(token_ids) == 7:
            raise ValueError("no more")
        return logits

    requests = [make_request([3, 4, 5], output=[6], logits_processors=[fails_at_7]), make_request([3], output=[6])]
    drafting = Drafting(requests)
    drafted = drafting.draft([5, 5])
    assert [len(tokens) for tokens in drafted.tokens] == [3, 5]
    assert drafted.num_forwards == [4, 5]
    assert [len(queries) for _, queries in drafting.runner.calls] == [2, 2, 2, 2, 1]
    drafting.check(drafted, [5, 5])


def test_tokens_that_the_draft_model_lacks_are_not_drafted_however_much_they_are_wanted() -> None:
    request = make_request(logit_bias={VOCAB - 1: 100.0})
    drafted = Drafting([request], vocab_size=VOCAB - 1).draft([4])
    assert len(drafted.tokens[0]) == 4
    assert VOCAB - 1 not in drafted.tokens[0]
    only = make_request(allowed_token_ids=[VOCAB - 1])
    assert Drafting([only], vocab_size=VOCAB - 1).draft([4]).tokens == [[]]
    assert Drafting([only], vocab_size=VOCAB).draft([4]).tokens == [[VOCAB - 1] * 4]


def test_tokens_that_the_target_lacks_are_not_drafted() -> None:
    requests = [make_request([number], temperature=1.0) for number in range(4)]
    drafted = Drafting(requests, vocab_size=4 * VOCAB).draft([5] * 4)
    assert all(0 <= token < VOCAB for tokens in drafted.tokens for token in tokens)


def test_padding_of_the_vocabulary_is_not_drafted() -> None:
    sampler = Sampler(GumbelNoise(VOCAB, CPU), tokenizer_vocab_size=2)
    drafting = Drafting([make_request()])
    drafter = Drafter(drafting.runner, VOCAB, new_state(), sampler, TARGET_STREAM)  # type: ignore[arg-type]
    assert set(drafter.draft(drafting.entries, drafting.starts, [6]).tokens[0]) <= {0, 1}


@pytest.mark.parametrize("behind", [-1, 2])
def test_a_model_that_is_further_behind_than_its_rows_is_our_bug(behind: int) -> None:
    drafting = Drafting([make_request(range(6), output=[1, 2, 3])], behind=[behind])
    with pytest.raises(AssertionError, match="further behind"):
        drafting.draft([1])


def test_drafts_of_some_requests_stand_in_their_rows_of_the_whole_batch() -> None:
    drafted = Drafted(tokens=[[5, 6], []], num_forwards=[2, 1], probs=[])
    found = draft_tokens(drafted, [3, 0], 4, 3)
    assert found.token_ids.tolist() == [[-1] * 3, [-1] * 3, [-1] * 3, [5, 6, -1]]
    assert found.num_draft_tokens.tolist() == [0, 0, 0, 2]
    nobody = draft_tokens(Drafted(tokens=[], num_forwards=[], probs=[]), [], 2, 3)
    assert nobody.token_ids.shape == (2, 3)
    assert nobody.num_draft_tokens.tolist() == [0, 0]
