"""Text token by token: no character split, in the end the whole text; stop texts by their plain definition."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compspec.detokenizer import Detokenizer, OutputText
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
    """Characters that are not ASCII are one token per byte."""
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def whole(tokenizer: Any, token_ids: list[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def stream(tokenizer: Any, prompt: list[int], token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("prompt", ["", "to be or", "日本", "😀 "])
def test_a_text_comes_out_as_it_went_in(tokenizer: Any, prompt: str, text: str) -> None:
    assert "".join(stream(tokenizer, encode(tokenizer, prompt), encode(tokenizer, text))) == text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 511), max_size=25), st.sampled_from(TEXTS))
def test_any_tokens_give_the_text_of_decode(tokenizer: Any, token_ids: list[int], prompt: str) -> None:
    """Random bytes and special tokens included. The prompt ends with a whole character, so decode has one answer."""
    token_ids = [token % len(tokenizer) for token in token_ids]
    assert "".join(stream(tokenizer, encode(tokenizer, prompt), token_ids)) == whole(tokenizer, token_ids)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=12))
def test_any_text_survives_and_no_character_is_split(tokenizer: Any, text: str) -> None:
    deltas = stream(tokenizer, encode(tokenizer, "prompt"), encode(tokenizer, text))
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in delta for delta in deltas)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=12))
def test_all_but_an_incomplete_character_is_released_with_its_last_token(tokenizer: Any, text: str) -> None:
    """Whatever decode shows of the tokens so far is out, but for U+FFFD at its end, which may become something else."""
    detokenizer, released = Detokenizer(tokenizer, encode(tokenizer, "prompt")), ""
    ids = encode(tokenizer, text)
    for count, token in enumerate(ids, 1):
        released += detokenizer.push(token)
        assert released.rstrip("\ufffd") == whole(tokenizer, ids[:count]).rstrip("\ufffd")


class Bytes:
    """A tokenizer whose token i is `pieces[i]`: any bytes, the middle of a character and more included."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self.all_special_ids: list[int] = []

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return b"".join(self._pieces[token] for token in token_ids).decode("utf-8", "replace")


some_bytes = st.lists(st.binary(max_size=3) | st.sampled_from(["é", "日", "😀", "a"]).map(str.encode), max_size=8)


@settings(max_examples=1000, deadline=None)
@given(st.text("aé日本😀 \u0301") | some_bytes.map(b"".join), st.lists(st.integers(1, 5), max_size=20))
def test_tokens_that_end_anywhere_in_a_character_give_the_text_of_decode(
    content: str | bytes, sizes: list[int]
) -> None:
    """One token may hold the end of a character, whole ones and the beginning of another."""
    data = content.encode() if isinstance(content, str) else content
    ends = [*itertools.accumulate(sizes, initial=0), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(ends) if a < len(data)]
    detokenizer, released = Detokenizer(Bytes(pieces), []), ""
    for count in range(len(pieces)):
        released += detokenizer.push(count)
        so_far = b"".join(pieces[: count + 1]).decode("utf-8", "replace")
        assert released.rstrip("\ufffd") == so_far.rstrip("\ufffd")
    assert released + detokenizer.finish() == data.decode("utf-8", "replace")


