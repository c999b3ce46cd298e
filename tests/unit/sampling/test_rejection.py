"""The ratio test keeps the target's distribution: by enumeration of all drafts and acceptance draws, to 1e-9."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compspec.batch import Batch, DraftTokens, StepOutput
from compspec.sampling import rejection
from compspec.sampling.metadata import GROUP_ROWS, MetadataState
from compspec.sampling.noise import GumbelNoise
from compspec.sampling.rejection import RejectionVerifier
from compspec.sampling.sampler import Sampled, Sampler
from compspec.sampling.verifier import EqualityVerifier
from tests.unit.fakes import decode, draft, entry, make_request, prefill, scores

ONE_BY_ONE, BLOCK = rejection._num_kept_one_by_one, rejection._num_kept_block
ROUNDING = 1e-10

NumKept = Callable[[Tensor, Tensor, list[int], Tensor], tuple[int, Tensor]]


@dataclass(frozen=True)
class World:
    """Distributions of the next token after each sequence of fewer than `num_drafts` + 1 tokens.

    Attributes:
        p, q: tokens so far -> [V] float64, of the target and of the drafter, who stops where it has none.
    """

    vocab_size: int
    num_drafts: int
    p: dict[tuple[int, ...], Tensor]
    q: dict[tuple[int, ...], Tensor]


def simplex(generator: torch.Generator, size: int, sharpness: float = 1.5) -> Tensor:
    logits = sharpness * torch.randn(size, generator=generator, dtype=torch.float64)
    return logits.softmax(-1)


def without(probs: Tensor, token: int) -> Tensor:
    """As after a filter."""
    kept = probs.clone()
    kept[token] = 0.0
    return kept / kept.sum()


def certain(token: int, size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)[token]


def make_world(kind: str, vocab_size: int, num_drafts: int, seed: int) -> World:
    """Random distributions of one kind, different after each sequence."""
    generator = torch.Generator().manual_seed(seed)
    p, q = {}, {}
    for length in range(num_drafts + 1):
        for before in itertools.product(range(vocab_size), repeat=length):
            target, drafter = simplex(generator, vocab_size), simplex(generator, vocab_size)
            place = int(torch.randint(vocab_size, (), generator=generator))
            if kind == "one distribution":
                drafter = target
            elif kind == "one distribution at even places":
                drafter = target if length % 2 == 0 else drafter
            elif kind == "nearly one distribution":
                drafter = (target + 0.05 * drafter) / 1.05
            elif kind == "nothing in common":
                both = torch.arange(vocab_size) <= place % (vocab_size - 1)
                target, drafter = (torch.where(side, each, 0.0) for side, each in ((both, target), (~both, drafter)))
                target, drafter = target / target.sum(), drafter / drafter.sum()
            elif kind == "filtered target":
                target = without(target, place)
            elif kind == "filtered drafter":
                drafter = without(drafter, place)
            elif kind == "both filtered":
                target, drafter = without(target, place), without(drafter, (place + length) % vocab_size)
            elif kind == "certain drafts":
                drafter = certain(place, vocab_size)
            elif kind == "certain drafts of a filtered target":
                target, drafter = without(target, (place + length) % vocab_size), certain(place, vocab_size)
            elif kind == "certain target":
                target = certain(place, vocab_size)
            else:
                assert kind in ("any", "drafts that end early")
            p[before] = target
            ends = kind == "drafts that end early" and length > 0 and before[-1] == 0
            if length < num_drafts and not ends:
                q[before] = drafter
    return World(vocab_size, num_drafts, p, q)


KINDS = [
    "any",
    "drafts that end early",
    "one distribution",
    "one distribution at even places",
    "nearly one distribution",
    "nothing in common",
    "filtered target",
    "filtered drafter",
    "both filtered",
    "certain drafts",
    "certain drafts of a filtered target",
    "certain target",
]
SIZES = [(3, 1), (4, 1), (3, 2), (4, 2), (3, 3)]


def windows(
    world: World, drafts: tuple[int, ...] = (), chance: float = 1.0
) -> Iterator[tuple[list[int], float, Tensor, Tensor]]:
    """Every possible window that begins with `drafts`: its drafts, their probability, and the rows p and q [n, V]."""
    if drafts in world.q:
        for token, part in enumerate(world.q[drafts].tolist()):
            if part > 0:
                yield from windows(world, (*drafts, token), chance * part)
    elif drafts:
        p, q = (torch.stack([rows[drafts[:length]] for length in range(len(drafts))]) for rows in (world.p, world.q))
        yield list(drafts), chance, p, q


def thresholds_one_by_one(p: Tensor, q: Tensor, drafts: list[int]) -> list[float]:
    """Leviathan et al., algorithm 1: draft i passes if its number is at most p(x) / q(x)."""
    return [min(1.0, float(p[place, token] / q[place, token])) for place, token in enumerate(drafts)]


def thresholds_block(p: Tensor, q: Tensor, drafts: list[int]) -> list[float]:
    """Sun et al., algorithm 2: h of each prefix."""
    found, weight = [], 1.0
    for place, token in enumerate(drafts):
        weight = min(1.0, weight * float(p[place, token] / q[place, token]))
        if place + 1 == len(drafts):
            found.append(weight)
        else:
            excess = float((weight * p[place + 1] - q[place + 1]).clamp(min=0).sum())
            found.append(excess / (excess + 1 - weight) if excess + 1 - weight > 0 else 1.0)
    return found


THRESHOLDS = {ONE_BY_ONE: thresholds_one_by_one, BLOCK: thresholds_block}


def outcomes(
    num_kept: NumKept, cuts: list[float], p: Tensor, q: Tensor, drafts: list[int]
) -> Iterator[tuple[float, int, Tensor]]:
    """All that the acceptance draws can lead to: probability, drafts kept, excess [V].

    Between the cuts the function must not change: it is called at both ends of each interval of each draw.
    """
    intervals = [[(low, high) for low, high in ((0.0, cut), (cut, 1.0)) if high - low > 4 * ROUNDING] for cut in cuts]
    for cell in itertools.product(*intervals):
        ends = [(low + ROUNDING, high - ROUNDING) for low, high in cell]
        results = [
            num_kept(p, q, drafts, torch.tensor(draws, dtype=torch.float64)) for draws in itertools.product(*ends)
        ]
        kept, excess = results[0]
        for other_kept, other_excess in results:
            assert other_kept == kept, f"the draws {cell} of {drafts} do not decide as the paper says"
            assert torch.equal(other_excess, excess)
        yield math.prod(high - low for low, high in cell), kept, excess


def law_and_kept(world: World, num_kept: NumKept, cuts_of: Callable[..., list[float]]) -> tuple[Tensor, float]:
    """The joint distribution of the first n + 1 output tokens [V, ..., V], and the expected number of drafts kept."""
    n = world.num_drafts
    joint = torch.zeros((world.vocab_size,) * (n + 1), dtype=torch.float64)
    expected = 0.0
    for drafts, chance, p, q in windows(world):
        for part, kept, excess in outcomes(num_kept, cuts_of(p, q, drafts), p, q, drafts):
            expected += chance * part * kept
            following = world.p[tuple(drafts)] if kept == len(drafts) else excess / excess.sum()
            for token in following.nonzero().flatten().tolist():
                output = (*drafts[:kept], token)
                joint[output] += chance * part * following[token] * continued(world, output)
    return joint, expected


def continued(world: World, output: tuple[int, ...]) -> Tensor:
    """The target's distribution of what follows, up to n + 1 tokens in all: [V, ..., V], or a number."""
    if len(output) > world.num_drafts:
        return torch.ones((), dtype=torch.float64)
    rows = [world.p[output][token] * continued(world, (*output, token)) for token in range(world.vocab_size)]
    return torch.stack(rows)


