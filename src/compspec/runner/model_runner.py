"""Owns the KV cache and the compiled steps of one model, and runs batches of query rows."""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compspec import attention
from compspec.batch import Bucket
from compspec.config import EngineConfig
from compspec.models.adapter import ModelAdapter
from compspec.runner import compiled, kv_cache
from compspec.runner.buckets import Buckets
from compspec.runner.inputs import InputBuffers, Query

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Told what was made ready, and in how many seconds."""

# Block tables are padded to whole runs of this many tokens, so that the gather of a reference backend, which
# reads in such runs, stays inside them.
_TABLE_STEP = 512


class ModelRunner:
    """Runs the model on `query_len` rows per request; speculation is not its concern.

    Args:
        adapter: the loaded model.
        config: the engine's configuration.
        max_model_len: the longest a request can get, tokens.

    Raises:
        CapacityError: the KV cache does not fit.
        UnsupportedError: this torch cannot compile decoder layers as regions.
    """

    def __init__(self, adapter: ModelAdapter, config: EngineConfig, max_model_len: int) -> None:
        self.adapter = adapter
        self.buckets = Buckets(config)
        self.block_size = config.cache.block_size
        self.memory = kv_cache.plan_memory(config, adapter, max_model_len, kv_cache.available_bytes(adapter.device))
        self.num_blocks = self.memory.num_blocks
        if config.numerics.mode == "exact":
            adapter.use_row_independent_experts()
        self.k_caches, self.v_caches = kv_cache.allocate(adapter, self.num_blocks, self.block_size)
        adapter.set_kv_buffers(self.k_caches, self.v_caches)
        self._mode: str = config.compile.mode
        if self._mode == "reduce-overhead" and not attention.fits_cuda_graphs(adapter.device):
            logger.warning(
                "compile.mode default instead of reduce-overhead: no attention backend here fits CUDA graphs"
            )
            self._mode = "default"
        padded = -(-max_model_len // _TABLE_STEP) * _TABLE_STEP
        self.max_blocks = -(-padded // self.block_size)
        if self._mode != "none":
            compiled.use_cache_folder(config.cache_path)
            compiled.mark_regions(adapter.module, adapter.decoder_layer_classes)
        self._buffers = {
            bucket: InputBuffers(bucket, self.block_size, self.max_blocks, adapter.device)
            for bucket in self.buckets.all
        }
        self._steps = {
            bucket: compiled.compile_step(self._make_step(), bucket, self._mode, adapter.device)
            for bucket in self.buckets.all
        }
        self.num_eager_runs = 0

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles every bucket, the largest first, on scratch rows."""
        for bucket in self.buckets.all:
            watch = compiled.Stopwatch()
            with torch.no_grad(), compiled.clear_compile_errors():
                for _ in range(compiled.warm_up_calls(self.adapter.device)):
                    self._call(bucket, [])
            if progress is not None and self._mode != "none":
                progress(str(bucket), watch.seconds)

    @torch.no_grad()
    def run(self, bucket: Bucket, queries: Sequence[Query]) -> Tensor:
        """Runs one batch and writes its keys and values into the cache.

        Args:
            bucket: one of `buckets`; holds at least `queries`.
            queries: the rows of each request.

        Returns:
            logits [R, Q, V] of a decode bucket, [R, 1, V] (each request's last row) of a prefill bucket, in
            the model's dtype. Rows and requests beyond `queries` hold junk. Valid until the next run.
        """
        self.num_eager_runs += self._mode == "none"
        with compiled.no_recompilation(self._mode):
            return self._call(bucket, queries)

    def _call(self, bucket: Bucket, queries: Sequence[Query]) -> Tensor:
        inputs = self._buffers[bucket].fill(queries)
        compiled.begin_step(self.adapter.device)
        logits = self._steps[bucket](*inputs)
        return logits.view(bucket.num_requests, bucket.num_logits, -1)

    def _make_step(self) -> compiled.StepFunction:
        adapter, block_size = self.adapter, self.block_size

        def step(
            input_ids: Tensor,
            positions: Tensor,
            slot_mapping: Tensor,
            block_table: Tensor,
            seq_lens: Tensor,
            logits_to_keep: Tensor,
        ) -> Tensor:
            return adapter.forward(
                input_ids, positions, slot_mapping, block_table, seq_lens, block_size, logits_to_keep
            )

        return step
