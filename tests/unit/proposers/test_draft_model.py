"""A draft model's keys and values follow what is committed, through rejection, preemption and shared beginnings."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import compspec.proposers.proposer as proposer_module
from compspec.batch import Batch, DraftTokens, ScheduledRequest, StepOutput
from compspec.config import EngineConfig, make_config
from compspec.errors import ConfigError, RequestError, UnsupportedError
from compspec.models.loader import LoadedModel
from compspec.proposers import draft_model
from compspec.proposers.draft_model import DraftModelProposer, Options, check_vocabularies
from compspec.proposers.proposer import Target, check_drafts, make_proposer
from compspec.request import Request
from compspec.sampling.metadata import MetadataState
from compspec.sampling.noise import TARGET_STREAM, GumbelNoise
from compspec.sampling.sampler import Sampler
from compspec.scheduling.block_pool import BlockPool
from compspec.scheduling.prefix_cache import PrefixCache
from compspec.scheduling.scheduler import Scheduler
from tests.unit.fakes import decode, entry, make_request, prefill
from tests.unit.runner.fake_model import FakeModelRunner, fake_adapter, logits_after

VOCAB = 12
K = 3
CHUNK = 4
CPU = torch.device("cpu")


def config_of(**settings: object) -> EngineConfig:
    """Chunks are shorter than a configuration may ask for, so that short prompts have several."""
    values = {"model__source": "x", "scheduler__max_num_seqs": 4, **settings}
    config = make_config({}, {name.replace("__", "."): value for name, value in values.items()})
    numerics = config.numerics.model_copy(update={"prefill_chunk": CHUNK})
    return config.model_copy(update={"numerics": numerics})


def loaded(vocab_size: int = VOCAB, tokenizer: Any = None, max_model_len: int = 64) -> LoadedModel:
    adapter = fake_adapter(vocab_size, max_model_len)
    return LoadedModel(adapter=adapter, tokenizer=tokenizer, folder=None, fingerprint="x")


def loaded_proposer(
    target: LoadedModel, draft: LoadedModel, *, num_draft_tokens: int = K, **options: Any
) -> DraftModelProposer:
    proposer = draft_model.make(Options(model="small", **options), num_draft_tokens)
    with patch.object(draft_model, "load_model", lambda section, cache_path: draft):
        assert list(proposer.load(target, config_of())) == [draft.adapter]
    return proposer


def started(
    proposer: DraftModelProposer, config: EngineConfig, metadata: MetadataState | None = None, progress: Any = None
) -> FakeModelRunner:
    """Starts it on a runner without a model, and returns that."""
    target = Target(
        config=config,
        runner=SimpleNamespace(num_blocks=33, adapter=SimpleNamespace(vocab_size=VOCAB)),  # type: ignore[arg-type]
        metadata=metadata or MetadataState(4, VOCAB, CPU, max_model_len=64),
        sampler=Sampler(GumbelNoise(VOCAB, CPU)),
        stream=TARGET_STREAM,
        progress=progress,
    )
    with patch.object(proposer_module, "ModelRunner", FakeModelRunner):
        proposer.start(target)
    (runner,) = proposer.runners
    assert isinstance(runner, FakeModelRunner)
    return runner


class Drafting:
    """A draft model, and one request whose prompt it has followed."""

    def __init__(self, num_prompt: int = 5, *, max_model_len: int = 64, **params: Any) -> None:
        self.proposer = loaded_proposer(loaded(), loaded(max_model_len=max_model_len))
        self.runner = started(self.proposer, config_of(cache__block_size=4))
        self.request = make_request(list(range(num_prompt)), max_tokens=40, **params)
        self.request.block_ids = list(range(1, 20))
        for start in range(0, num_prompt, CHUNK):
            count = min(CHUNK, num_prompt - start)
            batch = prefill(self.request, 0, start, count)
            self.proposer.prefill(batch)
            self.finish(batch, [7] if start + count == num_prompt else [], 0)
        self.prompt_rows = self.rows()

    def batch(self, most: int) -> Batch:
        return Batch(scheduled=(entry(self.request, 0, max_drafts=most),), is_prefill=False)

    def step(self, accepted: int = 0, most: int = K) -> list[int]:
        """A decode step that accepts so many drafts; returns the drafts."""
        batch = self.batch(most)
        drafts = self.proposer.propose(batch)
        check_drafts(batch, drafts, VOCAB)
        tokens = drafts.token_ids[0, : drafts.num_draft_tokens[0]].tolist()
        assert tokens == greedy(self.request.token_ids.tolist(), len(tokens))
        self.finish(batch, [*tokens[:accepted], 8], accepted)
        return tokens

    def finish(self, batch: Batch, token_ids: Sequence[int], accepted: int) -> None:
        output = StepOutput(
            token_ids=(tuple(token_ids),),
            num_draft_tokens=(accepted,),
            num_accepted_tokens=(accepted,),
            errors=(None,),
        )
        self.proposer.observe(batch, output)
        part = batch.scheduled[0]
        self.request.num_computed_tokens = part.num_computed_tokens + part.num_new_tokens + accepted
        self.request.append(list(token_ids))

    @property
    def num_valid(self) -> int:
        """So many tokens it says are complete, and they are."""
        found = self.proposer.num_computed_tokens(self.request)
        assert found <= self.request.num_computed_tokens
        assert self.runner.holds(self.request, found)
        return found

    def rows(self) -> list[tuple[bool, int, int]]:
        """Per forward since the last time: whether of a prompt, and its first position and rows."""
        found = [(not bucket.is_decode, query.start, len(query.token_ids)) for bucket, (query,) in self.runner.calls]
        self.runner.calls.clear()
        return found


def greedy(tokens: Sequence[int], count: int) -> list[int]:
    """What the draft model says next, without any cache."""
    tokens, found = list(tokens), []
    for _ in range(count):
        found.append(int(logits_after(tokens, VOCAB).argmax()))
        tokens.append(found[-1])
    return found


@pytest.mark.parametrize(("length", "chunks"), [(1, [1]), (4, [4]), (10, [4, 4, 2])])
def test_a_prompt_is_followed_in_the_targets_chunks(length: int, chunks: list[int]) -> None:
    drafting = Drafting(length)
    assert drafting.prompt_rows == [(True, sum(chunks[:place]), count) for place, count in enumerate(chunks)]
    assert drafting.num_valid == length


@pytest.mark.parametrize("accepted", range(K + 1))
def test_after_a_step_it_is_complete_for_what_was_kept_as_far_as_it_was_run(accepted: int) -> None:
    """The last draft of a window is never run; kept whole, it leaves the model one token short."""
    drafting = Drafting(5)
    assert len(drafting.step(accepted)) == K
    assert drafting.rows() == [(False, 5, 1), (False, 6, 1), (False, 7, 1)]
    assert drafting.request.num_tokens == 6 + accepted + 1
    assert drafting.num_valid == 6 + min(accepted, K - 1)
    drafting.step()
    kept_whole = accepted == K
    start = 5 + accepted + 1 - kept_whole
    assert drafting.rows()[0] == (False, start, 1 + kept_whole), "more rows than it lacks, or fewer"


def test_it_catches_up_in_prompt_chunks_after_steps_in_which_it_was_not_asked() -> None:
    drafting = Drafting(5)
    for _ in range(9):
        assert drafting.step(most=0) == []
    assert drafting.rows() == []
    assert drafting.num_valid == 5
    drafting.step(1)
    assert drafting.rows() == [
        (True, 5, 4),
        (True, 9, 4),
        (True, 13, 1),
        *[(False, 14 + place, 1) for place in range(K)],
    ]
    assert drafting.num_valid == 16


@pytest.mark.parametrize("missed", [1, 2, 3])
def test_what_two_rows_hold_needs_no_chunk(missed: int) -> None:
    drafting = Drafting(5)
    for _ in range(missed):
        drafting.step(most=0)
    drafting.step(most=1)
    found = drafting.rows()
    assert found == ([(False, 5, 2)] if missed == 1 else [(True, 5, missed), (False, 5 + missed, 1)])


def test_drafts_of_another_proposer_that_were_kept_are_caught_up_with() -> None:
    """As in a chain, where every proposer sees every step's outcome."""
    drafting = Drafting(5)
    batch = drafting.batch(3)
    drafting.finish(batch, [9, 9, 9, 8], 3)
    assert drafting.num_valid == 5
    drafting.step(0)
    assert drafting.rows()[0] == (True, 5, 4)


