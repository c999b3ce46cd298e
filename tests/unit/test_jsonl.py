"""Prompt and result files: nothing finished is lost or doubled, and nothing of the user's is overwritten."""

import json
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compspec.config import make_config
from compspec.errors import CompspecError, RequestError
from compspec.jsonl import OutputError, PromptLine, ResultFile, read_prompts, request_key, result_record
from compspec.llm import CompletionOutput, RequestOutput
from compspec.request import FinishReason, Logprob, RequestStats
from compspec.sampling.params import SamplingParams


def record(identity: str, text: str = "text") -> dict[str, Any]:
    """A result as `compspec generate` writes it."""
    return {"id": identity, "key": "k", "text": text, "token_ids": [1, 2], "finish_reason": "stop", "stats": {}}


def line(identity: str, text: str = "text") -> bytes:
    return json.dumps(record(identity, text), ensure_ascii=False).encode() + b"\n"


def ids_in(path: Path) -> list[str]:
    return [json.loads(raw)["id"] for raw in path.read_bytes().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def prompts(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_results_are_appended_line_by_line_and_are_there_at_once(path: Path) -> None:
    file = ResultFile(path, {})
    assert file.finished == set()
    file.write(record("a"))
    assert path.read_bytes() == line("a")
    file.write(record("b", "zwei\nZeilen é 😀"))
    assert path.read_bytes() == line("a") + line("b", "zwei\nZeilen é 😀")
    assert file.finished == {"a", "b"}
    file.close()


def test_a_second_run_knows_what_the_first_finished(path: Path) -> None:
    first = ResultFile(path, {})
    first.write(record("a"))
    first.write(record("7"))
    first.close()
    second = ResultFile(path, {})
    assert second.finished == {"a", "7"}
    second.write(record("c"))
    second.close()
    assert ids_in(path) == ["a", "7", "c"]


@pytest.mark.parametrize("cut_at", range(1, len(line("b"))))
def test_a_last_line_cut_anywhere_is_done_again(path: Path, cut_at: int) -> None:
    path.write_bytes(line("a") + line("b")[:cut_at])
    file = ResultFile(path, {})
    assert file.finished == {"a"}
    file.write(record("b"))
    file.close()
    assert path.read_bytes() == line("a") + line("b")


@pytest.mark.parametrize(
    "foreign",
    [
        b"my notes\n",
        b"my notes",
        b'{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "y"}',
        b'{"id": "a", "prompt": "x"}',
        b'{"prompt": "x"}\n',
        b"[1]\n",
        b"3\n",
        b"\n",
        b"\xff\xfe\x00\n",
        line("a") + b"notes\n" + line("b"),
        line("a") + b"notes",
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_file_with_something_else_in_it_is_refused_and_not_touched(path: Path, foreign: bytes) -> None:
    path.write_bytes(foreign)
    with pytest.raises(OutputError, match="no result of compspec"):
        ResultFile(path, {})
    assert path.read_bytes() == foreign


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Lets the system refuse to write beyond `size` bytes, in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_leaves_all_earlier_results_and_nothing_else(path: Path) -> None:
    file = ResultFile(path, {})
    file.write(record("a"))
    with largest_file(len(line("a")) + 20), pytest.raises(OutputError, match="the 1 results finished so far are kept"):
        file.write(record("b", "long" * 100))
    assert path.read_bytes() == line("a")
    assert file.finished == {"a"}
    file.write(record("c"))  # the disk has room again
    file.close()
    del file
    assert path.read_bytes() == line("a") + line("c")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_output_error_and_a_device_is_not_read() -> None:
    file = ResultFile(Path("/dev/full"), {})
    assert file.finished == set()
    with pytest.raises(OutputError, match="No space left"):
        file.write(record("a"))
    file.close()


def test_results_can_go_into_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    file = ResultFile(pipe, {})
    file.write(record("a"))
    assert os.read(reader, 10_000) == line("a")
    file.close()
    os.close(reader)


def test_a_file_that_cannot_be_opened_is_an_output_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "results.jsonl"):
        with pytest.raises(OutputError, match="cannot write output file"):
            ResultFile(path, {})
    assert issubclass(OutputError, CompspecError)


def sample(index: int = 0, **changes: Any) -> CompletionOutput:
    fields: dict[str, Any] = {
        "index": index,
        "token_ids": [5, 6],
        "text": "é\ud800",  # no tokenizer gives a lone surrogate, but an id may hold one
        "finish_reason": FinishReason.LENGTH,
        "stop_reason": None,
        "error": None,
        "logprobs": None,
        "stats": RequestStats(num_decode_steps=2, num_decode_tokens=5),
    }
    return CompletionOutput(**{**fields, **changes})


def output_of(*samples: CompletionOutput, prompt_logprobs: Any = None) -> RequestOutput:
    return RequestOutput(
        request_id="0",
        prompt="hello",
        prompt_token_ids=[1, 2],
        prompt_logprobs=prompt_logprobs,
        outputs=list(samples),
    )


def written(path: Path, output: RequestOutput) -> dict[str, Any]:
    """The record of an output as it is read back; every line must be JSON in the strict sense."""
    made = result_record(
        PromptLine(id="x", prompt="hello", messages=None, prompt_token_ids=None, params={}), "k", output
    )
    file = ResultFile(path, {})
    file.write(made)
    file.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    (raw,) = path.read_bytes().splitlines()
    found: dict[str, Any] = json.loads(raw, parse_constant=refuse)
    assert found == made
    assert ResultFile(path, {}).finished == {"x"}
    return found


def test_a_result_record_holds_what_a_later_run_recognises(path: Path) -> None:
    found = written(path, output_of(sample()))
    assert found["stats"]["acceptance_length"] == 2.5
    assert found["finish_reason"] == "length"
    assert set(found) == {"id", "key", "text", "token_ids", "finish_reason", "stop_reason", "stats"}


@pytest.mark.parametrize("stop_reason", [None, 7, "\n\n"])
def test_a_record_says_what_stopped_the_output(path: Path, stop_reason: int | str | None) -> None:
    found = written(path, output_of(sample(finish_reason=FinishReason.STOP, stop_reason=stop_reason)))
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop_reason)


def test_a_record_says_why_a_request_failed_and_what_it_had_generated(path: Path) -> None:
    found = written(path, output_of(sample(finish_reason=FinishReason.ERROR, error="it broke")))
    assert (found["finish_reason"], found["error"], found["token_ids"]) == ("error", "it broke", [5, 6])


def test_log_probabilities_in_a_record_have_text_keys_and_null_for_minus_infinity(path: Path) -> None:
    own = {5: Logprob(-0.5, 1, "a"), 9: Logprob(-math.inf, 2, "b")}
    found = written(path, output_of(sample(logprobs=[own, {}]), prompt_logprobs=[None, {2: Logprob(math.nan, 3)}]))
    assert found["logprobs"] == [
        {"5": {"logprob": -0.5, "rank": 1, "token": "a"}, "9": {"logprob": None, "rank": 2, "token": "b"}},
        {},
    ]
    assert found["prompt_logprobs"] == [None, {"2": {"logprob": None, "rank": 3, "token": None}}]


@pytest.mark.parametrize("count", [2, 3])
def test_a_record_holds_all_samples_and_the_first_one_beside(path: Path, count: int) -> None:
    samples = [
        sample(index, token_ids=[index], text=str(index), stop_reason=index, finish_reason=FinishReason.STOP)
        for index in range(count)
    ]
    found = written(path, output_of(*samples))
    assert [each["token_ids"] for each in found["samples"]] == [[index] for index in range(count)]
    assert [each["stop_reason"] for each in found["samples"]] == list(range(count))
    assert {name: found[name] for name in found["samples"][0]} == found["samples"][0]
    assert "samples" not in result_record(
        PromptLine(id="x", prompt="a", messages=None, prompt_token_ids=None, params={}), "k", output_of(sample())
    )


def test_a_result_of_another_prompt_under_the_same_id_is_refused(path: Path) -> None:
    path.write_bytes(line("a") + line("b"))
    with pytest.raises(OutputError, match=r"prompt 'b'.*another prompt, model"):
        ResultFile(path, {"a": "k", "b": "other"})
    assert path.read_bytes() == line("a") + line("b")
    assert ResultFile(path, {"a": "k"}).finished == {"a", "b"}


def test_only_one_process_writes_a_result_file(path: Path) -> None:
    first = ResultFile(path, {})
    with pytest.raises(OutputError, match="being written by another process"):
        ResultFile(path, {})
    first.close()
    ResultFile(path, {}).close()


def test_a_key_stands_for_all_that_an_output_depends_on(tmp_path: Path) -> None:
    (prompt,) = read_prompts(prompts(tmp_path, '{"id": "x", "prompt": "hello"}'))
    (other,) = read_prompts(prompts(tmp_path, '{"id": "x", "prompt": "hello!"}'))
    config = make_config({"model": {"source": "m"}})
    params = SamplingParams()
    key = request_key(prompt, params, config, False)
    different = [
        request_key(other, params, config, False),
        request_key(prompt, SamplingParams(top_k=3), config, False),
        request_key(prompt, params, make_config({"model": {"source": "n"}}), False),
        request_key(prompt, params, make_config({"model": {"source": "m"}, "numerics": "fast"}), False),
        request_key(prompt, params, config, True),
    ]
    assert len({key, *different}) == 6
    speculative = make_config({"model": {"source": "m"}, "speculative": {"method": "ngram"}})
    assert request_key(prompt, SamplingParams(speculative=False), speculative, False) == key


NEW_PARAMS: dict[str, Any] = {
    "min_tokens": 2,
    "logit_bias": {"5": 1.5, "6": -100},
    "bad_words": ["no", [3, 4]],
    "allowed_token_ids": [3, 4],
    "stop": ["\n", "😀"],
    "stop_token_ids": [4],
    "ignore_eos": True,
    "n": 3,
    "logprobs": 0,
    "prompt_logprobs": 2,
    "seed": 1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "top_k": 4,
    "top_p": 0.5,
    "min_p": 0.1,
    "temperature": 0.5,
    "max_tokens": 7,
    "speculative": 2,
    "priority": 3,
    "cache_salt": "tenant",
}

SPEED_ALONE = ("speculative", "priority", "cache_salt")


def test_every_parameter_can_stand_in_a_line_of_a_prompt_file(tmp_path: Path) -> None:
    assert set(NEW_PARAMS) == set(SamplingParams.model_fields) - {"logits_processors"}
    content = json.dumps({"prompt": "a", "params": NEW_PARAMS})
    (prompt,) = read_prompts(prompts(tmp_path, content))
    params = prompt.sampling(SamplingParams(max_tokens=9))
    assert params == SamplingParams(
        **{
            **NEW_PARAMS,
            "logit_bias": {5: 1.5, 6: -100.0},
            "bad_words": ("no", (3, 4)),
            "stop": ("\n", "😀"),
        }
    )
    (one,) = read_prompts(prompts(tmp_path, '{"prompt": "a", "params": {"stop": "\\n", "speculative": false}}'))
    assert one.sampling(SamplingParams(stop="other")) == SamplingParams(stop=("\n",), speculative=False)


def test_defaults_of_the_configuration_hold_where_a_line_says_nothing(tmp_path: Path) -> None:
    defaults = SamplingParams(stop="x", bad_words=["y", [3]], logit_bias={3: 1.0}, allowed_token_ids=[1], logprobs=2)
    (prompt,) = read_prompts(prompts(tmp_path, '{"prompt": "a", "params": {"stop": [], "min_tokens": 1}}'))
    assert prompt.sampling(defaults) == defaults.model_copy(update={"stop": (), "min_tokens": 1})


@pytest.mark.parametrize(
    "params",
    [
        {"n": 2},
        {"stop": [""]},
        {"stop": 3},
        {"bad_words": ["a", []]},
        {"bad_words": "word"},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"5": 101}},
        {"allowed_token_ids": []},
        {"logprobs": -1},
        {"logprobs": True},
        {"prompt_logprobs": 1.5},
        {"min_tokens": 200},
        {"logits_processors": ["os.system"]},
        {"speculative": True},
    ],
    ids=str,
)
def test_a_wrong_new_parameter_is_one_line_with_its_prompt(tmp_path: Path, params: dict[str, Any]) -> None:
    (prompt,) = read_prompts(prompts(tmp_path, json.dumps({"id": "x", "prompt": "a", "params": params})))
    with pytest.raises(RequestError, match="prompt 'x': ") as caught:
        prompt.sampling(SamplingParams())
    assert "\n" not in str(caught.value)


