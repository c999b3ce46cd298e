"""The CUDA backend on a CPU: FlashInfer's own wrappers over a stand-in for the module that it compiles."""

import dataclasses
import importlib.metadata
import importlib.util
import logging
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from compspec import attention
from compspec.attention import flashinfer
from compspec.attention.backend import AttentionPlan, AttentionSetup, LayerSpec, in_force, storable_values
from compspec.attention.cpu import CpuBackend
from compspec.attention.flashinfer import FlashInferBackend
from compspec.batch import SCRATCH_BLOCK, Bucket
from compspec.errors import CapacityError, CompspecError, UnsupportedError
from compspec.runner.inputs import InputBuffers, Query
from tests.flashinfer_interpreter import Plan, StandIn, installed, stand_in_fixture  # noqa: F401  # a fixture
from tests.tiny_models import tiny_model_folder

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BLOCK_SIZE = 16
MAX_BLOCKS = 20
NUM_BLOCKS = 1 + 4 * MAX_BLOCKS
HEAD_DIM = 16
# fp32 of the stand-in against fp32 of the CPU kernel, as in test_sdpa.py
TOLERANCE = 4e-6

FULL = LayerSpec(num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, scale=0.3, window=0, softcap=0.0)
SLIDING = dataclasses.replace(FULL, window=7)
CAPPED = dataclasses.replace(FULL, softcap=5.0, scale=0.25)
BOTH = dataclasses.replace(FULL, window=20, softcap=2.0)
ONE_KV_HEAD = dataclasses.replace(FULL, num_heads=6, num_kv_heads=1)
LAYERS = (FULL, SLIDING, CAPPED, FULL, BOTH, ONE_KV_HEAD, SLIDING)  # layers repeat, kinds do not
KINDS = (FULL, SLIDING, CAPPED, BOTH, ONE_KV_HEAD)

DECODE = Bucket(num_requests=3, query_len=1, num_logits=1)
PLAIN = Bucket(num_requests=3, query_len=2, num_logits=2)
VERIFY = Bucket(num_requests=3, query_len=8, num_logits=8)
CHUNK = Bucket(num_requests=1, query_len=64, num_logits=1)
BUCKETS = (CHUNK, VERIFY, PLAIN, DECODE)

# Starts of requests, and how many of their rows are real; fewer than the bucket holds are padded.
SHORT = [(0, 1), (5, 1)]
LONG = [(250, 8), (31, 3), (128, 8)]
MIXED = [(15, 8), (300, 1), (16, 2)]
BATCHES = [SHORT, LONG, MIXED, [(8, 8)], LONG]


def make_setup(**changes: Any) -> AttentionSetup:
    options: dict[str, Any] = {
        "layers": LAYERS,
        "dtype": torch.float32,
        "device": CPU,
        "block_size": BLOCK_SIZE,
        "max_blocks": MAX_BLOCKS,
        "max_model_len": MAX_BLOCKS * BLOCK_SIZE,
        "buckets": BUCKETS,
        "exact": True,
    }
    return AttentionSetup(**{**options, **changes})


@pytest.fixture
def backend(stand_in: StandIn) -> FlashInferBackend:
    made = FlashInferBackend(make_setup())
    stand_in.clear()
    return made


