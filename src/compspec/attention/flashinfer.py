"""The CUDA backend: FlashInfer's paged attention with several query rows per request, inside CUDA graphs.

Each bucket has wrappers of its own, one for each kind of layer, because a wrapper in a CUDA graph keeps its batch
size and its buffers for life. `plan` runs on the host before every forward; what it leaves in those buffers is read
by the captured kernels. FlashInfer itself is imported when the first backend is made, and only then.

Versions: flashinfer-python 0.6.18 and newer (`q_len_per_req`, fixed shapes of uniform rows).
"""

import importlib.metadata
import importlib.util
import itertools
import re
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compspec.attention import prebuilt
from compspec.attention.backend import AttentionSetup, LayerSpec
from compspec.attention.paging import PagedIndices, paged_indices
from compspec.batch import SCRATCH_BLOCK, Bucket
from compspec.errors import CapacityError, CompspecError, UnsupportedError, one_line
from compspec.transfer import CopyFence

OLDEST_VERSION = (0, 6, 18)
OLDEST_GENERATION = (8, 0)
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)

# Plans take a few kilobytes; FlashInfer's own default is 8 MiB for each wrapper, on the device and pinned.
_INT_WORKSPACE = 1 << 20
# Places in FlashInfer's plan, `PrefillPlanInfo` in scheduler.cuh.
_PLAN_NUMBERS = 15
_GRID, _TILE_ROWS, _SPLITS_KEYS = 0, 3, 14
# Exact numerics never split keys, and so has no partial results.
_LEAST_FLOAT_WORKSPACE = 1 << 20


def refusal(setup: AttentionSetup) -> str | None:
    """Why FlashInfer cannot serve, or None if it can."""
    if setup.device.type != "cuda":
        return f"it runs on CUDA, the model is on {setup.device}"
    missing = unavailable()
    if missing is not None:
        return missing
    generation = torch.cuda.get_device_capability(setup.device)
    if generation < OLDEST_GENERATION:
        return f"it needs a GPU of compute capability 8.0 or newer, this one has {generation[0]}.{generation[1]}"
    if setup.dtype not in DTYPES:
        return f"it has kernels for bfloat16 and float16, the model is {setup.dtype}"
    others = sorted({layer.head_dim for layer in setup.layers} - set(HEAD_DIMS))
    if others:
        return f"it has kernels for head dims 64, 128 and 256, the model has {', '.join(map(str, others))}"
    if setup.exact and any(0 < layer.window < setup.max_model_len for layer in setup.layers):
        return "it cuts the keys of a sliding window by where a step begins, which numerics: exact does not allow"
    return None


def unavailable() -> str | None:
    """Why FlashInfer cannot be used on this machine at all, or None; imports nothing."""
    if importlib.util.find_spec("flashinfer") is None:
        return 'flashinfer is not installed (pip install "compspec[cuda]")'
    version = _version()
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if numbers < OLDEST_VERSION:
        return f"flashinfer-python {version} is older than {'.'.join(map(str, OLDEST_VERSION))}"
    return None


class FlashInferBackend:
    """Paged attention of every bucket of one runner.

    All memory is taken and every kernel is loaded (and compiled, where it is not ready made) here: what is
    allocated later could land in the memory pool of a CUDA graph.

    Args:
        setup: what the runner needs.
        prefill: FlashInfer's kernels for prompt chunks: fa2, fa3, or auto. Exact numerics take fa2, whose rows do not
            depend on how the keys are split.

    Raises:
        UnsupportedError: a kernel cannot be built or run.
        CapacityError: the workspaces do not fit.
    """

    def __init__(self, setup: AttentionSetup, prefill: str | None = None) -> None:
        self._kinds = tuple(dict.fromkeys(setup.layers))
        prefill = prefill or ("fa2" if setup.exact else "auto")
        try:
            compiler = prebuilt.use(setup, only_fa2=prefill == "fa2")
            self.implementation = f"flashinfer {_version()}" + (f" ({compiler})" if compiler else "")
            workspace = torch.zeros(_float_workspace(setup), dtype=torch.uint8, device=setup.device)
            self._buckets = {bucket: _BucketAttention(bucket, setup, workspace, prefill) for bucket in setup.buckets}
            for bucket in self._buckets.values():
                bucket.prime()
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"no memory for FlashInfer's workspaces: {one_line(error)}") from error
        except CompspecError:
            raise
        except Exception as error:  # compilers, loaders and kernels each raise their own
            raise UnsupportedError(
                f"FlashInfer cannot run here ({type(error).__name__}: {one_line(error)}); "
                "see compspec doctor, or choose another model.attention"
            ) from error

    def arithmetic(self, bucket: Bucket) -> object:
        """See `AttentionBackend.arithmetic`: how many rows a tile has decides how keys are cut."""
        return tuple(tile_rows(bucket, spec) for spec in self._kinds)

    def plan(self, bucket: Bucket, block_table: NDArray[np.int32], starts: NDArray[np.int64]) -> "FlashInferPlan":
        """See `AttentionBackend.plan`."""
        return self._buckets[bucket].plan(block_table, starts)


