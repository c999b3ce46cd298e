"""Log-probabilities: of the raw logits, in an order without doubt, whatever else is reported with them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compspec.request import TokenLogprobs
from compspec.sampling import logprobs
from compspec.sampling.logprobs import step_logprobs, token_logprobs
from compspec.sampling.metadata import GROUP_ROWS, MetadataState
from tests.unit.fakes import decode, draft, make_request, scores, step_output

VOCAB = 40


def random_logits(seed: int, rows: int, vocab_size: int = VOCAB) -> Tensor:
    """Logits with ties, zeros of both signs, and tokens that cannot be."""
    logits = (torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 8).round() / 2
    logits[:, ::5] = -0.0
    logits[:, 3::7] = float("-inf")
    return logits


def by_rank(row: Tensor) -> list[int]:
    """All tokens, the most likely first, of equally likely ones the lowest id."""
    values = row.double().tolist()
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def same(a: TokenLogprobs, b: TokenLogprobs) -> bool:
    """Whether two reports agree in every bit and in their order."""
    return list(a.items()) == list(b.items())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    chosen=st.lists(st.tuples(st.integers(0, 4), st.integers(0, VOCAB - 1), st.integers(0, VOCAB)), max_size=20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_reports_equal_the_definition(seed: int, chosen: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
    logits = random_logits(seed, 5).to(dtype)
    before = logits.clone()
    rows, tokens, num_top = ([each[part] for each in chosen] for part in range(3))
    found = token_logprobs(logits, rows, tokens, num_top)
    assert torch.equal(logits, before), "the raw logits were changed"
    assert len(found) == len(chosen)
    for entry, row, token, count in zip(found, rows, tokens, num_top, strict=True):
        order = by_rank(logits[row])
        expected = logits[row].double().log_softmax(-1)
        assert list(entry) == [token, *[each for each in order[:count] if each != token]]
        for each, report in entry.items():
            assert report.rank == order.index(each) + 1
            assert report.logprob == pytest.approx(expected[each].item(), abs=1e-5)
            assert report.token is None


def test_of_equally_likely_tokens_the_lowest_id_comes_first() -> None:
    logits = torch.zeros(1, 50_000)
    logits[0, 100] = -0.0  # equal to 0.0
    logits[0, [7, 40_000]] = 1.0
    (entry,) = token_logprobs(logits, [0], [40_000], [5])
    assert [(token, report.rank) for token, report in entry.items()] == [(40_000, 2), (7, 1), (0, 3), (1, 4), (2, 5)]
    (entry,) = token_logprobs(logits, [0], [100], [0])
    assert entry[100].rank == 2 + 100 - 1 + 1


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_the_token_itself_is_reported_once_wherever_it_ranks(num_top: int) -> None:
    logits = torch.arange(VOCAB, 0, -1, dtype=torch.float32)[None]
    for token in (0, 2, 39):
        (entry,) = token_logprobs(logits, [0], [token], [num_top])
        assert list(entry) == [token, *[each for each in range(num_top) if each != token]]
        assert entry[token].rank == token + 1


def test_nothing_to_report_is_an_empty_list() -> None:
    assert token_logprobs(torch.zeros(2, 3), [], [], []) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [VOCAB, 1003])
def test_bits_do_not_depend_on_what_is_reported_together(dtype: torch.dtype, vocab_size: int) -> None:
    num_rows = 2 * GROUP_ROWS + 3
    logits = (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    rows, tokens = list(range(num_rows)), [row * 2 for row in range(num_rows)]
    num_top = [(row * 3) % 7 for row in rows]
    together = token_logprobs(logits, rows, tokens, num_top)
    reversed_ = token_logprobs(logits, rows[::-1], tokens[::-1], num_top[::-1])
    for row in rows:
        (alone,) = token_logprobs(logits[row : row + 1], [0], [tokens[row]], [num_top[row]])
        assert same(together[row], alone)
        assert same(reversed_[-1 - row], alone)


def test_rows_are_reported_in_groups_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    group = logprobs._group

    def spy(logits: Tensor, chosen: Tensor, num_top: list[int]) -> list[TokenLogprobs]:
        shapes.append((*logits.shape, *chosen.shape))
        return group(logits, chosen, num_top)

    monkeypatch.setattr(logprobs, "_group", spy)
    for size in (1, GROUP_ROWS):
        monkeypatch.setattr(logprobs, "group_sizes", lambda device, size=size: (size,))
        shapes.clear()
        for count in (1, GROUP_ROWS, GROUP_ROWS + 1):
            token_logprobs(random_logits(3, count), range(count), [1] * count, [2] * count)
        assert set(shapes) == {(size, VOCAB, size)}


def test_neighbours_that_are_not_numbers_do_not_matter() -> None:
    logits = random_logits(2, 3)
    (alone,) = token_logprobs(logits, [1], [4], [6])
    logits[0], logits[2] = float("nan"), float("inf")
    assert same(token_logprobs(logits, [0, 1, 2], [4, 4, 4], [6, 6, 6])[1], alone)


def test_a_token_that_cannot_be_has_no_probability_and_ranks_last() -> None:
    logits = torch.tensor([[1.0, float("-inf"), 2.0, float("-inf")]])
    (entry,) = token_logprobs(logits, [0], [3], [4])
    assert [(token, report.rank) for token, report in entry.items()] == [(3, 4), (2, 1), (0, 2), (1, 3)]
    assert entry[3].logprob == entry[1].logprob == float("-inf")


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, 0.0, -3e38], [-3e38, -3e38, -3e38]])
    first, second = token_logprobs(logits, [0, 1], [0, 2], [3, 3])
    assert first[0].logprob == 0.0
    assert [report.rank for report in second.values()] == [3, 1, 2]
    assert second[2].logprob == pytest.approx(-torch.tensor(3.0).log().item(), abs=1e-6)


def test_a_step_reports_the_rows_that_became_output_of_those_who_asked() -> None:
    logits = random_logits(4, 16).view(4, 4, VOCAB)
    counts = (2, None, 0, 3)
    batch = decode(*[make_request([1], logprobs=count) for count in counts])
    drafts = draft([5, 6], [7], [8, 8, 8], [])
    state = MetadataState(4, VOCAB, torch.device("cpu"), max_model_len=64)
    metadata = state.build(batch, drafts, scores(logits))
    tokens = [[5, 9], [7, 7], [8, 8, 8, 1], []]
    found = step_logprobs(batch, scores(logits), metadata, step_output(*tokens))
    for index, count in enumerate(counts):
        kept = tokens[index]
        expected = token_logprobs(logits[index], range(len(kept)), kept, [count or 0] * len(kept))
        assert found[index] == (None if count is None else expected)
    nobody = decode(*[make_request([1])] * 4)
    assert step_logprobs(nobody, scores(logits), metadata, step_output(*tokens)) == [None] * 4