class Caches:
    """Keys and values of every kind of layer, and the host's part of a forward."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.buffers: dict[Bucket, InputBuffers] = {}
        self.of = {kind: self._random(2, NUM_BLOCKS * BLOCK_SIZE, kind.num_kv_heads, HEAD_DIM) for kind in KINDS}
        self.q: dict[tuple[Bucket, LayerSpec], Tensor] = {}

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def fill(self, bucket: Bucket, batch: Sequence[tuple[int, int]]) -> InputBuffers:
        """Requests in blocks of their own, whose order depends on the batch; new queries for every kind."""
        batch = [(start, min(count, bucket.query_len)) for start, count in batch][: bucket.num_requests]
        order = iter((torch.randperm(NUM_BLOCKS - 1, generator=self._generator) + 1).tolist())
        queries = [
            Query(
                token_ids=[1] * count,
                start=start,
                block_ids=[next(order) for _ in range(-(-(start + count) // BLOCK_SIZE))],
            )
            for start, count in batch
        ]
        for kind in KINDS:
            values = self._random(bucket.num_tokens, kind.num_heads, HEAD_DIM)
            self.q.setdefault((bucket, kind), torch.empty_like(values)).copy_(values)
        buffers = self.buffers.get(bucket) or InputBuffers(bucket, BLOCK_SIZE, MAX_BLOCKS, CPU)
        self.buffers[bucket] = buffers
        buffers.fill(queries)
        return buffers

    def plan(self, backend: FlashInferBackend, bucket: Bucket, batch: Sequence[tuple[int, int]]) -> AttentionPlan:
        buffers = self.fill(bucket, batch)
        return backend.plan(bucket, buffers.block_table, buffers.starts)

    def run(self, plan: AttentionPlan, bucket: Bucket, kind: LayerSpec, **changes: Any) -> Tensor:
        """Through the operator."""
        _, positions, _, table, seq_lens, _ = self.buffers[bucket].tensors
        arguments = (self.q[bucket, kind], *self.of[kind], table, seq_lens, positions[0], BLOCK_SIZE)
        options = {"scale": kind.scale, "window": kind.window, "softcap": kind.softcap, **changes}
        with in_force(plan):
            out: Tensor = torch.ops.compspec.paged_attention(*arguments, *options.values())
        return out

    def check(self, found: Tensor, bucket: Bucket, kind: LayerSpec, batch: Sequence[tuple[int, int]]) -> None:
        """Real rows are what the CPU backend computes."""
        expected = self.run(CpuBackend(), bucket, kind)
        assert found.shape == expected.shape and found.is_contiguous() and found.dtype == expected.dtype
        for row, (_, count) in enumerate(batch[: bucket.num_requests]):
            real = slice(row * bucket.query_len, row * bucket.query_len + min(count, bucket.query_len))
            torch.testing.assert_close(found[real], expected[real], atol=TOLERANCE, rtol=TOLERANCE)


# What it computes


@pytest.mark.parametrize(
    ("exact", "auto"), [(True, "fa2"), (False, "fa2"), (False, "fa3")], ids=["exact", "fast", "fast on Hopper"]
)
def test_every_bucket_and_kind_computes_what_the_cpu_backend_does(exact: bool, auto: str) -> None:
    """Kinds and buckets take turns, as they do in a model, and batches grow and shrink."""
    pytest.importorskip("flashinfer")
    with installed(num_sm=8, auto=auto) as stand_in:
        made, caches = FlashInferBackend(make_setup(exact=exact)), Caches()
        stand_in.clear()
        for batch in BATCHES:
            for bucket in BUCKETS:
                plan = caches.plan(made, bucket, batch)
                for kind in LAYERS:
                    caches.check(caches.run(plan, bucket, kind), bucket, kind, batch)
        kinds_of_work = {(plan.num_blocks > plan.batch_size) for plan in stand_in.plans}
    assert kinds_of_work == {False, True}, "tiles of more than one block, or split keys, were never tried"


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_a_captured_run_follows_every_later_plan(stand_in: StandIn, backend: FlashInferBackend, bucket: Bucket) -> None:
    """A CUDA graph repeats the kernel with the arguments of its capture: all that changes must be on the device."""
    caches = Caches()
    plan = caches.plan(backend, bucket, SHORT)
    captured = {kind: (caches.run(plan, bucket, kind), stand_in.runs[-1]) for kind in KINDS}
    for batch in BATCHES:
        before = {kind: out.clone() for kind, (out, _) in captured.items()}
        caches.plan(backend, bucket, batch)
        for kind, (out, run) in captured.items():
            run.replay()
            caches.check(out, bucket, kind, batch)
            assert not torch.equal(out, before[kind])


def test_plans_of_other_buckets_change_nothing(backend: FlashInferBackend) -> None:
    """Each bucket has buffers of its own, and so has each kind."""
    caches = Caches()
    plan = caches.plan(backend, VERIFY, LONG)
    expected = {kind: caches.run(plan, VERIFY, kind) for kind in KINDS}
    for bucket in (CHUNK, PLAIN, DECODE):
        caches.plan(backend, bucket, MIXED)
    for kind in KINDS:
        assert torch.equal(caches.run(plan, VERIFY, kind), expected[kind])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_scratch_and_free_blocks_and_later_keys_change_nothing(backend: FlashInferBackend, kind: LayerSpec) -> None:
    """Rows of padding look at all of them, real rows at none."""
    caches = Caches()
    batch = [(29, 3), (250, 8)]
    plan = caches.plan(backend, VERIFY, batch)
    expected = caches.run(plan, VERIFY, kind)
    stale = torch.ones(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    for row, (start, count) in enumerate(batch):
        at = np.arange(start + count)
        table = caches.buffers[VERIFY].block_table[row]
        stale[torch.from_numpy(table[at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE)] = False
    keys, values = caches.of[kind]
    # The kernel sums what a warp masked altogether before it multiplies by zero, so a few of these must not overflow.
    for poison in (0.0, 1e4, 1e36, -1e36):
        keys[stale], values[stale] = 3e38 if poison > 0 else -3e38, poison
        found = caches.run(plan, VERIFY, kind)
        for row, (_, count) in enumerate(batch):
            assert torch.equal(found[row * 8 : row * 8 + count], expected[row * 8 : row * 8 + count])
    keys[stale] = math.nan
    assert torch.equal(caches.run(plan, VERIFY, kind)[:3], expected[:3])


def _bits_by_place(backend: FlashInferBackend, kind: LayerSpec, position: int) -> list[Tensor]:
    """The same row as the j-th of a window, at every j, beside neighbours of all lengths: the law in small."""
    generator = torch.Generator().manual_seed(0)
    caches = torch.randn(2, NUM_BLOCKS * BLOCK_SIZE, kind.num_kv_heads, HEAD_DIM, generator=generator)
    row = torch.randn(kind.num_heads, HEAD_DIM, generator=generator)
    table = np.zeros((3, MAX_BLOCKS), dtype=np.int32)
    table[1] = np.arange(1, 1 + MAX_BLOCKS)
    found, empty = [], torch.empty(0)
    for place in range(8):
        plan = backend.plan(VERIFY, table, np.array([place * 17, position - place, 250 - place]))
        q = torch.randn(VERIFY.num_tokens, kind.num_heads, HEAD_DIM, generator=generator)
        q[8 + place] = row
        with in_force(plan):
            out = torch.ops.compspec.paged_attention(
                q, *caches, empty, empty, empty, BLOCK_SIZE, kind.scale, kind.window, kind.softcap
            )
        found.append(out[8 + place])
    return found


@pytest.mark.parametrize("position", [9, 63, 100, 260])
@pytest.mark.parametrize("kind", [FULL, CAPPED, ONE_KV_HEAD], ids=str)
def test_a_row_has_the_same_bits_wherever_it_stands(backend: FlashInferBackend, kind: LayerSpec, position: int) -> None:
    rows = _bits_by_place(backend, kind, position)
    assert all(torch.equal(row, rows[0]) for row in rows)


@pytest.mark.parametrize("window", [20, 100])
def test_with_a_window_the_bits_of_a_row_depend_on_where_it_stands(stand_in: StandIn, window: int) -> None:
    """The kernel begins at the first key that the first row of a block sees (kv_start_idx in prefill.cuh), so the runs
    of keys that are summed together move with a row's place: why exact numerics refuse windows here."""
    kind = dataclasses.replace(FULL, window=window)
    rows = _bits_by_place(FlashInferBackend(make_setup(layers=(kind,), buckets=(VERIFY,))), kind, 260)
    assert not all(torch.equal(row, rows[0]) for row in rows)


