"""FlashInfer without a GPU: its paged layout written out, and a stand-in for its compiled module.

`paged_attention` is the documented meaning of the paged layout. `StandIn` takes the place of the one thing that
FlashInfer needs a GPU for, the module that it compiles, so that its own wrappers plan and run on CPU tensors. The
stand-in plans as `PrefillPlan` does (flashinfer/data/include/flashinfer/attention/scheduler.cuh) and walks the grid
of blocks that the plan left on the device as the kernel does (prefill.cuh): tile by tile, from the first key of a
block's window, with masked scores of -5e4. Orders of summation are those of the kernel down to tiles, roundings are
not: what is inside a tile is summed in float64.

Legend: T packed query rows, Hq query heads, Hkv KV heads, D head dim, R requests, N pages of all requests.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import compspec.attention.flashinfer as backend_module

Array = NDArray[Any]

LOG2E = math.log2(math.e)
MASKED = -5e4
"""What the kernel writes over a masked score, and where its running maximum starts (`math::inf` in math.cuh)."""

RUN = 64
"""Keys of one iteration; blocks of 16 rows deal them to 4 warps, whose states meet at the end."""

MASK_MODES = {0: False, 1: True}  # MaskMode.NON_CAUSAL, MaskMode.CAUSAL
NHD = 0


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
    *,
    causal: bool,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float,
) -> Tensor:
    """Attention over FlashInfer's paged layout in float64, one request at a time.

    Args:
        q: [T, Hq, D]; request r has rows qo_indptr[r] .. qo_indptr[r + 1].
        k_cache, v_cache: [pages, page_size, Hkv, D].
        qo_indptr, kv_indptr: [R + 1] int32.
        kv_indices: [N or more] int32 pages; request r has kv_indptr[r] .. kv_indptr[r + 1].
        last_page_len: [R] int32, tokens in the last page.
        causal: the last row sees all keys, the one before it all but one, and so on.
        window_left: how many keys before its own a row sees; -1 for all.
        logits_soft_cap: scores become cap * tanh(score / cap); 0 for none.
        sm_scale: factor on q @ k.

    Returns:
        [T, Hq, D] in float64. A masked key has probability 0, and its value is multiplied by it: a value that is no
        number reaches every row of its request.
    """
    out = torch.zeros(q.shape, dtype=torch.float64)
    page_size, groups = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    for r in range(len(last_page_len)):
        pages = kv_indices[int(kv_indptr[r]) : int(kv_indptr[r + 1])].long()
        rows = slice(int(qo_indptr[r]), int(qo_indptr[r + 1]))
        num_keys = (len(pages) - 1) * page_size + int(last_page_len[r])
        keys, values = (
            cache[pages].flatten(0, 1)[:num_keys].double().repeat_interleave(groups, 1).transpose(0, 1)
            for cache in (k_cache, v_cache)
        )
        scores = q[rows].double().transpose(0, 1) @ keys.transpose(1, 2) * sm_scale
        if logits_soft_cap > 0:
            scores = torch.tanh(scores / logits_soft_cap) * logits_soft_cap
        own = torch.arange(num_keys - scores.shape[1], num_keys)[:, None]
        at = torch.arange(num_keys)
        visible = at <= own if causal else torch.ones(len(own), num_keys, dtype=torch.bool)
        if window_left >= 0:
            visible &= at >= own - window_left
        out[rows] = (scores.masked_fill(~visible, -math.inf).softmax(-1) @ values).transpose(0, 1)
    return out


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Arguments of one call of the module's `plan`, by the names of csrc/batch_prefill.cu, and what came of it.

    `info` is what the wrapper keeps and hands to `run`; for fa2 `PrefillPlanInfo::ToVector`.
    """

    backend: str
    window_kernel: bool
    soft_cap_kernel: bool
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    int_workspace: Tensor
    pinned: Tensor
    total_num_rows: int
    batch_size: int
    num_qo_heads: int
    num_kv_heads: int
    page_size: int
    enable_cuda_graph: bool
    head_dim: int
    causal: bool
    window_left: int
    kv_lens: tuple[int, ...]
    disable_split_kv: bool | None = None
    uniform_q_len: int | None = None
    num_blocks: int = 0
    info: tuple[int, ...] = ()

    @property
    def padded_num_blocks(self) -> int:
        return self.info[0]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Arguments of one call of the module's `paged_run`: tensors on the device, and numbers, as a graph keeps them."""

    module: "Module"
    info: tuple[int, ...]
    int_workspace: Tensor
    float_workspace: Tensor
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor
    out: Tensor
    causal: bool
    window_left: int
    enable_pdl: bool
    soft_cap: float
    sm_scale: float

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of every buffer that a plan writes and a captured kernel reads."""
        names = ("float_workspace", "int_workspace", "qo_indptr", "kv_indptr", "kv_indices", "last_page_len")
        return tuple(getattr(self, name).data_ptr() for name in names)

    def replay(self) -> None:
        """What a CUDA graph does: the same kernel with the same arguments, whatever the tensors hold by now."""
        self.module.launch(self)


@dataclass
class StandIn:
    """Makes modules in the place of FlashInfer's compiler, and remembers how they were called.

    Attributes:
        num_sm: multiprocessors of the GPU that it pretends to be.
        auto: what FlashInfer's `auto` stands for.
        state: float32: running sums are rounded as the kernel rounds them; float64: the order of tiles does not show.
        modules: as they were asked for: backend and the arguments of `gen_batch_prefill_module`.
        calls: names of calls ("plan", "run") with the int workspace that they worked on.
    """

    num_sm: int = 132
    auto: str = "fa2"
    state: torch.dtype = torch.float32
    modules: list[tuple[Any, ...]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    calls: list[tuple[str, int]] = field(default_factory=list)

    def generate(self, backend: str, *options: Any) -> SimpleNamespace:
        """Takes the place of `flashinfer.jit.gen_batch_prefill_module`."""
        self.modules.append((backend, *options))
        module = {"fa2": Fa2Module, "fa3": Fa3Module}[backend](self, *options)

        def plan(*arguments: Any) -> Any:
            """What crosses the border from C++ is an array of tvm-ffi's."""
            import tvm_ffi

            return tvm_ffi.convert(module.plan(*arguments))

        loaded = SimpleNamespace(plan=plan, ragged_run=None, paged_run=module.paged_run)
        return SimpleNamespace(build_and_load=lambda: loaded)

    def clear(self) -> None:
        """Forgets the calls so far."""
        for calls in (self.plans, self.runs, self.calls):
            calls.clear()