def test_a_window_that_ended_early_counts_as_far_as_it_was_run() -> None:
    """Another proposer may draft where it had nothing to say."""

    def nothing_else(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, float("-inf")) if len(token_ids) == 6 else logits

    drafting = Drafting(5, logits_processors=[nothing_else])
    batch = drafting.batch(K)
    assert drafting.proposer.propose(batch).num_draft_tokens.tolist() == [0]
    drafting.finish(batch, [9, 9, 8], 2)
    assert drafting.num_valid == 6
    assert drafting.rows() == [(False, 5, 1)]


def test_a_request_that_was_forgotten_begins_anew() -> None:
    drafting = Drafting(5)
    drafting.step(2)
    drafting.proposer.forget(drafting.request)
    assert drafting.num_valid == 0
    drafting.rows()
    drafting.runner.cache.clear()
    drafting.step(2)
    assert drafting.rows()[:3] == [(True, 0, 4), (True, 4, 4), (False, 8, 1)]
    drafting.proposer.forget(drafting.request)
    drafting.proposer.forget(drafting.request)


def test_a_step_that_was_never_finished_is_forgotten_too() -> None:
    drafting = Drafting(5)
    drafting.proposer.propose(drafting.batch(K))
    drafting.proposer.forget(drafting.request)
    drafting.finish(drafting.batch(0), [8], 0)
    assert drafting.num_valid == 0


