"""Prompts from JSONL and from Spec-Bench."""

import json
from pathlib import Path

import pytest

from compspec.bench.prompts import SPEC_BENCH_IDS, encode_questions, read_questions
from compspec.errors import ConfigError, RequestError


class Encoder:
    def encode(self, prompt: str) -> list[int]:
        return [len(prompt)]

    def chat_token_ids(self, messages: list) -> list[int]:
        if messages[0]["content"] == "bad":
            raise RequestError("the chat template refused the messages")
        return [100 + len(messages[0]["content"])]


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def question(number: object, category: object = "qa", *turns: object) -> dict:
    return {"question_id": number, "category": category, "turns": list(turns) or [f"q{number}", "later"]}


@pytest.fixture
def spec_bench(tmp_path: Path) -> Path:
    return write(tmp_path / "question.jsonl", *(question(number) for number in range(81, 561)))


def test_spec_bench_gives_its_first_turns_twelve_of_them_unless_told(spec_bench: Path) -> None:
    found = read_questions(spec_bench=spec_bench.parent)
    assert [each.line.id for each in found] == list(SPEC_BENCH_IDS)
    assert (found[0].line.prompt, found[0].category) == ("q81", "qa")


def test_ids_keep_their_order_and_a_limit_takes_the_first(spec_bench: Path) -> None:
    assert [each.line.id for each in read_questions(spec_bench=spec_bench, ids=["90", "82"])] == ["90", "82"]
    assert [each.line.id for each in read_questions(spec_bench=spec_bench, limit=2)] == ["81", "82"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ids": ["82", "nine"]}, "no prompt with id 'nine'"),
        ({"ids": []}, "at least one"),
        ({"ids": ["82", "82"]}, "each once"),
        ({"limit": 481}, "has 480 prompts"),
        ({"limit": 0}, "--limit is 0"),
    ],
)
def test_what_is_not_there_is_named(spec_bench: Path, options: dict, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_questions(spec_bench=spec_bench, **options)


def test_exactly_one_file_and_one_choice(spec_bench: Path) -> None:
    for options in ({}, {"prompts": spec_bench, "spec_bench": spec_bench}):
        with pytest.raises(ConfigError, match="one of the two"):
            read_questions(**options)
    with pytest.raises(ConfigError, match="not both"):
        read_questions(spec_bench=spec_bench, ids=["81"], limit=1)


@pytest.mark.parametrize(
    "line",
    [{"prompt": "x"}, question("81"), question(81, None), question(81, "qa", 3), {**question(81), "turns": []}, [], 7],
)
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: object) -> None:
    with pytest.raises(RequestError, match="line 2"):
        read_questions(spec_bench=write(tmp_path / "q.jsonl", question(80), line))


def test_unreadable_empty_and_doubled_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="No such file"):
        read_questions(spec_bench=tmp_path / "none.jsonl")
    with pytest.raises(RequestError, match="has no prompts"):
        read_questions(prompts=write(tmp_path / "empty.jsonl"))
    with pytest.raises(RequestError, match="two questions with id '5'"):
        read_questions(spec_bench=write(tmp_path / "two.jsonl", question(5), question(5)))


def test_texts_go_through_the_template_where_asked_messages_always_and_ids_never(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"id": "t", "prompt": "abc", "params": {"max_tokens": 3}},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"prompt_token_ids": [7, 8]},
    )
    questions = read_questions(prompts=path)
    assert [each.token_ids for each in encode_questions(questions, Encoder(), chat=False)] == [[3], [105], [7, 8]]
    with_chat = encode_questions(questions, Encoder(), chat=True)
    assert [each.token_ids for each in with_chat] == [[103], [105], [7, 8]]
    assert [(each.id, each.params) for each in with_chat] == [("t", {"max_tokens": 3}), ("1", {}), ("2", {})]


def test_a_prompt_that_cannot_be_tokenised_is_named(tmp_path: Path) -> None:
    questions = read_questions(prompts=write(tmp_path / "p.jsonl", {"id": "x", "prompt": "bad"}))
    with pytest.raises(RequestError, match="prompt 'x': the chat template refused"):
        encode_questions(questions, Encoder(), chat=True)