class Module:
    """One compiled module. Arguments are those that cross the border to C++, in its order."""

    backend = ""

    def __init__(
        self,
        stand_in: StandIn,
        dtype_q: torch.dtype,
        dtype_kv: torch.dtype,
        dtype_o: torch.dtype,
        dtype_idx: torch.dtype,
        head_dim_qk: int,
        head_dim_vo: int,
        pos_encoding_mode: int,
        use_sliding_window: bool,
        use_logits_soft_cap: bool,
        use_fp16_qk_reduction: bool,
    ) -> None:
        assert dtype_idx == torch.int32 and head_dim_qk == head_dim_vo
        assert pos_encoding_mode == 0 and not use_fp16_qk_reduction
        self.stand_in = stand_in
        self.dtypes = (dtype_q, dtype_kv, dtype_o)
        self.head_dim = head_dim_qk
        self.window_kernel, self.soft_cap_kernel = use_sliding_window, use_logits_soft_cap
        self._info: dict[int, tuple[int, ...]] = {}

    def _plan(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        pinned: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_lens: Tensor,
        total_num_rows: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        enable_cuda_graph: bool,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        **more: Any,
    ) -> Plan:
        """Checks what is common to both planners."""
        for tensor, size in ((qo_indptr, batch_size + 1), (kv_indptr, batch_size + 1), (kv_lens, batch_size)):
            assert tensor.dtype == torch.int32 and tensor.device.type == "cpu" and tensor.is_contiguous()
            assert len(tensor) == size
        for workspace in (float_workspace, int_workspace, pinned):
            assert workspace.dtype == torch.uint8 and workspace.data_ptr() % 16 == 0
        assert len(pinned) == len(int_workspace) and pinned.data_ptr() != int_workspace.data_ptr()
        for number in (total_num_rows, batch_size, num_qo_heads, num_kv_heads, page_size, head_dim_qk, window_left):
            assert type(number) is int
        assert type(enable_cuda_graph) is type(causal) is bool
        assert head_dim_qk == head_dim_vo == self.head_dim and num_qo_heads % num_kv_heads == 0
        assert qo_indptr[0] == kv_indptr[0] == 0 and bool((qo_indptr.diff() >= 0).all())
        assert int(qo_indptr[-1]) <= total_num_rows
        assert bool((kv_indptr.diff() > 0).all()) and bool((kv_lens > (kv_indptr.diff() - 1) * page_size).all())
        assert bool((kv_lens <= kv_indptr.diff() * page_size).all())
        assert bool((kv_lens >= qo_indptr.diff()).all()), "a row would stand before the first key"
        assert (window_left >= 0) == self.window_kernel
        return Plan(
            backend=self.backend,
            window_kernel=self.window_kernel,
            soft_cap_kernel=self.soft_cap_kernel,
            dtypes=self.dtypes,
            int_workspace=int_workspace,
            pinned=pinned,
            total_num_rows=total_num_rows,
            batch_size=batch_size,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            page_size=page_size,
            enable_cuda_graph=enable_cuda_graph,
            head_dim=head_dim_qk,
            causal=causal,
            window_left=window_left,
            kv_lens=tuple(kv_lens.tolist()),
            **more,
        )

    def _remember_plan(self, plan: Plan) -> tuple[int, ...]:
        """A graph keeps the numbers of the plan that it was captured with, so no later plan may have others."""
        before = self._info.setdefault(plan.int_workspace.data_ptr(), plan.info)
        assert before == plan.info or not plan.enable_cuda_graph, "a plan that a captured graph does not follow"
        self.stand_in.plans.append(plan)
        self.stand_in.calls.append(("plan", plan.int_workspace.data_ptr()))
        return plan.info

    def _remember_run(
        self,
        float_workspace: Tensor,
        int_workspace: Tensor,
        info: tuple[int, ...],
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        last_page_len: Tensor,
        out: Tensor,
        lse: None,
        mask_mode: int,
        layout: int,
        window_left: int,
        enable_pdl: bool,
        *,
        soft_cap: float,
        sm_scale: float,
    ) -> None:
        """Checks a run, and launches it."""
        dtype_q, dtype_kv, dtype_o = self.dtypes
        assert q.dtype == dtype_q and k_cache.dtype == v_cache.dtype == dtype_kv and out.dtype == dtype_o
        assert out.shape == q.shape and out.is_contiguous() and q.stride(2) == 1
        assert k_cache.shape == v_cache.shape and k_cache.dim() == 4 and q.shape[2] == k_cache.shape[3] == self.head_dim
        for tensor in (qo_indptr, kv_indptr, kv_indices, last_page_len):
            assert tensor.dtype == torch.int32 and tensor.device == q.device
        assert layout == NHD and lse is None and type(enable_pdl) is bool
        assert (window_left >= 0) == self.window_kernel and (soft_cap > 0) == self.soft_cap_kernel
        run = Run(
            module=self,
            info=tuple(info),
            int_workspace=int_workspace,
            float_workspace=float_workspace,
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            last_page_len=last_page_len,
            out=out,
            causal=MASK_MODES[mask_mode],
            window_left=window_left,
            enable_pdl=enable_pdl,
            soft_cap=soft_cap,
            sm_scale=sm_scale,
        )
        self.stand_in.runs.append(run)
        self.stand_in.calls.append(("run", int_workspace.data_ptr()))
        self.launch(run)

    def launch(self, run: Run) -> None:
        """Computes `run.out` from what is on the device."""
        raise NotImplementedError


