"""Streamed text: the same however tokens come in groups, no character split, and in the end the whole text."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compspec.detokenizer import Detokenizer
from tests.tiny_models import tiny_tokenizer

TEXTS = [
    "the quick brown fox",
    "naïve café, señor",
    "日本語のテキスト",
    "mixed 😀 and 👩‍👩‍👧‍👦 text",
    "e\u0301 combining",
    " leading and trailing ",
    "line\n\nbreaks\tand tabs",
    "a real \ufffd character \ufffd",
    "\ufffd",
    "",
]
NUM_SPECIAL = 7


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def whole(tokenizer: Any, token_ids: list[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def stream(tokenizer: Any, prompt: list[int], groups: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(group) for group in groups), detokenizer.finish()]


def cut(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Splits tokens into groups of the given sizes, the rest in one."""
    groups, at = [], 0
    for size in sizes:
        groups.append(token_ids[at : at + size])
        at += size
    return [*groups, token_ids[at:]]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["", "to be or", "日本", "😀 "])
def test_a_text_comes_out_as_it_went_in(tokenizer: Any, prompt: str, text: str) -> None:
    ids = encode(tokenizer, text)
    for groups in ([ids], [[token] for token in ids], cut(ids, [2, 1, 3, 1])):
        assert "".join(stream(tokenizer, encode(tokenizer, prompt), groups)) == text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 511), max_size=25), st.lists(st.integers(0, 4), max_size=12), st.sampled_from(TEXTS))
def test_any_tokens_give_the_text_of_decode_however_they_are_grouped(
    tokenizer: Any, token_ids: list[int], sizes: list[int], prompt: str
) -> None:
    """Random bytes and special tokens included. The prompt ends with a whole character, so decode has one answer."""
    size = len(tokenizer)
    token_ids = [token % size for token in token_ids]
    context = encode(tokenizer, prompt)
    grouped = "".join(stream(tokenizer, context, cut(token_ids, sizes)))
    assert grouped == whole(tokenizer, token_ids)
    assert grouped == "".join(stream(tokenizer, context, [[token] for token in token_ids]))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=12), st.lists(st.integers(0, 3), max_size=10))
def test_any_text_survives_and_no_character_is_split(tokenizer: Any, text: str, sizes: list[int]) -> None:
    deltas = stream(tokenizer, encode(tokenizer, "prompt"), cut(encode(tokenizer, text), sizes))
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in delta for delta in deltas)


def test_a_character_of_several_tokens_is_held_back_until_it_is_whole(tokenizer: Any) -> None:
    ids = encode(tokenizer, "😀")
    assert len(ids) == 4
    detokenizer = Detokenizer(tokenizer, encode(tokenizer, "x"))
    assert [detokenizer.push([token]) for token in ids] == ["", "", "", "😀"]
    assert detokenizer.finish() == ""


def test_what_is_incomplete_at_the_end_is_shown_as_decode_shows_it(tokenizer: Any) -> None:
    ids = [*encode(tokenizer, "ok"), *encode(tokenizer, "😀")[:3]]
    deltas = stream(tokenizer, [], [[token] for token in ids])
    assert "".join(deltas) == whole(tokenizer, ids) == "ok\ufffd"
    assert deltas[-1] == "\ufffd"


def test_special_tokens_have_no_text(tokenizer: Any) -> None:
    ids = encode(tokenizer, "a b")
    assert "".join(stream(tokenizer, [1], [[1], ids, [2]])) == "a b"


def test_finish_twice_gives_nothing_twice(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer, [])
    detokenizer.push(encode(tokenizer, "😀")[:2])
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


class Counting:
    """A tokenizer that counts the tokens it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.longest = 0

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.longest = max(self.longest, len(token_ids))
        text: str = self._tokenizer.decode(token_ids, **options)
        return text


def test_each_token_is_decoded_with_a_few_before_it_and_not_with_all(tokenizer: Any) -> None:
    counting = Counting(tokenizer)
    ids = encode(tokenizer, "日本語 the quick 😀 " * 30)
    stream(counting, ids, [[token] for token in ids])
    assert counting.longest <= 16
