"""Engine statistics are sums over requests, and rates that are defined before anything ran."""

import pytest

from compspec.request import RequestStats
from compspec.stats import SpecStats


def stats_of(*steps: tuple[int, int, int]) -> RequestStats:
    stats = RequestStats()
    for step in steps:
        stats.count_step(*step)
    return stats


def test_nothing_divides_by_zero_before_the_first_step() -> None:
    stats = SpecStats()
    assert stats.acceptance_length == 1.0
    assert stats.acceptance_per_position == []
    assert (stats.decode_tokens_per_s, stats.prefill_tokens_per_s, stats.host_ms_per_step) == (0.0, 0.0, 0.0)


def test_requests_are_summed_whatever_their_number_of_positions() -> None:
    stats = SpecStats()
    stats.add_request(stats_of((1, 1, 2)), num_prompt_tokens=5, num_output_tokens=3)
    stats.add_request(stats_of((3, 1, 2), (2, 2, 3)), num_prompt_tokens=7, num_output_tokens=6)
    stats.add_request(stats_of((0, 0, 1)), num_prompt_tokens=1, num_output_tokens=2)
    assert (stats.num_requests, stats.num_prompt_tokens, stats.num_output_tokens) == (3, 13, 11)
    assert (stats.num_decode_steps, stats.num_decode_tokens) == (4, 8)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (6, 4)
    assert stats.drafted_per_position == [3, 2, 1]
    assert stats.accepted_per_position == [3, 1, 0]
    assert stats.acceptance_per_position == [1.0, 0.5, 0.0]
    assert stats.acceptance_length == 2.0


def test_adding_a_request_does_not_share_its_lists() -> None:
    stats, request = SpecStats(), stats_of((2, 1, 2))
    stats.add_request(request, 1, 1)
    stats.add_request(request, 1, 1)
    assert request.drafted_per_position == [1, 1]
    assert stats.drafted_per_position == [2, 2]


def test_rates_separate_prefill_from_decode() -> None:
    stats = SpecStats(
        num_decode_tokens=30, step_s=4.0, prefill_s=1.0, prefill_tokens=50, forward_s=3.0, num_forwards=10
    )
    assert stats.decode_s == pytest.approx(3.0)
    assert stats.decode_tokens_per_s == pytest.approx(10.0)
    assert stats.prefill_tokens_per_s == pytest.approx(50.0)
    assert stats.host_ms_per_step == pytest.approx(100.0)