@pytest.mark.parametrize(("length", "drafts"), [(9, 3), (8, 3), (7, 2), (6, 1), (5, 0), (4, 0)])
def test_drafts_fit_into_the_draft_models_context(length: int, drafts: int) -> None:
    """6 tokens are there; all drafts but the last are run."""
    drafting = Drafting(5, max_model_len=length)
    assert len(drafting.step()) == drafts
    because = drafting.request.stats.speculation_off_because
    assert because == (None if drafts else f"the draft model's context is {length} tokens")


def test_a_request_beyond_the_context_goes_on_without_drafts_and_says_why() -> None:
    drafting = Drafting(5, max_model_len=9)
    counts = [len(drafting.step(1)) for _ in range(4)]
    assert counts == [3, 2, 0, 0]
    assert drafting.request.stats.speculation_off_because == "the draft model's context is 9 tokens"


def test_a_prompt_beyond_the_context_is_followed_as_far_as_it_goes_and_keeps_nobody_from_its_blocks() -> None:
    drafting = Drafting(14, max_model_len=6)
    assert drafting.runner.holds(drafting.request, 6)
    assert drafting.proposer.num_computed_tokens(drafting.request) == 14
    drafting.step()
    assert drafting.proposer.num_computed_tokens(drafting.request) == 15
    assert drafting.rows() == []


def test_a_request_that_asks_for_no_drafts_is_followed_in_its_prompt_alone() -> None:
    drafting = Drafting(5, max_model_len=6, speculative=False)
    for _ in range(4):
        drafting.step(most=0)
    assert drafting.num_valid == 5
    assert drafting.request.stats.speculation_off_because is None, "that is not the reason"


def test_requests_are_drafted_for_together() -> None:
    drafting = Drafting(5)
    other = make_request([3, 4, 5], output=[6], request_id="other")
    other.block_ids = [25, 26]
    drafting.runner.store(other, 3)
    batch = decode(drafting.request, other)
    batch = replace(batch, scheduled=tuple(replace(part, max_draft_tokens=2) for part in batch.scheduled))
    drafts = drafting.proposer.propose(batch)
    assert drafts.token_ids[:, :2].tolist() == [
        greedy(request.token_ids.tolist(), 2) for request in (drafting.request, other)
    ]
    decoding = [len(queries) for bucket, queries in drafting.runner.calls if bucket.is_decode]
    assert decoding == [2, 2]