class Fa2Module(Module):
    """Plans and kernels of fa2."""

    backend = "fa2"

    def plan(self, *arguments: Any) -> tuple[int, ...]:
        """`BatchPrefillWithKVCachePlan`: 16 arguments as in fa3, and four of its own; under CUDA graphs."""
        assert len(arguments) == 20
        fixed_split_size, disable_split_kv, num_colocated_ctas, uniform_q_len = arguments[16:]
        assert type(fixed_split_size) is type(num_colocated_ctas) is type(uniform_q_len) is int
        assert type(disable_split_kv) is bool and fixed_split_size == -1 and num_colocated_ctas == 0
        plan = self._plan(*arguments[:16], disable_split_kv=disable_split_kv, uniform_q_len=uniform_q_len)
        assert plan.enable_cuda_graph
        float_workspace, pinned, split = arguments[0], plan.pinned, not disable_split_kv
        rows, pages = (tensor.diff().tolist() for tensor in arguments[3:5])
        most = 2 * self.stand_in.num_sm // plan.num_kv_heads
        grid = _split(plan, rows, pages, most)
        padded, tile = max(most, grid.num_tiles), grid.tile
        assert len(grid.blocks) <= padded, "new batch size should not exceed padded batch size"
        space = _Allocator(len(plan.int_workspace))
        places = [space.take(4 * padded) for _ in range(3)]
        o_indptr, chunk_place = space.take(4 * (plan.batch_size + 1)), space.take(4, alignment=1)
        total = space.take(4)
        for place, values in zip(places, zip(*grid.blocks, strict=True), strict=True):
            _write(pinned, place, values)
        parts = [count * chunks for count, chunks in zip(rows, grid.num_chunks, strict=True)]
        _write(pinned, o_indptr, [0, *itertools.accumulate(parts)])
        _write(pinned, chunk_place, [grid.chunk])
        _write(pinned, total, [sum(rows)])
        v = s = merge_indptr = valid = 0
        if split:
            partial = _Allocator(len(float_workspace))
            v = partial.take(plan.num_qo_heads * padded * tile * plan.head_dim * 4)
            s = partial.take(plan.num_qo_heads * padded * tile * 4)
            merge_indptr, valid = space.take(4 * (plan.total_num_rows + 1)), space.take(padded)
            pinned[valid : valid + padded] = (torch.arange(padded) < len(grid.blocks)).to(torch.uint8)
        # cudaMemcpyAsync, of all that was allocated
        plan.int_workspace[: space.end] = pinned[: space.end]
        info = (padded, plan.total_num_rows, total, tile, *places, merge_indptr, o_indptr, chunk_place, v, s, valid)
        return self._remember_plan(replace(plan, num_blocks=len(grid.blocks), info=(*info, 1, int(split))))

    def paged_run(self, *arguments: Any) -> None:
        """`BatchPrefillWithPagedKVCacheRun` with the additional parameters of `gen_batch_prefill_module`."""
        assert len(arguments) == 29
        custom_mask, mask_indptr, _alibi_slopes, *tensors = arguments[16:24]
        assert custom_mask is mask_indptr is None and not any(tensor is not None for tensor in tensors)
        soft_cap, sm_scale, rope_rcp_scale, _rope_rcp_theta, token_pos_in_items_len = arguments[24:]
        assert rope_rcp_scale == 1.0 and token_pos_in_items_len == 0
        self._remember_run(*arguments[:16], soft_cap=soft_cap, sm_scale=sm_scale)

    def launch(self, run: Run) -> None:
        """Each block of the grid computes the rows that the int workspace says; blocks that agree do so once."""
        padded, _, _, tile, request_place, row_place, key_place, _, o_place, chunk_place = run.info[:10]
        valid_place, split = run.info[12], bool(run.info[14])
        places = (request_place, row_place, key_place)
        grid = list(zip(*(_read(run.int_workspace, place, padded) for place in places), strict=True))
        if split:
            valid = run.int_workspace[valid_place : valid_place + padded].tolist()
            grid = [block for block, good in zip(grid, valid, strict=True) if good]
        chunk = _read(run.int_workspace, chunk_place, 1)[0] if split else None
        qo_indptr = run.qo_indptr.tolist()
        if not split:
            # Not split, the kernel writes where the planner's own row offsets say.
            assert _read(run.int_workspace, o_place, len(qo_indptr)) == qo_indptr
        run.out.fill_(math.nan)
        partial: dict[tuple[int, int], list[_State]] = {}
        with np.errstate(all="ignore"):
            for block in sorted(set(grid)):
                state = _block(run, tile, block, chunk, self.stand_in.state)
                partial.setdefault(block[:2], []).append(state)
            for states in partial.values():
                _store(run, states)


