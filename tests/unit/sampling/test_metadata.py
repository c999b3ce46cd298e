"""Sampling metadata: slots start clean, counts follow the outputs, rows know their positions, padding is neutral."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compspec.batch import Batch
from compspec.request import Request
from compspec.sampling import transforms
from compspec.sampling.metadata import MetadataState, SamplingMetadata
from tests.unit.fakes import decode, draft, entry, make_request, no_drafts, prefill, same_bits, step_output

VOCAB = 12
CPU = torch.device("cpu")


def new_state(max_num_seqs: int = 4) -> MetadataState:
    return MetadataState(max_num_seqs, VOCAB, CPU)


def build(state: MetadataState, batch: Batch, num_requests: int | None = None, num_rows: int = 4) -> SamplingMetadata:
    return state.build(batch, no_drafts(batch), num_requests or len(batch.scheduled), num_rows)


def mask_of(metadata: SamplingMetadata, row: int) -> set[int]:
    assert metadata.prompt_mask is not None
    return set(metadata.prompt_mask[row].nonzero().flatten().tolist())


def counts_of(metadata: SamplingMetadata, row: int) -> list[int]:
    assert metadata.output_counts is not None
    return metadata.output_counts[row].tolist()


def commit(state: MetadataState, batch: Batch, *token_ids: list[int]) -> None:
    state.commit(batch, step_output(*token_ids))
    for part, tokens in zip(batch.scheduled, token_ids, strict=True):
        part.request.append(list(tokens))


def penalised(metadata: SamplingMetadata, logits: Tensor) -> Tensor:
    assert metadata.prompt_mask is not None and metadata.output_counts is not None
    return transforms.apply_penalties(
        logits,
        prompt_mask=metadata.prompt_mask,
        output_counts=metadata.output_counts,
        draft_token_ids=metadata.draft_token_ids,
        repetition=metadata.repetition,
        presence=metadata.presence,
        frequency=metadata.frequency,
    )


def test_the_prompt_is_masked_and_not_counted() -> None:
    request = make_request([3, 3, 5], repetition_penalty=1.2)
    metadata = build(new_state(), prefill(request, 0, 0, 3), num_rows=1)
    assert mask_of(metadata, 0) == {3, 5}
    assert counts_of(metadata, 0) == [0] * VOCAB


def test_a_slot_taken_over_by_another_request_holds_nothing_of_the_last_one() -> None:
    state = new_state()
    first = make_request([1, 2], repetition_penalty=1.5, frequency_penalty=1.0)
    batch = decode(first)
    build(state, batch)
    commit(state, batch, [7, 7, 8])
    second = make_request([3], output=[4], presence_penalty=0.5, temperature=0.7, top_k=3, seed=9)
    metadata = build(state, decode(second))
    assert mask_of(metadata, 0) == {3}
    assert counts_of(metadata, 0) == np.bincount([4], minlength=VOCAB).tolist()
    assert metadata.repetition.tolist() == [1.0]
    assert metadata.frequency.tolist() == [0.0]
    assert metadata.presence.tolist() == [0.5]
    assert (metadata.seeds.tolist(), metadata.top_k.tolist()) == ([9], [3])


def test_a_request_without_penalties_in_a_slot_with_stale_counts_is_not_changed_by_them() -> None:
    state = new_state()
    stale = make_request([1, 2], frequency_penalty=1.0)
    batch = decode(stale)
    build(state, batch)
    commit(state, batch, [7, 7, 8])
    plain, other = make_request([3], output=[7]), make_request([4], output=[5], frequency_penalty=1.0)
    batch = decode(plain, other)
    metadata = build(state, batch)
    logits = torch.randn(2, 4, VOCAB, generator=torch.Generator().manual_seed(0))
    assert same_bits(penalised(metadata, logits)[0], logits[0])
    commit(state, batch, [7], [7])
    third = make_request([6], frequency_penalty=1.0)
    assert counts_of(build(state, decode(third)), 0) == [0] * VOCAB


def test_a_new_request_with_the_same_id_and_slot_is_a_new_request() -> None:
    state = new_state()
    for token in (5, 6):
        request = make_request([1], frequency_penalty=1.0, request_id="same")
        batch = decode(request)
        assert counts_of(build(state, batch), 0) == [0] * VOCAB
        commit(state, batch, [token])


def test_a_request_that_comes_back_to_another_slot_brings_its_whole_output() -> None:
    request = make_request([1], output=[5, 6, 5], frequency_penalty=1.0)
    part = entry(request, 3)
    metadata = build(new_state(), Batch(scheduled=(part,), is_prefill=False))
    assert counts_of(metadata, 0) == np.bincount([5, 6, 5], minlength=VOCAB).tolist()


steps = st.lists(st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=5), min_size=3, max_size=3), max_size=6)


@settings(max_examples=100, deadline=None)
@given(steps)
def test_counts_equal_a_recount_after_every_step(steps: list[list[list[int]]]) -> None:
    state = new_state()
    requests = [
        make_request([1, 2], max_tokens=64, frequency_penalty=0.5),
        make_request([3], max_tokens=64),
        make_request([4, 4], max_tokens=64, repetition_penalty=1.1),
    ]
    batch = decode(*requests)
    for step in steps:
        metadata = build(state, batch)
        for row in (0, 2):
            expected = np.bincount(requests[row].output_token_ids, minlength=VOCAB)
            assert counts_of(metadata, row) == expected.tolist()
            assert mask_of(metadata, row) == set(requests[row].token_ids[: requests[row].num_prompt_tokens].tolist())
        commit(state, batch, *step)


def test_metadata_that_was_handed_over_is_not_changed_by_a_later_commit() -> None:
    state, request = new_state(), make_request([1], frequency_penalty=1.0)
    batch = decode(request)
    metadata = build(state, batch)
    commit(state, batch, [5])
    assert counts_of(metadata, 0) == [0] * VOCAB


def test_the_order_of_requests_in_a_batch_is_not_their_slots() -> None:
    a, b = make_request([1], frequency_penalty=1.0, seed=1), make_request([2], frequency_penalty=1.0, seed=2)
    state = new_state()
    build(state, decode(a, b))
    commit(state, decode(a, b), [5], [6])
    metadata = build(state, Batch(scheduled=(entry(b, 1), entry(a, 0)), is_prefill=False))
    assert metadata.seeds.tolist() == [2, 1]
    assert [mask_of(metadata, 0), mask_of(metadata, 1)] == [{2}, {1}]
    assert counts_of(metadata, 0)[6] == counts_of(metadata, 1)[5] == 1


def test_padded_requests_ask_for_nothing() -> None:
    request = make_request([1], temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, frequency_penalty=1.0, seed=5)
    metadata = new_state().build(decode(request), draft([4, 5], k=3), 3, 4)
    assert metadata.draft_token_ids.tolist() == [[4, 5, -1], [-1] * 3, [-1] * 3]
    for name, neutral in {
        "temperature": 0.0,
        "top_p": 1.0,
        "log_min_p": float("-inf"),
        "repetition": 1.0,
        "presence": 0.0,
        "frequency": 0.0,
        "top_k": 0,
        "seeds": 0,
    }.items():
        assert getattr(metadata, name)[1:].tolist() == [neutral] * 2, name
    assert mask_of(metadata, 1) == set()
    assert counts_of(metadata, 2) == [0] * VOCAB


@pytest.mark.parametrize(
    ("params", "flags"),
    [
        ({}, (False, False, False, 0, False)),
        ({"temperature": 0.5}, (True, False, False, 0, False)),
        ({"top_p": 0.5}, (False, True, False, 0, False)),
        ({"min_p": 0.5}, (False, False, True, 0, False)),
        ({"top_k": 5}, (False, False, False, 5, False)),
        ({"top_k": 10**6}, (False, False, False, VOCAB, False)),
        ({"presence_penalty": 0.5}, (False, False, False, 0, True)),
    ],
)
def test_flags_say_what_any_request_of_the_batch_needs(params: dict, flags: tuple) -> None:
    metadata = build(new_state(), decode(make_request(), make_request(**params)))
    found = (metadata.any_noise, metadata.any_top_p, metadata.any_min_p, metadata.max_top_k)
    assert (*found, metadata.prompt_mask is not None) == flags


def positions_by_definition(request: Request, rows: int) -> list[int]:
    """Row j samples the token after everything known and j drafts."""
    return [request.num_tokens + row for row in range(rows)]


def test_positions_of_decode_rows_are_those_of_the_tokens_they_sample() -> None:
    requests = [make_request([1], output=[5]), make_request([1, 2, 3, 4], output=[5, 6])]
    metadata = build(new_state(), decode(*requests), num_rows=5)
    assert metadata.positions.tolist() == [positions_by_definition(request, 5) for request in requests]


def test_the_position_of_a_prefill_row_follows_its_chunk() -> None:
    request = make_request(range(10))
    state = new_state()
    assert build(state, prefill(request, 0, 0, 4), num_rows=1).positions.tolist() == [[4]]
    assert build(state, prefill(request, 0, 4, 4), num_rows=1).positions.tolist() == [[8]]
    last = build(state, prefill(request, 0, 8, 2), num_rows=1)
    assert last.positions.tolist() == [[10]]
    request.append([5])
    # The first decode row goes on where the prompt's sample left off.
    assert build(state, decode(request), num_rows=2).positions.tolist() == [[11, 12]]


def test_seeds_keep_all_their_bits() -> None:
    metadata = build(new_state(), decode(make_request(seed=2**63 - 1)))
    assert metadata.seeds.tolist() == [2**63 - 1]


def test_state_bytes_counts_the_tensors_that_exist() -> None:
    state = new_state(6)
    held = [state._prompt_mask, state._output_counts]
    assert MetadataState.state_bytes(6, VOCAB) == sum(each.numel() * each.element_size() for each in held)
