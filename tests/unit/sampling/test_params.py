"""Sampling parameters: everything out of range, misspelt or of a wrong type is a RequestError of one line."""

import math

import pytest

from compspec.errors import RequestError
from compspec.sampling.params import MAX_SEED, SamplingParams

NAN, INF = float("nan"), float("inf")

REFUSED = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", None),
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", INF),
    ("temperature", "1"),
    ("temperature", 1e-6),
    ("temperature", 1e39),
    ("top_k", -1),
    ("top_k", 1.0),
    ("top_p", 0.0),
    ("top_p", 1.0001),
    ("top_p", -0.5),
    ("top_p", NAN),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", NAN),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", NAN),
    ("repetition_penalty", INF),
    ("repetition_penalty", 1e-46),
    ("repetition_penalty", 1e39),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("presence_penalty", NAN),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", NAN),
    ("seed", -1),
    ("seed", MAX_SEED + 1),
    ("seed", 1.0),
    ("seed", True),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", ("a",)),
    ("stop_token_ids", "12"),
    ("ignore_eos", 1),
    ("ignore_eos", "yes"),
    ("speculative", -1),
    ("speculative", True),
    ("speculative", 1.5),
]

ACCEPTED = [
    ("max_tokens", 1),
    ("temperature", 0),
    ("temperature", 1e-5),
    ("temperature", 100.0),
    ("top_k", 0),
    ("top_k", 10**6),
    ("top_p", 1.0),
    ("top_p", 1e-9),
    ("min_p", 0.0),
    ("min_p", 1.0),
    ("repetition_penalty", 0.5),
    ("repetition_penalty", 10),
    ("presence_penalty", -2.0),
    ("frequency_penalty", 2.0),
    ("seed", 0),
    ("seed", MAX_SEED),
    ("stop_token_ids", ()),
    ("speculative", False),
    ("speculative", 1),
    ("speculative", None),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_wrong_value_is_refused_and_named(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_the_ends_of_every_range_are_allowed(name: str, value: object) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize("name", ["topk", "max_new_tokens", "a\nb"])
def test_an_unknown_name_lists_the_valid_ones(name: str) -> None:
    with pytest.raises(RequestError, match="unknown sampling parameter") as caught:
        SamplingParams(**{name: 1})
    assert "\n" not in str(caught.value)
    assert all(valid in str(caught.value) for valid in SamplingParams.model_fields)


def test_an_unknown_name_is_told_before_a_wrong_value() -> None:
    with pytest.raises(RequestError, match="unknown sampling parameter 'bad'"):
        SamplingParams(temperature=-1, bad=2)


def test_a_list_of_stop_tokens_becomes_a_tuple() -> None:
    assert SamplingParams(stop_token_ids=[3, 1]).stop_token_ids == (3, 1)


def test_parameters_cannot_be_changed() -> None:
    params = SamplingParams()
    with pytest.raises(ValueError, match="frozen"):
        params.temperature = 1.0  # type: ignore[misc]
    assert params.temperature == 0.0


@pytest.mark.parametrize(
    ("values", "penalised"),
    [
        ({}, False),
        ({"temperature": 1.0}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_has_penalties_tells_whether_a_logit_changes(values: dict[str, float], penalised: bool) -> None:
    assert SamplingParams(**values).has_penalties is penalised


def test_min_p_becomes_a_margin_of_logits() -> None:
    assert SamplingParams().log_min_p == -math.inf
    assert SamplingParams(min_p=1.0).log_min_p == 0.0
    assert SamplingParams(min_p=0.25).log_min_p == math.log(0.25)


def test_greedy_means_temperature_zero() -> None:
    assert SamplingParams().is_greedy
    assert not SamplingParams(temperature=0.5).is_greedy