@pytest.mark.parametrize("num_kept", [ONE_BY_ONE, BLOCK], ids=["one by one", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_distributed_as_the_target_s(kind: str, num_kept: NumKept) -> None:
    for seed, (vocab_size, num_drafts) in enumerate(SIZES):
        world = make_world(kind, vocab_size, num_drafts, seed)
        joint, _ = law_and_kept(world, num_kept, THRESHOLDS[num_kept])
        difference = float((joint - continued(world, ())).abs().max())
        assert difference < 1e-9, f"{vocab_size} tokens, {num_drafts} drafts: off by {difference:.2g}"


@pytest.mark.parametrize("kind", KINDS)
def test_block_verification_keeps_at_least_as_many(kind: str) -> None:
    for seed, (vocab_size, num_drafts) in enumerate(SIZES):
        world = make_world(kind, vocab_size, num_drafts, seed)
        single, block = (law_and_kept(world, each, cuts)[1] for each, cuts in THRESHOLDS.items())
        assert block >= single - 1e-9
        if num_drafts == 1:
            assert block == pytest.approx(single, abs=1e-9)
        if kind == "any" and num_drafts > 1:
            assert block > single + 1e-3


@pytest.mark.parametrize("num_kept", [ONE_BY_ONE, BLOCK], ids=["one by one", "block"])
def test_the_first_draft_is_kept_as_often_as_the_distributions_overlap(num_kept: NumKept) -> None:
    world = make_world("any", 4, 1, seed=7)
    _, kept = law_and_kept(world, num_kept, THRESHOLDS[num_kept])
    assert kept == pytest.approx(float(torch.minimum(world.p[()], world.q[()]).sum()), abs=1e-9)


@pytest.mark.parametrize("num_kept", [ONE_BY_ONE, BLOCK], ids=["one by one", "block"])
@pytest.mark.parametrize("draw", [2.0**-33, 0.5, 1 - 2.0**-33])
def test_the_least_and_the_largest_draw(num_kept: NumKept, draw: float) -> None:
    """All drafts of the target's own distribution are kept, and none that it excludes."""
    for kind, kept in (("one distribution", 3), ("nothing in common", 0)):
        for drafts, _, p, q in windows(make_world(kind, 3, 3, seed=1)):
            assert num_kept(p, q, drafts, torch.full((3,), draw, dtype=torch.float64))[0] == kept


def swapped(p: Tensor, q: Tensor, drafts: list[int], draws: Tensor) -> tuple[int, Tensor]:
    kept, _ = ONE_BY_ONE(q, p, drafts, draws)
    place = min(kept, len(drafts) - 1)
    return kept, (p[place] - q[place]).clamp(min=0)


def not_clamped(p: Tensor, q: Tensor, drafts: list[int], draws: Tensor) -> tuple[int, Tensor]:
    kept, _ = ONE_BY_ONE(p, q, drafts, draws)
    place = min(kept, len(drafts) - 1)
    return kept, (p[place] - q[place]).abs()


def from_the_target(p: Tensor, q: Tensor, drafts: list[int], draws: Tensor) -> tuple[int, Tensor]:
    kept, _ = ONE_BY_ONE(p, q, drafts, draws)
    return kept, p[min(kept, len(drafts) - 1)]


def block_with_plain_excess(p: Tensor, q: Tensor, drafts: list[int], draws: Tensor) -> tuple[int, Tensor]:
    kept, _ = BLOCK(p, q, drafts, draws)
    place = min(kept, len(drafts) - 1)
    return kept, (p[place] - q[place]).clamp(min=0)


def block_up_to_the_first_failure(p: Tensor, q: Tensor, drafts: list[int], draws: Tensor) -> tuple[int, Tensor]:
    kept = 0
    while kept < len(drafts) and draws[kept] <= thresholds_block(p, q, drafts)[kept]:
        kept += 1
    weight = math.prod([1.0, *(min(1.0, float(p[i, t] / q[i, t])) for i, t in enumerate(drafts[:kept]))])
    place = min(kept, len(drafts) - 1)
    return kept, (weight * p[place] - q[place]).clamp(min=0)


@pytest.mark.parametrize(
    ("mistake", "cuts_of"),
    [
        (swapped, lambda p, q, drafts: thresholds_one_by_one(q, p, drafts)),
        (not_clamped, thresholds_one_by_one),
        (from_the_target, thresholds_one_by_one),
        (block_with_plain_excess, thresholds_block),
        (block_up_to_the_first_failure, thresholds_block),
    ],
)
def test_the_enumeration_sees_a_mistake(mistake: NumKept, cuts_of: Callable[..., list[float]]) -> None:
    world = make_world("any", 4, 2, seed=2)
    joint, _ = law_and_kept(world, mistake, cuts_of)
    assert float((joint - continued(world, ())).abs().max()) > 1e-3


# The verifier around it: which rows it looks at, and what it does where there is nothing to test.

V = 6
CPU = torch.device("cpu")
NOISE = GumbelNoise(V, CPU)
VERIFIERS = [pytest.param(RejectionVerifier(NOISE, block=block), id=name) for block, name in ((0, "one"), (1, "block"))]


def run(
    verifier: Any, batch: Batch, drafts: DraftTokens, logits: Tensor, num_slots: int | None = None
) -> tuple[StepOutput, Sampled]:
    """One step over logits [R, Q, V]."""
    state = MetadataState(num_slots or len(batch.scheduled), V, CPU, max_model_len=64)
    metadata = state.build(batch, drafts, scores(logits))
    sampled = Sampler(NOISE).sample(scores(logits), metadata)
    return verifier.verify(sampled, metadata, batch, drafts), sampled


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, V, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_greedy_requests_and_rows_without_drafts_take_the_target_s_tokens(verifier: RejectionVerifier) -> None:
    greedy, plain, drafted = (
        make_request(seed=seed, temperature=heat) for seed, heat in ((0, 0.0), (1, 1.0), (2, 1.0))
    )
    logits = random_logits(3, 4)
    truth = logits[0].argmax(-1).tolist()
    for greedy_drafts, length in ((truth[:3], 4), ([truth[0], (truth[1] + 1) % V, truth[2]], 2)):
        batch, drafts = decode(greedy, plain, drafted), draft(greedy_drafts, [], [1, 2, 3])
        output, sampled = run(verifier, batch, drafts, logits)
        assert output.token_ids[0] == tuple(truth[:length])
        assert output.num_accepted_tokens[:2] == (length - 1, 0)
        assert output.token_ids[1] == (int(sampled.token_ids[4]),)
        assert output.num_draft_tokens == (3, 0, 3)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_when_all_drafts_are_kept_the_bonus_token_is_the_target_s(verifier: RejectionVerifier) -> None:
    logits = random_logits(1, 4)
    for seed in range(20):
        batch, drafts = decode(make_request(seed=seed, temperature=1.0)), draft([1, 2, 3])
        drafts = replace(drafts, probs=logits[:, :3].softmax(-1))
        output, sampled = run(verifier, batch, drafts, logits)
        assert output.token_ids == ((1, 2, 3, int(sampled.token_ids[3])),)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_forbidden_draft_is_never_kept_and_never_drawn(verifier: RejectionVerifier) -> None:
    requests = [make_request(seed=seed, temperature=1.0, bad_words=((4,),)) for seed in range(50)]
    logits = random_logits(1, 3).expand(50, 3, V).clone()
    logits[..., 4] = 5.0
    probs = torch.zeros(50, 2, V)
    probs[..., 4] = 0.5
    probs[..., :2] = 0.25
    for given in (None, probs):
        output, _ = run(verifier, decode(*requests), replace(draft(*[[4, 4]] * 50), probs=given), logits)
        assert output.num_accepted_tokens == (0,) * 50
        assert not any(4 in tokens for tokens in output.token_ids)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_row_without_a_token_is_an_error_only_where_it_is_reached(verifier: RejectionVerifier) -> None:
    """Row 2 has no token. The drafts before it are certain to be kept, certain to fail, or it comes first."""
    certain_rows = torch.full((3, 4, V), -50.0)
    certain_rows[..., 1] = 50.0
    certain_rows[0, 2] = certain_rows[1, 2] = certain_rows[2, 0] = float("-inf")
    requests = [make_request(seed=seed, temperature=1.0) for seed in range(3)]
    output, _ = run(verifier, decode(*requests), draft([1, 1, 1], [1, 2, 1], [1, 1, 1]), certain_rows)
    assert output.token_ids == ((1, 1), (1, 1), ())
    assert output.num_accepted_tokens == (2, 1, 0)
    assert [error is None for error in output.errors] == [False, True, False]


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_request_s_tokens_do_not_depend_on_its_neighbours(verifier: RejectionVerifier) -> None:
    """More recoveries than fit a group of noise, drafts of all lengths, greedy and prompt rows among them."""
    num_requests = 3 * GROUP_ROWS + 1
    heats = [0.0 if index % 5 == 0 else 1.0 for index in range(num_requests)]
    requests = [make_request(seed=index, temperature=heat) for index, heat in enumerate(heats)]
    logits = random_logits(num_requests, 4)
    q = random_logits(num_requests, 3, seed=1).softmax(-1)
    lists = [[index % V, 1, 2][: index % 4] for index in range(num_requests)]
    together, _ = run(verifier, decode(*requests), replace(draft(*lists, k=3), probs=q), logits)
    assert any(0 < kept < len(each) for kept, each in zip(together.num_accepted_tokens, lists, strict=True))
    for index, request in enumerate(requests):
        alone = replace(draft(lists[index], k=3), probs=q[index : index + 1])
        output, _ = run(verifier, decode(request), alone, logits[index : index + 1])
        assert output.token_ids == together.token_ids[index : index + 1]


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_prompt_chunks_sample_nothing_or_the_target_s_token(verifier: RejectionVerifier) -> None:
    request = make_request(range(6), temperature=1.0)
    for num_computed, num_new, count in ((0, 4, 0), (4, 2, 1)):
        batch = prefill(request, 0, num_computed, num_new)
        output, sampled = run(verifier, batch, draft([]), random_logits(1, 1))
        assert output.token_ids == (tuple(sampled.token_ids.tolist()),)
        assert len(output.token_ids[0]) == count
    silent = entry(make_request(temperature=1.0), 0, samples=False)
    batch = Batch(scheduled=(silent, entry(make_request(temperature=1.0), 1)), is_prefill=False)
    output, _ = run(verifier, batch, draft([], [3, 3]), random_logits(2, 3))
    assert output.token_ids[0] == ()
    assert output.num_accepted_tokens[0] == 0
    assert len(output.token_ids[1]) >= 1


@pytest.mark.parametrize("verifier", [*VERIFIERS, pytest.param(EqualityVerifier(), id="equality")])
def test_the_error_of_a_row_is_its_own(verifier: Any) -> None:
    def refuse(token_ids: list[int], logits: Tensor) -> Tensor:
        if len(token_ids) == 5:
            raise ValueError("five")
        return torch.where(torch.arange(V) == 1, 50.0, -50.0)

    request = make_request((3, 4, 5), temperature=1.0, logits_processors=(refuse,))
    output, _ = run(verifier, decode(request), draft([1, 1, 1]), random_logits(1, 4))
    assert output.token_ids == ((1, 1),)
    assert "five" in str(output.errors[0])


@pytest.mark.parametrize("keep", [ONE_BY_ONE, BLOCK])
def test_a_forbidden_draft_is_rejected_even_where_its_own_probability_is_zero(keep: Any) -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]] * 3, dtype=torch.float64)
    for draw in (1e-9, 0.5, 0.9):
        kept, _ = keep(p, p, [2, 0, 0], torch.full((3,), draw, dtype=torch.float64))
        assert kept == 0


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize(("drafts", "expected"), [([4, 4], (4, 4, 4)), ([2, 2], (4,))])
def test_a_token_that_is_forced_with_an_infinite_logit_is_certain(
    block: bool, drafts: list[int], expected: tuple[int, ...]
) -> None:
    logits = torch.zeros(1, 3, 6)
    logits[..., 4] = float("inf")
    batch, proposed = decode(make_request(temperature=1.0)), draft(drafts)
    state = MetadataState(1, 6, torch.device("cpu"), max_model_len=64)
    metadata = state.build(batch, proposed, scores(logits))
    noise = GumbelNoise(6, torch.device("cpu"))
    sampled = Sampler(noise).sample(scores(logits), metadata)
    output = RejectionVerifier(noise, block=block).verify(sampled, metadata, batch, proposed)
    assert output.token_ids == (expected,)


def test_nothing_is_kept_after_a_draft_that_the_target_forbids() -> None:
    p = torch.tensor([[0, 1, 0, 0], [0.25] * 4, [0.25] * 4], dtype=torch.float64)
    q = torch.tensor([[1, 0, 0, 0], [0, 0.5, 0.5, 0], [0.25] * 4], dtype=torch.float64)
    kept, excess = BLOCK(p, q, [0, 0, 1], torch.full((3,), 0.9, dtype=torch.float64))
    assert kept == 0
    assert excess.tolist() == [0, 1, 0, 0]
