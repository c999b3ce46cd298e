"""Ends of every kind, at every place of a verification window: text, tokens, log-probabilities and counters agree.

The model is made to type a script: a logits processor leaves one token at each place. Its drafts are the script too, so
that windows of K drafts and a bonus token are kept whole, or garbage after a right beginning.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compspec import LLM, RequestOutput, SamplingParams
from compspec.batch import Batch, DraftTokens
from compspec.engine import Engine
from compspec.proposers.proposer import Proposer
from compspec.request import Request
from compspec.stats import SpecStats
from tests.tiny_models import tiny_model_folder, tiny_tokenizer

WIDEST = 7
EOS = 2
WINDOWS = range(1, WIDEST + 1)


class Typist:
    """A logits processor that leaves one token at each place of the output, and may fail at one."""

    def __init__(self, num_prompt_tokens: int, script: Sequence[int], fails_at: int | None = None) -> None:
        self.script = list(script)
        self._num_prompt_tokens = num_prompt_tokens
        self._fails_at = fails_at

    def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
        at = len(token_ids) - self._num_prompt_tokens
        if at == self._fails_at:
            raise ValueError(f"no token {at}")
        kept = torch.full_like(logits, float("-inf"))
        token = self.script[min(at, len(self.script) - 1)]
        kept[token] = logits[token]
        return kept


def all_right(num_output_tokens: int, most: int) -> int:
    """How many drafts are right: all."""
    return most


def some_right(num_output_tokens: int, most: int) -> int:
    """Another number in each window."""
    return num_output_tokens % (most + 1)


class Drafter(Proposer):
    """Drafts each request's script, `right` tokens of it and then garbage."""

    def __init__(self) -> None:
        self.right = all_right

    def propose(self, batch: Batch) -> DraftTokens:
        return DraftTokens.from_lists([self._draft(each.request, each.max_draft_tokens) for each in batch.scheduled], 7)

    def _draft(self, request: Request, most: int) -> list[int]:
        (typist,) = request.params.logits_processors
        done = request.num_output_tokens
        right = min(most, self.right(done, most))
        return typist.script[done : done + right] + [10 + done] * (most - right)


@pytest.fixture(scope="module")
def lab(models: Path) -> "Lab":
    folder = tiny_model_folder("llama", models / "stop-texts", vocab_size=512)
    tiny_tokenizer(folder)
    speculative = {"method": "ngram", "num_draft_tokens": WIDEST}
    llm = LLM(
        str(folder), device="cpu", compile={"mode": "none"}, scheduler={"max_num_seqs": 4}, speculative=speculative
    )
    drafter = Drafter()
    llm.engine = Engine(llm.config, loaded=llm.engine.loaded, proposer=drafter)
    return Lab(llm, drafter)


@dataclass
class Lab:
    """An LLM whose drafts are made here."""

    llm: LLM
    drafter: Drafter

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.llm.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def job(self, number: int, script: Sequence[int], fails_at: int | None = None, **params: Any) -> Any:
        """A prompt, and parameters that make the model type `script` after it."""
        prompt = [5, 6 + number % 200, 7, 8]
        settings = {"max_tokens": 40, "speculative": False, "logprobs": 1, **params}
        return prompt, SamplingParams(logits_processors=(Typist(len(prompt), script, fails_at),), **settings)

    def generate(
        self, jobs: Sequence[Any], k: int | bool, right: Callable[[int, int], int] = all_right
    ) -> list[RequestOutput]:
        """Runs jobs with at most k drafts per step; `llm.stats` is of these alone."""
        self.drafter.right = right
        self.llm.engine.stats = SpecStats()
        prompts, params = zip(*jobs, strict=True)
        return self.llm.generate(prompts, [each.model_copy(update={"speculative": k}) for each in params])


def sums_for(num_tokens: int, max_tokens: int, script: int, k: int) -> tuple[int, int, int]:
    """Decode steps, drafts and accepted drafts of an output whose drafts are all right, counted step by step."""
    done, steps, drafted, accepted = 1, 0, 0, 0
    while done < num_tokens:
        drafts = max(0, min(k, max_tokens - done - 1, script - done))
        kept = min(drafts + 1, num_tokens - done)
        done, steps, drafted, accepted = done + kept, steps + 1, drafted + drafts, accepted + min(drafts, kept)
    return steps, drafted, accepted


KINDS = ["eos", "stop token", "stop text", "long stop text", "emoji", "max_tokens", "error"]