def test_it_runs_in_the_targets_blocks_and_in_fast_numerics() -> None:
    proposer = loaded_proposer(loaded(), loaded())
    said: list[str] = []
    runner = started(proposer, config_of(), progress=lambda what, seconds: said.append(what))
    assert runner.made_with["num_blocks"] == 33
    assert runner.made_with["caches"] is None
    assert runner.made_with["config"].numerics.mode == "fast"
    assert {bucket.query_len for bucket in runner.buckets.decode} == {2}
    assert {bucket.query_len for bucket in runner.buckets.prefill} == {CHUNK}
    assert said == ["draft model: shape"]


@pytest.mark.parametrize(
    ("own", "target", "asked", "found"), [(64, 64, None, 64), (32, 64, None, 32), (64, 32, None, 32), (64, 64, 20, 20)]
)
def test_its_context_is_the_smallest_of_what_it_has_what_is_asked_and_the_targets(
    own: int, target: int, asked: int | None, found: int
) -> None:
    proposer = loaded_proposer(loaded(max_model_len=target), loaded(max_model_len=own), max_model_len=asked)
    assert proposer.max_model_len == found
    assert started(proposer, config_of()).max_model_len == found


def test_more_context_than_the_draft_model_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 65, but the draft model was made for 64"):
        loaded_proposer(loaded(), loaded(), max_model_len=65)


def test_the_draft_model_is_loaded_as_its_options_say_and_on_the_targets_device() -> None:
    sections = []

    def load(section: Any, cache_path: Path) -> LoadedModel:
        sections.append(section)
        return loaded()

    proposer = draft_model.make(Options(model="small", revision="r", dtype="float16", trust_remote_code=True), K)
    with patch.object(draft_model, "load_model", load):
        proposer.load(loaded(), config_of())
    (section,) = sections
    assert (section.source, section.revision, section.dtype, section.trust_remote_code, section.device) == (
        "small",
        "r",
        "float16",
        True,
        "cpu",
    )


def test_which_model_drafts_has_to_be_said() -> None:
    with pytest.raises((ConfigError, RequestError), match="model"):
        make_proposer("draft_model", {}, K)


class FakeTokenizer:
    """Ids by token; cuts a text where it is told to."""

    def __init__(self, vocab: dict[str, int], cut: Sequence[int] = (1, 2)) -> None:
        self.vocab = vocab
        self.cut = list(cut)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.vocab)

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": self.cut}


def words(count: int = 10, **changes: int) -> FakeTokenizer:
    return FakeTokenizer({**{f"word{number}": number for number in range(count)}, **changes})


