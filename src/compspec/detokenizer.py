"""Token ids to text, one token at a time, so that the text does not depend on how tokens come in groups."""

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental decoding of one output.

    A token is decoded together with the few before it, because tokenizers join across tokens. Text whose
    last character is still incomplete is held back until it completes or the output ends.

    Args:
        tokenizer: a transformers tokenizer.
        prompt_token_ids: context for the first token (whether it starts with a space, for one).
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # The last prompt tokens are context alone; five are enough to complete any character.
        self._token_ids = list(prompt_token_ids[-5:])
        self._prefix = 0
        self._read = len(self._token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that became certain."""
        return "".join(self._push_one(token) for token in token_ids)

    def finish(self) -> str:
        """Returns what was held back; the output has ended."""
        prefix_text = self._decode(self._token_ids[self._prefix : self._read])
        text = self._decode(self._token_ids[self._prefix :])
        self._prefix = self._read = len(self._token_ids)
        return text[len(prefix_text) :]

    def _push_one(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        prefix_text = self._decode(self._token_ids[self._prefix : self._read])
        text = self._decode(self._token_ids[self._prefix :])
        if len(text) <= len(prefix_text) or text.endswith(_REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self._token_ids)
        return text[len(prefix_text) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
