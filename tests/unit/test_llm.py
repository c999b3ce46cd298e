"""LLM: prompts of every kind, streaming, one-for-all and one-each parameters, errors that leave nothing behind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from compspec import (
    LLM,
    CapacityError,
    ConfigError,
    EngineConfig,
    RequestError,
    RequestOutput,
    SamplingParams,
    UnsupportedError,
)
from tests.tiny_models import tiny_model_folder, tiny_tokenizer

SETTINGS = {
    "compile": {"mode": "none"},
    "speculative": {"method": "ngram", "num_draft_tokens": 3, "adaptive": False},
    "device": "cpu",
}
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
        "speculative: {method: ngram, num_draft_tokens: 3, adaptive: false}\n",
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
    with pytest.raises(UnsupportedError, match="use stop_token_ids instead of stop"):
        llm.generate([5, 6, 7], SamplingParams(stop="x"))
    with pytest.raises(UnsupportedError, match="bad words that are text"):
        llm.generate([5, 6, 7], SamplingParams(bad_words=["x"]))
    assert not llm.engine.has_work
    (output,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=3, logprobs=1, bad_words=[[9]]))
    assert all(one.token is None for each in output.logprobs for one in each.values())
    assert [chunk.text for chunk in llm.stream([5, 6, 7], SamplingParams(max_tokens=2, speculative=False))] == ["", ""]


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


SAMPLED = {"temperature": 1.2, "max_tokens": 14}


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [sample.token_ids for sample in output.outputs]


def idle(llm: LLM) -> bool:
    """Whether nothing is queued, and all blocks are free."""
    return not llm.engine.has_work and llm.engine.pool.num_free == llm.engine.pool.num_usable


def test_what_a_request_says_is_what_its_first_sample_says(llm: LLM) -> None:
    params = SamplingParams(**SAMPLED, seed=3, n=3, logprobs=2)
    (output,) = llm.generate("the quick", params)
    first = output.outputs[0]
    names = ("token_ids", "text", "finish_reason", "stop_reason", "error", "logprobs", "stats")
    assert [getattr(output, name) for name in names] == [getattr(first, name) for name in names]
    assert [sample.index for sample in output.outputs] == [0, 1, 2]


def test_samples_differ_and_the_first_is_that_of_n_1(llm: LLM) -> None:
    params = SamplingParams(**SAMPLED, seed=3, logprobs=1)
    one, four = (llm.generate("the quick", params.model_copy(update={"n": n}))[0] for n in (1, 4))
    assert len({tuple(sample.token_ids) for sample in four.outputs}) == 4
    assert (four.token_ids, four.text, four.logprobs) == (one.token_ids, one.text, one.logprobs)
    two = llm.generate("the quick", params.model_copy(update={"n": 2}))[0]
    assert tokens_of(two) == tokens_of(four)[:2], "a sample depends on how many there are"
    for sample in four.outputs:
        assert sample.text == llm.tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        assert len(sample.logprobs) == len(sample.token_ids)


def test_samples_of_one_seed_are_not_those_of_the_next(llm: LLM) -> None:
    outputs = [llm.generate("the quick", SamplingParams(**SAMPLED, seed=seed, n=4))[0] for seed in (3, 4)]
    assert len({tuple(each) for output in outputs for each in tokens_of(output)}) == 8


def test_samples_without_a_seed_differ_each_time(llm: LLM) -> None:
    params = SamplingParams(**SAMPLED, n=3)
    outputs = [llm.generate("the quick", params)[0] for _ in range(2)]
    assert len({tuple(each) for output in outputs for each in tokens_of(output)}) == 6


@pytest.mark.parametrize(
    "speculative",
    [
        {"method": "none"},
        *({"method": "ngram", "num_draft_tokens": k} for k in (1, 5, 7)),
        {"method": "ngram", "num_draft_tokens": 3, "prompt_lookup_max": 1},
    ],
    ids=str,
)
def test_samples_depend_on_no_proposer_and_no_neighbour(folder: Path, llm: LLM, speculative: dict[str, Any]) -> None:
    params = SamplingParams(**SAMPLED, seed=3, n=5, logprobs=1)
    (alone,) = llm.generate("the quick the quick", params)
    other = LLM(str(folder), **{**SETTINGS, "speculative": speculative})
    outputs = other.generate(["to be", "the quick the quick", "lazy"], [PARAMS, params, SamplingParams(**SAMPLED, n=2)])
    assert tokens_of(outputs[1]) == tokens_of(alone)
    assert [sample.logprobs for sample in outputs[1].outputs] == [sample.logprobs for sample in alone.outputs]
    assert idle(other)


def test_a_stream_of_samples_joins_to_each_of_them(llm: LLM) -> None:
    params = SamplingParams(**SAMPLED, seed=5, n=3, logprobs=1)
    (whole,) = llm.generate("the lazy dog", params)
    chunks = list(llm.stream("the lazy dog", params))
    assert {chunk.index for chunk in chunks} == {0, 1, 2}
    for sample in whole.outputs:
        own = [chunk for chunk in chunks if chunk.index == sample.index]
        assert "".join(chunk.text for chunk in own) == sample.text
        assert [token for chunk in own for token in chunk.token_ids] == sample.token_ids
        assert [each for chunk in own for each in chunk.logprobs] == sample.logprobs
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + [sample.finish_reason]


def test_closing_a_stream_of_samples_aborts_them_all(llm: LLM) -> None:
    stream = llm.stream("the lazy dog", SamplingParams(temperature=1.0, max_tokens=50, n=9))
    next(stream)
    stream.close()
    assert idle(llm)
    assert list(stream) == []


def test_more_samples_than_slots_all_end(llm: LLM) -> None:
    (output,) = llm.generate("the quick", SamplingParams(**SAMPLED, seed=1, n=19))
    assert [sample.index for sample in output.outputs] == list(range(19))
    assert len({tuple(each) for each in tokens_of(output)}) == 19
    assert llm.generate("the quick", SamplingParams(**SAMPLED, seed=1, n=2))[0].outputs[1].token_ids == (
        output.outputs[1].token_ids
    )


def test_prompt_log_probabilities_come_once_for_all_samples(llm: LLM) -> None:
    params = SamplingParams(**SAMPLED, seed=5, n=2, prompt_logprobs=1)
    (output,) = llm.generate("the lazy dog", params)
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    assert [next(iter(each)) for each in output.prompt_logprobs[1:]] == output.prompt_token_ids[1:]
    decoded = [llm.tokenizer.decode([token]) for token in output.prompt_token_ids[1:]]
    assert [next(iter(each.values())).token for each in output.prompt_logprobs[1:]] == decoded


def test_log_probabilities_have_the_text_of_each_token(llm: LLM) -> None:
    (output,) = llm.generate("the lazy dog", SamplingParams(max_tokens=8, logprobs=3))
    assert [next(iter(each)) for each in output.logprobs] == output.token_ids
    for each in output.logprobs:
        assert 3 <= len(each) <= 4
        assert all(one.token == llm.tokenizer.decode([token]) for token, one in each.items())
    (chunk, *_) = llm.stream("the lazy dog", SamplingParams(max_tokens=8, logprobs=3))
    assert chunk.logprobs == output.logprobs[: len(chunk.token_ids)]
    assert llm.generate("the lazy dog", SamplingParams(max_tokens=2))[0].logprobs is None


BAD_PARAMS = SamplingParams(max_tokens=60, temperature=1.0, seed=1, logit_bias={300: 4.0, 284: 4.0, 266: 4.0})


@pytest.mark.parametrize("word", ["quick", " quick", "the", "  the"])
def test_bad_words_are_never_generated_alone_or_after_a_space(llm: LLM, word: str) -> None:
    bare = word.strip()
    (free,) = llm.generate("to be", BAD_PARAMS)
    assert bare in free.text, "nothing is tested"
    (output,) = llm.generate("to be", BAD_PARAMS.model_copy(update={"bad_words": (word,)}))
    for spelling in {word, f" {bare}"}:
        ids = llm.tokenizer(spelling, add_special_tokens=False)["input_ids"]
        found = output.token_ids
        assert not any(found[at : at + len(ids)] == ids for at in range(len(found)))
        assert spelling not in output.text


def test_a_bad_word_of_several_tokens_keeps_its_beginning(llm: LLM) -> None:
    """Its last token is forbidden only after the others."""
    ids = llm.tokenizer(" quick brown", add_special_tokens=False)["input_ids"]
    assert len(ids) == 2
    bias = SamplingParams(max_tokens=40, temperature=1.0, seed=1, logit_bias=dict.fromkeys(ids, 6.0))
    (free,) = llm.generate("to be", bias)
    assert " quick brown" in free.text, "nothing is tested"
    (output,) = llm.generate("to be", bias.model_copy(update={"bad_words": ("quick brown",)}))
    assert " quick brown" not in output.text
    assert set(ids) <= set(output.token_ids)


def test_bad_words_as_text_and_as_token_ids_mix(llm: LLM) -> None:
    ids = tuple(llm.tokenizer(" quick", add_special_tokens=False)["input_ids"])
    words: list[Any] = ["the", ids]
    (output,) = llm.generate("to be", BAD_PARAMS.model_copy(update={"bad_words": tuple(words)}))
    assert "the" not in output.text
    assert " quick" not in output.text


class Tokens:
    """A tokenizer that has tokens for some texts."""

    def __init__(self, known: dict[str, list[int]]) -> None:
        self._known = known

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": self._known.get(text, [])}


@pytest.mark.parametrize("known", [{}, {"x": [9]}, {" x": [9]}], ids=str)
def test_a_bad_word_without_tokens_is_refused(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, known: dict[str, list[int]]
) -> None:
    """However it is spelled."""
    monkeypatch.setattr(llm, "tokenizer", Tokens(known))
    with pytest.raises(RequestError, match=r"bad word 'x' has no tokens"):
        llm.generate([[5, 6]], SamplingParams(bad_words=["x"]))
    assert idle(llm)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        (SamplingParams(stop="x"), "stop texts need a tokenizer"),
        (SamplingParams(n=2, temperature=1.0), "n is 2"),
        (SamplingParams(bad_words=["x"]), "bad words that are text"),
    ],
)
def test_the_engine_refuses_what_needs_text_or_samples(llm: LLM, params: SamplingParams, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told) as caught:
        llm.engine.add_request([5], params)
    assert "use LLM" in str(caught.value)
    assert idle(llm)


REFUSED = {
    "ids": ("fine", {"allowed_token_ids": [600]}, "600"),
    "logprobs": ("fine", {"logprobs": 513}, "513"),
    "no token": ("fine", {"allowed_token_ids": [9], "bad_words": [[9]]}, "leave no token"),
    "min_tokens": ("fine", {"min_tokens": 300, "max_tokens": 300}, "300"),
    "empty": ([], {}, "empty"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_bad_request_refuses_all_and_leaves_nothing_queued(llm: LLM, name: str, place: int) -> None:
    prompt, values, told = REFUSED[name]
    prompts: list[Any] = ["one", "two"]
    each = [SamplingParams(max_tokens=5, temperature=1.0, n=3)] * 2
    prompts.insert(place, prompt)
    each.insert(place, SamplingParams(**values))
    with pytest.raises(RequestError, match=told) as caught:
        llm.generate(prompts, each)
    assert "\n" not in str(caught.value)
    assert idle(llm)
    with pytest.raises(RequestError, match=told):
        llm.check_request(prompt, SamplingParams(**values))
    with pytest.raises(RequestError, match=told):
        llm.stream(prompt, SamplingParams(**values))
    assert idle(llm)


def test_a_request_that_fits_no_cache_refuses_all(folder: Path) -> None:
    llm = LLM(str(folder), **SETTINGS, cache={"block_size": 16, "num_blocks": 5})
    with pytest.raises(CapacityError, match="KV blocks"):
        llm.generate(["one", "two"], [PARAMS, SamplingParams(max_tokens=100)])
    assert idle(llm)
    assert len(llm.generate("one", PARAMS)[0].token_ids) == 12


class Fails:
    """A logits processor that raises once there are so many tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
        if len(token_ids) >= self.num_tokens:
            raise KeyError("lost")
        return logits


