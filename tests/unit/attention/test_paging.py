"""FlashInfer's page tables: what `paged_indices` makes of a batch means what the other backends compute of it."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compspec.attention.cpu import CpuBackend
from compspec.attention.paging import PagedIndices, paged_indices
from compspec.attention.sdpa import SdpaBackend
from compspec.batch import SCRATCH_BLOCK, Bucket
from compspec.runner.inputs import InputBuffers, Query
from tests.flashinfer_interpreter import Fa2Module, StandIn, paged_attention

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
SCALE = 0.3
# fp32 against float64, as in test_sdpa.py
TOLERANCE = 2e-6
BLOCK_SIZES = (1, 2, 16, 256)
WIDTHS = [
    pytest.param(1, id="decode"),
    pytest.param(2, id="plain"),
    pytest.param(8, id="verify"),
    pytest.param(32, id="chunk"),
]
OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"window": 7}, id="window"),
    pytest.param({"window": 1}, id="window of one"),
    pytest.param({"softcap": 2.0}, id="softcap"),
    pytest.param({"softcap": 5.0, "window": 20}, id="softcap and window"),
]


@dataclass(frozen=True)
class Batch:
    """Queries as a runner gives them, fewer than the bucket holds and of fewer rows, and what their blocks hold."""

    bucket: Bucket
    block_size: int
    max_blocks: int
    queries: list[Query]
    seed: int

    def filled(self) -> InputBuffers:
        buffers = InputBuffers(self.bucket, self.block_size, self.max_blocks, torch.device("cpu"))
        buffers.fill(self.queries)
        return buffers

    @property
    def indices(self) -> PagedIndices:
        buffers = self.filled()
        return paged_indices(buffers.block_table, buffers.starts, self.bucket.query_len, self.block_size)

    @property
    def is_real(self) -> Tensor:
        """Of each row [T]."""
        real = torch.zeros(self.bucket.num_requests, self.bucket.query_len, dtype=torch.bool)
        for row, query in enumerate(self.queries):
            real[row, : len(query.token_ids)] = True
        return real.flatten()

    def tensors(self, stale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, Hq, D] and caches [S, Hkv, D]; `stale` where no token of a request is."""
        rng = np.random.default_rng(self.seed)
        num_blocks = 1 + max(max(query.block_ids) for query in self.queries)
        caches = np.full((2, num_blocks * self.block_size, KV_HEADS, HEAD_DIM), stale, dtype=np.float32)
        for query in self.queries:
            at = np.arange(query.start + len(query.token_ids))
            slots = np.asarray(query.block_ids)[at // self.block_size] * self.block_size + at % self.block_size
            caches[:, slots] = rng.standard_normal((2, len(at), KV_HEADS, HEAD_DIM))
        q = rng.standard_normal((self.bucket.num_tokens, HEADS, HEAD_DIM)).astype(np.float32)
        return torch.from_numpy(q), *torch.from_numpy(caches)

    def meaning(self, stale: float = 3.0, window: int = 0, softcap: float = 0.0) -> Tensor:
        """What FlashInfer's layout says of the batch, [T, Hq, D] in float64."""
        q, *caches = self.tensors(stale)
        k_cache, v_cache = (cache.view(-1, self.block_size, KV_HEADS, HEAD_DIM) for cache in caches)
        layout = {name: torch.from_numpy(getattr(self.indices, name)) for name in PagedIndices.__slots__}
        return paged_attention(
            q,
            k_cache,
            v_cache,
            **layout,
            causal=self.bucket.query_len > 1,
            window_left=window - 1 if window else -1,
            logits_soft_cap=softcap,
            sm_scale=SCALE,
        )

    def computed(self, backend: CpuBackend | SdpaBackend, window: int = 0, softcap: float = 0.0) -> Tensor:
        _, positions, _, table, seq_lens, _ = self.filled().tensors
        size = self.block_size
        return backend.paged_attention(*self.tensors(), table, seq_lens, positions[0], size, SCALE, window, softcap)


@st.composite
def batches(draw: st.DrawFn, query_len: int) -> Batch:
    size = draw(st.sampled_from(BLOCK_SIZES))
    num_requests = draw(st.integers(1, 4))
    # In the middle of a page, at its first token, at its last, and where the rows just fill it.
    anywhere = st.integers(0, min(40 * size, 300))
    at_ends = st.tuples(st.integers(1, 3), st.sampled_from((0, 1, query_len, query_len + 1)))
    starts = st.one_of(anywhere, at_ends.map(lambda pair: max(0, pair[0] * size - pair[1])))
    sizes = draw(st.lists(st.tuples(starts, st.integers(1, query_len)), min_size=1, max_size=num_requests))
    # Blocks reach to the last real row, those of the table a little further.
    widths = [-(-(start + count) // size) for start, count in sizes]
    spare = draw(st.integers(0, 3))
    max_blocks = -(-(max(start for start, _ in sizes) + query_len) // size) + spare
    seed = draw(st.integers(0, 2**32))
    ids = iter((np.random.default_rng(seed).permutation(sum(widths) + 3) + 1).tolist())
    queries = [
        Query(token_ids=[1] * count, start=start, block_ids=[next(ids) for _ in range(width)])
        for (start, count), width in zip(sizes, widths, strict=True)
    ]
    bucket = Bucket(num_requests=num_requests, query_len=query_len, num_logits=query_len)
    return Batch(bucket=bucket, block_size=size, max_blocks=max_blocks, queries=queries, seed=seed)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("query_len", WIDTHS)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_layout_means_what_other_backends_compute(query_len: int, options: dict, data: st.DataObject) -> None:
    """Real rows, in batches with padded rows and requests, blocks in any order, starts at page ends."""
    batch = data.draw(batches(query_len))
    exact = batch.meaning(**options)[batch.is_real]
    for backend in (CpuBackend(), SdpaBackend()):
        found = batch.computed(backend, **options)[batch.is_real]
        assert (found.double() - exact).abs().max() <= TOLERANCE * exact.abs().amax().clamp(min=1.0)


@pytest.mark.parametrize("query_len", WIDTHS)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_arrays_are_those_of_the_layout(query_len: int, data: st.DataObject) -> None:
    batch = data.draw(batches(query_len))
    found, buffers = batch.indices, batch.filled()
    size, requests = batch.block_size, batch.bucket.num_requests
    for name in PagedIndices.__slots__:
        array = getattr(found, name)
        assert array.dtype == np.int32 and array.ndim == 1 and array.flags.c_contiguous, name
    assert found.qo_indptr.tolist() == [row * query_len for row in range(requests + 1)]
    assert found.kv_indptr[0] == 0 and len(found.kv_indptr) == requests + 1
    assert len(found.kv_indices) == found.kv_indptr[-1]
    assert len(found.last_page_len) == requests
    for row in range(requests):
        pages = found.kv_indices[found.kv_indptr[row] : found.kv_indptr[row + 1]].tolist()
        length = int(buffers.starts[row]) + query_len
        assert 1 <= found.last_page_len[row] <= size
        assert (len(pages) - 1) * size + found.last_page_len[row] == length
        query = batch.queries[row] if row < len(batch.queries) else None
        own = list(query.block_ids) if query is not None else []
        assert pages == own + [SCRATCH_BLOCK] * (len(pages) - len(own))
        # The kernel puts the last row on the last key: so row j of a request stands on its own key.
        positions = buffers.tensors[1].view(requests, query_len)[row, : len(query.token_ids) if query else 0]
        assert positions.tolist() == list(range(length - query_len, length))[: len(positions)]
    assert (found.kv_indptr[1:] <= (np.arange(requests) + 1) * batch.max_blocks).all()


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1], OPTIONS[4]])
@pytest.mark.parametrize("query_len", WIDTHS)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_what_padding_sees_never_changes_a_bit(query_len: int, options: dict, data: st.DataObject) -> None:
    """Rows of padding look at keys beyond the real rows: at the scratch block, and at what is left in a last page."""
    batch = data.draw(batches(query_len))
    expected = batch.meaning(**options)[batch.is_real]
    for stale in (0.0, -1e6, 3e38):
        assert torch.equal(batch.meaning(stale, **options)[batch.is_real], expected)


def test_the_length_counts_padded_rows_and_pages_end_with_them() -> None:
    """By hand: three real rows of eight from 13 on, in pages of four, and a request that is all padding."""
    table = np.zeros((2, 7), dtype=np.int32)
    table[0, :4] = (9, 4, 7, 5)
    found = paged_indices(table, np.array([13, 0]), 8, 4)
    assert found.qo_indptr.tolist() == [0, 8, 16]
    assert found.kv_indptr.tolist() == [0, 6, 8]
    assert found.kv_indices.tolist() == [9, 4, 7, 5, 0, 0, 0, 0]
    assert found.last_page_len.tolist() == [1, 4]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_interpreter_lets_no_number_through_as_the_kernels_do(bad: float) -> None:
    """A masked value that is no number reaches the rows before it: why the cache never holds one on CUDA."""
    batch = Batch(
        bucket=Bucket(num_requests=1, query_len=4, num_logits=4),
        block_size=4,
        max_blocks=4,
        queries=[Query(token_ids=[1], start=3, block_ids=[2])],
        seed=0,
    )
    assert batch.meaning().isfinite().all()
    assert batch.meaning(bad)[0].isnan().all()


@st.composite
def launches(draw: st.DrawFn) -> tuple[Tensor, ...]:
    """Ragged requests over pages of any order: row counts, key counts, pages."""
    rows = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    lengths = [count + draw(st.integers(0, 200)) for count in rows]
    size = draw(st.sampled_from((1, 4, 16, 128)))
    pages = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    last = [(length - 1) % size + 1 for length in lengths]
    indptrs = [torch.tensor([0, *counts]).cumsum(0).int() for counts in (rows, pages)]
    return *indptrs, order.int(), torch.tensor(last, dtype=torch.int32), torch.tensor(size)


@pytest.mark.parametrize("heads", [(4, 2), (7, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_the_kernel_of_the_stand_in_computes_what_the_layout_means(
    split: bool, heads: tuple[int, int], data: st.DataObject
) -> None:
    """The two readings of FlashInfer's source in tests/flashinfer_interpreter.py, against each other."""
    qo_indptr, kv_indptr, indices, last, size = data.draw(launches())
    window, cap = data.draw(st.sampled_from((-1, 0, 6, 90))), data.draw(st.sampled_from((0.0, 2.0)))
    causal = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(int(qo_indptr[-1]), heads[0], HEAD_DIM, generator=generator)
    caches = torch.randn(2, len(indices), int(size), heads[1], HEAD_DIM, generator=generator)
    float32 = (torch.float32,) * 3
    module = Fa2Module(StandIn(num_sm=8), *float32, torch.int32, HEAD_DIM, HEAD_DIM, 0, window >= 0, cap > 0, False)
    workspaces = [torch.full((count,), 0, dtype=torch.uint8) for count in (1 << 25, 1 << 16, 1 << 16)]
    kv_lens = (kv_indptr.diff() - 1) * int(size) + last
    sizes = (len(q), len(last), *heads, int(size), True, HEAD_DIM, HEAD_DIM, causal, window)
    info = module.plan(*workspaces, qo_indptr, kv_indptr, kv_lens, *sizes, -1, not split, 0, 0)
    out = torch.empty_like(q)
    layout = (qo_indptr, kv_indptr, indices, last)
    module.paged_run(
        *workspaces[:2],
        info,
        q,
        *caches,
        *layout,
        out,
        None,
        int(causal),
        0,
        window,
        False,
        *(None,) * 8,
        cap,
        SCALE,
        1.0,
        1e-4,
        0,
    )
    options = {"causal": causal, "window_left": window, "logits_soft_cap": cap, "sm_scale": SCALE}
    exact = paged_attention(q, *caches, *layout, **options)
    assert (out - exact).abs().max() <= TOLERANCE * exact.abs().amax().clamp(min=1.0)