@pytest.mark.parametrize(("target", "draft"), [(10, 10), (12, 10), (10, 12), (64, 16)])
def test_padding_of_either_vocabulary_is_no_difference(target: int, draft: int) -> None:
    check_vocabularies(loaded(target, words()), loaded(draft, words()), "small")


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        (words(11), ["11 tokens against 10", "id 10", "'word10'"]),
        (words(9), ["9 tokens against 10", "id 9", "'word9'"]),
        (words(10, word3=4, word4=3), ["10 tokens against 10", "id 3", "'word3'"]),
    ],
)
def test_another_tokenizer_is_refused_and_the_first_difference_is_named(other: FakeTokenizer, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_vocabularies(loaded(tokenizer=words()), loaded(tokenizer=other), "small")
    message = str(caught.value)
    assert all(part in message for part in ["'small'", "use a draft model with the target's tokenizer", *parts])
    assert "\n" not in message


def test_the_same_tokens_cut_in_another_way_are_refused() -> None:
    other = FakeTokenizer(words().vocab, cut=[2, 1])
    with pytest.raises(ConfigError, match="cuts texts differently"):
        check_vocabularies(loaded(tokenizer=words()), loaded(tokenizer=other), "small")


@pytest.mark.parametrize(("target", "draft"), [(12, 9), (9, 12)])
def test_tokens_that_a_model_has_no_row_for_are_refused(target: int, draft: int) -> None:
    with pytest.raises(UnsupportedError, match=r"ids up to 9.* 12 .*9|ids up to 9.* 9 .*12"):
        check_vocabularies(loaded(target, words()), loaded(draft, words()), "small")


@pytest.mark.parametrize("lacking", ["target", "draft", "both"])
def test_without_tokenizers_the_numbers_of_ids_must_be_equal(lacking: str) -> None:
    ours = None if lacking in ("target", "both") else words()
    theirs = None if lacking in ("draft", "both") else words()
    check_vocabularies(loaded(12, ours), loaded(12, theirs), "small")
    with pytest.raises(ConfigError, match=r"'small' has 13 token ids, the target 12.*tokenizer"):
        check_vocabularies(loaded(12, ours), loaded(13, theirs), "small")


def test_a_draft_model_with_another_tokenizer_is_refused_at_load() -> None:
    with pytest.raises(ConfigError, match="another tokenizer"):
        loaded_proposer(loaded(tokenizer=words()), loaded(tokenizer=words(9)))


class Engine:
    """The engine's order of calls around a real scheduler, with a target that keeps as many drafts as chance wants."""

    def __init__(self, mix: dict[str, Any]) -> None:
        self.rng = Random(mix["seed"])
        config = config_of(cache__block_size=mix["block_size"])
        self.length = mix["max_model_len"]
        self.proposer = loaded_proposer(loaded(), loaded(max_model_len=self.length), num_draft_tokens=mix["k"])
        self.metadata = MetadataState(4, VOCAB, CPU, max_model_len=64)
        self.runner = started(self.proposer, config, self.metadata)
        pool = BlockPool(mix["num_blocks"], mix["block_size"])
        caching = mix["caching"]
        self.scheduler = Scheduler(
            pool,
            prefix_cache=None if caching is None else PrefixCache(pool, CHUNK if caching == "exact" else None),
            max_num_seqs=3,
            prefill_chunk=CHUNK,
            query_len=mix["k"] + 1,
            max_draft_tokens=mix["k"],
            eos_token_ids=frozenset(),
            num_final_tokens=self.proposer.num_computed_tokens,
        )
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        batch = self.scheduler.schedule()
        assert batch is not None
        for request in batch.preempted:
            self.proposer.forget(request)
        self.counts["preempted"] += len(batch.preempted)
        drafts = DraftTokens.from_lists([[] for _ in batch.scheduled], 0)
        if batch.is_prefill:
            self.proposer.prefill(batch)
        else:
            batch = self._not_always(batch)
            drafts = self.proposer.propose(batch)
            check_drafts(batch, drafts, VOCAB)
        output = self._target(batch, drafts)
        self.metadata.commit(batch, output)
        self.proposer.observe(batch, output)
        for delta in self.scheduler.update(batch, output):
            if delta.finish_reason is not None:
                self.proposer.forget(delta.request)
        self.check()

    def preempt(self) -> None:
        running = self.scheduler.running
        if running:
            request = self.rng.choice(running)
            self.scheduler.preempt(request)
            self.proposer.forget(request)
            self.counts["preempted"] += 1

    def abort(self) -> None:
        if self.scheduler.running:
            request = self.rng.choice(self.scheduler.running)
            self.scheduler.abort(request)
            self.proposer.forget(request)

    def check(self) -> None:
        """What the model says that it has computed is there, and was committed."""
        for request in self.scheduler.running:
            num_valid = self.proposer.num_computed_tokens(request)
            assert num_valid <= request.num_computed_tokens
            assert self.runner.holds(request, min(num_valid, self.length))
        self.counts["found"] += sum(request.stats.num_cached_tokens for request in self.scheduler.running)

    def _not_always(self, batch: Batch) -> Batch:
        """In some steps some requests are not drafted for."""
        parts = [part if self.rng.random() < 0.7 else replace(part, max_draft_tokens=0) for part in batch.scheduled]
        return replace(batch, scheduled=tuple(parts))

    def _target(self, batch: Batch, drafts: DraftTokens) -> StepOutput:
        token_ids: list[tuple[int, ...]] = []
        accepted = []
        for row, part in enumerate(batch.scheduled):
            own = drafts.token_ids[row, : drafts.num_draft_tokens[row]].tolist()
            self._check_drafts(part, own)
            accepted.append(self.rng.randint(0, len(own)))
            kept = own[: accepted[-1]]
            token_ids.append((*kept, self.rng.randrange(VOCAB)) if part.samples else ())
        return StepOutput(
            token_ids=tuple(token_ids),
            num_draft_tokens=tuple(drafts.num_draft_tokens.tolist()),
            num_accepted_tokens=tuple(accepted),
            errors=(None,) * len(token_ids),
        )

    def _check_drafts(self, part: ScheduledRequest, own: list[int]) -> None:
        request = part.request
        room = max(0, self.length - request.num_tokens + 1)
        assert len(own) == min(part.max_draft_tokens, room)
        assert own == greedy(request.token_ids.tolist(), len(own)), "its keys and values are not the request's"
        self.counts["drafted after a preemption"] += bool(own) and request.stats.num_preemptions > 0
        self.counts["drafted after a hit"] += bool(own) and request.stats.num_cached_tokens > 0
        self.counts["beyond the context"] += part.max_draft_tokens > room


MIXES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(16, 30),
        "block_size": st.sampled_from([2, 4]),
        "max_model_len": st.sampled_from([9, 14, 64]),
        "k": st.integers(1, 4),
        "caching": st.sampled_from([None, "fast", "fast", "exact"]),
        "requests": st.lists(
            st.tuples(st.integers(1, 14), st.integers(0, 1), st.integers(1, 12), st.sampled_from([None, None, False])),
            min_size=1,
            max_size=5,
        ),
        "seed": st.integers(0, 2**32),
    }
)