class Fa3Module(Module):
    """Plans and kernels of fa3. Its planner's own arrays are not modelled: they do not depend on what lies beyond."""

    backend = "fa3"

    def plan(self, *common: Any) -> tuple[int, ...]:
        """`BatchPrefillWithKVCacheSM90Plan`."""
        assert len(common) == 16
        return self._remember_plan(replace(self._plan(*common), info=(0,) * 9))

    def paged_run(self, *arguments: Any) -> None:
        """`BatchPrefillWithPagedKVCacheSM90Run` with the additional parameters of `gen_batch_prefill_module`."""
        assert len(arguments) == 24 and not any(tensor is not None for tensor in arguments[16:20])
        soft_cap, sm_scale, value_scale, token_pos_in_items_len = arguments[20:]
        assert value_scale == 1.0 and token_pos_in_items_len == 0
        self._remember_run(*arguments[:16], soft_cap=soft_cap, sm_scale=sm_scale)

    def launch(self, run: Run) -> None:
        found = paged_attention(
            run.q,
            run.k_cache,
            run.v_cache,
            run.qo_indptr,
            run.kv_indptr,
            run.kv_indices,
            run.last_page_len,
            causal=run.causal,
            window_left=run.window_left,
            logits_soft_cap=run.soft_cap,
            sm_scale=run.sm_scale,
        )
        run.out.copy_(found)