def ending(lab: Lab, kind: str, at: int) -> tuple[Any, list[int], str, str, Any]:
    """A job whose output ends at token `at`, and its tokens, text, finish reason and stop reason."""
    script = lab.encode("ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEFGHI")
    assert len(script) == 35, "one token per letter"

    def typed(count: int) -> str:
        text: str = lab.llm.tokenizer.decode(script[:count])
        return text

    number = 30 * KINDS.index(kind) + at
    if kind == "eos":
        script[at] = EOS
        return lab.job(number, script), script[: at + 1], typed(at), "stop", None
    if kind == "stop token":
        script[at : at + 1] = lab.encode("!")
        token = script[at]
        return lab.job(number, script, stop_token_ids=(token,)), script[: at + 1], typed(at), "stop", token
    if kind == "stop text":
        script[at : at + 1] = lab.encode("!")
        return lab.job(number, script, stop="!"), script[: at + 1], typed(at), "stop", "!"
    if kind == "long stop text":
        word = "xyz"[-(at + 1) :]
        script[at + 1 - len(word) : at + 1] = lab.encode(word)
        return lab.job(number, script, stop=word), script[: at + 1], typed(at + 1 - len(word)), "stop", word
    if kind == "emoji" and at < 3:
        script[at : at + 1] = lab.encode("?")
        return lab.job(number, script, stop=["😀", "?"]), script[: at + 1], typed(at), "stop", "?"
    if kind == "emoji":
        script[at - 3 : at + 1] = lab.encode("😀")
        return lab.job(number, script, stop=["😁", "😀"]), script[: at + 1], typed(at - 3), "stop", "😀"
    if kind == "max_tokens":
        return lab.job(number, script, max_tokens=at + 1), script[: at + 1], typed(at + 1), "length", None
    return lab.job(number, script, fails_at=at), script[:at], typed(at), "error", None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", WINDOWS)
def test_an_end_at_every_place_of_the_window_cuts_everything_alike(lab: Lab, k: int, kind: str) -> None:
    """As the prompt's token, as each accepted draft, as bonus token, and all of that in the window after."""
    places = range(2 * (k + 1) + 1)
    cases = [ending(lab, kind, at) for at in places]
    plain = lab.generate([job for job, *_ in cases], False)
    outputs = lab.generate([job for job, *_ in cases], k)
    expected_sums = [0, 0, 0]
    for output, alone, ((_, params), token_ids, text, finish_reason, stop_reason) in zip(
        outputs, plain, cases, strict=True
    ):
        assert output.token_ids == token_ids == alone.token_ids
        assert output.text == text == alone.text
        assert output.finish_reason == finish_reason == alone.finish_reason
        assert output.stop_reason == stop_reason == alone.stop_reason
        assert (output.error is not None) == (kind == "error")
        assert output.error == alone.error
        assert output.logprobs == alone.logprobs
        assert [next(iter(each)) for each in output.logprobs] == token_ids
        stats = output.stats
        reached = len(token_ids) + (kind == "error")
        steps, drafted, accepted = sums_for(reached, params.max_tokens, 35, k)
        assert stats.num_decode_tokens == max(0, len(token_ids) - 1)
        assert stats.num_decode_steps == steps
        assert stats.num_steps == steps + 1
        assert stats.num_draft_tokens == sum(stats.drafted_per_position) == drafted
        if kind == "error" and steps:  # the last step gave no token of its own
            accepted = stats.num_decode_tokens - (steps - 1)
        assert stats.num_accepted_tokens == sum(stats.accepted_per_position) == accepted
        assert len(stats.accepted_per_position) <= k
        expected_sums = [a + b for a, b in zip(expected_sums, (steps, drafted, accepted), strict=True)]
    total: SpecStats = lab.llm.stats
    assert [total.num_decode_steps, total.num_draft_tokens, total.num_accepted_tokens] == expected_sums
    assert total.num_output_tokens == sum(len(output.token_ids) for output in outputs)
    assert total.num_requests == len(cases)
    assert lab.llm.engine.pool.num_free == lab.llm.engine.pool.num_usable


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [2, 7])
def test_an_end_inside_a_window_of_wrong_drafts_is_the_same(lab: Lab, k: int, kind: str) -> None:
    cases = [ending(lab, kind, at) for at in range(2 * (k + 1) + 1)]
    outputs = lab.generate([job for job, *_ in cases], k, some_right)
    for output, (_, token_ids, text, finish_reason, stop_reason) in zip(outputs, cases, strict=True):
        found = (output.token_ids, output.text, output.finish_reason, output.stop_reason)
        assert found == (token_ids, text, finish_reason, stop_reason)
    assert lab.llm.stats.num_accepted_tokens < lab.llm.stats.num_draft_tokens


