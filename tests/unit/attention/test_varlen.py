"""torch's variable-length attention: right arguments for its kernel, and a refusal wherever it has none.

The kernel runs on CUDA alone. `kernel` below does what its documentation says, in plain torch.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compspec import attention
from compspec.attention import varlen
from compspec.attention.backend import AttentionSetup, LayerSpec
from compspec.attention.sdpa import SdpaBackend
from compspec.attention.varlen import VarlenBackend
from compspec.batch import SCRATCH_BLOCK, Bucket
from compspec.errors import UnsupportedError
from compspec.runner.inputs import InputBuffers, Query
from tests.law import make_engine
from tests.tiny_models import tiny_model_folder
from tests.unit.attention.test_sdpa_static import OnDevice

varlen_attn = pytest.importorskip("torch.nn.attention.varlen").varlen_attn

PAGE = 256
MAX_BLOCKS = 6
NUM_BLOCKS = 40
HEAD_DIM = 16
LAYER = LayerSpec(num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, scale=0.3, window=0, softcap=0.0)
SETUP = AttentionSetup(
    layers=(LAYER,),
    dtype=torch.bfloat16,
    device=torch.device("cuda"),
    block_size=PAGE,
    max_blocks=MAX_BLOCKS,
    max_model_len=MAX_BLOCKS * PAGE,
    buckets=(Bucket(num_requests=1, query_len=8, num_logits=8),),
    exact=True,
)


def kernel(*args: Any, **kwargs: Any) -> Tensor:
    """Flash attention over pages, one row at a time.

    Query row i of n sees the keys up to key (length - n + i): the last row is aligned with the last key. Of those it
    sees the last `left + 1` if left is not negative, and `right` more behind them.
    """
    given = inspect.signature(varlen_attn).bind(*args, **kwargs)
    given.apply_defaults()
    call = SimpleNamespace(**given.arguments)
    num_pages, page_size, num_kv_heads, _ = call.key.shape
    num_requests, width = call.block_table.shape
    for name in ("cu_seq_q", "cu_seq_k", "seqused_k", "block_table"):
        assert getattr(call, name).dtype == torch.int32 and getattr(call, name).is_contiguous(), name
    assert call.cu_seq_q.shape == call.cu_seq_k.shape == (num_requests + 1,)
    assert call.seqused_k.shape == (num_requests,)
    assert call.key.is_contiguous() and call.value.is_contiguous() and call.query.stride(-1) == 1
    assert page_size % PAGE == 0 and call.value.shape == call.key.shape
    assert call.window_size[1] == 0, "causal"
    starts, lengths = call.cu_seq_q.tolist(), call.seqused_k.tolist()
    assert call.cu_seq_k.diff().tolist() == lengths and call.cu_seq_k[0] == 0
    assert starts[0] == 0 and starts[-1] == len(call.query)
    assert max(lengths) <= call.max_k <= width * page_size
    groups, remainder = divmod(call.query.shape[1], num_kv_heads)
    assert remainder == 0 and (call.enable_gqa or groups == 1)
    left = call.window_size[0] if call.window_size[0] >= 0 else call.max_k
    out = torch.full_like(call.query, float("nan"))
    for request, length in enumerate(lengths):
        rows = range(starts[request], starts[request + 1])
        assert len(rows) <= call.max_q
        slots = torch.arange(length)
        pages = call.block_table[request, slots // page_size].long()
        assert pages.min() >= 0 and pages.max() < num_pages
        keys, values = (
            cache[pages, slots % page_size].repeat_interleave(groups, 1).double() for cache in (call.key, call.value)
        )
        for i, row in enumerate(rows):
            last = length - len(rows) + i
            seen = slice(max(0, last - left), last + 1)
            scores = torch.einsum("hd,khd->hk", call.query[row].double(), keys[seen]) * call.scale
            out[row] = torch.einsum("hk,khd->hd", scores.softmax(1), values[seen]).to(out.dtype)
    return out


@dataclass
class Batch:
    """A bucket filled by `InputBuffers`, and which of its rows are real."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    inputs: tuple[Tensor, ...]
    real: Tensor
    window: int = 0

    def run(self, backend: VarlenBackend | SdpaBackend) -> Tensor:
        """[T, Hq, D]"""
        _, positions, _, block_table, seq_lens, _ = self.inputs
        out = backend.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            block_table,
            seq_lens,
            positions[0],
            PAGE,
            LAYER.scale,
            self.window,
            0.0,
        )
        assert out.shape == self.q.shape and out.dtype == self.q.dtype and out.is_contiguous()
        return out


