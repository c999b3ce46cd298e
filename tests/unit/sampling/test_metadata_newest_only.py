"""Metadata of the newest rows alone: a row after some drafts says what the same row of the whole window says."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compspec.batch import Batch, Scores
from compspec.request import Request
from compspec.sampling.metadata import NO_DRAFT, MetadataState, SamplingMetadata
from compspec.sampling.noise import GumbelNoise
from compspec.sampling.sampler import Sampler
from tests.unit.fakes import decode, draft, make_request, same_bits, step_output

VOCAB = 12
CPU = torch.device("cpu")
SAMPLER = Sampler(GumbelNoise(VOCAB, CPU))


def new_state() -> MetadataState:
    return MetadataState(4, VOCAB, CPU, max_model_len=80, eos_token_ids=(10, 11))


def process(token_ids: list[int], logits: Tensor) -> Tensor:
    """Depends on every token before the row."""
    logits[sum(token_ids) % VOCAB] += 3
    return logits


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.8]),
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
        "logits_processors": st.sampled_from([(), (process,)]),
    }
)
TOKENS = st.lists(st.sampled_from([0, 1, 2, 3, 5, 9, 11]), min_size=1, max_size=5)
REQUESTS = st.lists(st.tuples(TOKENS, TOKENS, TOKENS, st.integers(0, 4), PARAMS, st.booleans()), min_size=1, max_size=4)


def build_both(
    batch: Batch, drafts: Sequence[Sequence[int]], logits: Tensor
) -> tuple[SamplingMetadata, SamplingMetadata, Scores, Scores]:
    """Of whole windows with logits [R, K + 1, V], and of their last rows."""
    k, made = logits.shape[1] - 1, draft(*drafts, k=logits.shape[1] - 1)
    whole = Scores(logits=logits.flatten(0, 1), first_row=tuple(range(0, len(drafts) * (k + 1), k + 1)))
    counts = [len(own) for own in drafts]
    newest = Scores(
        logits=torch.stack([logits[row, count] for row, count in enumerate(counts)]),
        first_row=tuple(range(len(counts))),
    )
    state = new_state()
    full = state.build(batch, made, whole)
    return full, state.build(batch, made, newest, newest_only=True), whole, newest


@settings(max_examples=300, deadline=None)
@given(REQUESTS)
def test_the_newest_row_is_sampled_as_the_last_row_of_its_window(specs: list[Any]) -> None:
    requests = [make_request(prompt, output=output, **params) for prompt, output, _, _, params, _ in specs]
    drafts = [own[:count] for _, _, own, count, _, _ in specs]
    batch = decode(*requests)
    does_sample = [samples for *_, samples in specs]
    parts = [replace(part, samples=own) for part, own in zip(batch.scheduled, does_sample, strict=True)]
    batch = replace(batch, scheduled=tuple(parts))
    logits = torch.randn(len(specs), 5, VOCAB, generator=torch.Generator().manual_seed(len(specs)))
    full, newest, whole_scores, newest_scores = build_both(batch, drafts, logits)
    last = [end - 1 for row, end in enumerate(full.row_starts[1:]) if does_sample[row]]
    assert newest.row_starts == (0, *(sum(does_sample[: row + 1]) for row in range(len(specs))))
    assert newest.logit_rows.tolist() == [row for row, samples in enumerate(does_sample) if samples]
    for name in ("request", "depth", "positions", "window_starts", "seeds", "temperature", "top_p", "top_k"):
        assert torch.equal(getattr(newest, name), getattr(full, name)[last]), name
    assert newest.next_draft.tolist() == [NO_DRAFT] * len(last)
    expected, found = SAMPLER.sample(whole_scores, full), SAMPLER.sample(newest_scores, newest)
    assert found.token_ids.tolist() == expected.token_ids[last].tolist()
    assert same_bits(found.logits, expected.logits[last])
    assert found.failures.keys() == {index for index, row in enumerate(last) if row in expected.failures}
    seen = {one.row: one.token_ids for one in newest.processors}
    assert seen == {last.index(one.row): one.token_ids for one in full.processors if one.row in last}


def test_a_step_that_is_drafted_in_between_changes_nothing_for_the_target() -> None:
    """The draft's rows are built from the same state, before the target's."""
    params: dict[str, Any] = {"frequency_penalty": 1.0, "repetition_penalty": 1.3, "bad_words": [[5, 6]]}

    def run(drafts_before: bool) -> SamplingMetadata:
        state = new_state()
        requests = [make_request([1, 2], output=[5], **params), make_request([3], output=[4], **params)]
        for _ in range(3):
            batch = decode(*requests)
            if drafts_before:
                for place in range(3):
                    so_far = draft(*[[7, 8, 5][:place]] * 2, k=place)
                    at = Scores(logits=torch.zeros(2, VOCAB), first_row=(0, 1))
                    state.build(batch, so_far, at, newest_only=True)
            made = draft([7, 8, 5], [7, 8])
            metadata = state.build(batch, made, Scores(logits=torch.zeros(8, VOCAB), first_row=(0, 4)))
            tokens = ([7, 8, 5, 5], [7, 9])
            state.commit(batch, step_output(*tokens))
            for request, own in zip(requests, tokens, strict=True):
                request.append(own)
        return metadata

    assert_same(run(True), run(False))


def assert_same(found: SamplingMetadata, expected: SamplingMetadata) -> None:
    assert found.penalties is not None and expected.penalties is not None
    for name in ("token_ids", "in_prompt", "counts", "draft_token_ids", "draft_counts", "num_drafts_seen"):
        assert torch.equal(getattr(found.penalties, name), getattr(expected.penalties, name)), name
    for name in ("rows", "positions", "depth", "next_draft"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.banned is not None and expected.banned is not None
    assert torch.equal(found.banned, expected.banned)


def test_counts_of_drafts_may_differ() -> None:
    requests: list[Request] = [make_request([1, 2, 3], output=[4]), make_request([1], output=[5, 6])]
    scores = Scores(logits=torch.zeros(2, VOCAB), first_row=(0, 1))
    metadata = new_state().build(decode(*requests), draft([7, 8], []), scores, newest_only=True)
    assert metadata.rows.tolist() == [0, 1]
    assert metadata.depth.tolist() == [2, 0]
    assert metadata.positions.tolist() == [6, 3]
    assert metadata.window_starts.tolist() == [4, 3]
