"""The prompts of a benchmark: lines of a JSONL file, or first turns of Spec-Bench."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from compspec.errors import ConfigError, RequestError, UnsupportedError
from compspec.jsonl import PromptLine, read_prompts

# From where drafts never fit (writing, coding) to where they fit best (extraction, retrieval).
SPEC_BENCH_IDS = ("81", "121", "122", "131", "161", "241", "242", "243", "321", "401", "481", "482")


class Encoder(Protocol):
    """Turns text into token ids; an `LLM` does."""

    def encode(self, prompt: str) -> list[int]:
        """Of a plain prompt."""
        ...

    def chat_token_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Of a conversation, ready for the assistant's turn."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt before it is tokenised.

    Attributes:
        category: of Spec-Bench; empty for lines of a prompt file.
    """

    line: PromptLine
    category: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """A tokenised prompt.

    Attributes:
        params: its own sampling parameters, where its line has some.
    """

    id: str
    category: str
    token_ids: list[int]
    params: dict[str, Any]


def read_questions(
    *,
    prompts: Path | None = None,
    spec_bench: Path | None = None,
    ids: Sequence[str] | None = None,
    limit: int | None = None,
) -> list[Question]:
    """Reads one file and chooses from it.

    Args:
        prompts: JSONL as `compspec generate` reads it.
        spec_bench: question.jsonl of github.com/hemingkx/Spec-Bench, or the folder it lies in.
        ids: those to take, in this order; default: all of a prompt file, 12 of Spec-Bench.
        limit: the first so many of the file, instead of `ids`.

    Raises:
        ConfigError: not exactly one file is given, or both `ids` and `limit`.
        RequestError: an unreadable file, a line that is not a prompt, no prompts, an id that is not there or twice.
    """
    if (prompts is None) == (spec_bench is None):
        raise ConfigError("give --prompts or --spec-bench, one of the two")
    if ids is not None and limit is not None:
        raise ConfigError("give --ids or --limit, not both")
    if prompts is not None:
        path = prompts
        found = [Question(line=line, category="") for line in read_prompts(path)]
    else:
        assert spec_bench is not None
        path = spec_bench / "question.jsonl" if spec_bench.is_dir() else spec_bench
        found = _read_spec_bench(path)
        if ids is None and limit is None:
            ids = SPEC_BENCH_IDS
    if not found:
        raise RequestError(f"'{path}' has no prompts")
    if limit is not None:
        if not 1 <= limit <= len(found):
            raise RequestError(f"--limit is {limit}, '{path}' has {len(found)} prompts")
        return found[:limit]
    if ids is None:
        return found
    by_id = {question.line.id: question for question in found}
    unknown = [name for name in ids if name not in by_id]
    if unknown:
        raise RequestError(f"'{path}' has no prompt with id {', '.join(map(repr, unknown))}")
    if not ids or len(set(ids)) < len(ids):
        raise RequestError("--ids takes at least one id, and each once")
    return [by_id[name] for name in ids]


def encode_questions(questions: Sequence[Question], encoder: Encoder, *, chat: bool) -> list[BenchPrompt]:
    """Tokenises prompts.

    Args:
        chat: wrap texts in the chat template, as a user's message.

    Raises:
        RequestError, UnsupportedError: a prompt cannot be tokenised; the message names it.
    """
    return [
        BenchPrompt(
            id=question.line.id,
            category=question.category,
            token_ids=_encode(question.line, encoder, chat),
            params=question.line.params,
        )
        for question in questions
    ]


def _encode(line: PromptLine, encoder: Encoder, chat: bool) -> list[int]:
    try:
        if line.prompt_token_ids is not None:
            return line.prompt_token_ids
        if line.messages is not None:
            return encoder.chat_token_ids(line.messages)
        assert line.prompt is not None
        if chat:
            return encoder.chat_token_ids([{"role": "user", "content": line.prompt}])
        return encoder.encode(line.prompt)
    except (RequestError, UnsupportedError) as error:
        raise type(error)(f"prompt '{line.id}': {error}") from None


def _read_spec_bench(path: Path) -> list[Question]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RequestError(f"cannot read '{path}': {reason}") from None
    lines = [(number, raw) for number, raw in enumerate(text.split("\n"), 1) if raw.strip()]
    found: dict[str, Question] = {}
    for number, raw in lines:
        question = _spec_bench_question(raw, f"'{path}' line {number}")
        if question.line.id in found:
            raise RequestError(f"'{path}' has two questions with id '{question.line.id}'")
        found[question.line.id] = question
    return list(found.values())


def _spec_bench_question(raw: str, where: str) -> Question:
    try:
        data = json.loads(raw)
        name, category, turn = data["question_id"], data["category"], data["turns"][0]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise RequestError(f"{where} is no question of Spec-Bench: it needs question_id, category and turns") from None
    if type(name) is not int or not isinstance(category, str) or not isinstance(turn, str):
        raise RequestError(f"{where} is no question of Spec-Bench: question_id is an integer, the others are text")
    line = PromptLine(id=str(name), prompt=turn, messages=None, prompt_token_ids=None, params={})
    return Question(line=line, category=category)
