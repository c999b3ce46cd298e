"""Groups of rows: wide ones, as a GPU takes them, sample the same tokens as narrow ones."""

import numpy as np
import pytest
import torch

from compspec.sampling.metadata import GROUP_ROWS, WIDE_GROUP_ROWS, MetadataState, group_rows, group_sizes
from compspec.sampling.noise import GumbelNoise
from compspec.sampling.sampler import Sampler
from tests.unit.fakes import decode, draft, make_request, scores

VOCAB = 97
BOTH = (GROUP_ROWS, WIDE_GROUP_ROWS)


def sizes_of(num_plain: int, num_top_p: int, num_greedy: int, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Rows and size of each group, after checking that every row with temperature is in one of them."""
    temperature = np.array([1.0] * num_plain + [0.0] * num_greedy + [0.5] * num_top_p, dtype=np.float32)
    top_p = np.array([1.0] * (num_plain + num_greedy) + [0.9] * num_top_p, dtype=np.float32)
    order = np.random.default_rng(0).permutation(len(temperature))
    temperature, top_p = temperature[order], top_p[order]
    groups = list(group_rows(temperature, top_p, sizes))
    seen = np.concatenate([rows for rows, _ in groups]) if groups else np.empty(0, dtype=np.int64)
    assert sorted(seen.tolist()) == np.flatnonzero(temperature > 0).tolist()
    for rows, size in groups:
        assert size == sizes[0] or not (top_p[rows] < 1).any(), "a row whose sampling rounds is in a wide group"
    return [(len(rows), size) for rows, size in groups]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((0, 0, 5), []),
        ((3, 0, 1), [(3, 8)]),
        ((64, 0, 0), [(64, 64)]),
        ((63, 0, 0), [(8, 8)] * 7 + [(7, 8)]),
        ((70, 0, 2), [(64, 64), (6, 8)]),
        ((64, 9, 0), [(64, 64), (8, 8), (1, 8)]),
        ((60, 9, 0), [(8, 8)] * 8 + [(5, 8)]),
    ],
)
def test_wide_groups_hold_full_loads_of_rows_that_do_not_round(
    counts: tuple[int, int, int], expected: list[tuple[int, int]]
) -> None:
    assert sizes_of(*counts, BOTH) == expected


def test_a_cpu_pads_no_group() -> None:
    sizes = group_sizes(torch.device("cpu"))
    assert (sizes, group_sizes(torch.device("cuda", 0))) == ((1, GROUP_ROWS), BOTH)
    assert sizes_of(18, 3, 2, sizes) == [(8, 8)] * 2 + [(1, 1)] * 5


def test_tokens_do_not_depend_on_the_size_of_groups() -> None:
    options = [{}, {"top_k": 5}, {"min_p": 0.05}, {"top_p": 0.8}, {"temperature": 0.0}]
    batch = decode(*[make_request(seed=i, **{"temperature": 1.1, **options[i % 5]}) for i in range(60)])
    drafts = draft(*[[5, 6, 7, 8][: i % 5] for i in range(60)], k=4)
    logits = torch.randn(60, 5, VOCAB, generator=torch.Generator().manual_seed(1))
    found, widths = [], []
    for sizes in (group_sizes(torch.device("cpu")), BOTH, (GROUP_ROWS, 16)):
        state = MetadataState(60, VOCAB, torch.device("cpu"), max_model_len=64)
        state._group_sizes = sizes
        step = scores(logits)
        metadata = state.build(batch, drafts, step)
        widths.append({len(group.rows) for group in metadata.groups})
        found.append(Sampler(GumbelNoise(VOCAB, torch.device("cpu"))).sample(step, metadata))
    assert widths == [{1, 8}, {8, 64}, {8, 16}]
    for other in found[1:]:
        assert torch.equal(other.token_ids, found[0].token_ids)
        assert torch.equal(other.logits, found[0].logits)