class _Allocator:
    """`AlignedAllocator`: offsets into a workspace of `size` bytes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.end = 0

    def take(self, size: int, alignment: int = 16) -> int:
        start = -(-self.end // alignment) * alignment
        if start + size > self._size:
            raise RuntimeError(
                f"Buffer overflow: {size} bytes at {start} of {self._size}. Increase the workspace size."
            )
        self.end = start + size
        return start


def _write(workspace: Tensor, place: int, values: Any) -> None:
    array = torch.tensor(list(values), dtype=torch.int32).view(torch.uint8)
    workspace[place : place + len(array)] = array


def _read(workspace: Tensor, place: int, count: int) -> list[int]:
    return workspace[place : place + 4 * count].view(torch.int32).tolist()


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """Rows of a tile, tiles at most, (request, row tile, key chunk) of blocks with work, key chunks of each request,
    and tokens of a key chunk, 0 where keys are not split.
    """

    tile: int
    num_tiles: int
    blocks: list[tuple[int, int, int]]
    num_chunks: list[int]
    chunk: int


def _split(plan: Plan, rows: list[int], pages: list[int], most: int) -> _Grid:
    """`PrefillSplitQOKVIndptr` and `PrefillBinarySearchKVChunkSize`, under CUDA graphs."""
    group = plan.num_qo_heads // plan.num_kv_heads
    packed = [count * group for count in rows]
    if plan.uniform_q_len:
        assert packed == [plan.uniform_q_len * group] * len(rows), "qo_indptr is not uniform"
        tile = _tile(plan.uniform_q_len * group, plan.head_dim)
        num_tiles = len(rows) * -(-plan.uniform_q_len * group // tile)
    else:
        tile = _tile((plan.total_num_rows - len(rows) + 1) * group, plan.head_dim)
        num_tiles = -(-plan.total_num_rows * group // tile) + len(rows) - 1
    if plan.window_left >= 0:
        pages = [min(-(-(plan.window_left + tile) // plan.page_size), count) for count in pages]

    def chunks(size: int) -> list[int]:
        return [-(-max(count, 1) // size) for count in pages]

    def num_blocks(size: int) -> int:
        return sum(-(-q // tile) * count for q, count in zip(packed, chunks(size), strict=True))

    low = high = max(1, *pages)
    if not plan.disable_split_kv:
        low = max(128 // plan.page_size, 1)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if num_blocks(middle) > most else (low, middle)
    num_chunks = chunks(low)
    blocks = [
        (request, row, key)
        for request, (q, count) in enumerate(zip(packed, num_chunks, strict=True))
        for row in range(-(-q // tile))
        for key in range(count)
    ]
    chunk = 0 if plan.disable_split_kv else low * plan.page_size
    return _Grid(tile=tile, num_tiles=num_tiles, blocks=blocks, num_chunks=num_chunks, chunk=chunk)


def _tile(packed_len: int, head_dim: int) -> int:
    """`FA2DetermineCtaTileQ` on a GPU of compute capability 8.0 or newer."""
    if packed_len > 64 and head_dim < 256:
        return 128
    return 64 if packed_len > 16 else 16


@dataclass(frozen=True, kw_only=True)
class _State:
    """What a block holds at its end: packed rows [n] of one request, their heads, and sums over the keys they saw.

    maximum, total: [Hkv, n], maximum times the scale in base 2; weighted: [Hkv, n, D].
    """

    rows: Array
    heads: Array
    maximum: Array
    total: Array
    weighted: Array


def _block(run: Run, tile: int, block: tuple[int, int, int], chunk: int | None, dtype: torch.dtype) -> _State:
    """`BatchPrefillWithPagedKVCacheDevice` for all KV heads."""

    def rounded(array: Array) -> Array:
        return array.astype(np.float32).astype(np.float64) if dtype == torch.float32 else array

    request, tile_index, key_tile = block
    assert 0 <= request < len(run.last_page_len), f"illegal memory access: request {request}"
    first, end = run.qo_indptr[request : request + 2].tolist()
    first_page, end_page = run.kv_indptr[request : request + 2].tolist()
    page_size, num_kv_heads = run.k_cache.shape[1:3]
    group = run.q.shape[1] // num_kv_heads
    qo_len, kv_len = end - first, (end_page - first_page - 1) * page_size + int(run.last_page_len[request])
    window = run.window_left if run.window_left >= 0 else kv_len
    packed = np.arange(tile_index * tile, min((tile_index + 1) * tile, qo_len * group))
    assert len(packed), f"illegal memory access: row tile {tile_index} of request {request}"
    rows, heads = packed // group, packed % group
    start = max(0, kv_len + tile_index * tile // group - (qo_len + window))
    key_start = start if chunk is None else min(key_tile * chunk + start, kv_len)
    key_end = kv_len if chunk is None else min((key_tile + 1) * chunk + start, kv_len)
    reach = key_end - key_start
    if run.causal:
        reach = min(reach, max(0, kv_len - qo_len + -(-(tile_index + 1) * tile // group) - key_start))
    num_runs = -(-reach // RUN)
    at = np.arange(key_start, key_start + num_runs * RUN)
    keys, values = (_gather(cache, run.kv_indices[first_page:], at, key_end) for cache in (run.k_cache, run.v_cache))
    q = run.q[first:end].double().numpy().reshape(qo_len, num_kv_heads, group, -1)[rows, :, heads]
    scores = q.transpose(1, 0, 2) @ keys.transpose(1, 2, 0)
    scale = run.sm_scale * LOG2E
    if run.soft_cap > 0:
        scores, scale = np.tanh(scores * run.sm_scale / run.soft_cap), run.soft_cap * LOG2E
    masked = np.broadcast_to(at >= key_end, (len(rows), len(at)))
    if run.causal:
        masked = masked | (at + qo_len > kv_len + rows[:, None])
    if run.module.window_kernel:
        masked = masked | (at + qo_len + window < kv_len + rows[:, None])
    scores = rounded(np.where(masked, MASKED, scores))
    warps = 4 if tile == 16 else 1
    # [runs, warps, Hkv, n, keys of a warp] and [runs, warps, Hkv, keys of a warp, D]
    scores = scores.reshape(*scores.shape[:2], num_runs, warps, RUN // warps).transpose(2, 3, 0, 1, 4)
    values = values.reshape(num_runs, warps, RUN // warps, *values.shape[1:]).transpose(0, 1, 3, 2, 4)
    maximum = np.full((warps, num_kv_heads, len(rows)), MASKED)
    total, weighted = np.ones_like(maximum), np.zeros((*maximum.shape, run.q.shape[2]))
    for seen, met in zip(scores, values, strict=True):
        before, maximum = maximum, np.maximum(maximum, seen.max(-1))
        factor = np.exp2((before - maximum) * scale)
        probs = np.exp2((seen - maximum[..., None]) * scale)
        if dtype == torch.float32:  # the tensor cores take probabilities in the type of the queries
            probs = torch.from_numpy(probs).to(run.q.dtype).double().numpy()
        total = rounded(total * factor + probs.sum(-1))
        weighted = rounded(weighted * factor[..., None] + probs @ met)
    maximum = np.where(maximum == MASKED, MASKED, maximum * scale)
    factor = np.exp2(maximum - maximum.max(0))
    return _State(
        rows=first + rows,
        heads=heads,
        maximum=maximum.max(0),
        total=rounded((total * factor).sum(0)),
        weighted=rounded((weighted * factor[..., None]).sum(0)),
    )


def _gather(cache: Tensor, pages: Tensor, at: Array, key_end: int) -> Array:
    """Keys or values of one request at positions [n], zero from `key_end` on: [n, Hkv, D]."""
    page_size, real = cache.shape[1], torch.from_numpy(at[at < key_end])
    own = pages[real // page_size].long()
    assert not len(own) or 0 <= int(own.min()) <= int(own.max()) < len(cache), "illegal memory access: page"
    found = np.zeros((len(at), *cache.shape[2:]))
    found[: len(real)] = cache[own, real % page_size].double().numpy()
    return found


def _store(run: Run, states: list[_State]) -> None:
    """Writes a tile's rows; those of several chunks of keys are merged (`VariableLengthMergeStates`)."""
    maximum, total, weighted = (
        np.stack([getattr(state, name) for state in states]) for name in ("maximum", "total", "weighted")
    )
    factor = np.exp2(maximum - maximum.max(0))
    summed = (weighted * factor[..., None]).sum(0) / (total * factor).sum(0)[..., None]
    summed = np.where(maximum.max(0)[..., None] == MASKED, 0.0, summed)
    out = run.out.view(len(run.out), run.k_cache.shape[2], -1, run.out.shape[2])
    rows, heads = torch.from_numpy(states[0].rows), torch.from_numpy(states[0].heads)
    out[rows, :, heads] = torch.from_numpy(summed).transpose(0, 1).to(out.dtype)


