"""From records to numbers."""

import pytest

from compspec.bench.records import StepTimes
from compspec.bench.summary import (
    ALL,
    Spread,
    acceptance_per_position,
    decode_speed,
    differences,
    inter_token_gaps,
    metrics,
    percentile,
    step_times_ms,
)
from tests.unit.bench.records import request, run, step


def test_a_spread_has_the_median_and_both_ends_and_leaves_out_rounds_without_the_number() -> None:
    assert Spread.of([3.0, None, 1.0, 2.0, 10.0]) == Spread(median=2.5, min=1.0, max=10.0)
    assert Spread.of([None]) is None


def test_decode_speed_leaves_the_first_step_out_and_sums_over_requests() -> None:
    slow = request(steps=[step(5.0), step(7.0), step(9.0, 4, 3, 3)])  # 5 tokens in 4 s
    fast = request(steps=[step(0.5), step(1.5, 3, 2, 2)])  # 3 tokens in 1 s
    assert decode_speed([slow, fast]) == pytest.approx(8 / 5)
    assert decode_speed([request(steps=[step(1.0)])]) is None


def test_tokens_that_come_together_are_one_gap() -> None:
    assert inter_token_gaps(request(steps=[step(1.0), step(1.5, 4, 3, 3), step(1.75)])) == [0.5, 0.25]


def test_percentiles_are_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([0.0, 100.0], 99) == pytest.approx(99.0)
    assert percentile([], 50) is None


def test_metrics_are_of_one_category_and_medians_over_rounds() -> None:
    def one(scale: float) -> list:
        first = request("a", [step(scale), step(2 * scale, 2, 1, 1)], category="x", num_computed_tokens=8)
        return [first, request("b", [step(9.0), step(99.0)], category="y")]

    runs = [run(*one(1.0), wall_s=5.0), run(*one(4.0), wall_s=10.0), run(*one(2.0), wall_s=2.5)]
    references = [run(*one(4.0)), run(*one(4.0)), run(*one(4.0))]
    found = metrics(runs, references, "x")
    assert found.num_requests == 1
    assert found.num_output_tokens == 3
    assert found.decode_tokens_per_s == Spread(median=1.0, min=0.5, max=2.0)
    assert found.speed_up == Spread(median=2.0, min=1.0, max=4.0)
    assert found.time_to_first_token_s == Spread(median=2.0, min=1.0, max=4.0)
    assert found.inter_token_p50_s == Spread(median=2.0, min=1.0, max=4.0)
    assert found.acceptance_length == Spread(median=2.0, min=2.0, max=2.0)
    assert found.prefill_tokens_per_s == Spread(median=16.0, min=16.0, max=16.0)
    assert found.throughput_tokens_per_s is None
    assert metrics(runs, references, ALL).num_requests == 2
    assert metrics(runs, references, ALL).throughput_tokens_per_s == Spread(median=1.0, min=0.5, max=2.0)


def test_a_request_of_one_token_has_no_speed_and_no_gaps() -> None:
    runs = [run(request(steps=[step(1.0)]))]
    found = metrics(runs, runs, ALL)
    assert (found.decode_tokens_per_s, found.speed_up, found.inter_token_p99_s, found.acceptance_length) == (None,) * 4


def test_acceptance_by_position_is_summed_over_requests_of_other_lengths_and_rounds() -> None:
    one = request("a", drafted_per_position=(4, 2), accepted_per_position=(3, 1))
    other = request("b", drafted_per_position=(5,), accepted_per_position=(0,))
    assert acceptance_per_position([run(one, other), run(one, other)]) == ([18, 4], [6, 2])


def test_step_times_are_milliseconds_of_one_step_and_the_median_over_rounds() -> None:
    times = [StepTimes(num_steps=2, forward_s=forward, propose_s=0.002) for forward in (0.2, 0.02, 0.06)]
    found = step_times_ms([run(request(), decode=each) for each in times])
    assert found == pytest.approx({"propose": 1.0, "forward": 30.0, "sample": 0.0, "rest": 0.0})
    assert step_times_ms([run(request())]) is None


def test_differences_name_the_first_round_and_the_first_place() -> None:
    same, two = request("a", token_ids=(1, 2)), request("b", token_ids=(5, 6, 7))
    references = [run(same, two)] * 3
    runs = [
        run(same, two),
        run(same, request("b", token_ids=(5, 9, 7))),
        run(request("a", token_ids=(1,)), request("b", token_ids=(0,))),
    ]
    first, second = differences(runs, references)
    assert (first.prompt_id, first.round, first.position) == ("a", 2, 1)
    assert (first.token_id, first.reference_token_id) == (None, 2)
    assert (second.prompt_id, second.round, second.position) == ("b", 1, 1)
    assert (second.token_id, second.reference_token_id) == (9, 6)
    assert differences(references, references) == []
