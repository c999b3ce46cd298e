"""What is sampled is distributed as the softmax of the logits, through any drafts: sampler and verifier, no model.

Seeds are fixed, so each test gives one number for good. A right sampler is far from the limit, and each planted
mistake is far beyond it: the same test would catch it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compspec.batch import Batch, DraftTokens
from compspec.request import Request
from compspec.sampling import rejection
from compspec.sampling.metadata import MetadataState
from compspec.sampling.noise import (
    ACCEPTANCE_STREAM,
    DRAFT_STREAM,
    RECOVERY_STREAM,
    TARGET_STREAM,
    GumbelNoise,
    stream_salts,
)
from compspec.sampling.rejection import RejectionVerifier
from compspec.sampling.sampler import Sampler
from compspec.sampling.verifier import EqualityVerifier, Verifier
from tests.law import chi_square
from tests.unit.fakes import entry, make_request, scores

V = 4
K = 3
NUM_TOKENS = 4
NUM_REQUESTS = 1500
FEW = 500
PROMPT = (0, 1)
CPU = torch.device("cpu")
NOISE = GumbelNoise(V, CPU)

LIKELY, IMPOSSIBLE = 1e-3, 1e-9
"""Chances of a statistic as large: a right sampler stays above the first, a wrong one below the second."""

Propose = Callable[[Batch], DraftTokens]


def random_table(seed: int) -> Tensor:
    """Logits [V, V, V] of the next token after the last two."""
    return 1.5 * torch.randn(V, V, V, generator=torch.Generator().manual_seed(seed))


def table(after: dict[int, list[float]], otherwise: list[float]) -> Tensor:
    """Log-probabilities [V, V, V] of the next token, by the last one alone."""
    rows = torch.tensor([after.get(token, otherwise) for token in range(V)])
    return rows.log().expand(V, V, V)


TARGET = random_table(1)
DRAFTER = random_table(2)


class TargetNoise:
    """The project's noise for salt 0, made once for all seeds below a number: the sampler asks for eight rows each."""

    def __init__(self, num_seeds: int) -> None:
        self._length = len(PROMPT) + NUM_TOKENS + K + 1
        seeds = torch.arange(num_seeds).repeat_interleave(self._length)
        positions = torch.arange(self._length).repeat(num_seeds)
        self._rows = NOISE(seeds, positions, torch.zeros_like(seeds)).view(num_seeds, self._length, V)

    def __call__(self, seeds: Tensor, positions: Tensor, salts: Tensor) -> Tensor:
        assert not salts.any()
        return self._rows[seeds, positions]


TARGET_NOISE = TargetNoise(NUM_REQUESTS)


def known(batch: Batch) -> Tensor:
    """The last two tokens of each request, [R, 2]."""
    return torch.tensor([entry.request.token_ids[-2:].tolist() for entry in batch.scheduled])


def made(batch: Batch, token_ids: Tensor, probs: Tensor | None = None, *, counts: Tensor | None = None) -> DraftTokens:
    """Drafts [R, K], cut to `counts` and to what each request may have."""
    wanted = [K] * len(token_ids) if counts is None else counts.tolist()
    lists = [
        row[: min(count, entry.max_draft_tokens)]
        for row, count, entry in zip(token_ids.tolist(), wanted, batch.scheduled, strict=True)
    ]
    return replace(DraftTokens.from_lists(lists, K), probs=probs)


