"""Rounds in turns, and a run that profits of no earlier one."""

from typing import Any

import pytest

from compspec import LLM, SamplingParams
from compspec.bench import measure
from compspec.bench.measure import Job, run_rounds, text_pieces
from compspec.bench.prompts import BenchPrompt
from compspec.bench.sides import Side
from compspec.errors import RequestError
from tests.tiny_models import tiny_model_folder, tiny_tokenizer

JOB = Job(prompt=BenchPrompt(id="a", category="", token_ids=[1], params={}), params=SamplingParams(speculative=2))
SIDES = [
    Side(label=label, setup=setup, speculative=label != "plain", reference="plain")
    for label, setup in (("plain", 1), ("x", 0), ("y", 1))
]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Takes the place of running: which engine was asked, and for how many drafts."""
    seen: list[tuple[Any, Any]] = []

    def run(llm: Any, jobs: Any, *, concurrent: Any) -> int:
        seen.append((llm, jobs[0].params.speculative))
        return len(seen)

    monkeypatch.setattr(measure, "run", run)
    return seen


def rounds(**changes: Any) -> dict[str, list[Any]]:
    options: dict[str, Any] = {"rounds": 2, "warm_up": False, "concurrent": 1, "tell": lambda text: None, **changes}
    engines: Any = ["engine 0", "engine 1"]
    return run_rounds(SIDES, engines, [[JOB], [JOB]], **options)  # type: ignore[return-value]


def test_every_other_round_goes_the_other_way_and_only_plain_sides_ask_for_no_drafts(runs: list) -> None:
    found = rounds()
    plain, x, y = ("engine 1", False), ("engine 0", 2), ("engine 1", 2)
    assert runs == [plain, x, y, y, x, plain]
    assert found == {"plain": [1, 6], "x": [2, 5], "y": [3, 4]}


def test_a_warm_up_runs_every_side_and_does_not_count(runs: list) -> None:
    told: list[str] = []
    found = rounds(rounds=1, warm_up=True, tell=told.append)
    assert len(runs) == 6
    assert [len(records) for records in found.values()] == [1, 1, 1]
    assert told[0].startswith("warm-up")
    assert told[3:] == ["round 1 of 1: plain", "round 1 of 1: x", "round 1 of 1: y"]


def test_what_goes_wrong_is_told_with_the_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RequestError("prompt 'a': too long")

    monkeypatch.setattr(measure, "run", fail)
    with pytest.raises(RequestError, match="'plain': prompt 'a': too long"):
        rounds()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tiny_model_folder("llama", tmp_path_factory.mktemp("bench"), vocab_size=512)
    tiny_tokenizer(folder)
    return LLM(str(folder), device="cpu", compile={"mode": "none"}, numerics="fast", speculative={"method": "ngram"})


def test_a_run_profits_of_no_earlier_one(llm: LLM) -> None:
    """The prefix cache would have this prompt."""
    prompt = BenchPrompt(id="a", category="", token_ids=list(range(10, 74)), params={})
    job = Job(prompt=prompt, params=SamplingParams(max_tokens=2))
    computed = [measure.run(llm, [job], concurrent=1).requests[0].num_computed_tokens for _ in range(2)]
    assert computed == [64, 64]
    llm.generate([prompt.token_ids], job.params)
    assert llm.generate([prompt.token_ids], job.params)[0].stats.num_cached_tokens > 0, "no cache, so no test"


def test_a_request_that_fails_is_an_error(llm: LLM) -> None:
    def refuse(token_ids: Any, logits: Any) -> Any:
        raise ValueError("no")

    params = SamplingParams(max_tokens=2, logits_processors=(refuse,))
    job = Job(prompt=BenchPrompt(id="bad", category="", token_ids=[5, 6], params={}), params=params)
    with pytest.raises(RequestError, match=r"prompt 'bad': .*no"):
        measure.run(llm, [job], concurrent=None)


def test_pieces_join_to_the_text_and_stand_where_a_character_completes(llm: LLM) -> None:
    text = "naïve €5, the lazy dog"
    token_ids = llm.encode(text)
    pieces = text_pieces(llm, [], token_ids)
    assert "".join(pieces) == text
    assert len(pieces) == len(token_ids)
    euro = pieces.index("€")
    assert pieces[euro - 2 : euro] == ["", ""], "its first two bytes are tokens of their own"