def test_exact_numerics_refuse_a_window_that_a_request_can_leave(good_gpu: Callable[..., AttentionSetup]) -> None:
    layers = (dataclasses.replace(FULL, head_dim=64), dataclasses.replace(FULL, head_dim=64, window=300))
    reason = "it cuts the keys of a sliding window by where a step begins, which numerics: exact does not allow"
    assert flashinfer.refusal(good_gpu(layers=layers, max_model_len=301)) == reason
    assert flashinfer.refusal(good_gpu(layers=layers, max_model_len=300)) is None
    assert flashinfer.refusal(good_gpu(layers=layers, max_model_len=301, exact=False)) is None


# What it refuses to run


def test_attention_without_a_plan_is_an_error(backend: FlashInferBackend) -> None:
    caches = Caches()
    plan = caches.plan(backend, VERIFY, LONG)
    caches.run(plan, VERIFY, FULL)
    q, empty = caches.q[VERIFY, FULL], torch.empty(0)
    with pytest.raises(CompspecError, match="without a plan"):
        torch.ops.compspec.paged_attention(q, *caches.of[FULL], empty, empty, empty, BLOCK_SIZE, 0.3, 0, 0.0)


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_a_superseded_plan_is_an_error(backend: FlashInferBackend, bucket: Bucket) -> None:
    caches = Caches()
    old = caches.plan(backend, bucket, LONG)
    new = caches.plan(backend, bucket, LONG)
    caches.run(new, bucket, FULL)
    with pytest.raises(CompspecError, match="newer one has superseded"):
        caches.run(old, bucket, FULL)


