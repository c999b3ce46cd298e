"""What is refused before it is queued, in one line with the numbers, and what just fits."""

from typing import Any

import numpy as np
import pytest

from compspec.errors import CompspecError, RequestError, UnsupportedError
from compspec.sampling.params import SamplingParams
from compspec.scheduling.admission import Limits, check_request

LIMITS = Limits(max_model_len=10, vocab_size=8, num_token_ids=6, eos_token_ids=frozenset({2}))


def refused(prompt: Any = (1,), kind: type[CompspecError] = RequestError, **params: Any) -> str:
    """The message, which must be one line."""
    with pytest.raises(kind) as caught:
        check_request(prompt, SamplingParams(**params), LIMITS)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def accepted(prompt: Any = (1,), **params: Any) -> list[int]:
    return check_request(prompt, SamplingParams(**params), LIMITS)


def test_a_prompt_becomes_a_list_of_plain_integers() -> None:
    found = accepted(np.array([1, 7, 0]))
    assert found == [1, 7, 0]
    assert all(type(token) is int for token in found)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], ["empty"]),
        ([1] * 10, ["10 tokens", "takes 10"]),
        ([1, 8], ["token id 8", "vocabulary of 8"]),
        ([-1], ["token id -1"]),
        ([1.5], ["integers"]),
        (["a"], ["integers"]),
    ],
)
def test_prompts_that_do_not_fit(prompt: list[Any], words: list[str]) -> None:
    assert all(word in refused(prompt) for word in words)


def test_a_prompt_may_leave_room_for_one_token() -> None:
    assert accepted([1] * 9, min_tokens=1) == [1] * 9


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"stop_token_ids": [3, 8]}, "stop token id 8"),
        ({"logit_bias": {3: 1.0, 8: 1.0}}, "logit_bias token id 8"),
        ({"bad_words": [[3], [4, 8]]}, "bad_words token id 8"),
        ({"allowed_token_ids": [3, 8]}, "allowed_token_ids token id 8"),
    ],
)
def test_ids_outside_the_vocabulary(params: dict[str, Any], name: str) -> None:
    message = refused(**params)
    assert name in message
    assert "vocabulary of 8" in message


def test_the_last_id_of_the_vocabulary_is_inside() -> None:
    accepted(stop_token_ids=[7], logit_bias={7: 1.0}, bad_words=[[7], [3, 7]], allowed_token_ids=[3, 7])


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_log_probabilities_than_tokens(name: str) -> None:
    accepted(**{name: 8})
    message = refused(**{name: 9})
    assert f"{name} is 9" in message
    assert "8 tokens" in message


def test_min_tokens_beyond_the_room() -> None:
    accepted([1] * 4, min_tokens=6)
    message = refused([1] * 4, min_tokens=7)
    assert "min_tokens is 7" in message
    assert "room for 6" in message


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"allowed_token_ids": [3], "bad_words": [[3]]}, "leave no token"),
        ({"bad_words": [[token] for token in range(6)]}, "leave no token"),
        ({"allowed_token_ids": [6, 7]}, "leave no token"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "min_tokens forbids all"),
        ({"allowed_token_ids": [2, 3, 6], "stop_token_ids": [3], "min_tokens": 1}, "min_tokens forbids all"),
        ({"stop_token_ids": list(range(6)), "ignore_eos": True, "min_tokens": 1}, "min_tokens forbids all"),
        ({"allowed_token_ids": [3], "stop_token_ids": [3, 4], "min_tokens": 1}, "min_tokens forbids all"),
        ({"bad_words": [[4], [5], [3], [0], [1]], "min_tokens": 1}, "min_tokens forbids all"),
    ],
)
def test_parameters_that_leave_no_token_to_sample(params: dict[str, Any], name: str) -> None:
    assert name in refused(**params)


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [3, 4], "bad_words": [[3]]},
        {"allowed_token_ids": [3], "bad_words": [[3, 3], [4, 3]]},
        {"allowed_token_ids": [2]},
        {"allowed_token_ids": [2], "ignore_eos": True, "min_tokens": 1},
        {"allowed_token_ids": [2, 3], "min_tokens": 1},
        {"stop_token_ids": list(range(6))},
        {"allowed_token_ids": [5, 6, 7]},
    ],
)
def test_parameters_that_leave_one_token_pass(params: dict[str, Any]) -> None:
    accepted(**params)


def test_bad_words_that_are_text_need_a_tokenizer() -> None:
    assert "use LLM" in refused(kind=UnsupportedError, bad_words=[[3], "word"])