def make_batch(
    num_requests: int,
    rows: int,
    requests: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    window: int = 0,
    seed: int = 0,
    prefill: bool = False,
) -> Batch:
    """Requests of (start, number of rows); whatever no request owns is large."""
    generator = torch.Generator().manual_seed(seed)
    bucket = Bucket(num_requests=num_requests, query_len=rows, num_logits=1 if prefill else rows)
    order = (torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1).tolist()
    queries, owned = [], torch.zeros(NUM_BLOCKS * PAGE, dtype=torch.bool)
    real = torch.zeros(num_requests, rows, dtype=torch.bool)
    for index, (start, count) in enumerate(requests):
        blocks = [order.pop() for _ in range((start + count - 1) // PAGE + 1)]
        queries.append(Query(token_ids=[1] * count, start=start, block_ids=blocks))
        real[index, :count] = True
        slots = torch.arange(start + count)
        owned[torch.tensor(blocks)[slots // PAGE] * PAGE + slots % PAGE] = True
    caches = [torch.randn(NUM_BLOCKS * PAGE, heads[1], HEAD_DIM, generator=generator) for _ in range(2)]
    for cache in caches:
        cache[~owned] *= 1e4
    return Batch(
        q=torch.randn(bucket.num_tokens, heads[0], HEAD_DIM, generator=generator),
        k_cache=caches[0],
        v_cache=caches[1],
        inputs=InputBuffers(bucket, PAGE, MAX_BLOCKS, torch.device("cpu")).fill(queries),
        real=real.flatten(),
        window=window,
    )


def backend_with(attend: Callable[..., Any], *, exact: bool = True) -> VarlenBackend:
    backend = VarlenBackend(replace(SETUP, exact=exact))
    backend.attend = attend
    return backend


def check(batch: Batch) -> None:
    """Real rows are those of the reference; rows of padding are numbers."""
    found, expected = batch.run(backend_with(kernel)), batch.run(SdpaBackend())
    assert torch.allclose(found[batch.real], expected[batch.real], atol=3e-6)
    assert found.isfinite().all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_real_rows_are_those_of_the_reference(data: st.DataObject) -> None:
    """Any lengths, padded rows and requests, heads and windows."""
    rows = data.draw(st.sampled_from([1, 2, 8, 32]))
    num_requests = data.draw(st.integers(1, 4))
    start = st.integers(0, MAX_BLOCKS * PAGE // 2) | st.sampled_from([0, PAGE - 1, PAGE, 2 * PAGE - 3])
    requests = data.draw(st.lists(st.tuples(start, st.integers(1, rows)), max_size=num_requests))
    heads = data.draw(st.sampled_from([(4, 2), (2, 2), (6, 1)]))
    window = data.draw(st.sampled_from([0, 1, 2, 9, 300, 5000]))
    check(make_batch(num_requests, rows, requests, heads=heads, window=window, seed=data.draw(st.integers(0, 99))))


@pytest.mark.parametrize("window", [0, 1, 7, 255, 256])
@pytest.mark.parametrize(
    ("num_requests", "rows", "requests"),
    [
        pytest.param(3, 1, [(0, 1), (300, 1), (255, 1)], id="decode"),
        pytest.param(3, 8, [(250, 8), (0, 8), (700, 8)], id="verify"),
        pytest.param(4, 8, [(250, 3), (511, 1), (255, 2)], id="verify with padded rows and a padded request"),
        pytest.param(1, 32, [(240, 32)], id="a whole chunk"),
        pytest.param(1, 32, [(240, 5)], id="the last chunk"),
        pytest.param(2, 8, [], id="warm-up: nothing but padding"),
    ],
)
def test_shapes_of_a_step(num_requests: int, rows: int, requests: list[tuple[int, int]], window: int) -> None:
    check(make_batch(num_requests, rows, requests, window=window, prefill=rows == 32))


def test_a_padded_request_reads_scratch_alone() -> None:
    batch = make_batch(2, 8, [(40, 8)])
    scratch = slice(SCRATCH_BLOCK * PAGE, (SCRATCH_BLOCK + 1) * PAGE)
    batch.v_cache[scratch] = 5.0
    found = batch.run(backend_with(kernel))
    assert torch.allclose(found[8:], torch.tensor(5.0))
    assert not torch.isclose(found[:8], torch.tensor(5.0)).any()


@pytest.mark.parametrize("exact", [True, False])
def test_arguments_of_the_call(exact: bool) -> None:
    """Types and shapes are what the kernel takes, whatever torch's defaults do."""
    seen: dict[str, Any] = {}

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        seen.update(inspect.signature(varlen_attn).bind(*args, **kwargs).arguments)
        return torch.zeros_like(args[0])

    batch = make_batch(3, 8, [(250, 3), (0, 8)], window=9)
    batch.run(backend_with(attend, exact=exact))
    assert seen["query"] is batch.q
    for name, cache in (("key", batch.k_cache), ("value", batch.v_cache)):
        assert seen[name].shape == (NUM_BLOCKS, PAGE, 2, HEAD_DIM)
        assert seen[name].data_ptr() == cache.data_ptr(), "a copy of the cache"
    assert seen["block_table"] is batch.inputs[3]
    expected = {"cu_seq_q": [0, 8, 16, 24], "cu_seq_k": [0, 258, 266, 274], "seqused_k": [258, 8, 8]}
    for name, values in expected.items():
        assert seen[name].dtype == torch.int32
        assert seen[name].tolist() == values
    assert (seen["max_q"], seen["max_k"]) == (8, MAX_BLOCKS * PAGE)
    assert (seen["scale"], seen["window_size"], seen["enable_gqa"]) == (LAYER.scale, (8, 0), True)
    assert seen["num_splits"] == (1 if exact else None)
    batch.window = 0
    batch.run(backend_with(attend, exact=exact))
    assert seen["window_size"] == (-1, 0)


def test_a_soft_cap_is_never_dropped() -> None:
    batch = make_batch(1, 8, [(40, 8)])
    _, positions, _, block_table, seq_lens, _ = batch.inputs
    arguments = (batch.q, batch.k_cache, batch.v_cache, block_table, seq_lens, positions[0], PAGE, 1.0, 0)
    with pytest.raises(AssertionError):
        backend_with(kernel).paged_attention(*arguments, 5.0)


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("exact", [True, False])
def test_torchs_own_function_takes_the_call_and_nothing_is_read_on_the_host(exact: bool, window: int) -> None:
    """On tensors without values, so that its own checks and the schema of its operator are met."""
    batch = make_batch(3, 8, [(250, 3), (0, 8)], window=window)
    meta = Batch(
        q=batch.q.to("meta", torch.bfloat16),
        k_cache=batch.k_cache.to("meta", torch.bfloat16),
        v_cache=batch.v_cache.to("meta", torch.bfloat16),
        inputs=tuple(tensor.to("meta") for tensor in batch.inputs),
        real=batch.real,
        window=window,
    )
    backend = VarlenBackend(replace(SETUP, exact=exact))
    assert backend.attend is varlen_attn
    with OnDevice() as seen:
        assert meta.run(backend).is_meta
    assert seen.num_operators > 5


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_it_serves_what_its_kernel_can_do(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    asked: list[torch.device] = []

    def capability(of: torch.device) -> tuple[int, int]:
        asked.append(of)
        return (8, 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    setup = replace(SETUP, device=torch.device(device))
    if device == "cpu":
        assert varlen.refusal(setup) == "it runs on CUDA, the model is on cpu"
        return
    widest = replace(LAYER, head_dim=256, window=5)
    for possible in (
        setup,
        replace(setup, dtype=torch.float16),
        replace(setup, block_size=512),
        replace(setup, layers=(LAYER, widest)),
        replace(setup, layers=(replace(LAYER, head_dim=8),)),
        replace(setup, exact=False),
    ):
        assert varlen.refusal(possible) is None
    assert set(asked) == {setup.device}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "it runs bfloat16 and float16, the model is torch.float32"),
        ({"block_size": 16}, "it needs cache.block_size to be a multiple of 256, which is 16"),
        ({"block_size": 128}, "it needs cache.block_size to be a multiple of 256, which is 128"),
        ({"layers": (LAYER, replace(LAYER, softcap=30.0))}, "it has no soft cap, which the model needs"),
        ({"layers": (LAYER, replace(LAYER, head_dim=264))}, "it goes up to head dim 256, the model has 264"),
        (
            {"layers": (LAYER, replace(LAYER, head_dim=100))},
            "it needs head dims that are multiples of 8, the model has 100",
        ),
    ],
    ids=["fp32", "block size", "half a page", "soft cap", "head dim", "odd head dim"],
)
def test_what_it_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    setup = replace(SETUP, **changes)
    assert varlen.refusal(setup) == reason
    with pytest.raises(UnsupportedError, match=r"model\.attention: varlen cannot serve: it ") as caught:
        attention.choose(setup, "varlen")
    assert reason in str(caught.value)


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert varlen.refusal(SETUP) == "it needs a GPU of compute capability 8.0 or newer, this one has 7.5"


def test_a_torch_without_the_module_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen.importlib.util, "find_spec", lambda name: None)
    reason = f"torch {torch.__version__} has no torch.nn.attention.varlen"
    assert varlen.unavailable() == varlen.refusal(SETUP) == reason


def test_a_torch_whose_function_takes_less_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(
        query: Tensor, key: Tensor, *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)
    ) -> None:
        pass

    monkeypatch.setattr(varlen, "_function", lambda: older)
    reason = (
        f"torch.nn.attention.varlen of torch {torch.__version__} has no block_table, enable_gqa, num_splits, seqused_k"
    )
    assert varlen.unavailable() == varlen.refusal(SETUP) == reason


def test_every_keyword_of_the_call_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without any one of them is refused."""
    used: set[str] = set()

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        used.update(kwargs)
        return torch.zeros_like(args[0])

    make_batch(1, 2, [(5, 2)]).run(backend_with(attend))
    assert used == varlen._NEEDED
    assert varlen.unavailable() is None
    names = inspect.signature(varlen_attn).parameters
    assert set(list(names)[:7]) == {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"}
    for name in used:
        rest = [parameter for parameter in names.values() if parameter.name != name]
        older = SimpleNamespace(__signature__=inspect.Signature(rest), __call__=None)
        monkeypatch.setattr(varlen.inspect, "signature", lambda function, older=older: older.__signature__)
        assert varlen.unavailable() == f"torch.nn.attention.varlen of torch {torch.__version__} has no {name}"


@pytest.mark.parametrize("length", [480, 512])
def test_padding_of_the_longest_request_stays_inside_its_block_table(models: Path, length: int) -> None:
    """The kernel counts all rows of a request, so those of padding look beyond its last token."""
    folder = tiny_model_folder("llama", models, max_position_embeddings=length)
    runner = make_engine(folder, cache__num_blocks=200).runner
    widest = max(bucket.query_len for bucket in runner.buckets.all)
    assert runner.max_blocks * runner.block_size >= length - 1 + widest
