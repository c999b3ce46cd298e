"""Buckets: which static shapes there are, and that every step finds the smallest that holds it."""

import itertools

import pytest

from compspec.batch import Bucket
from compspec.config import EngineConfig, make_config
from compspec.errors import ConfigError
from compspec.runner.buckets import DRAFT_ROWS, Buckets


def config_of(**settings: object) -> EngineConfig:
    values = {"model.source": "x", **{name.replace("__", "."): value for name, value in settings.items()}}
    return make_config({}, values)


def shapes(buckets: list[Bucket]) -> list[tuple[int, int]]:
    return sorted((bucket.num_requests, bucket.query_len) for bucket in buckets)


def test_exact_numerics_have_the_same_widths_with_and_without_drafts() -> None:
    for method in ("none", "ngram"):
        base = {"speculative__method": method, "numerics__decode_width": 6, "scheduler__max_num_seqs": 5}
        assert shapes(Buckets.of_target(config_of(**base)).decode) == [(1, 2), (1, 6), (4, 2), (4, 6), (5, 2), (5, 6)]
        one = Buckets.of_target(config_of(**base, numerics__plain_width=None))
        assert shapes(one.decode) == [(1, 6), (4, 6), (5, 6)]
        assert one.widest_decode == Bucket(num_requests=5, query_len=6, num_logits=6)


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"), [(1, [1]), (2, [1, 2]), (4, [1, 4]), (16, [1, 4, 16]), (17, [1, 4, 16, 17])]
)
def test_batch_sizes_are_powers_of_four_and_the_widest(max_num_seqs: int, sizes: list[int]) -> None:
    buckets = Buckets.of_target(config_of(scheduler__max_num_seqs=max_num_seqs, numerics__plain_width=None))
    assert [bucket.num_requests for bucket in sorted(buckets.decode)] == sizes


def test_fast_numerics_decode_one_row_or_all_drafts() -> None:
    fast = {"numerics__mode": "fast", "scheduler__max_num_seqs": 4}
    drafting = Buckets.of_target(config_of(speculative__method="ngram", speculative__num_draft_tokens=3, **fast))
    assert shapes(drafting.decode) == [(1, 1), (1, 4), (4, 1), (4, 4)]
    assert shapes(Buckets.of_target(config_of(**fast)).decode) == [(1, 1), (4, 1)]


@pytest.mark.parametrize(("chunk", "lengths"), [(256, [64, 256]), (64, [16, 64]), (32, [32]), (100, [25, 100])])
def test_the_last_chunk_of_a_prompt_may_be_shorter(chunk: int, lengths: list[int]) -> None:
    buckets = Buckets.of_target(config_of(numerics__prefill_chunk=chunk))
    assert shapes(buckets.prefill) == [(1, length) for length in lengths]
    assert all(bucket.num_logits == 1 for bucket in buckets.prefill)


def test_batch_expansion_has_as_many_rows_each_a_request_of_its_own() -> None:
    expansion = {"speculative__scorer": "batch_expansion", "speculative__method": "ngram"}
    exact = Buckets.of_target(config_of(scheduler__max_num_seqs=5, numerics__decode_width=6, **expansion))
    assert shapes(exact.decode) == [(2, 1), (6, 1), (8, 1), (10, 1), (24, 1), (30, 1)]
    assert exact.widest_decode == Bucket(num_requests=30, query_len=1, num_logits=1)
    fast = {"numerics__mode": "fast", "scheduler__max_num_seqs": 4, "speculative__num_draft_tokens": 3}
    assert shapes(Buckets.of_target(config_of(**expansion, **fast)).decode) == [(1, 1), (4, 1), (16, 1)]
    assert shapes(exact.prefill) == shapes(Buckets.of_target(config_of()).prefill)
    assert len(set(exact.all)) == len(exact.all)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 16])
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_batch_expansion_holds_every_number_of_rows_up_to_all_drafts_of_all_requests(
    mode: str, max_num_seqs: int
) -> None:
    config = config_of(
        numerics__mode=mode,
        scheduler__max_num_seqs=max_num_seqs,
        speculative__method="ngram",
        speculative__num_draft_tokens=4,
        speculative__scorer="batch_expansion",
    )
    buckets = Buckets.of_target(config)
    for num_rows in range(1, max_num_seqs * 5 + 1):
        chosen = buckets.select(num_rows, 1, is_prefill=False)
        assert chosen.num_requests == min(b.num_requests for b in buckets.decode if b.num_requests >= num_rows)
    assert buckets.widest_decode.num_tokens == max_num_seqs * config.query_len


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4, 5, 16, 17])
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_every_step_up_to_the_widest_has_a_bucket_that_holds_it(mode: str, max_num_seqs: int) -> None:
    config = config_of(
        numerics__mode=mode,
        scheduler__max_num_seqs=max_num_seqs,
        speculative__method="ngram",
        speculative__num_draft_tokens=4,
    )
    buckets = Buckets.of_target(config)
    for num_requests, num_rows in itertools.product(range(1, max_num_seqs + 1), range(1, 6)):
        chosen = buckets.select(num_requests, num_rows, is_prefill=False)
        holding = [b for b in buckets.decode if b.num_requests >= num_requests and b.query_len >= num_rows]
        assert chosen in holding
        assert chosen.is_decode
        assert chosen.num_tokens == min(bucket.num_tokens for bucket in holding)
    for length in range(1, config.numerics.prefill_chunk + 1):
        chosen = buckets.select(1, length, is_prefill=True)
        assert chosen in buckets.prefill and chosen.query_len >= length