@pytest.mark.parametrize("after", [0, 1, 4, 11])
def test_a_processor_that_raises_ends_its_request_alone_and_keeps_what_was_generated(llm: LLM, after: int) -> None:
    texts = ["to be or not", "the quick brown fox", "the lazy dog"]
    params = SamplingParams(max_tokens=12, logprobs=0)
    free = llm.generate(texts, params)
    length = len(llm.encode(texts[1]))
    failing = params.model_copy(update={"logits_processors": (Fails(length + after),)})
    outputs = llm.generate(texts, [params, failing, params])
    assert [output.token_ids for output in outputs[::2]] == [output.token_ids for output in free[::2]]
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert [output.error for output in outputs[::2]] == [None, None]
    failed = outputs[1]
    assert failed.token_ids == free[1].token_ids[:after]
    assert failed.text == llm.tokenizer.decode(failed.token_ids, skip_special_tokens=True)
    assert failed.logprobs == free[1].logprobs[:after]
    assert failed.error == "logits processor 'Fails' raised KeyError: 'lost'"
    assert idle(llm)
    chunks = list(llm.stream(texts[1], failing))
    assert [token for chunk in chunks for token in chunk.token_ids] == failed.token_ids
    assert (chunks[-1].finish_reason, chunks[-1].error) == ("error", failed.error)
    assert all(chunk.error is None for chunk in chunks[:-1])