def test_a_key_changes_with_every_parameter_but_those_of_speed_alone() -> None:
    prompt = PromptLine(id="x", prompt="hello", messages=None, prompt_token_ids=None, params={})
    config = make_config({"model": {"source": "m"}})

    def key(**values: Any) -> str:
        return request_key(prompt, SamplingParams(**{"temperature": 1.0, **values}), config, False)

    base = key()
    changed = {name: key(**{name: value}) for name, value in NEW_PARAMS.items() if name not in SPEED_ALONE}
    assert len({base, *changed.values()}) == len(changed) + 1
    assert key(speculative=2) == key(speculative=False) == key(priority=3) == key(cache_salt="tenant") == base
    assert key(stop="a") != key(stop="b")
    assert key(bad_words=["3"]) != key(bad_words=[[3]])
    assert key(stop=["a", "b"]) != key(stop=["ab"])
    assert key(logit_bias={5: 1.0, 30: 2.0}) == key(logit_bias={30: 2.0, 5: 1.0}), "the order of a mapping is no value"


def test_a_key_changes_with_speculation_where_it_samples_by_itself() -> None:
    """The rejection verifier keeps the distribution of sampled outputs, not their tokens."""
    prompt = PromptLine(id="x", prompt="hello", messages=None, prompt_token_ids=None, params={})

    def key(temperature: float, **speculative: Any) -> str:
        config = make_config({"model": {"source": "m"}, "speculative": {"method": "ngram", **speculative}})
        return request_key(prompt, SamplingParams(temperature=temperature), config, False)

    rejection = [
        key(1.0, verifier="rejection"),
        key(1.0, verifier="rejection", num_draft_tokens=3),
        key(1.0, verifier="rejection", block_verification=True),
    ]
    assert len({key(1.0), *rejection}) == 4
    assert key(1.0) == key(1.0, num_draft_tokens=3) != key(1.0, scorer="batch_expansion")
    assert key(0.0) == key(0.0, verifier="rejection"), "greedy outputs are the same"


