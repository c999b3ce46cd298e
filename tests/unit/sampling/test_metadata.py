"""Sampling metadata: every scored row has its request's parameters and has seen exactly the tokens before it."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compspec.batch import Batch, DraftTokens
from compspec.request import Request
from compspec.sampling import transforms
from compspec.sampling.metadata import GROUP_ROWS, MetadataState, SamplingMetadata
from tests.unit.fakes import (
    decode,
    draft,
    entry,
    make_request,
    no_drafts,
    prefill,
    same_bits,
    step_output,
    step_scores,
)

VOCAB = 12
EOS = (10, 11)
CPU = torch.device("cpu")


def new_state(max_num_seqs: int = 4) -> MetadataState:
    return MetadataState(max_num_seqs, VOCAB, CPU, max_model_len=80, eos_token_ids=EOS)


def build(state: MetadataState, batch: Batch, drafts: DraftTokens | None = None) -> SamplingMetadata:
    drafts = no_drafts(batch) if drafts is None else drafts
    return state.build(batch, drafts, step_scores(drafts))


def mixed(*entries: tuple[Request, int]) -> Batch:
    """A decode step of requests in given slots."""
    return Batch(scheduled=tuple(entry(request, slot) for request, slot in entries), is_prefill=False)


def mask_of(metadata: SamplingMetadata, number: int) -> set[int]:
    """The prompt of one of the requests with penalties."""
    assert metadata.penalties is not None
    return set(metadata.penalties.token_ids[number][metadata.penalties.in_prompt[number]].tolist())


def counts_of(metadata: SamplingMetadata, number: int) -> dict[int, int]:
    """The output of one of the requests with penalties, counted."""
    assert metadata.penalties is not None
    pairs = zip(metadata.penalties.token_ids[number].tolist(), metadata.penalties.counts[number].tolist(), strict=True)
    return {token: count for token, count in pairs if count}


def counted(request: Request) -> tuple[set[int], dict[int, int]]:
    """What the two functions above should find."""
    return set(request.token_ids[: request.num_prompt_tokens].tolist()), dict(Counter(request.output_token_ids))


def places(index: Tensor | None) -> set[tuple[int, int]]:
    """(row, token) of places row * V + token."""
    return set() if index is None else {divmod(place, VOCAB) for place in index.tolist()}


def commit(state: MetadataState, batch: Batch, *token_ids: Sequence[int]) -> None:
    state.commit(batch, step_output(*token_ids))
    for part, tokens in zip(batch.scheduled, token_ids, strict=True):
        part.request.append(list(tokens))


def test_the_prompt_is_masked_and_not_counted() -> None:
    metadata = build(new_state(), prefill(make_request([3, 3, 5], repetition_penalty=1.2), 0, 0, 3))
    assert mask_of(metadata, 0) == {3, 5}
    assert counts_of(metadata, 0) == {}


def test_a_slot_taken_over_by_another_request_holds_nothing_of_the_last_one() -> None:
    state = new_state()
    first = make_request(
        [1, 2], repetition_penalty=1.5, frequency_penalty=1.0, logit_bias={1: 5}, bad_words=[[7]], min_tokens=9
    )
    batch = decode(first)
    build(state, batch)
    commit(state, batch, [7, 7, 8])
    second = make_request([3], output=[4], presence_penalty=0.5, temperature=0.7, top_k=3, seed=9)
    metadata = build(state, decode(second))
    assert (mask_of(metadata, 0), counts_of(metadata, 0)) == ({3}, {4: 1})
    penalties = metadata.penalties
    assert penalties is not None
    assert (penalties.repetition.tolist(), penalties.presence.tolist(), penalties.frequency.tolist()) == (
        [1.0],
        [0.5],
        [0.0],
    )
    assert (metadata.seeds.tolist(), metadata.top_k.tolist()) == ([9], [3])
    assert metadata.banned is metadata.bias is metadata.bias_index is None


def test_a_request_without_penalties_in_a_slot_with_stale_counts_is_not_changed_by_them() -> None:
    state = new_state()
    batch = decode(make_request([1, 2], frequency_penalty=1.0))
    build(state, batch)
    commit(state, batch, [7, 7, 8])
    batch = decode(make_request([3], output=[7]), make_request([4], output=[5], frequency_penalty=1.0))
    metadata = build(state, batch)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    assert metadata.penalties is not None
    transforms.apply_penalties_(logits, metadata.penalties)
    assert same_bits(logits[0], before[0])
    assert not same_bits(logits[1], before[1])
    commit(state, batch, [7], [7])
    assert counts_of(build(state, decode(make_request([6], frequency_penalty=1.0))), 0) == {}


def test_a_new_request_with_the_same_id_and_slot_is_a_new_request() -> None:
    state = new_state()
    for token in (5, 6):
        batch = decode(make_request([1], frequency_penalty=1.0, request_id="same"))
        assert counts_of(build(state, batch), 0) == {}
        commit(state, batch, [token])


def test_a_request_that_comes_back_to_another_slot_brings_its_whole_output() -> None:
    request = make_request([1], output=[5, 6, 5], frequency_penalty=1.0)
    assert counts_of(build(new_state(), mixed((request, 3))), 0) == {5: 2, 6: 1}


def test_a_request_that_was_in_another_slot_meanwhile_brings_its_whole_output_back() -> None:
    state, request = new_state(), make_request([1], frequency_penalty=1.0)
    for slot, token in ((0, 5), (1, 6)):
        build(state, mixed((request, slot)))
        commit(state, mixed((request, slot)), [token])
    assert counts_of(build(state, mixed((request, 0))), 0) == {5: 1, 6: 1}


EVERYTHING = {
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {2: 1.0},
    "bad_words": [[5, 6], [7]],
    "min_tokens": 3,
    "allowed_token_ids": [1, 5, 6, 7, 10],
}


def same_metadata(a: SamplingMetadata, b: SamplingMetadata) -> bool:
    """Whether two steps of one penalised request say the same, whatever the order of its distinct tokens."""
    assert a.penalties is not None and b.penalties is not None
    fields = ("rows", "positions", "window_starts", "seeds", "temperature", "bias_index", "bias")
    drafts = ("draft_token_ids", "draft_in_prompt", "draft_counts", "repetition", "frequency", "num_drafts_seen")
    return (
        all(torch.equal(getattr(a, name), getattr(b, name)) for name in fields)
        and all(torch.equal(getattr(a.penalties, name), getattr(b.penalties, name)) for name in drafts)
        and (mask_of(a, 0), counts_of(a, 0)) == (mask_of(b, 0), counts_of(b, 0))
        and set(a.penalties.token_ids[0].tolist()) == set(b.penalties.token_ids[0].tolist())
        and places(a.banned) == places(b.banned)
        and [(first, end, ids.tolist()) for first, end, ids in a.allowed]
        == [(first, end, ids.tolist()) for first, end, ids in b.allowed]
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), st.booleans()), max_size=8))
def test_a_request_whose_slot_was_taken_over_meanwhile_finds_the_state_it_would_have_had(
    steps: list[tuple[list[int], bool]],
) -> None:
    """As after a preemption: in between another request samples and commits in the same slot."""
    state, untouched = new_state(), new_state()
    request = make_request([1, 2, 1], max_tokens=64, temperature=0.5, seed=3, **EVERYTHING)
    other = make_request([3, 5], max_tokens=64, **EVERYTHING)
    drafts = draft([5, 1])
    for tokens, preempted in steps:
        if preempted:
            build(state, mixed((other, 0)))
            commit(state, mixed((other, 0)), [6, 4])
        build(state, mixed((request, 0)))
        build(untouched, mixed((request, 0)))
        untouched.commit(mixed((request, 0)), step_output(tokens))
        commit(state, mixed((request, 0)), tokens)
        found, expected = (build(each, mixed((request, 0)), drafts) for each in (state, untouched))
        assert same_metadata(found, expected)
        assert (mask_of(found, 0), counts_of(found, 0)) == counted(request)


steps = st.lists(st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=5), min_size=3, max_size=3), max_size=6)


@settings(max_examples=60, deadline=None)
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
        for number, request in enumerate((requests[0], requests[2])):
            assert (mask_of(metadata, number), counts_of(metadata, number)) == counted(request)
        commit(state, batch, *step)


def test_metadata_that_was_handed_over_is_not_changed_by_a_later_commit() -> None:
    state, request = new_state(), make_request([1], frequency_penalty=1.0, bad_words=[[5, 6]])
    metadata = build(state, decode(request))
    commit(state, decode(request), [5])
    assert (mask_of(metadata, 0), counts_of(metadata, 0), metadata.banned) == ({1}, {}, None)


def test_the_order_of_requests_in_a_batch_is_not_their_slots() -> None:
    a, b = make_request([1], frequency_penalty=1.0, seed=1), make_request([2], frequency_penalty=1.0, seed=2)
    state = new_state()
    build(state, decode(a, b))
    commit(state, decode(a, b), [5], [6])
    metadata = build(state, mixed((b, 1), (a, 0)))
    assert metadata.seeds.tolist() == [2, 1]
    assert [mask_of(metadata, 0), mask_of(metadata, 1)] == [{2}, {1}]
    assert [counts_of(metadata, 0), counts_of(metadata, 1)] == [{6: 1}, {5: 1}]


def test_absent_drafts_are_no_tokens() -> None:
    """Token 0 stands in for them and must keep the values of token 0."""
    requests = [make_request([0, 1], output=[0], frequency_penalty=1.0), make_request([1], frequency_penalty=1.0)]
    metadata = build(new_state(), decode(*requests), draft([], [4, 0], k=3))
    penalties = metadata.penalties
    assert penalties is not None
    assert penalties.draft_token_ids.tolist() == [[-1] * 3, [4, 0, -1]]
    assert penalties.draft_in_prompt.tolist() == [[True] * 3, [False] * 3]
    assert penalties.draft_counts.tolist() == [[1] * 3, [0] * 3]


def test_rows_follow_each_other_whatever_was_drafted_and_whatever_does_not_sample() -> None:
    requests = [make_request([1] * 4, seed=7), make_request([2] * 9), make_request([3] * 2, output=[5], seed=8)]
    parts = (entry(requests[0], 0), entry(requests[1], 1, num_computed=4, samples=False), entry(requests[2], 2))
    batch = Batch(scheduled=parts, is_prefill=False)
    metadata = build(new_state(), batch, draft([4, 4], [], [6, 6, 6]))
    assert metadata.row_starts == (0, 3, 3, 7)
    assert metadata.rows.tolist() == [0, 1, 2, 8, 9, 10, 11]
    assert metadata.positions.tolist() == [4, 5, 6, 3, 4, 5, 6]
    assert metadata.window_starts.tolist() == [4, 4, 4, 3, 3, 3, 3]
    assert metadata.seeds.tolist() == [7] * 3 + [8] * 4


def test_a_step_in_which_nothing_samples_has_no_rows() -> None:
    request = make_request(range(10), frequency_penalty=1.0, temperature=1.0, logit_bias={1: 1.0})
    metadata = build(new_state(), prefill(request, 0, 0, 4))
    assert metadata.row_starts == (0, 0)
    assert (len(metadata.rows), metadata.groups, metadata.penalties, metadata.bias) == (0, (), None, None)


def test_positions_of_decode_rows_are_those_of_the_tokens_they_sample() -> None:
    requests = [make_request([1], output=[5]), make_request([1, 2, 3, 4], output=[5, 6])]
    metadata = build(new_state(), decode(*requests), draft([0] * 4, [0] * 4))
    # Row j samples the token after everything known and j drafts.
    assert metadata.positions.tolist() == [request.num_tokens + row for request in requests for row in range(5)]


def test_the_position_of_a_prefill_row_follows_its_chunk() -> None:
    request, state = make_request(range(10)), new_state()
    for start in (0, 4):
        assert build(state, prefill(request, 0, start, 4)).positions.tolist() == []
    assert build(state, prefill(request, 0, 8, 2)).positions.tolist() == [10]
    request.append([5])
    # The first decode row goes on where the prompt's sample left off.
    assert build(state, decode(request), draft([1])).positions.tolist() == [11, 12]


def test_seeds_keep_all_their_bits() -> None:
    assert build(new_state(), decode(make_request(seed=2**63 - 1))).seeds.tolist() == [2**63 - 1]


def test_state_bytes_counts_the_tensors_that_exist() -> None:
    for max_model_len in (5, 80):
        state = MetadataState(6, VOCAB, CPU, max_model_len=max_model_len)
        held = [state._prompt_mask, state._output_counts, state._distinct]
        found = MetadataState.state_bytes(6, VOCAB, max_model_len)
        assert found == sum(each.numel() * each.element_size() for each in held)


@pytest.mark.parametrize(
    ("params", "flags"),
    [
        ({}, (0, False, False)),
        ({"top_p": 0.5}, (0, True, False)),
        ({"min_p": 0.5}, (0, False, True)),
        ({"top_k": 5}, (5, False, False)),
        ({"top_k": 10**6}, (VOCAB, False, False)),
    ],
)
def test_flags_say_what_any_row_of_the_group_needs(params: dict, flags: tuple) -> None:
    plain, greedy = make_request(temperature=1.0), make_request(top_p=0.1, min_p=0.1, top_k=1)
    state = new_state()
    state._group_sizes = (GROUP_ROWS,)
    metadata = build(state, decode(greedy, plain, make_request(temperature=0.5, **params)))
    (group,) = metadata.groups
    assert (group.max_top_k, group.any_top_p, group.any_min_p) == flags


filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5]),
        "top_p": st.sampled_from([1.0, 0.5]),
        "top_k": st.sampled_from([0, 3]),
        "min_p": st.sampled_from([0.0, 0.1]),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(filters, st.integers(0, 5)), min_size=1, max_size=8))
def test_groups_have_few_shapes_and_hold_the_rows_with_temperature_once(requests: list[tuple[dict, int]]) -> None:
    batch = decode(*[make_request(**params) for params, _ in requests])
    state = new_state(8)
    state._group_sizes = (4, GROUP_ROWS)
    metadata = build(state, batch, draft(*[[1] * count for _, count in requests]))
    held: list[int] = []
    for group in metadata.groups:
        size = len(group.rows)
        assert size == 4 or (size == group.num_rows == GROUP_ROWS and not group.any_top_p)
        rows, padding = group.rows.split([group.num_rows, size - group.num_rows])
        assert set(padding.tolist()) <= {rows[-1].item()}
        assert group.max_top_k == max(metadata.top_k[rows])
        assert group.any_top_p == bool((metadata.top_p[rows] < 1).any())
        assert group.any_min_p == bool((metadata.log_min_p[rows] > float("-inf")).any())
        held += rows.tolist()
    assert sorted(held) == metadata.temperature.nonzero().flatten().tolist()
    assert sum(len(group.rows) for group in metadata.groups) == -(-len(held) // 4) * 4


@settings(max_examples=60, deadline=None)
@given(
    min_tokens=st.integers(0, 9),
    num_outputs=st.integers(0, 8),
    num_drafts=st.integers(0, 5),
    stops=st.sets(st.integers(0, VOCAB - 1), max_size=3),
    ignore_eos=st.booleans(),
)
def test_ends_are_banned_in_exactly_the_rows_whose_output_index_is_below_min_tokens(
    min_tokens: int, num_outputs: int, num_drafts: int, stops: set[int], ignore_eos: bool
) -> None:
    before = make_request()  # so that the rows do not start at 0
    request = make_request(
        output=[1] * num_outputs, min_tokens=min_tokens, stop_token_ids=list(stops), ignore_eos=ignore_eos
    )
    metadata = build(new_state(), decode(before, request), draft([], [2] * num_drafts))
    ends = stops if ignore_eos else stops | set(EOS)
    early = [row for row in range(num_drafts + 1) if num_outputs + row < min_tokens]
    assert places(metadata.banned) == {(1 + row, token) for row in early for token in ends}


def test_min_tokens_holds_for_the_first_token_too() -> None:
    request = make_request(range(6), min_tokens=1)
    assert places(build(new_state(), prefill(request, 0, 2, 4)).banned) == {(0, token) for token in EOS}


def test_an_end_outside_the_vocabulary_bans_nothing_in_the_next_row() -> None:
    """A model may name such an end; it can never be sampled."""
    state = MetadataState(2, VOCAB, CPU, max_model_len=80, eos_token_ids=(VOCAB, VOCAB - 1, -1))
    metadata = build(state, decode(make_request(min_tokens=1), make_request()))
    assert places(metadata.banned) == {(0, VOCAB - 1)}


def test_what_a_request_asks_for_stands_in_its_own_rows_alone() -> None:
    asking = make_request([8, 5], logit_bias={3: 1.5, 4: -2.0}, bad_words=[[9], [5, 6]], allowed_token_ids=[7, 1, 7])
    plain = make_request([5])
    metadata = build(new_state(), decode(plain, asking, plain), draft([5], [0, 5], [5]))
    assert places(metadata.bias_index) == {(row, token) for row in (2, 3, 4) for token in (3, 4)}
    assert metadata.bias is not None and metadata.bias.tolist() == [1.5, -2.0] * 3
    assert places(metadata.banned) == {(2, 9), (3, 9), (4, 9), (2, 6), (4, 6)}
    assert [(first, end, ids.tolist()) for first, end, ids in metadata.allowed] == [(2, 5, [1, 7])]


def test_processors_get_the_tokens_before_their_row_and_a_list_of_their_own() -> None:
    def processor(token_ids: list[int], logits: Tensor) -> Tensor:
        return logits

    request = make_request([8, 5], output=[6], logits_processors=[processor])
    metadata = build(new_state(), decode(make_request(), request), draft([1], [0, 4]))
    assert [(one.row, one.token_ids) for one in metadata.processors] == [
        (2, [8, 5, 6]),
        (3, [8, 5, 6, 0]),
        (4, [8, 5, 6, 0, 4]),
    ]
    assert all(type(token) is int for one in metadata.processors for token in one.token_ids)
    assert len({id(one.token_ids) for one in metadata.processors}) == 3
    assert all(one.processors == (processor,) for one in metadata.processors)


def test_seen_tokens_of_a_long_request_fit() -> None:
    """Prompt and output fill the model's length with distinct tokens."""
    state = MetadataState(1, 100, CPU, max_model_len=9)
    request = make_request(range(5), max_tokens=4, frequency_penalty=1.0)
    build(state, decode(request))
    commit(state, decode(request), [50, 51])
    commit(state, decode(request), [52, 53])
    metadata = build(state, decode(request))
    assert metadata.penalties is not None
    assert sorted(metadata.penalties.token_ids[0].tolist()) == [*range(5), *range(50, 54)]
    assert counts_of(metadata, 0) == {50: 1, 51: 1, 52: 1, 53: 1}