def sampled_drafts(
    logits: Tensor = DRAFTER, *, stream: int = DRAFT_STREAM, claim: Tensor | None = None, salted: bool = True
) -> Propose:
    """Drafts sampled from softmax(logits) with the noise of a stream.

    Args:
        claim: what the drafts say they were sampled from, if it is not the truth.
        salted: whether the noise is new in each window.
    """

    def propose(batch: Batch) -> DraftTokens:
        tokens, probs = known(batch), []
        seeds = torch.tensor([entry.request.seed for entry in batch.scheduled])
        starts = torch.tensor([entry.request.num_tokens for entry in batch.scheduled])
        salts = stream_salts(stream, starts if salted else torch.zeros_like(starts))
        for depth in range(K):
            row = logits[tokens[:, -2], tokens[:, -1]]
            said = logits if claim is None else claim
            probs.append(said[tokens[:, -2], tokens[:, -1]].softmax(-1))
            chosen = (row + NOISE(seeds, starts + depth, salts)).argmax(-1)
            tokens = torch.cat([tokens, chosen[:, None]], dim=1)
        return made(batch, tokens[:, 2:], torch.stack(probs, dim=1))

    return propose


def chosen_drafts(logits: Tensor = DRAFTER, *, claim: bool = False) -> Propose:
    """The most likely tokens, as certain; `claim` says instead that they were sampled, which is wrong."""

    def propose(batch: Batch) -> DraftTokens:
        tokens, probs = known(batch), []
        for _ in range(K):
            row = logits[tokens[:, -2], tokens[:, -1]]
            probs.append(row.softmax(-1))
            tokens = torch.cat([tokens, row.argmax(-1)[:, None]], dim=1)
        return made(batch, tokens[:, 2:], torch.stack(probs, dim=1) if claim else None)

    return propose


def ragged_drafts(batch: Batch) -> DraftTokens:
    """Fixed tokens, of some requests none and of others up to K."""
    requests = [entry.request for entry in batch.scheduled]
    counts = torch.tensor([(request.seed + request.num_tokens) % (K + 1) for request in requests])
    tokens = torch.tensor([2, 0, 3]).expand(len(requests), K)
    return made(batch, tokens, counts=counts)


def no_drafts(batch: Batch) -> DraftTokens:
    return DraftTokens.from_lists([[] for _ in batch.scheduled], K)


DRAFTS: dict[str, Propose] = {
    "sampled": sampled_drafts(),
    "sampled from the target's distribution": sampled_drafts(TARGET),
    "greedy": chosen_drafts(),
    "deterministic": ragged_drafts,
}


def generate(
    verifier: Verifier,
    propose: Propose,
    num_requests: int = NUM_REQUESTS,
    *,
    target: Tensor = TARGET,
    first_seed: int = 0,
    num_tokens: int = NUM_TOKENS,
    **params: Any,
) -> Tensor:
    """Runs one prompt with many seeds, each request as the scheduler would; returns the outputs [R, num_tokens]."""
    params = {"temperature": 1.0, **params}
    seeds = range(first_seed, first_seed + num_requests)
    requests = [make_request(PROMPT, seed=seed, max_tokens=num_tokens, **params) for seed in seeds]
    state = MetadataState(num_requests, V, CPU, max_model_len=len(PROMPT) + num_tokens)
    sampler = Sampler(TARGET_NOISE)
    while running := [
        (slot, request) for slot, request in enumerate(requests) if request.num_output_tokens < num_tokens
    ]:
        step(running, state, sampler, verifier, propose, target)
    return torch.tensor([request.output_token_ids for request in requests])


def step(
    running: list[tuple[int, Request]],
    state: MetadataState,
    sampler: Sampler,
    verifier: Verifier,
    propose: Propose,
    target: Tensor,
) -> None:
    """What the engine does in a step, with a table for the model."""
    rooms = [min(K, request.max_tokens - request.num_output_tokens - 1) for _, request in running]
    scheduled = [entry(request, slot, max_drafts=room) for (slot, request), room in zip(running, rooms, strict=True)]
    batch = Batch(scheduled=tuple(scheduled), is_prefill=False)
    drafts = propose(batch)
    tokens = torch.cat([known(batch), torch.from_numpy(drafts.token_ids)], dim=1)
    rows = [target[tokens[:, row], tokens[:, row + 1]] for row in range(tokens.shape[1] - 1)]
    step_scores = scores(torch.stack(rows, dim=1))
    metadata = state.build(batch, drafts, step_scores)
    output = verifier.verify(sampler.sample(step_scores, metadata), metadata, batch, drafts)
    state.commit(batch, output)
    for (_, request), token_ids, num_accepted in zip(
        running, output.token_ids, output.num_accepted_tokens, strict=True
    ):
        assert len(token_ids) == num_accepted + 1
        request.append(list(token_ids))