def test_the_plan_that_warmed_up_is_not_for_use(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor would it be with the number that it had."""
    plans: list[AttentionPlan] = []
    plan = flashinfer._BucketAttention.plan

    def watched(self: Any, table: NDArray[np.int32], starts: NDArray[np.int64]) -> AttentionPlan:
        plans.append(plan(self, table, starts))
        return plans[-1]

    monkeypatch.setattr(flashinfer._BucketAttention, "plan", watched)
    FlashInferBackend(make_setup(buckets=(VERIFY,)))
    caches = Caches()
    caches.fill(VERIFY, SHORT)
    with pytest.raises(CompspecError, match="superseded"):
        caches.run(plans[0], VERIFY, FULL)


@pytest.mark.parametrize("num_rows", [0, 8, 23, 25, 64])
def test_another_number_of_rows_is_an_error(backend: FlashInferBackend, num_rows: int) -> None:
    caches = Caches()
    plan = caches.plan(backend, VERIFY, LONG)
    caches.q[VERIFY, FULL] = torch.zeros(num_rows, 4, HEAD_DIM)
    with pytest.raises(CompspecError, match=f"planned for decode 3x8, it got {num_rows} rows"):
        caches.run(plan, VERIFY, FULL)


@pytest.mark.parametrize("change", [{"scale": 0.31}, {"window": 6}, {"window": 8}, {"softcap": 1.0}], ids=str)
def test_a_layer_that_was_not_planned_is_an_error(backend: FlashInferBackend, change: dict[str, Any]) -> None:
    caches = Caches()
    plan = caches.plan(backend, VERIFY, LONG)
    with pytest.raises(CompspecError, match="was not planned for LayerSpec"):
        caches.run(plan, VERIFY, FULL, **change)


# What it asks of FlashInfer


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_every_kind_is_planned_before_it_runs_and_once(
    stand_in: StandIn, backend: FlashInferBackend, bucket: Bucket
) -> None:
    caches = Caches()
    for batch in (LONG, SHORT):
        stand_in.clear()
        plan = caches.plan(backend, bucket, batch)
        assert [name for name, _ in stand_in.calls] == ["plan"] * len(KINDS)
        planned = [workspace for _, workspace in stand_in.calls]
        assert len(set(planned)) == len(KINDS), "kinds share a workspace, so one plan overwrites another"
        for kind in LAYERS:
            caches.run(plan, bucket, kind)
        ran = [workspace for name, workspace in stand_in.calls[len(KINDS) :] if name == "run"]
        assert len(ran) == len(LAYERS) and set(ran) == set(planned)


def test_all_is_compiled_planned_and_run_once_when_it_is_made(stand_in: StandIn) -> None:
    """Later nothing is loaded, and nothing but the output is allocated."""
    made, caches = FlashInferBackend(make_setup()), Caches()
    modules, wrappers = list(stand_in.modules), len(BUCKETS) * len(KINDS)
    assert len(stand_in.plans) == len(stand_in.runs) == wrappers
    assert len({run.int_workspace.data_ptr() for run in stand_in.runs}) == wrappers
    for bucket in BUCKETS:
        plan = caches.plan(made, bucket, LONG)
        for kind in KINDS:
            caches.run(plan, bucket, kind)
    assert stand_in.modules == modules


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_addresses_never_change(stand_in: StandIn, backend: FlashInferBackend, bucket: Bucket) -> None:
    """Neither of what a captured kernel reads, nor of the pinned memory that copies leave from."""
    caches = Caches()
    seen: set[tuple[Any, ...]] = set()
    for batch in BATCHES:
        stand_in.clear()
        plan = caches.plan(backend, bucket, batch)
        for kind in KINDS:
            caches.run(plan, bucket, kind)
        on_device = tuple((run.addresses, run.info, run.window_left, run.sm_scale) for run in stand_in.runs)
        seen.add((on_device, tuple(plan.pinned.data_ptr() for plan in stand_in.plans)))
    assert len(seen) == 1


def test_what_is_staged_stays_where_it_is(
    stand_in: StandIn, backend: FlashInferBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies out of pinned memory are still on their way when the next forward is prepared."""
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper as Wrapper

    addresses: set[tuple[int, ...]] = set()
    plan = Wrapper.plan

    def watched(self: Any, *arguments: Any, **options: Any) -> None:
        addresses.add(tuple(tensor.data_ptr() for tensor in arguments[:3]))
        indptr, indices, last_page_len = arguments[:3]
        assert len(indices) == indptr[-1] and len(last_page_len) == len(indptr) - 1 == VERIFY.num_requests
        plan(self, *arguments, **options)

    monkeypatch.setattr(Wrapper, "plan", watched)
    for batch in BATCHES:
        Caches().plan(backend, VERIFY, batch)
    assert len(addresses) == 1


class Fence:
    """Notes when it is waited for and raised."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def wait(self) -> None:
        self._events.append("wait")

    def raise_(self) -> None:
        self._events.append("raise")


def test_the_fence_is_waited_for_before_pinned_memory_is_written_and_raised_after_the_copies(
    stand_in: StandIn, backend: FlashInferBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    bucket = backend._buckets[VERIFY]
    monkeypatch.setattr(bucket, "_fence", Fence(events))
    stage, plan_layer = bucket._stage, bucket._plan_layer
    monkeypatch.setattr(bucket, "_stage", lambda *given: (events.append("stage"), stage(*given))[1])
    monkeypatch.setattr(bucket, "_plan_layer", lambda *given: (events.append("plan"), plan_layer(*given))[1])
    Caches().plan(backend, VERIFY, LONG)
    assert events == ["wait", "stage", *["plan"] * len(KINDS), "raise"]


SHAPES = [
    pytest.param(Bucket(num_requests=1, query_len=1, num_logits=1), id="1x1"),
    pytest.param(Bucket(num_requests=1, query_len=8, num_logits=8), id="1x8"),
    pytest.param(Bucket(num_requests=4, query_len=2, num_logits=2), id="4x2"),
    pytest.param(Bucket(num_requests=40, query_len=8, num_logits=8), id="40x8"),
    pytest.param(Bucket(num_requests=200, query_len=1, num_logits=1), id="200x1"),
    pytest.param(Bucket(num_requests=2, query_len=64, num_logits=64), id="2x64"),
    pytest.param(Bucket(num_requests=1, query_len=300, num_logits=1), id="chunk of 300"),
]


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("num_sm", [1, 132])
@pytest.mark.parametrize("heads", [(4, 2), (12, 1), (8, 8)], ids=str)
@pytest.mark.parametrize("bucket", SHAPES)
def test_blocks_beyond_the_work_are_zero(
    bucket: Bucket, heads: tuple[int, int], num_sm: int, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the pinned workspace held: kernels launched for them compute a block of request 0 again, if at all."""
    pytest.importorskip("flashinfer")
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    for kind in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        reset = kind.reset_workspace_buffer

        def poisoned(self: Any, *given: Any, reset: Callable[..., None] = reset) -> None:
            reset(self, *given)
            self._pin_memory_int_workspace_buffer.fill_(0x55)

        monkeypatch.setattr(kind, "reset_workspace_buffer", poisoned)
    monkeypatch.setattr(flashinfer._BucketAttention, "prime", lambda self: None)
    layer = dataclasses.replace(FULL, num_heads=heads[0], num_kv_heads=heads[1])
    with installed(num_sm=num_sm) as stand_in:
        made = FlashInferBackend(make_setup(layers=(layer,), buckets=(bucket,), exact=exact))
        starts = np.arange(bucket.num_requests, dtype=np.int64) % 16
        (wrapper,) = made._buckets[bucket]._wrappers.values()
        for shift in (0, 1):
            made.plan(bucket, np.zeros((bucket.num_requests, MAX_BLOCKS), dtype=np.int32), starts + shift)
            plan = stand_in.plans[-1]
            assert _unused(plan) == [0] * (3 * (plan.padded_num_blocks - plan.num_blocks))
            launched = plan.num_blocks if exact else plan.padded_num_blocks
            assert tuple(wrapper._plan_info) == (launched, *plan.info[1:])


def test_a_plan_of_another_layout_is_left_alone(backend: FlashInferBackend) -> None:
    bucket = backend._buckets[VERIFY]
    for strange in ((33, 1, 2), (33, *range(1, 14), 1)):  # not FlashInfer's numbers; keys are split
        assert bucket._without_padding(strange, KINDS[0]) == strange


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16, 17, 64])
@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_buckets_with_tiles_of_one_size_have_one_arithmetic(head_dim: int, num_rows: int) -> None:
    """A tile's size decides how keys are dealt to warps, and so the order in which they are summed."""
    pytest.importorskip("flashinfer")
    heads = [(4, 4), (4, 2), (7, 1), (12, 1), (28, 4)]
    layers = tuple(
        dataclasses.replace(FULL, num_heads=many, num_kv_heads=few, head_dim=head_dim) for many, few in heads
    )
    buckets = [Bucket(num_requests=count, query_len=num_rows, num_logits=num_rows) for count in (1, 3)]
    with installed() as stand_in, pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer._BucketAttention, "run", lambda *_: None)
        made = FlashInferBackend(make_setup(layers=layers, buckets=tuple(buckets)))
        for number, bucket in enumerate(buckets):
            planned = stand_in.plans[number * len(layers) : (number + 1) * len(layers)]
            assert made.arithmetic(bucket) == tuple(plan.info[3] for plan in planned)