def test_a_processor_that_raises_at_the_limit_is_not_reached(llm: LLM) -> None:
    length = len(llm.encode("to be"))
    (output,) = llm.generate("to be", SamplingParams(max_tokens=5, logits_processors=(Fails(length + 5),)))
    assert (output.finish_reason, output.error, len(output.token_ids)) == ("length", None, 5)


def test_one_sample_that_fails_leaves_the_others(llm: LLM) -> None:
    params = SamplingParams(**SAMPLED, seed=2, n=3)
    (free,) = llm.generate("to be", params)
    victim = free.outputs[1].token_ids
    length = len(llm.encode("to be"))

    def fails(token_ids: list[int], logits: Tensor) -> Tensor:
        assert token_ids[length : length + 6] != victim[:6], "not this one"
        return logits

    (output,) = llm.generate("to be", params.model_copy(update={"logits_processors": (fails,)}))
    assert [sample.finish_reason for sample in output.outputs] == ["length", "error", "length"]
    assert tokens_of(output) == [free.token_ids, victim[:6], free.outputs[2].token_ids]
    assert "not this one" in output.outputs[1].error
    assert output.error is None, "that of the first sample"


def test_a_processor_sees_prompt_and_output_and_its_logits_count(llm: LLM) -> None:
    seen: list[list[int]] = []

    def only_9(token_ids: list[int], logits: Tensor) -> Tensor:
        seen.append(token_ids)
        kept = logits[9].clone()
        logits[:] = float("-inf")
        logits[9] = kept
        return logits

    prompt = llm.encode("to be")
    (output,) = llm.generate("to be", SamplingParams(max_tokens=3, speculative=False, logits_processors=[only_9]))
    assert output.token_ids == [9, 9, 9]
    assert seen == [prompt, [*prompt, 9], [*prompt, 9, 9]]