class Words(Bytes):
    """A tokenizer that drops the space before the first word, as those of Llama do."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return super().decode(token_ids).removeprefix(" ")


def test_the_prompt_decides_whether_the_text_begins_with_a_space() -> None:
    words = Words([b" a", b" b", b" c"])
    assert "".join(stream(words, [0], [1, 2])) == " b c"
    assert "".join(stream(words, [0, 1, 2, 0, 1, 2, 0], [1, 2])) == " b c"
    assert "".join(stream(words, [], [1, 2])) == "b c"


def test_a_character_that_the_prompt_begins_is_no_debris_in_the_output(tokenizer: Any) -> None:
    *begun, last = encode(tokenizer, "😀")
    assert len(begun) == 3
    assert "".join(stream(tokenizer, [*encode(tokenizer, "the"), *begun], [last, *encode(tokenizer, "ok")])) == "ok"


def test_a_character_of_several_tokens_is_held_back_until_it_is_whole(tokenizer: Any) -> None:
    ids = encode(tokenizer, "😀")
    assert len(ids) == 4
    detokenizer = Detokenizer(tokenizer, encode(tokenizer, "x"))
    assert [detokenizer.push(token) for token in ids] == ["", "", "", "😀"]
    assert detokenizer.finish() == ""


def test_what_is_incomplete_at_the_end_is_shown_as_decode_shows_it(tokenizer: Any) -> None:
    ids = [*encode(tokenizer, "ok"), *encode(tokenizer, "😀")[:3]]
    deltas = stream(tokenizer, [], ids)
    assert "".join(deltas) == whole(tokenizer, ids) == "ok\ufffd"
    assert deltas[-1] == "\ufffd"


def test_special_tokens_have_no_text(tokenizer: Any) -> None:
    ids = encode(tokenizer, "a b")
    assert "".join(stream(tokenizer, [1], [1, *ids, 2])) == "a b"


def test_finish_twice_gives_nothing_twice(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer, [])
    for token in encode(tokenizer, "😀")[:2]:
        detokenizer.push(token)
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


class Counting:
    """A tokenizer that counts the tokens it is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.all_special_ids = tokenizer.all_special_ids
        self.longest = 0

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.longest = max(self.longest, len(token_ids))
        text: str = self._tokenizer.decode(token_ids, **options)
        return text


def test_each_token_is_decoded_with_a_few_before_it_and_not_with_all(tokenizer: Any) -> None:
    counting = Counting(tokenizer)
    ids = encode(tokenizer, "日本語 the quick 😀 " * 30)
    stream(counting, ids, ids)
    assert counting.longest <= 16


class ByteFallback(Bytes):
    """As SentencePiece's: of a run of single bytes either all are characters or each is shown as a wrong one."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        runs = itertools.groupby((self._pieces[token] for token in token_ids), lambda piece: len(piece) == 1)
        return "".join(self._run(b"".join(pieces)) for _, pieces in runs)

    @staticmethod
    def _run(data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(data)


@pytest.mark.parametrize("kind", [Bytes, ByteFallback])
@pytest.mark.parametrize(
    "run",
    [b"\x80" * 200, b"\xf0" * 200, b"\xe6\x97" * 101, b"\xff" + "😀".encode()[:3] * 70, b"\xf0\x9f\x98" * 66 + b"\x80"],
    ids=["ends", "beginnings", "two of three", "three of four", "a whole one at the end"],
)
@pytest.mark.parametrize("after", [b"", b" the end"])
@pytest.mark.parametrize("beginning", [b"so: ", b"ab\xff"])
def test_bytes_that_never_complete_a_character_are_not_decoded_again_and_again(
    kind: type[Bytes], run: bytes, after: bytes, beginning: bytes
) -> None:
    pieces = [beginning, *[bytes([byte]) for byte in run], *([after] if after else [])]
    tokenizer = Counting(kind(pieces))
    detokenizer, released = Detokenizer(tokenizer, []), ""
    for count in range(len(pieces)):
        released += detokenizer.push(count)
        so_far = kind(pieces).decode(list(range(count + 1)))
        assert released.rstrip("\ufffd") == so_far.rstrip("\ufffd")
    assert released + detokenizer.finish() == kind(pieces).decode(list(range(len(pieces))))
    assert tokenizer.longest <= 40


class Pieces:
    """A detokenizer whose token i has the text `pieces[i]`, and `rest` is what the output's end brings."""

    def __init__(self, pieces: Sequence[str], rest: str = "") -> None:
        self._pieces = pieces
        self._rest = rest

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]

    def finish(self) -> str:
        return self._rest


def first_stop(pieces: Sequence[str], stop: Sequence[str], min_tokens: int) -> tuple[int, str, str] | None:
    """By definition: number of tokens, text and stop text, of the stop text that ends first, of several the longest."""
    text = ""
    for count, piece in enumerate(pieces, 1):
        for end in range(len(text) + 1, len(text) + len(piece) + 1):
            here = [one for one in stop if (text + piece)[:end].endswith(one)]
            if here and count > min_tokens:
                longest = max(here, key=len)
                return count, (text + piece)[: end - len(longest)], longest
        text += piece
    return None