def _unused(plan: Plan) -> list[int]:
    """What the planner's arrays on the device hold for blocks without work."""
    arrays = [plan.int_workspace[at : at + 4 * plan.padded_num_blocks].view(torch.int32) for at in plan.info[4:7]]
    return [value for array in arrays for value in array[plan.num_blocks :].tolist()]


def test_a_poisoned_workspace_changes_nothing(stand_in: StandIn, backend: FlashInferBackend) -> None:
    caches = Caches()
    for bucket in BUCKETS:
        for wrapper in backend._buckets[bucket]._wrappers.values():
            wrapper._pin_memory_int_workspace_buffer.fill_(0x55)
        plan = caches.plan(backend, bucket, MIXED)
        for kind in KINDS:
            caches.check(caches.run(plan, bucket, kind), bucket, kind, MIXED)
    assert all(plan.padded_num_blocks > plan.num_blocks for plan in stand_in.plans)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_arguments(exact: bool) -> None:
    pytest.importorskip("flashinfer")
    batch = [(250, 8), (31, 8), (128, 8)]
    with installed(auto="fa3") as stand_in:
        made, caches = FlashInferBackend(make_setup(exact=exact)), Caches()
        for bucket in BUCKETS:
            stand_in.clear()
            plan = caches.plan(made, bucket, batch)
            for kind, planned in zip(KINDS, stand_in.plans, strict=True):
                caches.run(plan, bucket, kind)
                ran, rows = stand_in.runs[-1], bucket.query_len
                is_fa3 = not exact and not bucket.is_decode
                assert planned.backend == ("fa3" if is_fa3 else "fa2")
                assert planned.disable_split_kv == (None if is_fa3 else exact)
                assert planned.uniform_q_len == (None if is_fa3 else rows if bucket.is_decode and rows > 1 else 0)
                # One row is the last one, and sees all keys either way.
                assert planned.causal == ran.causal == (rows > 1)
                assert planned.window_left == ran.window_left == (kind.window - 1 if kind.window else -1)
                assert planned.window_kernel == (kind.window > 0)
                assert planned.soft_cap_kernel == (kind.softcap > 0) and ran.soft_cap == kind.softcap
                assert ran.sm_scale == kind.scale and ran.enable_pdl is False
                assert planned.dtypes == (torch.float32,) * 3
                assert (planned.num_qo_heads, planned.num_kv_heads) == (kind.num_heads, kind.num_kv_heads)
                assert (planned.page_size, planned.head_dim) == (BLOCK_SIZE, HEAD_DIM)
                assert (planned.batch_size, planned.total_num_rows) == (bucket.num_requests, bucket.num_tokens)
                assert planned.enable_cuda_graph
                assert planned.kv_lens == tuple(start + rows for start, _ in batch[: bucket.num_requests])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_types_are_those_of_the_model(stand_in: StandIn, dtype: torch.dtype) -> None:
    """FlashInfer's default is fp16."""
    FlashInferBackend(make_setup(dtype=dtype))
    assert {plan.dtypes for plan in stand_in.plans} == {(dtype,) * 3}
    assert {run.out.dtype for run in stand_in.runs} == {dtype}