SCRIPTS = {
    "one token": ("the quick brown fox", [" quick"], "the", " quick"),
    "inside one token": ("the quick brown fox", ["uic"], "the q", "uic"),
    "two tokens": ("the quick brown fox", ["k b"], "the quic", "k b"),
    "three tokens": ("the quick brown fox", ["e quick b"], "th", "e quick b"),
    "the whole output": ("the quick", ["the quick"], "", "the quick"),
    "the first of two": ("the quick brown fox", ["fox", "brown"], "the quick ", "brown"),
    "a prefix of another": ("the quick brown fox", ["brown fox", "brown"], "the quick ", "brown"),
    "the longer of two ends": ("the quick brown fox", ["own", "brown", "n"], "the quick ", "brown"),
    "one inside the other": ("the quick brown fox", ["quick brown", "ick"], "the qu", "ick"),
    "overlapping itself": ("ababababac", ["ababac"], "abab", "ababac"),
    "overlapping another": ("abcabcd", ["abcd", "bcabce"], "abc", "abcd"),
    "never": ("the quick brown fo", ["fox", "browny"], "the quick brown fo", None),
    "emoji": ("so 😀😁 it", ["😁"], "so 😀", "😁"),
    "emoji and more": ("so 😀😁 it", ["😀😁 "], "so ", "😀😁 "),
    "a family of emoji": ("a 👩‍👩‍👧 b", ["👧"], "a 👩‍👩‍", "👧"),
    "accents": ("naïve café, e\u0301", ["é,"], "naïve caf", "é,"),
    "combining": ("naïve e\u0301x", ["\u0301"], "naïve e", "\u0301"),
    "cjk": ("日本語のテキスト", ["語の"], "日本", "語の"),
    "lines": ("a\n\nb\n\nc", ["\n\n"], "a", "\n\n"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_stop_texts_end_the_text_whatever_is_drafted_and_streamed(lab: Lab, name: str) -> None:
    """For all K; what is streamed is never taken back, and the tokens end with the one that completes the text."""
    text, stop, expected, reason = SCRIPTS[name]
    script = [*lab.encode(text), *lab.encode(" to be or not to be")] if reason is not None else lab.encode(text)
    prompt, params = lab.job(0, script, stop=stop, max_tokens=len(script))
    decode = lab.llm.tokenizer.decode
    ends = len(script)
    if reason is not None:
        ends = next(n for n in range(len(script) + 1) if expected + reason in decode(script[:n]))
    for k in [False, *WINDOWS]:
        (output,) = lab.generate([(prompt, params)], k)
        assert output.text == expected
        assert output.stop_reason == reason
        assert output.finish_reason == ("stop" if reason is not None else "length")
        assert output.token_ids == script[:ends]
        chunks = list(lab.llm.stream(prompt, params.model_copy(update={"speculative": k})))
        assert "".join(chunk.text for chunk in chunks) == expected
        assert [token for chunk in chunks for token in chunk.token_ids] == output.token_ids
        assert [each for chunk in chunks for each in chunk.logprobs] == output.logprobs
        assert [chunk.stop_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [reason]


@pytest.mark.parametrize("k", [False, *WINDOWS])
def test_stop_texts_within_min_tokens_do_not_count(lab: Lab, k: int | bool) -> None:
    script = lab.encode("ab!cd!ef!gh!")
    assert len(script) == 12, "one token per letter"
    jobs = [lab.job(0, script, stop=["!", "h!"], min_tokens=count, max_tokens=12) for count in range(13)]
    for count, output in enumerate(lab.generate(jobs, k)):
        end = next((at for at in (3, 6, 9, 12) if at > count), None)
        if end is None:
            assert (output.text, output.finish_reason) == ("ab!cd!ef!gh!", "length")
        else:
            assert output.text == "ab!cd!ef!g"[: 10 if end == 12 else end - 1]
            assert output.stop_reason == ("h!" if end == 12 else "!")
        assert output.token_ids == script[: end or 12]
    jobs = [lab.job(0, script, stop="d!e", min_tokens=count, max_tokens=12) for count in range(13)]
    outputs = lab.generate(jobs, k)
    assert [output.text for output in outputs] == ["ab!c"] * 7 + ["ab!cd!ef!gh!"] * 6


@pytest.mark.parametrize("k", [False, 1, 3, 7])
def test_a_stop_token_whose_text_would_complete_a_stop_text_ends_by_its_id(lab: Lab, k: int) -> None:
    script = lab.encode("abcdef!gh")
    (output,) = lab.generate([lab.job(0, script, stop="f!", stop_token_ids=(script[6],))], k)
    assert (output.text, output.stop_reason, output.token_ids) == ("abcdef", script[6], script[:7])


@pytest.mark.parametrize("k", [False, 1, 3, 7])
def test_the_end_token_releases_text_that_could_have_become_a_stop_text(lab: Lab, k: int) -> None:
    script = [*lab.encode("abcd"), EOS, *lab.encode("ef")]
    (output,) = lab.generate([lab.job(0, script, stop="cdef")], k)
    assert (output.text, output.stop_reason, output.finish_reason) == ("abcd", None, "stop")


def test_a_stream_holds_back_what_could_become_a_stop_text_and_no_more(lab: Lab) -> None:
    script = lab.encode("A#$A#$%B")
    prompt, params = lab.job(0, script, stop="#$%&", max_tokens=len(script))
    lab.drafter.right = all_right
    texts = [chunk.text for chunk in lab.llm.stream(prompt, params)]
    assert texts == ["A", "", "", "#$A", "", "", "", "#$%B"]
    params = params.model_copy(update={"speculative": 3})
    assert [chunk.text for chunk in lab.llm.stream(prompt, params)] == ["A", "#$A", "#$%B"]