def test_chat_and_stream_take_every_parameter(llm: LLM) -> None:
    messages = [{"role": "user", "content": "to be"}]
    plain = SamplingParams(**SAMPLED, seed=4, n=2, logprobs=1, prompt_logprobs=1, bad_words=["the"], min_tokens=3)
    (free,) = llm.chat(messages, plain)
    stop = free.text[6:8]
    params = plain.model_copy(update={"stop": (stop,)})
    (chat,) = llm.chat(messages, params)
    (generated,) = llm.generate([llm.chat_token_ids(messages)], params)
    assert chat.finish_reason == "stop"
    assert chat.stop_reason == stop
    assert stop not in chat.text
    assert len(chat.outputs) == 2
    for one, other in zip(chat.outputs, generated.outputs, strict=True):
        assert (one.token_ids, one.text, one.logprobs) == (other.token_ids, other.text, other.logprobs)
    assert chat.prompt_logprobs == generated.prompt_logprobs
    for sample in chat.outputs:
        chunks = [chunk for chunk in llm.stream(llm.chat_token_ids(messages), params) if chunk.index == sample.index]
        assert "".join(chunk.text for chunk in chunks) == sample.text
        assert chunks[-1].stop_reason == sample.stop_reason


def test_stop_texts_of_each_sample_end_that_sample(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=30, seed=7, n=4)
    (free,) = llm.generate("the quick", params)
    stop = ["a", "e", "o", "t"]
    (output,) = llm.generate("the quick", params.model_copy(update={"stop": tuple(stop)}))
    reasons = set()
    for sample, whole in zip(output.outputs, free.outputs, strict=True):
        ends = [whole.text.index(one) for one in stop if one in whole.text]
        assert sample.text == whole.text[: min(ends, default=len(whole.text))]
        assert sample.token_ids == whole.token_ids[: len(sample.token_ids)]
        reasons.add(sample.stop_reason)
    assert len(reasons) > 1, "all samples ended alike"


