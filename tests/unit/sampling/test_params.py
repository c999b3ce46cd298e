"""Sampling parameters: everything out of range, misspelt or of a wrong type is a RequestError of one line."""

import copy
import json
import math
import pickle

import numpy as np
import pytest

from compspec.errors import RequestError
from compspec.sampling.params import MAX_SEED, SamplingParams

NAN, INF = float("nan"), float("inf")


def processor(token_ids: list[int], logits: object) -> object:
    """A logits processor."""
    return logits


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
    ("min_tokens", -1),
    ("min_tokens", 1.0),
    ("min_tokens", True),
    ("min_tokens", None),
    ("temperature", -INF),
    ("temperature", True),
    ("top_p", INF),
    ("min_p", INF),
    ("presence_penalty", INF),
    ("frequency_penalty", -INF),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 1),
    ("stop", {"a"}),
    ("n", 0),
    ("n", -1),
    ("n", 2.0),
    ("n", True),
    ("n", None),
    ("logprobs", -1),
    ("logprobs", 1.0),
    ("logprobs", True),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 1.0),
    ("prompt_logprobs", True),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: 100.1}),
    ("logit_bias", {1: -100.1}),
    ("logit_bias", {1: NAN}),
    ("logit_bias", {1: INF}),
    ("logit_bias", {1: "2"}),
    ("logit_bias", {1: True}),
    ("logit_bias", {1: None}),
    ("logit_bias", {1.0: 2.0}),
    ("logit_bias", {"a": 2.0}),
    ("logit_bias", {"-1": 2.0}),
    ("logit_bias", {"1.0": 2.0}),
    ("logit_bias", {"a\nb": 2.0}),
    ("logit_bias", {"9" * 5000: 2.0}),
    ("logit_bias", [1, 2]),
    ("bad_words", "word"),
    ("bad_words", [""]),
    ("bad_words", [[]]),
    ("bad_words", [[1, -1]]),
    ("bad_words", [[1.0]]),
    ("bad_words", [5]),
    ("bad_words", [None]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [1.0]),
    ("allowed_token_ids", "12"),
    ("allowed_token_ids", 1),
    ("logits_processors", processor),
    ("logits_processors", [1]),
    ("logits_processors", ["processor"]),
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
    ("min_tokens", 0),
    ("min_tokens", 128),
    ("n", 1),
    ("logprobs", None),
    ("logprobs", 0),
    ("prompt_logprobs", None),
    ("prompt_logprobs", 0),
    ("logit_bias", None),
    ("logit_bias", {}),
    ("logit_bias", {0: 100.0, 5: -100, 7: 0.0}),
    ("bad_words", ()),
    ("bad_words", ("word", (1,), (1, 2, 3))),
    ("allowed_token_ids", None),
    ("allowed_token_ids", (0,)),
    ("logits_processors", ()),
    ("logits_processors", (processor, print)),
    ("stop", ()),
    ("stop", ("a", "\n")),
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


def test_a_wrong_value_of_any_kind_is_told_in_one_line() -> None:
    with pytest.raises(RequestError, match="temperature") as caught:
        SamplingParams(temperature=np.array([[1.0], [2.0]]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("stop_token_ids", [3, 1], (3, 1)),
        ("allowed_token_ids", [3, 1], (3, 1)),
        ("logits_processors", [processor], (processor,)),
        ("bad_words", ["a", [1, 2], (3,)], ("a", (1, 2), (3,))),
        ("stop", ["b", "a"], ("b", "a")),
        ("stop", "ab", ("ab",)),
        ("stop", None, ()),
        ("bad_words", None, ()),
        ("logit_bias", {"5": 1, "7": -2.5, 9: 3.0}, {5: 1.0, 7: -2.5, 9: 3.0}),
    ],
)
def test_what_json_and_callers_write_becomes_one_form(name: str, given: object, value: object) -> None:
    assert getattr(SamplingParams(**{name: given}), name) == value


def test_a_dictionary_that_changes_afterwards_changes_no_parameters() -> None:
    bias = {5: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[5] = 2.0
    assert params.logit_bias == {5: 1.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 is more than max_tokens 4"),
        ({"min_tokens": 129}, "min_tokens 129 is more than max_tokens 128"),
        ({"n": 2}, "n is 2 but temperature is 0"),
        ({"n": 2, "temperature": 0.0, "top_k": 5}, "n is 2 but temperature is 0"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(values: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**values)
    assert "\n" not in str(caught.value)


def test_parameters_at_the_edge_of_contradiction_are_allowed() -> None:
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(n=2, temperature=0.1).n == 2


FULL = {
    "min_tokens": 2,
    "temperature": 0.5,
    "n": 3,
    "stop": ["a", "b"],
    "stop_token_ids": [4],
    "logit_bias": {5: 1.0},
    "bad_words": ["x", [1, 2]],
    "allowed_token_ids": [1, 2, 5],
    "logprobs": 2,
    "prompt_logprobs": 0,
    "speculative": False,
    "seed": 7,
}


def test_equal_parameters_are_equal_and_others_are_not() -> None:
    assert SamplingParams(**FULL) == SamplingParams(**FULL)
    assert all(SamplingParams(**FULL) != SamplingParams(**{**FULL, name: None}) for name in ("seed", "logit_bias"))
    assert SamplingParams(logits_processors=[processor]) == SamplingParams(logits_processors=(processor,))


@pytest.mark.parametrize(
    "values",
    [
        {name: value for name, value in FULL.items() if name != "logit_bias"},
        {"logits_processors": [processor]},
        FULL,
    ],
)
def test_equal_parameters_have_one_hash(values: dict) -> None:
    assert len({SamplingParams(**values), SamplingParams(**values)}) == 1


def test_parameters_can_be_copied_and_sent() -> None:
    params = SamplingParams(**FULL, logits_processors=[processor])
    assert params.model_copy(update={"seed": 8}) == SamplingParams(**{**FULL, "seed": 8}, logits_processors=[processor])
    assert copy.deepcopy(params) == params == pickle.loads(pickle.dumps(params))
    assert SamplingParams(**params.model_dump()) == params


def test_parameters_survive_json() -> None:
    written = json.loads(SamplingParams(**FULL).model_dump_json(exclude={"logits_processors"}))
    assert SamplingParams(**written) == SamplingParams(**FULL)


def test_the_json_schema_has_every_parameter_that_json_can_hold() -> None:
    schema = SamplingParams.model_json_schema()
    assert set(schema["properties"]) == set(SamplingParams.model_fields) - {"logits_processors"}
    assert json.loads(json.dumps(schema)) == schema


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


def test_a_token_id_that_is_given_twice_is_refused() -> None:
    with pytest.raises(RequestError, match="given twice"):
        SamplingParams(logit_bias={"5": 1.0, "05": 2.0})