def run_mix(mix: dict[str, Any]) -> Counter[str]:
    engine = Engine(mix)
    pending: list[Request] = []
    for number, (length, kind, max_tokens, speculative) in enumerate(mix["requests"]):
        prompt = [(kind + place * place) % VOCAB for place in range(length)]
        pending.append(make_request(prompt, max_tokens=max_tokens, speculative=speculative, request_id=str(number)))
    for _ in range(500):
        if pending and (not engine.scheduler.has_work or engine.rng.random() < 0.3):
            engine.scheduler.add(pending.pop(0))
        if not engine.scheduler.has_work:
            break
        chance = engine.rng.random()
        if chance < 0.08:
            engine.preempt()
        elif chance < 0.1:
            engine.abort()
        if engine.scheduler.has_work:
            engine.step()
    assert not pending and not engine.scheduler.has_work
    return engine.counts


@settings(max_examples=150, deadline=None)
@given(MIXES)
def test_drafts_are_those_of_a_cold_model_that_saw_the_requests_tokens_alone(mix: dict[str, Any]) -> None:
    """Whatever was shared, preempted, rejected or left out before."""
    for name in sorted(run_mix(mix)):
        event(name)


def test_all_that_can_happen_to_a_draft_models_cache_happens_in_some_mixes() -> None:
    counts: Counter[str] = Counter()
    for seed in range(16):
        rng = Random(seed)
        mix = {
            "num_blocks": 18,
            "block_size": 2,
            "max_model_len": rng.choice([14, 64]),
            "k": 2,
            "caching": "fast" if seed % 2 else "exact",
            "requests": [(rng.randint(6, 14), 0, 12, None) for _ in range(4)],
            "seed": seed,
        }
        counts += run_mix(mix)
    assert min(counts[name] for name in ("preempted", "found", "beyond the context")) > 0
    assert min(counts[name] for name in ("drafted after a preemption", "drafted after a hit")) > 0