@pytest.mark.parametrize(
    ("exact", "auto", "prefill", "backends"),
    [
        (True, "fa3", None, {"fa2"}),
        (False, "fa3", None, {"fa2", "fa3"}),
        (False, "fa2", None, {"fa2"}),
        (False, "fa3", "fa2", {"fa2"}),
        (True, "fa2", "fa3", {"fa2", "fa3"}),
    ],
)
def test_kernels_of_prompt_chunks_can_be_chosen(
    exact: bool, auto: str, prefill: str | None, backends: set[str]
) -> None:
    """fa2 for exact numerics, what FlashInfer prefers for fast ones; decode steps are fa2."""
    pytest.importorskip("flashinfer")
    with installed(auto=auto) as stand_in:
        FlashInferBackend(make_setup(exact=exact), prefill)
    assert {backend for backend, *_ in stand_in.modules} == backends
    assert {run.module.backend for run in stand_in.runs if len(run.q) != CHUNK.num_tokens} == {"fa2"}


LARGE = [
    pytest.param(512, 4, (28, 4), id="512x4, 28 heads over 4"),
    pytest.param(256, 8, (64, 8), id="256x8, 64 heads over 8"),
]


@pytest.mark.parametrize(("requests", "rows", "heads"), LARGE)
def test_fast_numerics_have_room_for_the_partial_results_of_2048_tokens(
    requests: int, rows: int, heads: tuple[int, int], stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2048 rows are what scheduler.max_batched_tokens allows where nothing else is said."""
    bucket = Bucket(num_requests=requests, query_len=rows, num_logits=rows)
    layer = dataclasses.replace(FULL, num_heads=heads[0], num_kv_heads=heads[1], head_dim=128)
    monkeypatch.setattr(flashinfer._BucketAttention, "run", lambda *_: None)
    FlashInferBackend(make_setup(layers=(layer,), buckets=(bucket,), exact=False))


# When it serves


@pytest.mark.parametrize("step", ["import", "compile"])
def test_what_flashinfer_raises_becomes_an_error_of_ours(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    from flashinfer import prefill

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("ninja\nfailed")

    if step == "import":
        monkeypatch.setattr(flashinfer.prebuilt, "use", broken)
    else:
        monkeypatch.setattr(prefill, "gen_batch_prefill_module", broken)
    with pytest.raises(UnsupportedError, match=r"FlashInfer cannot run here \(RuntimeError: ninja failed\); see comp"):
        FlashInferBackend(make_setup())


def test_the_implementation_names_what_decides_the_bits(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version, and the compiler of kernels that were compiled ahead of time."""
    version = importlib.metadata.version("flashinfer-python")
    assert FlashInferBackend(make_setup(buckets=(PLAIN,))).implementation == f"flashinfer {version}"
    monkeypatch.setattr(flashinfer.prebuilt, "use", lambda setup, **options: "nvcc 13.0.88")
    named = FlashInferBackend(make_setup(buckets=(PLAIN,))).implementation
    assert named == f"flashinfer {version} (nvcc 13.0.88)"


def test_memory_that_is_not_there_is_a_matter_of_capacity(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(flashinfer, "_BucketAttention", full)
    with pytest.raises(CapacityError, match="no memory for FlashInfer's workspaces: CUDA out of memory"):
        FlashInferBackend(make_setup())


@pytest.fixture
def good_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AttentionSetup]:
    """A setup that FlashInfer can serve, on a GPU that is not there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.18")
    layers = tuple(dataclasses.replace(FULL, head_dim=size) for size in (64, 128, 256))

    def make(**changes: Any) -> AttentionSetup:
        return make_setup(**{"layers": layers, "dtype": torch.bfloat16, "device": CUDA, **changes})

    return make


def test_it_serves_half_precision_on_a_new_enough_gpu(
    good_gpu: Callable[..., AttentionSetup], monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert flashinfer.refusal(good_gpu(dtype=dtype)) is None
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert flashinfer.refusal(good_gpu()) is None
    for version in ("0.6.18", "0.6.18.post1", "0.6.19.dev20260101", "0.7.0", "0.10", "1.0"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, found=version: found)
        assert flashinfer.refusal(good_gpu()) is None, version


def test_refusals_of_a_model_name_what_it_has(good_gpu: Callable[..., AttentionSetup]) -> None:
    odd = tuple(dataclasses.replace(FULL, head_dim=size) for size in (96, 64, 80, 96))
    assert flashinfer.refusal(good_gpu(device=CPU)) == "it runs on CUDA, the model is on cpu"
    assert (
        flashinfer.refusal(good_gpu(dtype=torch.float32))
        == "it has kernels for bfloat16 and float16, the model is torch.float32"
    )
    assert (
        flashinfer.refusal(good_gpu(layers=odd)) == "it has kernels for head dims 64, 128 and 256, the model has 80, 96"
    )


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_an_old_gpu_is_refused(
    good_gpu: Callable[..., AttentionSetup], monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    expected = f"it needs a GPU of compute capability 8.0 or newer, this one has 7.{capability[1]}"
    assert flashinfer.refusal(good_gpu()) == expected


@pytest.mark.parametrize("version", ["0.6.17", "0.6.6", "0.5.20", "0.2.0.post1"])
def test_an_old_flashinfer_is_refused(
    good_gpu: Callable[..., AttentionSetup], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    expected = f"flashinfer-python {version} is older than 0.6.18"
    assert flashinfer.refusal(good_gpu()) == flashinfer.unavailable() == expected


def test_a_build_with_a_local_version_serves(
    good_gpu: Callable[..., AttentionSetup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.19+cu130")
    assert flashinfer.refusal(good_gpu()) is None


def test_no_flashinfer_is_refused_with_the_way_to_get_it(
    good_gpu: Callable[..., AttentionSetup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    expected = 'flashinfer is not installed (pip install "compspec[cuda]")'
    assert flashinfer.refusal(good_gpu()) == flashinfer.unavailable() == expected


class Backends:
    """Backends that are names, and refuse what they are told to refuse."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused: dict[str, str] = {}
        for name in attention._BACKENDS:
            refusal = lambda setup, name=name: self.refused.get(name)  # noqa: E731
            monkeypatch.setitem(attention._BACKENDS, name, (lambda setup, name=name: name, refusal))


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Backends:
    return Backends(monkeypatch)


@pytest.mark.parametrize(
    ("device", "order"), [(CPU, ["cpu", "sdpa"]), (CUDA, ["flashinfer", "varlen", "sdpa"])], ids=str
)
def test_the_best_that_can_serve_is_chosen(backends: Backends, device: torch.device, order: list[str]) -> None:
    setup = make_setup(device=device)
    for name in order:
        assert attention.choose(setup) == (name, backends.refused)
        assert attention.make_backend(setup) == name
        backends.refused[name] = f"{name} is tired"
    reasons = "; ".join(backends.refused.values())
    with pytest.raises(UnsupportedError, match=f"^no attention backend can serve: {reasons}$"):
        attention.choose(setup)


@pytest.mark.parametrize("name", ["cpu", "flashinfer", "varlen", "sdpa"])
def test_the_one_that_is_wanted_serves_or_says_why_not(backends: Backends, name: str) -> None:
    for device in (CPU, CUDA):
        assert attention.choose(make_setup(device=device), name) == (name, {})
    backends.refused[name] = "it is tired"
    with pytest.raises(UnsupportedError, match=f"^model.attention: {name} cannot serve: it is tired$"):
        attention.make_backend(make_setup(), name)


@pytest.mark.parametrize("name", ["flashinfer", "varlen"])
def test_cuda_backends_refuse_a_cpu(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^model.attention: {name} cannot serve: it runs on CUDA, the model"):
        attention.make_backend(make_setup(), name)


def test_the_slow_reference_on_cuda_is_a_warning(backends: Backends, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "compspec.attention")
    attention.make_backend(make_setup(device=CUDA))
    assert not caplog.records
    backends.refused = {"flashinfer": "no wheel"}
    attention.make_backend(make_setup(device=CUDA))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "attention: varlen instead of flashinfer: no wheel")
    ]
    caplog.clear()
    backends.refused = {"flashinfer": "no wheel", "varlen": "small blocks"}
    attention.make_backend(make_setup(device=CUDA))
    assert [(r.levelname, r.getMessage()) for r in caplog.records][-1:] == [
        ("WARNING", "slow reference attention on cuda: no wheel; small blocks")
    ]


