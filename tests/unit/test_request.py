"""Requests and their statistics: plain bookkeeping that everything else trusts."""

import numpy as np
import pytest

from compspec.request import FinishReason, RequestStats
from tests.unit.fakes import make_request


def test_tokens_are_the_prompt_and_then_the_output() -> None:
    request = make_request([5, 6], max_tokens=4)
    assert request.token_ids.tolist() == [5, 6]
    assert request.output_token_ids == []
    request.append([7])
    request.append([8, 9])
    assert request.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert request.output_token_ids == [7, 8, 9]
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (2, 5, 3)
    assert request.token_ids.dtype == np.int32


def test_an_output_never_grows_beyond_its_limit() -> None:
    request = make_request([5, 6], max_tokens=3)
    assert request.max_total_tokens == 5
    request.append([1, 2])
    with pytest.raises(AssertionError):
        request.append([3, 4])
    assert request.output_token_ids == [1, 2]
    request.append([3])


def test_a_request_is_prefilling_until_its_prompt_is_computed() -> None:
    request = make_request([5, 6])
    for computed, prefilling in [(0, True), (1, True), (2, False), (3, False)]:
        request.num_computed_tokens = computed
        assert request.is_prefilling is prefilling


def test_two_requests_share_no_state() -> None:
    first, second = make_request([5]), make_request([5])
    first.append([7])
    first.block_ids.append(3)
    first.stats.count_step(2, 1, 2)
    assert second.token_ids.tolist() == [5]
    assert second.block_ids == []
    assert second.stats == RequestStats()


def test_finish_reasons_read_as_words() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error"]


def test_steps_are_counted_by_draft_position() -> None:
    stats = RequestStats()
    assert stats.acceptance_length == 1.0
    stats.count_step(2, 1, 2)
    stats.count_step(0, 0, 1)
    stats.count_step(3, 3, 4)
    assert (stats.num_steps, stats.num_decode_steps, stats.num_decode_tokens) == (3, 3, 7)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (5, 4)
    assert stats.drafted_per_position == [2, 2, 1]
    assert stats.accepted_per_position == [2, 1, 1]
    assert stats.acceptance_length == pytest.approx(7 / 3)


def test_positions_add_up_to_the_totals() -> None:
    stats = RequestStats()
    rng = np.random.default_rng(0)
    for _ in range(50):
        drafts = int(rng.integers(0, 6))
        stats.count_step(drafts, int(rng.integers(0, drafts + 1)), 1)
    assert sum(stats.drafted_per_position) == stats.num_draft_tokens
    assert sum(stats.accepted_per_position) == stats.num_accepted_tokens
    assert all(a <= d for a, d in zip(stats.accepted_per_position, stats.drafted_per_position, strict=True))


def test_log_probabilities_are_collected_only_where_asked_for() -> None:
    assert (make_request().logprobs, make_request().prompt_logprobs) == (None, None)
    asked = make_request(logprobs=0, prompt_logprobs=2)
    assert asked.logprobs == []
    assert asked.prompt_logprobs == [None], "nothing comes before the first prompt token"


def test_a_new_request_has_no_end() -> None:
    request = make_request()
    assert (request.finish_reason, request.stop_reason, request.error, request.end_check) == (None,) * 4