def held_back(text: str, stop: Sequence[str]) -> int:
    """By definition: the longest end of the text that is the beginning, and not the whole, of a stop text."""
    fits = [n for n in range(len(text) + 1) for one in stop if n < len(one) and text.endswith(one[:n])]
    return max(fits, default=0)


def run(pieces: Sequence[str], stop: Sequence[str] = (), min_tokens: int = 0, rest: str = "") -> tuple[int, str, Any]:
    """Number of tokens pushed, the joined deltas, and the stop text."""
    output = OutputText(Pieces(pieces, rest), stop, min_tokens)
    deltas, found, count = [], None, 0
    while count < len(pieces) and found is None:
        found = output.push(count)
        deltas.append(output.take())
        count += 1
    output.finish()
    return count, "".join([*deltas, output.take()]), found


STOP_CASES = [
    # pieces, stop texts, tokens, text, stop text
    (["ab", "cd"], ["cd"], 2, "ab", "cd"),
    (["abcd", "ef"], ["bc"], 1, "a", "bc"),
    (["ab", "cd"], ["bc"], 2, "a", "bc"),
    (["ab", "c", "de"], ["bcd"], 3, "a", "bcd"),
    (["stop"], ["stop"], 1, "", "stop"),
    (["x", "", "y"], ["xy"], 3, "", "xy"),
    (["ab", "ab", "ac"], ["abac"], 3, "ab", "abac"),
    (["aaaa"], ["aa"], 1, "", "aa"),
    (["a", "a", "b"], ["aab", "ab"], 3, "", "aab"),
    (["abc"], ["bc", "abc", "c"], 1, "", "abc"),
    (["abc"], ["c", "bc"], 1, "a", "bc"),
    (["abcd"], ["abcd", "bc"], 1, "a", "bc"),
    (["abcd"], ["d", "a"], 1, "", "a"),
    (["ab", "cd"], ["abc", "ab"], 1, "", "ab"),
    (["a", "b", "c"], ["abc", "ab"], 2, "", "ab"),
    (["ab", "x", "cd"], ["abcd", "cd"], 3, "abx", "cd"),
    (["日", "本", "語"], ["本語"], 3, "日", "本語"),
    (["ok ", "", "", "", "😀!"], ["😀"], 5, "ok ", "😀"),
    (["ab\n", "\nUser:"], ["\n\n", "User"], 2, "ab", "\n\n"),
]


@pytest.mark.parametrize(("pieces", "stop", "count", "text", "reason"), STOP_CASES)
def test_the_text_ends_before_the_stop_text_that_ends_first(
    pieces: list[str], stop: list[str], count: int, text: str, reason: str
) -> None:
    assert run(pieces, stop) == (count, text, reason)
    assert run(pieces, stop[::-1]) == (count, text, reason), "the order of the stop texts matters"


@pytest.mark.parametrize("stop", [[], ["abcx"], ["bcd", "cde"], ["cabc"], ["abcabc"]])
def test_without_a_stop_text_in_it_all_text_comes_out(stop: list[str]) -> None:
    assert run(["ab", "c", "ab"], stop, rest="\ufffd") == (3, "abcab\ufffd", None)


@pytest.mark.parametrize("min_tokens", range(5))
def test_stop_texts_that_end_within_the_first_tokens_do_not_count(min_tokens: int) -> None:
    expected = (min_tokens + 1, "ab" * min_tokens, "ab") if min_tokens < 4 else (4, "abababab", None)
    assert run(["ab"] * 4, ["ab"], min_tokens) == expected


def test_a_stop_text_that_begins_in_the_first_tokens_and_ends_after_them_counts() -> None:
    assert run(["xa", "bc"], ["ab"], min_tokens=1) == (2, "x", "ab")
    assert run(["a", "a", "a"], ["aa"], min_tokens=2) == (3, "a", "aa")
    assert run(["ab", "c"], ["ab", "abc"], min_tokens=1) == (2, "", "abc"), "the shorter one was ignored"
    assert run(["ab", "x"], ["ab", "abc"], min_tokens=1) == (2, "abx", None)
    assert run(["abcab", "c"], ["abc"], min_tokens=1) == (2, "abc", "abc")


