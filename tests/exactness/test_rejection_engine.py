"""The ratio test in a whole engine: greedy output is unchanged, sampled output has the target's distribution."""

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from compspec.batch import Batch, DraftTokens
from compspec.engine import Engine
from compspec.request import FinishReason, Request
from compspec.sampling.params import SamplingParams
from tests.law import (
    SampledDrafts,
    Scripted,
    chi_square,
    chi_square_of_two,
    guess,
    make_engine,
    make_prompts,
    oracle,
    outputs,
    run,
    whole_outputs,
)
from tests.tiny_models import tiny_model_folder

K = 3
V = 16
TOP_K = 4
PROMPT = [5, 9, 3, 5]
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
BLOCK = pytest.mark.parametrize("block", [False, True], ids=["one by one", "block"])
METHODS = pytest.mark.parametrize("method", ["ngram", "sampled"])

Distribution = Callable[[Sequence[int]], Tensor]


@pytest.fixture(scope="module")
def folder(models: Path) -> Path:
    """A model that is small enough for thousands of requests."""
    return tiny_model_folder("llama", models, vocab_size=V, num_hidden_layers=1, hidden_size=32, intermediate_size=64)


def next_token(model_folder: Path, *, top_k: int = 0) -> Distribution:
    """The next token's distribution [V] by transformers itself."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)

    @functools.cache
    def of(tokens: tuple[int, ...]) -> Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1].double()
        if top_k:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
        return logits.softmax(-1)

    return lambda tokens: of(tuple(tokens))


@pytest.fixture(scope="module")
def target(folder: Path) -> Distribution:
    return next_token(folder)


@pytest.fixture(scope="module")
def other(models: Path) -> Path:
    """Another model; it says something else."""
    return tiny_model_folder("llama", models, vocab_size=V, seed=1, num_hidden_layers=1, hidden_size=32)


@pytest.fixture(scope="module")
def drafter(other: Path) -> Distribution:
    return next_token(other)


def rejecting(folder: Path, proposer: Any, block: bool, **overrides: Any) -> Engine:
    return make_engine(
        folder,
        proposer,
        **{
            "speculative__verifier": "rejection",
            "speculative__block_verification": block,
            "speculative__num_draft_tokens": K,
            "speculative__method": "ngram",
            "numerics__prefill_chunk": 16,
            "numerics__decode_width": K + 1,
            "scheduler__max_num_seqs": 8,
            **overrides,
        },
    )


def proposer_of(method: str, drafter: Distribution) -> Any:
    return SampledDrafts(drafter, K, vocab_size=V) if method == "sampled" else None


@BLOCK
@METHODS
def test_greedy_output_is_that_of_a_plain_run(folder, drafter, method: str, block: bool) -> None:
    prompts = [[token % V for token in prompt] for prompt in make_prompts(6)]
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=20, repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(max_tokens=9, min_tokens=4, bad_words=((7,), (3, 4)), stop_token_ids=(11,)),
    ] * 2
    plain = run(make_engine(folder, numerics__prefill_chunk=16, numerics__decode_width=K + 1), prompts, params)
    found = run(rejecting(folder, proposer_of(method, drafter), block), prompts, params)
    assert whole_outputs(found) == whole_outputs(plain)
    assert sum(request.stats.num_draft_tokens for request in found) > 0


@BLOCK
def test_a_request_without_drafts_gives_the_tokens_of_a_plain_run(folder, drafter, block: bool) -> None:
    """Speculation off for it, or nothing drafted for it, beside others that are drafted for."""
    prompts = [[token % V for token in prompt] for prompt in make_prompts(4)]
    params = [SAMPLED.model_copy(update={"seed": seed, "top_p": 0.95}) for seed in range(4)]
    plain = outputs(run(make_engine(folder, numerics__prefill_chunk=16, numerics__decode_width=K + 1), prompts, params))
    mixed = [each.model_copy(update={"speculative": False if seed % 2 else None}) for seed, each in enumerate(params)]
    found = run(rejecting(folder, proposer_of("sampled", drafter), block), prompts, mixed)
    assert outputs(found)[1::2] == plain[1::2]
    assert outputs(found)[0::2] != plain[0::2], "the others take numbers of their own"
    nothing = Scripted(lambda request, most: [], K)
    assert outputs(run(rejecting(folder, nothing, block), prompts, params)) == plain


@BLOCK
def test_all_drafts_of_the_target_s_own_distribution_are_kept(folder, target, block: bool) -> None:
    engine = rejecting(folder, SampledDrafts(target, K, vocab_size=V), block)
    for request in run(engine, [PROMPT] * 8, [SAMPLED.model_copy(update={"seed": seed}) for seed in range(8)]):
        assert request.stats.num_accepted_tokens == request.stats.num_draft_tokens > 0


def test_the_same_seed_gives_the_same_output_in_any_company(folder, drafter) -> None:
    params = [SAMPLED.model_copy(update={"seed": seed}) for seed in range(6)]
    together = outputs(run(rejecting(folder, proposer_of("sampled", drafter), True), [PROMPT] * 6, params))
    engine = rejecting(folder, proposer_of("sampled", drafter), True)
    assert [outputs(run(engine, [PROMPT], each))[0] for each in params] == together
    assert len({tuple(tokens) for tokens, _ in together}) > 1


NUM_REQUESTS = 240
NUM_TOKENS = 3


def sample(engine: Engine, num_requests: int = NUM_REQUESTS, *, first_seed: int = 0) -> Tensor:
    """Outputs [R, NUM_TOKENS] of one prompt with many seeds."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, top_k=TOP_K, ignore_eos=True)
    each = [params.model_copy(update={"seed": seed}) for seed in range(first_seed, first_seed + num_requests)]
    return torch.tensor([request.output_token_ids for request in run(engine, [PROMPT] * num_requests, each)])


