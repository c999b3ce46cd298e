"""The reference backend as CUDA runs it: one capacity for all requests, nothing read on the host."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compspec.attention import sdpa
from compspec.attention.backend import AttentionSetup, LayerSpec
from compspec.attention.sdpa import SdpaBackend
from compspec.batch import Bucket
from tests.unit.attention.test_sdpa import (
    BLOCK_SIZE,
    HEAD_DIM,
    OPTIONS,
    SHAPES,
    SOME_OPTIONS,
    Case,
    by_definition,
    make_case,
)

NAN = math.nan
# A multiple of the block size, and none; both beyond all lengths of `SHAPES`.
CAPACITIES = [640, 603]


class OnDevice(TorchDispatchMode):
    """Stands in for a GPU under capture: fails where the host reads a value, or a tensor of the host takes part.

    The device is `meta`, which has no values to read.
    """

    num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.num_operators += 1
        for leaf in tree_leaves((args, kwargs, out)):
            assert not isinstance(leaf, Tensor) or leaf.is_meta, f"{func} has a tensor {leaf.shape} of the host"
        return out


def run(case: Case, capacity: int) -> Tensor:
    """[R, Q, Hq, D]"""
    out = SdpaBackend(capacity=capacity).paged_attention(
        case.q.flatten(0, 1),
        case.k_cache,
        case.v_cache,
        case.block_table,
        case.seq_lens,
        case.positions.flatten(),
        BLOCK_SIZE,
        case.scale,
        case.window,
        case.softcap,
    )
    assert out.is_contiguous() and out.dtype == case.q.dtype
    return out.view(case.q.shape)


def on_meta(case: Case) -> Case:
    tensors = {name: value.to("meta") for name, value in vars(case).items() if isinstance(value, Tensor)}
    return replace(case, **tensors)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("lengths", "rows"), SHAPES)
def test_values_are_those_of_attention_by_definition(
    lengths: list[int], rows: int, options: dict[str, Any], capacity: int
) -> None:
    """Tables narrower than the capacity, and capacities within the last block, among them."""
    case = make_case(lengths, rows, **options)
    found = run(case, capacity)
    assert torch.allclose(found.double(), by_definition(case), atol=2e-6)
    assert torch.allclose(found, case.run(), atol=2e-6), "another value than with lengths read on the host"


@pytest.mark.parametrize("options", SOME_OPTIONS)
def test_bfloat16_is_as_good_as_its_rounding(options: dict[str, Any]) -> None:
    case = make_case([37, 8, 9, 64], 8, dtype=torch.bfloat16, **options)
    assert torch.allclose(run(case, 96).double(), by_definition(case), atol=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", SOME_OPTIONS)
@pytest.mark.parametrize(("lengths", "rows"), SHAPES)
def test_poison_outside_a_request_never_changes_a_bit(
    lengths: list[int], rows: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Scratch, stale pages, the rest of the last page and the tail of the tables may hold anything."""
    case = make_case(lengths, rows, dtype=dtype, **options)
    clean = run(case, 640)
    stale = torch.ones(len(case.k_cache), dtype=torch.bool)
    stale[torch.cat([case.slots(index) for index in range(len(lengths))])] = False
    assert stale[:BLOCK_SIZE].all(), "scratch"
    for poison in (NAN, math.inf, 3e38):
        case.k_cache[stale] = case.v_cache[stale] = poison
        for wrong in (2**31 - 1, -1, 0):
            for index, length in enumerate(lengths):
                case.block_table[index, -(-length // BLOCK_SIZE) :] = wrong
            assert torch.equal(run(case, 640), clean), (poison, wrong)


@pytest.mark.parametrize("options", SOME_OPTIONS)
@pytest.mark.parametrize("poison", [NAN, math.inf, 1e4])
def test_later_tokens_of_the_same_request_never_change_a_bit(options: dict[str, Any], poison: float) -> None:
    """A row sees the drafts before it and none after it."""
    case = make_case([37, 530], 8, **options)
    clean = run(case, 640)
    for index in range(2):
        later = case.slots(index)[-3:]
        case.k_cache[later], case.v_cache[later] = poison, -poison
        found = run(case, 640)
        assert torch.equal(found[index, :5], clean[index, :5])
        assert not torch.equal(found[index, 5:], clean[index, 5:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rows", [1, 8])
def test_a_row_is_bit_equal_whatever_its_neighbours_and_wherever_it_stands(
    rows: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """At one shape. One request meets neighbours of all lengths, first, in the middle and last."""
    case = make_case([9, 37, 600, 40, 530], rows, dtype=dtype, **options)
    together = run(case, 640)
    for index in (1, 2):
        for place in (0, 2, 4):
            others = [other for other in (4, 3, 0, 0, 3) if other != index]
            order = [*others[:place], index, *others[place:]][:5]
            names = ("q", "block_table", "seq_lens", "positions")
            moved = replace(case, **{name: getattr(case, name)[order].clone() for name in names})
            moved.q[torch.arange(5) != place] *= 3
            assert torch.equal(run(moved, 640)[place], together[index]), (index, place)


def test_a_request_of_padding_has_one_token_of_scratch_and_disturbs_nobody() -> None:
    case = make_case([37, 600, 40], 8)
    clean = run(case, 640)
    case.block_table[1], case.seq_lens[1], case.positions[1] = 0, 1, 0
    found = run(case, 640)
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    groups = case.q.shape[2] // case.v_cache.shape[1]
    assert torch.allclose(found[1], case.v_cache[0].repeat_interleave(groups, 0), atol=2e-6)


@pytest.mark.parametrize("capacity", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 37, 38, 2 * BLOCK_SIZE * 37])
def test_any_capacity_that_holds_the_longest_request(capacity: int) -> None:
    case = make_case([min(capacity, 37), 1], 1, seed=capacity)
    assert torch.allclose(run(case, capacity).double(), by_definition(case), atol=2e-6)


@pytest.mark.parametrize("num_blocks", [3, 4, 40, 41, 100])
def test_a_table_of_any_width_gives_the_same_bits(num_blocks: int) -> None:
    """Narrower than the capacity, as wide, and wider; 603 tokens are 37.7 blocks."""
    case = make_case([37, 48], 8)
    clean = run(case, 603)
    table = torch.full((2, num_blocks), 1)
    table[:, :3] = case.block_table[:, :3]
    assert torch.equal(run(replace(case, block_table=table.to(torch.int32)), 603), clean)


@pytest.mark.parametrize("options", SOME_OPTIONS)
@pytest.mark.parametrize("rows", [1, 8])
def test_nothing_is_read_or_made_on_the_host(rows: int, options: dict[str, Any]) -> None:
    """A graph captures neither."""
    case = on_meta(make_case([9, 37, 600], rows, **options))
    with OnDevice() as seen:
        run(case, 603)
    assert seen.num_operators > 10


def test_the_check_above_notices_what_it_is_for() -> None:
    """Lengths are read where there is no capacity, and a tensor of the host is made."""
    case = on_meta(make_case([9, 37, 600], 8))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta tensor"), OnDevice():
        case.run()
    with pytest.raises(AssertionError, match="of the host"), OnDevice():
        case.q + torch.tensor(1.0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cuda_gets_the_capacity_of_a_whole_block_table(device: str) -> None:
    layer = LayerSpec(num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, scale=1.0, window=0, softcap=0.0)
    setup = AttentionSetup(
        layers=(layer,),
        dtype=torch.float32,
        device=torch.device(device),
        block_size=BLOCK_SIZE,
        max_blocks=40,
        max_model_len=40 * BLOCK_SIZE,
        buckets=(Bucket(num_requests=1, query_len=8, num_logits=8),),
        exact=True,
    )
    backend = sdpa.make(setup)
    groups = backend._groups(torch.tensor([5, 600]))
    if device == "cuda":
        assert groups == {640: None}
    else:
        assert groups == {512: [0], 1024: [1]}
    assert sdpa.refusal(setup) is None