pieces_of = st.lists(st.text("ab", max_size=3), max_size=12)
stops_of = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


@settings(max_examples=1500, deadline=None)
@given(pieces_of, stops_of, st.integers(0, 6), st.text("ab\ufffd", max_size=2))
def test_stop_texts_follow_their_plain_definition(
    pieces: list[str], stop: list[str], min_tokens: int, rest: str
) -> None:
    expected = first_stop(pieces, stop, min_tokens) or (len(pieces), "".join(pieces) + rest, None)
    assert run(pieces, stop, min_tokens, rest) == expected


@settings(max_examples=1000, deadline=None)
@given(pieces_of, stops_of, st.integers(0, 6), st.lists(st.integers(1, 4), max_size=8))
def test_deltas_join_to_the_text_however_tokens_are_grouped_and_show_no_part_of_a_stop(
    pieces: list[str], stop: list[str], min_tokens: int, sizes: list[int]
) -> None:
    """What is out is never taken back, and nothing is held that is certain."""
    final = run(pieces, stop, min_tokens)[1]
    output = OutputText(Pieces(pieces), stop, min_tokens)
    released, at, found = "", 0, None
    for size in [*sizes, *[1] * len(pieces)]:
        for token in range(at, min(at + size, len(pieces))):
            found = found or output.push(token)
            if found is not None:
                break
        at = min(at + size, len(pieces))
        released += output.take()
        assert final.startswith(released)
        if found is not None:
            assert released == final, "a complete text is out at once"
            break
        text = "".join(pieces[:at])
        assert len(released) == len(text) - held_back(text, stop)
    output.finish()
    assert released + output.take() == final
    assert output.take() == ""


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 511), max_size=20), st.lists(st.integers(0, 60), min_size=2, max_size=6), st.data())
def test_stop_texts_in_real_tokens_follow_their_plain_definition(
    tokenizer: Any, token_ids: list[int], cuts: list[int], data: st.DataObject
) -> None:
    """The stop texts are parts of the output, in the middle of tokens and characters of several tokens included."""
    words = encode(tokenizer, "to 😀 日本 é the quick")
    token_ids = [words[token % len(words)] if token % 2 else token % len(tokenizer) for token in token_ids]
    *pieces, rest = stream(tokenizer, [], token_ids)
    text = "".join(pieces)
    stop = [text[a:b] for a, b in itertools.pairwise(cuts) if text[a:b]]
    min_tokens = data.draw(st.integers(0, 5))
    output = OutputText(Detokenizer(tokenizer, []), stop, min_tokens)
    released, found, count = "", None, 0
    while count < len(token_ids) and found is None:
        found = output.push(token_ids[count])
        released += output.take()
        count += 1
    output.finish()
    expected = first_stop(pieces, stop, min_tokens) or (len(token_ids), text + rest, None)
    assert (count, released + output.take(), found) == expected


def test_a_stop_text_of_a_character_in_four_tokens_ends_with_the_fourth(tokenizer: Any) -> None:
    ids = encode(tokenizer, "ok 😀😀")
    output = OutputText(Detokenizer(tokenizer, []), ["k 😀"])
    found = [output.push(token) for token in ids[:7]]
    assert found == [None] * 6 + ["k 😀"]
    assert output.take() == "o"


def test_finish_releases_what_was_held_and_once(tokenizer: Any) -> None:
    """As when an output ends for another reason, or is aborted."""
    output = OutputText(Detokenizer(tokenizer, []), ["xyz", "😀"])
    for token in [*encode(tokenizer, "wxy"), *encode(tokenizer, "😀")[:2]]:
        assert output.push(token) is None
    assert output.take() == "w"
    output.finish()
    assert output.take() == "xy\ufffd"
    output.finish()
    assert output.take() == ""


def test_finish_after_a_stop_text_releases_nothing_of_it() -> None:
    output = OutputText(Pieces(["ab", "cd!"], rest="\ufffd"), ["bc"])
    assert [output.push(0), output.push(1)] == [None, "bc"]
    output.finish()
    assert output.take() == "a"