def test_prompts_of_all_three_kinds_are_read(tmp_path: Path) -> None:
    content = (
        '{"prompt": "héllo 😀", "params": {"max_tokens": 3}}\n'
        "\n"
        '{"id": "chat", "messages": [{"role": "user", "content": "hi"}]}\r\n'
        '{"id": 7, "prompt_token_ids": [1, 2]}'
    )
    first, second, third = read_prompts(prompts(tmp_path, content))
    assert (first.id, first.prompt, first.params) == ("0", "héllo 😀", {"max_tokens": 3})
    assert (second.id, second.messages) == ("chat", [{"role": "user", "content": "hi"}])
    assert (third.id, third.prompt_token_ids) == ("7", [1, 2])


def test_a_line_break_inside_a_string_is_no_new_line(tmp_path: Path) -> None:
    """U+2028 and friends are line ends to str.splitlines and to nobody else."""
    (prompt,) = read_prompts(prompts(tmp_path, '{"prompt": "a\u2028b\x85c"}\n'))
    assert prompt.prompt == "a\u2028b\x85c"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "line 1 is not valid JSON"),
        ('{"prompt": "a"}\nnonsense', "line 2 is not valid JSON"),
        ("[1]", "line 1 must be a JSON object"),
        ("[" * 100_000, "line 1 is nested too deep"),
        ('{"prompt": "a", "temperature": 1}', "unknown key 'temperature'; valid are: id, prompt"),
        ('{"id": "a"}', "exactly one of prompt, messages, prompt_token_ids"),
        ('{"prompt": "a", "messages": []}', "exactly one of"),
        ('{"prompt": null}', "exactly one of"),
        ('{"prompt": 3}', "prompt must be text"),
        ('{"messages": "hi"}', "messages must be a list"),
        ('{"prompt_token_ids": "1 2"}', "prompt_token_ids must be a list"),
        ('{"prompt_token_ids": [1, "2"]}', "prompt_token_ids must be integers"),
        ('{"prompt_token_ids": [1, true]}', "prompt_token_ids must be integers"),
        ('{"prompt_token_ids": [1.0]}', "prompt_token_ids must be integers"),
        ('{"prompt": "a", "params": [1]}', "params must be an object"),
        ('{"prompt": "a", "id": null}', "id must be text or an integer"),
        ('{"prompt": "a", "id": [1]}', "id must be text or an integer"),
        ('{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}', "two prompts with id 'x'"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b"}', "two prompts with id '1'"),
        (b"\xff", "not UTF-8 text"),
    ],
)
def test_a_bad_prompt_file_is_refused_with_the_line(tmp_path: Path, content: str | bytes, told: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_prompts(prompts(tmp_path, content))
    assert told in str(caught.value)


def test_a_missing_prompt_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot read prompt file .*nowhere.*No such file"):
        read_prompts(tmp_path / "nowhere.jsonl")


def test_the_parameters_of_a_line_replace_the_defaults_and_no_others(tmp_path: Path) -> None:
    (prompt,) = read_prompts(prompts(tmp_path, '{"prompt": "a", "params": {"temperature": 1, "stop_token_ids": [3]}}'))
    params = prompt.sampling(SamplingParams(max_tokens=9, top_k=4))
    assert params == SamplingParams(max_tokens=9, top_k=4, temperature=1.0, stop_token_ids=(3,))


@pytest.mark.parametrize("params", ['{"top": 1}', '{"temperature": -1}', '{"max_tokens": "3"}'])
def test_a_wrong_parameter_names_its_prompt(tmp_path: Path, params: str) -> None:
    (prompt,) = read_prompts(prompts(tmp_path, '{"id": "x", "prompt": "a", "params": ' + params + "}"))
    with pytest.raises(RequestError, match="prompt 'x': "):
        prompt.sampling(SamplingParams())