class _WithoutPinning:
    """`torch` for a module that asks for pinned memory where there is none to be had."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.empty(*shape, **options)


@contextmanager
def installed(**options: Any) -> Iterator[StandIn]:
    """Inside, FlashInfer's wrappers work on CPU tensors; the options are those of `StandIn`."""
    from flashinfer import decode, prefill

    stand_in = StandIn(**options)
    # Modules are cached by what they were compiled for.
    prefill.get_batch_prefill_module.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "torch", _WithoutPinning())
        patch.setattr(prefill, "torch", _WithoutPinning())
        patch.setattr(prefill, "gen_batch_prefill_module", stand_in.generate)
        patch.setattr(prefill, "get_batch_prefill_uri", lambda *_: "stand_in")  # has no name for fp32
        patch.setattr(prefill, "determine_attention_backend", lambda *_, **__: stand_in.auto)
        patch.setattr(backend_module.prebuilt, "use", lambda setup, **options: None)
        patch.setattr(backend_module, "_num_multiprocessors", lambda device: stand_in.num_sm)
        yield stand_in
    prefill.get_batch_prefill_module.cache_clear()


@pytest.fixture(name="stand_in")
def stand_in_fixture() -> Iterator[StandIn]:
    """FlashInfer on CPU tensors, on a GPU of 132 multiprocessors."""
    pytest.importorskip("flashinfer")
    with installed() as stand_in:
        yield stand_in
