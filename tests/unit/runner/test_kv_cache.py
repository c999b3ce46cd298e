"""The memory plan: every part is counted before anything is taken, and what does not fit names its knob."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from compspec.attention.backend import LayerSpec
from compspec.config import EngineConfig, make_config
from compspec.errors import CapacityError
from compspec.runner import kv_cache
from compspec.runner.kv_cache import MemoryPlan, plan_memory

MIB = 2**20


@dataclass
class FakeLayer:
    spec: LayerSpec


def layer(num_kv_heads: int = 2, head_dim: int = 8) -> FakeLayer:
    spec = LayerSpec(num_heads=4, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=1.0, window=0, softcap=0.0)
    return FakeLayer(spec)


@dataclass
class FakeAdapter:
    """What the plan needs to know of a model."""

    layers: list[FakeLayer] = field(default_factory=lambda: [layer(), layer(num_kv_heads=4, head_dim=16)])
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    vocab_size: int = 1000
    weight_bytes: int = 12_345


def config_of(**settings: object) -> EngineConfig:
    return make_config(
        {}, {"model.source": "x", **{name.replace("__", "."): value for name, value in settings.items()}}
    )


def plan(available: int, max_model_len: int = 100, adapter: Any = None, **settings: object) -> MemoryPlan:
    return plan_memory(config_of(**settings), [adapter or FakeAdapter()], max_model_len, available)


def test_a_block_holds_keys_and_values_of_every_layer() -> None:
    per_token = 2 * (2 * 8 + 4 * 16) * 2  # keys and values, both layers, bf16
    assert plan(MIB * 100).block_bytes == 16 * per_token
    assert plan(MIB * 100, adapter=FakeAdapter(dtype=torch.float32)).block_bytes == 16 * per_token * 2
    assert plan(MIB * 100, cache__block_size=4).block_bytes == 4 * per_token


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_allocated_is_what_was_planned(dtype: torch.dtype) -> None:
    adapter = FakeAdapter(dtype=dtype)
    planned = plan(MIB * 100, adapter=adapter, cache__num_blocks=7)
    keys, values = kv_cache.allocate(adapter, planned.num_blocks, 16)
    assert [tuple(key.shape) for key in keys] == [(7 * 16, 2, 8), (7 * 16, 4, 16)]
    assert sum(each.numel() * each.element_size() for each in keys + values) == planned.kv_bytes
    assert all(not each.any() and each.dtype == dtype for each in keys + values)
    assert len({each.data_ptr() for each in keys + values}) == 4


def test_enough_memory_gives_every_slot_a_request_of_the_full_length_and_one_scratch_block() -> None:
    assert plan(MIB * 1000, scheduler__max_num_seqs=3).num_blocks == 3 * 7 + 1  # 100 tokens are 7 blocks of 16
    assert plan(MIB * 1000, max_model_len=96, scheduler__max_num_seqs=3).num_blocks == 3 * 6 + 1


def test_less_memory_gives_as_many_blocks_as_fit_beside_sampling() -> None:
    full = plan(MIB * 1000, scheduler__max_num_seqs=8)
    available = int((full.sampling_bytes + full.block_bytes * 20.5) / 0.6)
    assert plan(available, scheduler__max_num_seqs=8).num_blocks == 20


def test_sampling_counts_rows_times_vocabulary() -> None:
    small, wide = plan(MIB * 1000, scheduler__max_num_seqs=2), plan(MIB * 1000, scheduler__max_num_seqs=4)
    logits = 2 * 8 * 1000 * 4
    assert small.sampling_bytes >= logits
    assert wide.sampling_bytes - small.sampling_bytes >= logits
    fast = plan(MIB * 1000, scheduler__max_num_seqs=2, numerics="fast")
    assert fast.sampling_bytes < small.sampling_bytes, "fast decodes one row, exact a whole window"


def test_num_blocks_overrides_memory() -> None:
    assert plan(MIB * 100, cache__num_blocks=5, cache__memory=0.01).num_blocks == 5


def test_memory_is_turned_into_blocks() -> None:
    planned = plan(MIB * 1000, cache__memory=0.01)
    assert planned.num_blocks == int(0.01 * 2**30) // planned.block_bytes


@pytest.mark.parametrize(
    ("available", "settings", "knobs"),
    [
        (MIB, {}, ["model.max_model_len", "scheduler.max_num_seqs"]),
        (0, {}, ["model.max_model_len", "scheduler.max_num_seqs"]),
        (MIB * 100, {"cache__memory": 0.00001}, ["cache.memory", "model.max_model_len"]),
        (MIB * 100, {"cache__memory": 1.0}, ["lower cache.memory"]),
        (MIB * 100, {"cache__num_blocks": 10**6}, ["lower cache.num_blocks"]),
    ],
)
def test_what_does_not_fit_is_refused_and_the_knob_is_named(available: int, settings: dict, knobs: list[str]) -> None:
    with pytest.raises(CapacityError) as caught:
        plan(available, **settings)
    assert all(knob in str(caught.value) for knob in knobs)


def test_the_last_byte_that_fits_is_accepted_and_one_less_is_not() -> None:
    probe = plan(MIB * 100, cache__num_blocks=2)
    usable = probe.sampling_bytes + 50 * probe.block_bytes
    assert plan(int(usable / 0.6) + 2, cache__num_blocks=50).num_blocks == 50
    with pytest.raises(CapacityError):
        plan(int((usable - probe.block_bytes / 2) / 0.6), cache__num_blocks=50)


def test_free_memory_is_measured_in_bytes() -> None:
    assert kv_cache.available_bytes(torch.device("cpu")) > MIB


def plan_of(*adapters: FakeAdapter, available: int = MIB * 1000, **settings: object) -> MemoryPlan:
    return plan_memory(config_of(**settings), list(adapters), 100, available)


def small_adapter() -> FakeAdapter:
    return FakeAdapter(layers=[layer(num_kv_heads=1)], dtype=torch.float32, vocab_size=7, weight_bytes=11)


def test_a_block_holds_the_keys_and_values_of_every_model() -> None:
    target, draft = FakeAdapter(), small_adapter()
    beside = plan_of(target, draft)
    assert beside.block_bytes == plan_of(target).block_bytes + plan_of(draft).block_bytes
    assert plan_of(target, draft, draft).block_bytes == beside.block_bytes + plan_of(draft).block_bytes
    assert beside.weight_bytes == 12_345 + 11


def test_the_target_alone_is_sampled_from() -> None:
    target = FakeAdapter()
    assert plan_of(target, FakeAdapter(vocab_size=10**6)).sampling_bytes == plan_of(target).sampling_bytes


def test_a_model_beside_the_target_leaves_fewer_blocks_of_the_same_memory() -> None:
    one, two = plan_of(FakeAdapter(), cache__memory=0.01), plan_of(FakeAdapter(), FakeAdapter(), cache__memory=0.01)
    assert two.num_blocks == one.num_blocks // 2
    assert two.kv_bytes <= 0.01 * 2**30
    available = int((two.sampling_bytes + two.block_bytes * 20.5) / 0.6)
    assert plan_of(FakeAdapter(), FakeAdapter(), available=available).num_blocks == 20


def test_what_is_allocated_for_all_models_is_what_was_planned() -> None:
    adapters = [FakeAdapter(), small_adapter()]
    planned = plan_of(*adapters, cache__num_blocks=7)
    caches = [tensor for each in adapters for part in kv_cache.allocate(each, 7, 16) for tensor in part]
    assert sum(each.numel() * each.element_size() for each in caches) == planned.kv_bytes