def _lines(code: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_cpu_engine_never_imports_flashinfer(models: Path) -> None:
    code = """
        import sys
        from compspec.config import make_config
        from compspec.engine import Engine
        settings = {"model.source": sys.argv[1], "model.device": "cpu", "compile.mode": "none"}
        engine = Engine(make_config({}, {**settings, "scheduler.max_num_seqs": 1, "numerics.self_test": "skip"}))
        request = engine.add_request([5, 6, 7], engine.config.sampling.model_copy(update={"max_tokens": 3}))
        while engine.has_work:
            engine.step()
        print(request.num_output_tokens, engine.runner.attention.name)
        print(*(name for name in sys.modules if name.split(".")[0] == "flashinfer"))
    """
    assert _lines(code, str(tiny_model_folder("llama", models))) == ["3 cpu", ""]


def test_compspec_does_without_flashinfer() -> None:
    """Where it cannot be found, all imports work and the choice says why it is not used."""
    code = """
        import sys
        sys.modules["flashinfer"] = None
        import compspec, compspec.cli
        from compspec.attention import flashinfer
        print(flashinfer.unavailable())
    """
    assert _lines(code) == ['flashinfer is not installed (pip install "compspec[cuda]")']


class OnCuda(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


def test_values_that_are_no_numbers_never_reach_the_cache_of_a_gpu() -> None:
    """Others are stored as they are, and on a CPU all are: its backends mask values too."""
    given = torch.tensor([1.5, math.nan, math.inf, -math.inf, -0.0, 3e38, 1e-40], dtype=torch.bfloat16)
    expected = torch.tensor([1.5, 0.0, 0.0, 0.0, -0.0, 3e38, 1e-40], dtype=torch.bfloat16)
    found = storable_values(given.as_subclass(OnCuda)).as_subclass(Tensor)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
    assert storable_values(given) is given


def test_scratch_is_the_block_that_padding_points_at(backend: FlashInferBackend, stand_in: StandIn) -> None:
    """A request that is all padding reads the scratch block and nothing else."""
    caches = Caches()
    plan = caches.plan(backend, VERIFY, [(40, 8)])
    caches.run(plan, VERIFY, FULL)
    run = stand_in.runs[-1]
    pages = run.kv_indices[int(run.kv_indptr[1]) : int(run.kv_indptr[3])]
    assert pages.tolist() == [SCRATCH_BLOCK] * 2