def test_a_step_too_large_for_every_bucket_is_our_bug() -> None:
    buckets = Buckets.of_target(config_of(scheduler__max_num_seqs=2))
    with pytest.raises(AssertionError, match="no bucket"):
        buckets.select(3, 1, is_prefill=False)
    with pytest.raises(AssertionError, match="no bucket"):
        buckets.select(1, 9, is_prefill=False)


def test_chosen_batch_sizes_are_kept_and_the_widest_is_always_there() -> None:
    buckets = Buckets.of_target(config_of(scheduler__max_num_seqs=6, compile__decode_buckets=[2, 3, 2]))
    assert sorted({bucket.num_requests for bucket in buckets.decode}) == [2, 3, 6]


def test_a_bucket_larger_than_the_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"decode_buckets has 7 requests.*max_num_seqs = 6"):
        Buckets.of_target(config_of(scheduler__max_num_seqs=6, compile__decode_buckets=[2, 7, 9]))


def test_all_lists_every_bucket_once_the_largest_first() -> None:
    buckets = Buckets.of_target(config_of())
    sizes = [bucket.num_tokens for bucket in buckets.all]
    assert sizes == sorted(sizes, reverse=True)
    assert set(buckets.all) == {*buckets.decode, *buckets.prefill}
    assert len(buckets.all) == len(set(buckets.all))


def test_restricted_decode_buckets_are_not_chosen_any_more() -> None:
    buckets = Buckets.of_target(config_of(scheduler__max_num_seqs=8))
    largest = max(buckets.decode)
    buckets.restrict_decode([largest])
    assert buckets.select(1, 1, is_prefill=False) == largest
    assert buckets.select(1, 1, is_prefill=True).num_requests == 1


def test_a_model_that_drafts_has_two_rows_per_request_for_the_targets_batch_sizes() -> None:
    for settings in ({}, {"numerics__mode": "fast"}, {"speculative__scorer": "batch_expansion"}):
        config = config_of(scheduler__max_num_seqs=5, speculative__method="ngram", **settings)
        draft = Buckets.of_draft(config, has_prompts=True)
        assert shapes(draft.decode) == [(1, DRAFT_ROWS), (4, DRAFT_ROWS), (5, DRAFT_ROWS)] == [(1, 2), (4, 2), (5, 2)]
        assert all(bucket.is_decode for bucket in draft.decode)
        assert draft.prefill == Buckets.of_target(config).prefill


def test_a_model_that_runs_no_prompts_has_no_shapes_for_them() -> None:
    buckets = Buckets.of_draft(config_of(), has_prompts=False)
    assert buckets.prefill == []
    assert buckets.all == sorted(buckets.decode, key=lambda bucket: -bucket.num_tokens)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 17])
def test_any_number_of_requests_finds_a_shape_to_draft_in(max_num_seqs: int) -> None:
    buckets = Buckets.of_draft(config_of(scheduler__max_num_seqs=max_num_seqs), has_prompts=False)
    for num_requests in range(1, max_num_seqs + 1):
        chosen = buckets.select(num_requests, DRAFT_ROWS, is_prefill=False)
        assert chosen.num_requests == min(b.num_requests for b in buckets.decode if b.num_requests >= num_requests)


def test_chosen_batch_sizes_hold_for_models_that_draft_as_well() -> None:
    config = config_of(scheduler__max_num_seqs=6, compile__decode_buckets=[2, 3])
    assert [bucket.num_requests for bucket in Buckets.of_draft(config, has_prompts=False).decode] == [2, 3, 6]
    with pytest.raises(ConfigError, match=r"decode_buckets has 7 requests"):
        Buckets.of_draft(config_of(scheduler__max_num_seqs=6, compile__decode_buckets=[7]), has_prompts=False)