def counts_of(found: Tensor) -> Tensor:
    places = V ** torch.arange(NUM_TOKENS - 1, -1, -1)
    return (found * places).sum(1).bincount(minlength=V**NUM_TOKENS)


@pytest.fixture(scope="module")
def law(folder: Path) -> Tensor:
    """The probability of each output, [V ** NUM_TOKENS]."""
    target = next_token(folder, top_k=TOP_K)
    mass = torch.zeros((V,) * NUM_TOKENS, dtype=torch.float64)

    def fill(before: tuple[int, ...], chance: float) -> None:
        if len(before) == NUM_TOKENS:
            mass[before] = chance
            return
        row = target([*PROMPT, *before])
        for token in row.nonzero().flatten().tolist():
            fill((*before, token), chance * float(row[token]))

    fill((), 1.0)
    assert int((mass > 0).sum()) == TOP_K**NUM_TOKENS
    return mass.flatten()


@pytest.fixture(scope="module")
def plain(folder: Path) -> Tensor:
    settings = {"numerics__prefill_chunk": 16, "numerics__decode_width": K + 1, "scheduler__max_num_seqs": 32}
    return sample(make_engine(folder, **settings), first_seed=NUM_REQUESTS)


@pytest.mark.parametrize(
    ("method", "block"),
    [("sampled", False), ("sampled", True), ("fixed", True), ("draft_model", False), ("draft_model", True)],
    ids=lambda value: str(value),
)
def test_outputs_are_distributed_as_those_of_plain_runs(
    folder, other, drafter, law: Tensor, plain: Tensor, method: str, block: bool
) -> None:
    """Two samples of disjoint seeds, and each against the probabilities that transformers computes."""
    proposers = {
        "sampled": SampledDrafts(drafter, K, vocab_size=V),
        "fixed": Scripted(lambda request, most: [int(law.view(V, -1).sum(0).argmax()) // V] * most, K),
    }
    settings = {"scheduler__max_num_seqs": 32}
    if method == "draft_model":
        settings |= {"speculative__method": method, "speculative__model": str(other)}
    engine = rejecting(folder, proposers.get(method), block, **settings)
    found = sample(engine)
    assert engine.stats.num_draft_tokens > 0
    for name, (statistic, chance) in {
        "plain": chi_square(counts_of(plain), law),
        "speculative": chi_square(counts_of(found), law),
        "both": chi_square_of_two(counts_of(found), counts_of(plain)),
    }.items():
        assert chance > 1e-3, f"{name}: chi-square {statistic:.1f}, chance {chance:.2g}"


def test_a_drafter_that_lies_about_its_probabilities_is_seen(folder, drafter, target, law: Tensor) -> None:
    """The statistic of the test above can fail: the drafts say that they are sampled from what the target says."""

    class Liar(SampledDrafts):
        def propose(self, batch: Batch) -> DraftTokens:
            drafts = super().propose(batch)
            for probs, entry, tokens in zip(drafts.probs, batch.scheduled, drafts.token_ids.tolist(), strict=True):
                for place in range(entry.max_draft_tokens):
                    probs[place] = target([*entry.request.token_ids.tolist(), *tokens[:place]])
            return drafts

    found = sample(rejecting(folder, Liar(drafter, K, vocab_size=V), False), 100)
    statistic, chance = chi_square(counts_of(found), law)
    assert chance < 1e-9, f"chi-square {statistic:.1f}, chance {chance:.2g}"


def many(params: SamplingParams, count: int = 16) -> list[SamplingParams]:
    return [params.model_copy(update={"seed": seed}) for seed in range(count)]


def drafted(engine: Engine, params: SamplingParams, count: int = 16) -> list[Request]:
    """Requests of one prompt, of which some had drafts kept and some had drafts rejected."""
    requests = run(engine, [PROMPT] * count, many(params, count))
    accepted = sum(request.stats.num_accepted_tokens for request in requests)
    assert 0 < accepted < sum(request.stats.num_draft_tokens for request in requests)
    return requests


@BLOCK
def test_what_is_forbidden_is_never_output(folder, drafter, block: bool) -> None:
    engine = rejecting(folder, proposer_of("sampled", drafter), block)
    for request in drafted(engine, SAMPLED.model_copy(update={"bad_words": ((4,), (6, 7), (8, 8, 8))})):
        tokens = request.output_token_ids
        assert 4 not in tokens
        assert (6, 7) not in itertools.pairwise(tokens)
        assert (8, 8, 8) not in zip(tokens, tokens[1:], tokens[2:], strict=False)
    for request in drafted(engine, SAMPLED.model_copy(update={"allowed_token_ids": (3, 5, 10, 15)})):
        assert set(request.output_token_ids) <= {3, 5, 10, 15}
    for request in drafted(engine, SAMPLED.model_copy(update={"top_k": 2}), count=3):
        seen = request.token_ids.tolist()
        for place in range(request.num_prompt_tokens, request.num_tokens):
            assert seen[place] in next_two(folder, tuple(seen[:place]))


@functools.cache
def cached_next_token(model_folder: Path) -> Distribution:
    return next_token(model_folder)


def next_two(model_folder: Path, tokens: tuple[int, ...]) -> list[int]:
    return cached_next_token(model_folder)(tokens).topk(2).indices.tolist()


@BLOCK
def test_outputs_end_where_they_should(folder, drafter, block: bool) -> None:
    """Stop tokens at any place of a window, not before min_tokens, and never more than max_tokens."""
    engine = rejecting(folder, proposer_of("sampled", drafter), block)
    stops = (2, 5, 7)  # 2 is the model's own end
    for max_tokens, min_tokens in ((12, 0), (12, 5), (7, 7), (2, 0), (1, 0)):
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stops[1:], temperature=2.0)
        reasons = set()
        for request in run(engine, [PROMPT] * 16, many(params)):
            tokens = request.output_token_ids
            ends = [index + 1 for index, token in enumerate(tokens) if token in stops]
            assert len(tokens) == (ends[0] if ends else max_tokens)
            assert len(tokens) >= min_tokens
            assert request.finish_reason == (FinishReason.STOP if ends else FinishReason.LENGTH)
            reasons.add(request.finish_reason)
        assert len(reasons) == 2 or max_tokens == min_tokens or max_tokens == 1
    assert engine.stats.num_draft_tokens > 0


@BLOCK
def test_a_place_without_a_token_fails_that_request_alone(folder, drafter, block: bool) -> None:
    """A processor leaves nothing after a 9 is output: whoever samples one ends there, the others go on."""

    def nothing_after_9(token_ids: list[int], logits: Tensor) -> Tensor:
        return torch.full_like(logits, float("-inf")) if token_ids[-1] == 9 else logits

    engine = rejecting(folder, proposer_of("sampled", drafter), block)
    params = SAMPLED.model_copy(update={"logits_processors": (nothing_after_9,), "temperature": 1.5})
    requests = drafted(engine, params, count=32)
    failed = [request for request in requests if request.finish_reason == FinishReason.ERROR]
    assert 0 < len(failed) < len(requests)
    for request in requests:
        tokens = request.output_token_ids
        if request in failed:
            assert tokens.index(9) == len(tokens) - 1
            assert "no token can be sampled" in str(request.error)
        else:
            assert 9 not in tokens[:-1]
            assert (len(tokens), request.error) == (SAMPLED.max_tokens, None)


@BLOCK
def test_processors_see_each_row_s_own_tokens(folder, drafter, block: bool) -> None:
    """One that leaves a choice of two, by the number of tokens, and one that fails at some number."""

    def by_length(token_ids: list[int], logits: Tensor) -> Tensor:
        first = len(token_ids) % V
        kept = torch.full_like(logits, float("-inf"))
        kept[[first, (first + 3) % V]] = logits[[first, (first + 3) % V]]
        return kept

    def fails_late(token_ids: list[int], logits: Tensor) -> Tensor:
        if len(token_ids) == len(PROMPT) + 8:
            raise ValueError("late")
        return logits

    engine = rejecting(folder, proposer_of("sampled", drafter), block)
    for request in drafted(engine, SAMPLED.model_copy(update={"logits_processors": (by_length,)})):
        for place, token in enumerate(request.output_token_ids, start=len(PROMPT)):
            assert (token - place) % V in (0, 3)
    oks, fails = SAMPLED, SAMPLED.model_copy(update={"logits_processors": (fails_late,)})
    each = [(fails if seed % 2 else oks).model_copy(update={"seed": seed}) for seed in range(8)]
    for index, request in enumerate(run(engine, [PROMPT] * 8, each)):
        assert request.num_output_tokens == (8 if index % 2 else 12)
        assert ("late" in str(request.error)) == (index % 2 == 1)


def test_right_guesses_of_a_confident_model_are_kept(folder) -> None:
    """At a low temperature certain drafts pass, guesses do not, and outputs are those of greedy decoding."""
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    engine = make_engine(folder, numerics__prefill_chunk=16, numerics__decode_width=K + 1)
    (truth,) = outputs(run(engine, [PROMPT], greedy))
    cold = greedy.model_copy(update={"temperature": 1e-3, "seed": 1})
    for draft, accepted in ((oracle({tuple(PROMPT): truth[0]}), True), (guess(0), False)):
        proposer = Scripted(lambda request, most, draft=draft: [token % V for token in draft(request, most)], K)
        (request,) = run(rejecting(folder, proposer, True), [PROMPT], cold)
        assert outputs([request]) == [truth]
        assert (request.stats.num_accepted_tokens == request.stats.num_draft_tokens) == accepted
