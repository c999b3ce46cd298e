"""LLM: prompts of every kind, streaming, one-for-all and one-each parameters, errors that leave nothing behind."""

from pathlib import Path

import numpy as np
import pytest

from compspec import LLM, ConfigError, EngineConfig, RequestError, SamplingParams, UnsupportedError
from tests.tiny_models import tiny_model_folder, tiny_tokenizer

SETTINGS = {"compile": {"mode": "none"}, "speculative": {"method": "ngram", "num_draft_tokens": 3}, "device": "cpu"}
PARAMS = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model_folder("llama", tmp_path_factory.mktemp("llm"), vocab_size=512)
    tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), **SETTINGS)


def test_a_string_and_its_token_ids_are_the_same_prompt(llm: LLM) -> None:
    text = "to be or not to be"
    (from_text,) = llm.generate(text, PARAMS)
    (from_ids,) = llm.generate(llm.encode(text), PARAMS)
    (from_array,) = llm.generate(np.array(llm.encode(text)), PARAMS)
    assert from_array.token_ids == from_ids.token_ids
    several = llm.generate([text, llm.encode(text)], [PARAMS, PARAMS])
    assert {tuple(output.token_ids) for output in (from_text, from_ids, *several)} == {tuple(from_text.token_ids)}
    assert from_text.prompt == text
    assert from_ids.prompt is None
    assert from_text.prompt_token_ids == llm.encode(text)
    assert from_text.text == llm.tokenizer.decode(from_text.token_ids, skip_special_tokens=True)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    texts = [f"the quick {word} fox" for word in ("brown", "red", "", "lazy", "old")]
    each = [SamplingParams(max_tokens=3 + 4 * (index % 3)) for index in range(5)]
    finished: list[int] = []
    outputs = llm.generate(texts, each, on_finish=lambda index, output: finished.append(index))
    assert [output.prompt for output in outputs] == texts
    assert sorted(finished) == [0, 1, 2, 3, 4]
    assert [len(output.token_ids) for output in outputs] == [3, 7, 11, 3, 7]


def test_streamed_chunks_join_to_the_generated_output(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.5, seed=2)
    (whole,) = llm.generate("the lazy dog", params)
    chunks = list(llm.stream("the lazy dog", params))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == whole.finish_reason


def test_closing_a_stream_aborts_its_request(llm: LLM) -> None:
    stream = llm.stream("the lazy dog", SamplingParams(max_tokens=50))
    next(stream)
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work
    assert llm.engine.pool.num_free == llm.engine.pool.num_usable


def test_streams_and_batches_run_side_by_side(llm: LLM) -> None:
    params = SamplingParams(max_tokens=25)
    texts = ["the lazy dog", "to be or not to be", "the quick brown fox"]
    alone = [llm.generate(text, params)[0] for text in texts]
    one, two = llm.stream(texts[0], params), llm.stream(texts[1], params)
    first = next(one)
    (three,) = llm.generate(texts[2], params)
    assert three.token_ids == alone[2].token_ids
    rest = list(two)
    assert [token for chunk in rest for token in chunk.token_ids] == alone[1].token_ids
    assert first.text + "".join(chunk.text for chunk in one) == alone[0].text


def test_a_stream_that_is_dropped_or_closed_unread_leaves_nothing(llm: LLM) -> None:
    llm.stream("the lazy dog", PARAMS).close()
    assert not llm.engine.has_work
    stream = llm.stream("the lazy dog", PARAMS)
    del stream
    assert not llm.engine.has_work
    with llm.stream("the lazy dog", PARAMS) as stream:
        next(stream)
    assert not llm.engine.has_work
    assert list(stream) == []


def test_chat_goes_through_the_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "to be"}]
    ids = llm.tokenizer("<|user|>to be<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
    assert llm.chat(messages, PARAMS)[0].prompt_token_ids == ids
    assert [output.prompt_token_ids for output in llm.chat([messages, messages], PARAMS)] == [ids, ids]
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        llm.chat(messages)


def test_one_wrong_prompt_leaves_nothing_in_the_engine(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["fine", []], PARAMS)
    with pytest.raises(RequestError, match="tokenizer refused"):
        llm.generate("\ud800", PARAMS)
    with pytest.raises(RequestError, match="integers alone"):
        llm.generate([[5, 6.5]], PARAMS)
    with pytest.raises(RequestError, match="2 sampling parameters were given for 1"):
        llm.generate("fine", [PARAMS, PARAMS])
    assert not llm.engine.has_work


def test_three_ways_to_make_one(folder: Path, tmp_path: Path, llm: LLM) -> None:
    assert LLM(llm.config).config == llm.config
    path = tmp_path / "c.yaml"
    path.write_text(
        f"model: {{source: '{folder}', device: cpu}}\ncompile: {{mode: none}}\n"
        "speculative: {method: ngram, num_draft_tokens: 3}\n",
        encoding="utf-8",
    )
    assert LLM.from_yaml(path).config == llm.config
    changed = LLM.from_yaml(path, dtype="bfloat16", sampling={"max_tokens": 2})
    assert changed.config.model.dtype == "bfloat16"
    assert len(changed.generate("to be")[0].token_ids) == 2
    assert isinstance(changed.config, EngineConfig)
    with pytest.raises(ConfigError, match=r"unknown argument 'dtpe'.*dtype"):
        LLM(str(folder), dtpe="float32")


def test_without_a_tokenizer_token_ids_work_and_text_is_refused(tmp_path: Path) -> None:
    llm = LLM(str(tiny_model_folder("llama", tmp_path)), **SETTINGS)
    (output,) = llm.generate([5, 6, 7], PARAMS)
    assert output.text is None
    assert len(output.token_ids) == 12
    with pytest.raises(UnsupportedError, match="no tokenizer"):
        llm.generate("text")
    with pytest.raises(UnsupportedError, match="chat template"):
        llm.chat([{"role": "user", "content": "x"}])


def test_stats_sum_over_requests_and_agree_with_the_outputs(folder: Path) -> None:
    llm = LLM(str(folder), **SETTINGS)
    outputs = llm.generate(["to be or not to be to be or", "the quick brown fox"], PARAMS)
    stats = llm.stats
    assert stats.num_requests == 2
    assert stats.num_output_tokens == sum(len(output.token_ids) for output in outputs)
    assert stats.num_decode_tokens == stats.num_output_tokens - 2
    assert stats.num_decode_tokens == stats.num_decode_steps + stats.num_accepted_tokens
    assert stats.acceptance_length == stats.num_decode_tokens / stats.num_decode_steps
    assert stats.num_eager_steps == stats.num_forwards, "compile.mode is none"
    assert stats.num_recompilations == 0