def test_an_output_that_is_aborted_in_the_engine_keeps_all_its_text(llm: LLM) -> None:
    """What could have become a stop text is released when the output ends, whoever ends it."""
    (token,) = llm.tokenizer("x", add_special_tokens=False)["input_ids"]
    held = SamplingParams(max_tokens=50, stop="x" * 60, allowed_token_ids=[token])

    def abort(index: int, output: RequestOutput) -> None:
        for request in list(llm.engine.scheduler.running):
            llm.engine.abort(request.request_id)

    outputs = llm.generate(["to be", "the lazy dog"], [SamplingParams(max_tokens=4), held], on_finish=abort)
    assert outputs[1].finish_reason == "abort"
    assert len(outputs[1].token_ids) > 1
    assert outputs[1].text == "x" * len(outputs[1].token_ids)


def test_a_stream_brings_the_log_probabilities_of_the_prompt_with_its_first_chunk(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, prompt_logprobs=1, temperature=1.0, seed=3, n=2, ignore_eos=True)
    (output,) = llm.generate("the quick brown", params)
    chunks = list(llm.stream("the quick brown", params))
    assert [chunk.index for chunk in chunks if chunk.prompt_logprobs is not None] == [0]
    assert next(chunk for chunk in chunks if chunk.index == 0).prompt_logprobs == output.prompt_logprobs


@pytest.mark.parametrize("word", ["\n", "\t"])
def test_a_bad_word_of_white_space_bans_no_space(llm: LLM, word: str) -> None:
    (space,) = llm.encode(" ")
    banned = llm.engine_params(SamplingParams(bad_words=[word])).bad_words
    assert (space,) not in banned
    assert tuple(llm.encode(word)) in banned


def test_text_that_no_tokenizer_takes_is_refused(llm: LLM) -> None:
    surrogate = "\ud800"
    with pytest.raises(RequestError, match="refused the bad word"):
        llm.generate("the", SamplingParams(bad_words=[surrogate]))
    with pytest.raises(RequestError, match="refused the prompt"):
        llm.generate(surrogate)
    with pytest.raises(RequestError, match="refused the messages"):
        llm.chat([{"role": "user", "content": surrogate}])
    assert idle(llm)


def test_a_check_for_stop_texts_that_raises_ends_its_request_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    (expected,) = llm.generate(["the quick"], params)
    doomed = llm.stream("to be", params)
    pushed: list[int] = []

    def breaks(token: int) -> str | None:
        pushed.append(token)
        if len(pushed) == 3:
            raise LookupError("no such token")
        return None

    doomed._job.samples[0].request.end_check = breaks
    (alone,) = llm.generate(["the quick"], params)
    assert alone.text == expected.text
    last = list(doomed)[-1]
    assert last.finish_reason == "error"
    assert last.error is not None and "no such token" in last.error
    assert idle(llm)


def test_requests_that_an_interrupted_step_lost_are_an_error_and_no_endless_wait(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream("the quick", SamplingParams(max_tokens=2, ignore_eos=True))
    step = llm.engine.step

    def interrupted() -> list[Any]:
        step()
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupted)
    while llm.engine.has_work:
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="1 requests"):
        next(stream)
    assert llm.generate("the", SamplingParams(max_tokens=2))