def law_of(probs: Tensor, num_tokens: int = NUM_TOKENS) -> Tensor:
    """The probability of every output of `num_tokens` tokens after the prompt, [V ** num_tokens].

    Args:
        probs: [V, V, V].
    """
    contexts, mass = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    for _ in range(num_tokens):
        mass = (mass[:, None] * probs[contexts[:, -2], contexts[:, -1]].double()).flatten()
        following = torch.arange(V).repeat(len(contexts))
        contexts = torch.cat([contexts.repeat_interleave(V, 0), following[:, None]], dim=1)
    return mass


def counts_of(outputs: Tensor) -> Tensor:
    """How often each output occurs, in the order of `law_of`."""
    places = V ** torch.arange(outputs.shape[1] - 1, -1, -1)
    return (outputs * places).sum(1).bincount(minlength=V ** outputs.shape[1])


def fit(outputs: Tensor, probs: Tensor | None = None) -> tuple[float, float]:
    """Chi-square of whole outputs, and the chance of one as large."""
    probs = TARGET.double().softmax(-1) if probs is None else probs
    return chi_square(counts_of(outputs), law_of(probs, outputs.shape[1]))


def assert_right(outputs: Tensor, probs: Tensor | None = None) -> None:
    statistic, chance = fit(outputs, probs)
    assert chance > LIKELY, f"chi-square {statistic:.1f}, chance {chance:.2g}"


def assert_wrong(outputs: Tensor, probs: Tensor | None = None) -> None:
    statistic, chance = fit(outputs, probs)
    assert chance < IMPOSSIBLE, f"chi-square {statistic:.1f}, chance {chance:.2g}: the mistake was not seen"


@pytest.fixture(scope="module")
def plain() -> Tensor:
    """The sampler alone."""
    return generate(EqualityVerifier(), no_drafts)


def test_the_sampler_draws_from_the_softmax(plain: Tensor) -> None:
    assert_right(plain)
    assert_wrong(plain, (TARGET * 0.8).double().softmax(-1))


@pytest.mark.parametrize(
    "propose",
    [
        *DRAFTS.values(),
        pytest.param(sampled_drafts(TARGET, stream=TARGET_STREAM, salted=False), id="the target's own tokens"),
        pytest.param(sampled_drafts(stream=TARGET_STREAM, salted=False), id="the target's own noise"),
        pytest.param(sampled_drafts(claim=TARGET), id="probabilities that are not true"),
    ],
)
def test_equality_gives_the_sampler_s_own_tokens_whatever_is_drafted(plain: Tensor, propose: Propose) -> None:
    assert torch.equal(generate(EqualityVerifier(), propose, 200), plain[:200])


@pytest.mark.parametrize("block", [False, True], ids=["one by one", "block"])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_the_ratio_test_keeps_the_distribution(drafts: str, block: bool) -> None:
    assert_right(generate(RejectionVerifier(NOISE, block=block), DRAFTS[drafts]))


@pytest.mark.parametrize("block", [False, True], ids=["one by one", "block"])
def test_the_ratio_test_keeps_what_temperature_and_filters_made_of_the_logits(block: bool) -> None:
    outputs = generate(RejectionVerifier(NOISE, block=block), sampled_drafts(), 2 * FEW, temperature=0.7, top_k=3)
    dropped = (TARGET / 0.7).masked_fill(TARGET.amin(-1, keepdim=True) == TARGET, float("-inf"))
    assert_right(outputs, dropped.softmax(-1))
    assert_wrong(outputs)