class FlashInferPlan:
    """One forward of one bucket. Runs until the bucket is planned again."""

    def __init__(self, bucket: "_BucketAttention", number: int) -> None:
        self._bucket = bucket
        self._number = number

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_positions: Tensor,
        block_size: int,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        """See `AttentionPlan.paged_attention`. Tables, lengths and positions are those of the plan."""
        if self._number != self._bucket.num_plans:
            raise CompspecError("attention ran with a plan that a newer one has superseded")
        spec = LayerSpec(
            num_heads=q.shape[1],
            num_kv_heads=k_cache.shape[1],
            head_dim=q.shape[2],
            scale=scale,
            window=window,
            softcap=softcap,
        )
        return self._bucket.run(spec, q, k_cache, v_cache)


class _BucketAttention:
    """The wrappers of one bucket, and the buffers that they share."""

    def __init__(self, bucket: Bucket, setup: AttentionSetup, workspace: Tensor, prefill: str) -> None:
        self._bucket = bucket
        self._setup = setup
        self.num_plans = 0
        requests, pages = bucket.num_requests, bucket.num_requests * setup.max_blocks
        sizes = {"qo_indptr": requests + 1, "kv_indptr": requests + 1, "kv_indices": pages, "last_page_len": requests}
        pinned = setup.device.type == "cuda"
        self._staged = {name: torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for name, size in sizes.items()}
        self._sent_indices = torch.zeros(pages, dtype=torch.int32, device=setup.device)
        self._fence = CopyFence(setup.device)
        buffers = {name: torch.zeros(size, dtype=torch.int32, device=setup.device) for name, size in sizes.items()}
        self._wrappers = {
            spec: _make_wrapper(bucket, buffers, workspace, "fa2" if bucket.is_decode else prefill)
            for spec in dict.fromkeys(setup.layers)
        }

    def plan(self, block_table: NDArray[np.int32], starts: NDArray[np.int64]) -> FlashInferPlan:
        bucket, setup = self._bucket, self._setup
        indices = paged_indices(block_table, starts, bucket.query_len, setup.block_size)
        # The copies out of pinned memory, ours and the planner's, must be over before it is written again.
        self._fence.wait()
        staged = self._stage(indices)
        try:
            sent = self._sent_indices[: len(indices.kv_indices)]
            sent.copy_(staged["kv_indices"], non_blocking=True)
            for spec, wrapper in self._wrappers.items():
                self._plan_layer(wrapper, spec, staged, sent)
        finally:
            self._fence.raise_()
        self.num_plans += 1
        return FlashInferPlan(self, self.num_plans)

    def _stage(self, indices: PagedIndices) -> dict[str, Tensor]:
        staged = {}
        for name, buffer in self._staged.items():
            values = torch.from_numpy(getattr(indices, name))
            staged[name] = buffer[: len(values)]
            staged[name].copy_(values)
        return staged

    def _plan_layer(self, wrapper: Any, spec: LayerSpec, staged: dict[str, Tensor], sent_indices: Tensor) -> None:
        setup = self._setup
        pages = (staged["kv_indptr"], sent_indices, staged["last_page_len"])
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, setup.block_size)
        options: dict[str, Any] = {
            "window_left": spec.window - 1 if spec.window else -1,
            "logits_soft_cap": spec.softcap or None,
            "sm_scale": spec.scale,
            "q_data_type": setup.dtype,
            "kv_data_type": setup.dtype,
            "disable_split_kv": setup.exact,
        }
        if self._bucket.is_decode:
            wrapper.plan(*pages, *shape, q_len_per_req=self._bucket.query_len, **options)
        else:
            wrapper.plan(staged["qo_indptr"], *pages, *shape, causal=True, **options)
        if setup.exact:
            wrapper._plan_info = self._without_padding(wrapper._plan_info, spec)

    def _without_padding(self, info: Any, spec: LayerSpec) -> Any:
        """The plan with a grid of the tiles that there are.

        Where keys are not split, FlashInfer 0.6 launches at least two blocks per multiprocessor, and those without a
        tile of their own compute the first one again (flashinfer issues 4002 and 4430). The tiles come first in the
        grid. A plan of another layout is left as it is: what the others read is zero since the wrapper was made.
        """
        numbers = [int(number) for number in info]
        if len(numbers) != _PLAN_NUMBERS or numbers[_SPLITS_KEYS]:
            return info
        packed = self._bucket.query_len * (spec.num_heads // spec.num_kv_heads)
        numbers[_GRID] = self._bucket.num_requests * -(-packed // numbers[_TILE_ROWS])
        return type(info)(numbers)

    def run(self, spec: LayerSpec, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        wrapper = self._wrappers.get(spec)
        if wrapper is None:
            raise CompspecError(f"attention was not planned for {spec}")
        if len(q) != self._bucket.num_tokens:
            raise CompspecError(f"attention was planned for {self._bucket}, it got {len(q)} rows")
        pages = (-1, self._setup.block_size, spec.num_kv_heads, spec.head_dim)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        wrapper.run(q, (k_cache.view(pages), v_cache.view(pages)), out=out, enable_pdl=False)
        return out

    def prime(self) -> None:
        """Plans and runs once on a cache of one block, so that nothing is loaded or allocated later."""
        bucket, setup = self._bucket, self._setup
        table = np.full((bucket.num_requests, setup.max_blocks), SCRATCH_BLOCK, dtype=np.int32)
        self.plan(table, np.zeros(bucket.num_requests, dtype=np.int64))
        for spec in self._wrappers:
            options: dict[str, Any] = {"dtype": setup.dtype, "device": setup.device}
            q = torch.zeros(bucket.num_tokens, spec.num_heads, spec.head_dim, **options)
            cache = torch.zeros(setup.block_size, spec.num_kv_heads, spec.head_dim, **options)
            self.run(spec, q, cache, cache)
        self.num_plans += 1  # this plan is not for use


def _make_wrapper(bucket: Bucket, buffers: dict[str, Tensor], workspace: Tensor, backend: str) -> Any:
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    if bucket.is_decode:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffers["kv_indptr"],
            paged_kv_indices_buffer=buffers["kv_indices"],
            paged_kv_last_page_len_buffer=buffers["last_page_len"],
            backend=backend,
        )
    else:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=buffers["qo_indptr"],
            paged_kv_indptr_buf=buffers["kv_indptr"],
            paged_kv_indices_buf=buffers["kv_indices"],
            paged_kv_last_page_len_buf=buffers["last_page_len"],
            backend=backend,
        )
    wrapper.reset_workspace_buffer(workspace, torch.zeros(_INT_WORKSPACE, dtype=torch.uint8, device=workspace.device))
    # Blocks beyond the work read what the planner left there: zeros stand for a tile that is computed twice.
    wrapper._pin_memory_int_workspace_buffer.zero_()
    return wrapper


def _float_workspace(setup: AttentionSetup) -> int:
    """Bytes for the partial results of split keys: of every block of the grid one tile of outputs and scales."""
    most = _LEAST_FLOAT_WORKSPACE
    if setup.exact:
        return most
    for bucket, spec in itertools.product(setup.buckets, dict.fromkeys(setup.layers)):
        rows = tile_rows(bucket, spec)
        tiles = -(-bucket.query_len * (spec.num_heads // spec.num_kv_heads) // rows)
        # Plans of one row per request count a tile more for each of them.
        blocks = max(bucket.num_requests * (tiles + 1), 2 * _num_multiprocessors(setup.device) // spec.num_kv_heads)
        most = max(most, spec.num_heads * blocks * rows * 4 * (spec.head_dim + 1) + 64)
    return most


def tile_rows(bucket: Bucket, spec: LayerSpec) -> int:
    """Query rows times heads per KV head that one tile of fa2 has.

    Source: `FA2DetermineCtaTileQ` and its callers in flashinfer's utils.cuh and scheduler.cuh.
    """
    packed = bucket.query_len * (spec.num_heads // spec.num_kv_heads)
    if packed > 64 and spec.head_dim < 256:
        return 128
    return 64 if packed > 16 else 16


def _version() -> str:
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
