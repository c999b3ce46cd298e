"""Token ids to text, one token at a time, so that the text does not depend on how tokens come in groups."""

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"

_LONGEST_RUN = 32
"""Of so many tokens that complete no character those in the middle are left out, `_KEPT` at each end are not."""

_KEPT = 8


class Detokenizer:
    """Incremental decoding of one output.

    A token is decoded together with the few before it, because tokenizers join across tokens. The bytes of
    a character that is still incomplete are held back until it completes or the output ends.

    Args:
        tokenizer: a transformers tokenizer.
        prompt_token_ids: context for the first token (whether it starts with a space, for one).
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # Special tokens that leave no text; they would only pile up in what is decoded together.
        self._without_text = frozenset(token for token in tokenizer.all_special_ids if not self._decode([token]))
        # The last prompt tokens are context alone; five are enough to complete any character.
        self._token_ids = list(prompt_token_ids[-5:])
        self._prefix = 0
        self._read = len(self._token_ids)
        self._prefix_text = self._decode(self._token_ids)
        # Characters after those of the prefix that were given out before the last one was complete.
        self._given = 0
        # How many replacement characters the tokens that were left out stand for, and where.
        self._num_omitted = 0
        self._omitted_at = 0

    def push(self, token_id: int) -> str:
        """Adds a token and returns the text that became certain."""
        if token_id in self._without_text:
            return ""
        self._token_ids.append(token_id)
        text = self._new_text()
        certain = text.rstrip(_REPLACEMENT)
        new = certain[self._given :]
        if certain and len(certain) == len(text):
            self._prefix, self._read, self._given = self._read, len(self._token_ids), 0
            self._prefix_text = self._decode(self._token_ids[self._prefix : self._read])
            self._num_omitted = 0
        else:
            self._given = max(self._given, len(certain))
            if len(self._token_ids) - self._read >= _LONGEST_RUN:
                self._shorten(text)
        return new

    def finish(self) -> str:
        """Returns what was held back; the output has ended."""
        text = self._new_text()
        rest, self._given = text[self._given :], len(text)
        return rest

    def _new_text(self) -> str:
        """The text of the tokens since the last complete character."""
        text = self._decode(self._token_ids[self._prefix :])[len(self._prefix_text) :]
        return text[: self._omitted_at] + _REPLACEMENT * self._num_omitted + text[self._omitted_at :]

    def _shorten(self, text: str) -> None:
        """Leaves out tokens from the middle of a long run of bytes that are no characters, whose text is `text`.

        Else all of it would be decoded again with every token. What the run becomes hangs on its last few bytes, and
        with tokenizers that show no byte of a run with a wrong one, on there being a wrong one: both stay.
        """
        tokens, certain = self._token_ids, len(text.rstrip(_REPLACEMENT))
        shorter = [*tokens[: self._read + _KEPT], *tokens[-_KEPT:]]
        kept = self._decode(shorter[self._prefix :])[len(self._prefix_text) :]
        if len(kept) <= len(text) and kept == text[: len(kept)] and len(kept.rstrip(_REPLACEMENT)) == certain:
            self._token_ids = shorter
            self._num_omitted, self._omitted_at = len(text) - len(kept), certain

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class OutputText:
    """The text of one output up to the first of its stop texts.

    Text that may be the beginning of a stop text is held back until it is certain that it is none.

    Args:
        detokenizer: of this output.
        stop: the stop texts. The one that ends first counts, of those that end together the longest.
        min_tokens: stop texts that end within the text of so many first tokens do not count.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self._released = ""
        self._stopped = False

    def push(self, token_id: int) -> str | None:
        """Adds a token; returns the stop text that ends with it, if any. Then the text is complete."""
        self._num_tokens += 1
        text = self._held + self._detokenizer.push(token_id)
        found = self._find(text) if self._num_tokens > self._min_tokens else None
        if found is not None:
            start, stop = found
            self._released += text[:start]
            self._held, self._stopped = "", True
            return stop
        hold = self._length_to_hold(text)
        self._released += text[: len(text) - hold]
        self._held = text[len(text) - hold :]
        return None

    def take(self) -> str:
        """The text that became certain since the last call."""
        text, self._released = self._released, ""
        return text

    def finish(self) -> None:
        """Releases what was held back; the output has ended."""
        if not self._stopped:
            self._released += self._held + self._detokenizer.finish()
            self._held, self._stopped = "", True

    def _find(self, text: str) -> tuple[int, str] | None:
        """Where the stop text that ends first begins, and which it is. What was held back holds none in whole."""
        found = []
        for stop in self._stop:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None

    def _length_to_hold(self, text: str) -> int:
        """The length of the longest end of `text` with which a stop text begins."""
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stop if len(stop) > n)), 0)