def one_by_one(p: Tensor, q: Tensor, draft: list[int], draws: Tensor) -> tuple[int, Tensor, int]:
    """The ratio test in one place, for mistakes to start from."""
    kept = 0
    while kept < len(draft) and draws[kept] * q[kept, draft[kept]] < p[kept, draft[kept]]:
        kept += 1
    place = min(kept, len(draft) - 1)
    return kept, (p[place] - q[place]).clamp(min=0), place


def right(p: Tensor, q: Tensor, draft: list[int], draws: Tensor) -> tuple[int, Tensor]:
    return one_by_one(p, q, draft, draws)[:2]


def swapped(p: Tensor, q: Tensor, draft: list[int], draws: Tensor) -> tuple[int, Tensor]:
    return one_by_one(q, p, draft, draws)[:2]


def accepts_swapped(p: Tensor, q: Tensor, draft: list[int], draws: Tensor) -> tuple[int, Tensor]:
    kept, _, place = one_by_one(q, p, draft, draws)
    return kept, (p[place] - q[place]).clamp(min=0)


def recovers_from_the_target(p: Tensor, q: Tensor, draft: list[int], draws: Tensor) -> tuple[int, Tensor]:
    kept, _, place = one_by_one(p, q, draft, draws)
    return kept, p[place]


def recovers_without_the_clamp(p: Tensor, q: Tensor, draft: list[int], draws: Tensor) -> tuple[int, Tensor]:
    kept, _, place = one_by_one(p, q, draft, draws)
    return kept, (p[place] - q[place]).abs()


def recovers_at_the_next_row(p: Tensor, q: Tensor, draft: list[int], draws: Tensor) -> tuple[int, Tensor]:
    kept, _, place = one_by_one(p, q, draft, draws)
    place = min(place + 1, len(draft) - 1)
    return kept, (p[place] - q[place]).clamp(min=0)


MISTAKES = [
    swapped,
    accepts_swapped,
    recovers_from_the_target,
    recovers_without_the_clamp,
    recovers_at_the_next_row,
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_ratio_test_is_seen(mistake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_num_kept_one_by_one", mistake)
    assert_wrong(generate(RejectionVerifier(NOISE), sampled_drafts(), FEW))


def test_the_same_harness_without_a_mistake_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "_num_kept_one_by_one", right)
    assert_right(generate(RejectionVerifier(NOISE), sampled_drafts(), FEW))


@pytest.mark.parametrize("block", [False, True], ids=["one by one", "block"])
@pytest.mark.parametrize(
    "propose",
    [
        pytest.param(chosen_drafts(claim=True), id="greedy drafts that pass for sampled"),
        pytest.param(sampled_drafts(claim=random_table(3)), id="sampled from something else"),
    ],
)
def test_drafts_that_are_not_what_they_say_are_seen(propose: Propose, block: bool) -> None:
    assert_wrong(generate(RejectionVerifier(NOISE, block=block), propose, FEW))


@pytest.mark.parametrize("block", [False, True], ids=["one by one", "block"])
@pytest.mark.parametrize(
    ("stream", "target", "drafter"),
    [
        pytest.param(ACCEPTANCE_STREAM, [0.25, 0.75, 0, 0], [0.5, 0.5, 0, 0], id="acceptance"),
        pytest.param(RECOVERY_STREAM, [0, 0.75, 0.25, 0], [0.5, 0.49, 0.01, 0], id="recovery"),
    ],
)
def test_drafts_must_not_share_the_verifier_s_noise(
    stream: int, target: list[float], drafter: list[float], block: bool
) -> None:
    """A draft says where its noise was large: what decides about it and what replaces it must not depend on that."""
    verifier = RejectionVerifier(NOISE, block=block)

    def run(stream: int) -> Tensor:
        propose = sampled_drafts(table({}, drafter), stream=stream)
        return generate(verifier, propose, 2 * FEW, target=table({}, target), num_tokens=3)[:, :2]

    assert_right(run(DRAFT_STREAM), table({}, target).exp())
    assert_wrong(run(stream), table({}, target).exp())


def test_drafts_must_not_share_the_target_s_noise_under_block_verification() -> None:
    """The draft of a later place decides whether an earlier one is kept, so it must not come again unchanged.

    The prompt ends in 1. The drafter is certain of 0, the target even; after 0 the target is certain of 0, the drafter
    even. So 00 is kept whole, but 01 is given up for a 1 at the first place. The same noise would then draft 1 at the
    second place again, where it is kept, though the target is even there.
    """
    even = [0.5, 0.5, 0.0, 0.0]
    target = torch.tensor([[1.0, 0, 0, 0], even, even, even]).expand(V, V, V).clone()
    drafter = torch.tensor([even, [1.0, 0, 0, 0], even, even]).expand(V, V, V).clone()
    drafter[1, 1] = torch.tensor(even)
    verifier = RejectionVerifier(NOISE, block=True)

    def run(**how: Any) -> Tensor:
        propose = sampled_drafts(drafter.log(), **how)
        return generate(verifier, propose, FEW, target=target.log(), num_tokens=3)

    assert_right(run(), target)
    assert_wrong(run(stream=TARGET_STREAM, salted=False), target)
    assert_wrong(run(salted=False), target)


def test_acceptance_must_not_use_a_number_of_an_earlier_window_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a window ended before a place may mean that the number there was large.

    The target is even. After 1 the drafter is certain of 0, after 0 it is even: a window of two is kept whole if its
    second number is below one half, else given up for a 1. The next window has room for one draft, at that place.
    """
    even = [0.5, 0.5, 0.0, 0.0]
    target, drafter = table({}, even), table({1: [1.0, 0.0, 0.0, 0.0]}, even)
    verifier = RejectionVerifier(NOISE, block=True)
    assert_right(generate(verifier, sampled_drafts(drafter), FEW, target=target, num_tokens=3), target.exp())
    monkeypatch.setattr(rejection, "stream_salts", lambda stream, starts: stream_salts(stream, starts * 0))
    assert_wrong(generate(verifier, sampled_drafts(drafter), FEW, target=target, num_tokens=3), target.exp())


def test_no_number_is_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that drafts, acceptance and recovery ask for over several windows differs in (seed, place, salt)."""
    asked: list[tuple[int, int, int]] = []

    def remember(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def remembering(seeds: Tensor, positions: Tensor, salts: Tensor) -> Tensor:
            rows = list(zip(seeds.tolist(), positions.tolist(), salts.tolist(), strict=True))
            asked.extend(dict.fromkeys(rows))  # a group is padded with its first row
            return draw(seeds, positions, salts)

        return remembering

    monkeypatch.setattr(rejection, "uniform", remember(rejection.uniform))
    monkeypatch.setattr(f"{__name__}.NOISE", remember(NOISE))
    generate(RejectionVerifier(remember(NOISE), block=True), sampled_drafts(), 50)
    window = {stream: [] for stream in (DRAFT_STREAM, ACCEPTANCE_STREAM, RECOVERY_STREAM)}
    for seed, position, salt in asked:
        window[salt >> 32].append((seed, position, salt & 0xFFFFFFFF))
    for stream in (DRAFT_STREAM, ACCEPTANCE_STREAM):
        assert len(window[stream]) == len(set(window[stream]))
    starts = {start for _, _, start in window[ACCEPTANCE_STREAM]}
    assert len(starts) == NUM_TOKENS, "there were windows at every place"
    # The last group of recoveries is padded, so rows come twice; they are of the window that they belong to.
    assert set(window[RECOVERY_STREAM]) <= set(window[ACCEPTANCE_STREAM])
    assert {start for _, _, start in window[RECOVERY_STREAM]} == starts - {max(starts)}
