"""Owns the KV cache and the compiled steps of one model, and runs batches of query rows."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from compspec.attention import make_backend
from compspec.attention.backend import AttentionSetup, in_force
from compspec.batch import Bucket
from compspec.config import EngineConfig
from compspec.errors import CapacityError, UnsupportedError, one_line
from compspec.kernels.program import NotRecordable, Program
from compspec.models.adapter import ModelAdapter
from compspec.runner import compiled, graphs, kv_cache
from compspec.runner.buckets import Buckets
from compspec.runner.compile_check import check_compiled
from compspec.runner.inputs import InputBuffers, Query
from compspec.runner.recording import record

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Told what was made ready, and in how many seconds."""

# Block tables are padded to whole runs of this many tokens, so that the gather of a reference backend, which
# reads in such runs, stays inside them.
_TABLE_STEP = 512

# The first call warms up, the second captures, the third replays.
_CAPTURE_CALLS = 3


@contextmanager
def _clear_memory_errors(bucket: Bucket) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"no memory for the forward of {bucket}: {one_line(error)}; lower cache.memory, scheduler.max_num_seqs, "
            "numerics.prefill_chunk or model.max_model_len"
        ) from error


class ModelRunner:
    """Runs the model on `query_len` rows per request; speculation is not its concern.

    Args:
        adapter: the loaded model.
        config: the engine's configuration.
        max_model_len: the longest a request can get, tokens.
        buckets: its shapes; default: those of the target.
        beside: the models that will have keys and values of their own in every block.
        num_blocks: how many blocks there are, with the scratch block; default: as many as the configuration asks for
            or the memory holds.
        caches: the key caches and the value caches of each layer; default: it allocates its own.

    Raises:
        CapacityError: the KV cache does not fit.
        UnsupportedError: this torch cannot compile decoder layers as regions, or no attention backend can serve.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        config: EngineConfig,
        max_model_len: int,
        *,
        buckets: Buckets | None = None,
        beside: Sequence[ModelAdapter] = (),
        num_blocks: int | None = None,
        caches: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
    ) -> None:
        self.adapter = adapter
        self.buckets = buckets or Buckets.of_target(config)
        self.block_size = config.cache.block_size
        self._max_model_len = max_model_len
        self._mode: str = config.compile.mode
        self._strict = config.compile.strict
        self.uses_graphs = self._mode == "reduce-overhead" and adapter.device.type == "cuda"
        # Rows of padding reach beyond the longest request.
        longest = max_model_len + max(bucket.query_len for bucket in self.buckets.all)
        self.max_blocks = -(-longest // _TABLE_STEP) * _TABLE_STEP // self.block_size
        # Before the cache, which takes what memory is left.
        exact = config.numerics.mode == "exact"
        self.attention = make_backend(self._attention_setup(exact), config.model.attention)
        if exact:
            self._drop_other_arithmetic()
        if num_blocks is None:
            available = kv_cache.available_bytes(adapter.device)
            num_blocks = kv_cache.plan_memory(config, [adapter, *beside], max_model_len, available).num_blocks
        self.num_blocks = num_blocks
        if exact:
            adapter.use_row_independent_experts()
        self.k_caches, self.v_caches = caches or kv_cache.allocate(adapter, self.num_blocks, self.block_size)
        adapter.set_kv_buffers(self.k_caches, self.v_caches)
        if self._mode != "none":
            compiled.mark_regions(adapter.module, adapter.decoder_layer_classes)
        self._buffers = {
            bucket: InputBuffers(bucket, self.block_size, self.max_blocks, adapter.device)
            for bucket in self.buckets.all
        }
        self._steps = {
            bucket: compiled.compile_step(self._make_step(), bucket, self._mode, adapter.device, exact=exact)
            for bucket in self.buckets.all
        }
        if self.uses_graphs:
            inputs = [tensor for buffers in self._buffers.values() for tensor in buffers.tensors]
            graphs.keep_addresses([*self.k_caches, *self.v_caches, *inputs])
        self._thread = threading.current_thread()
        self.num_eager_runs = 0
        self.num_skips = 0
        self.late_graphs = graphs.GraphCounts()  # what torch captured and left out in forwards after the warm-up
        self._captured: set[Bucket] = set()
        self._uses_programs = self._mode == "reduce-overhead" and adapter.device.type == "cpu"
        self._programs: dict[Bucket, tuple[Program, Tensor]] = {}

    def _drop_other_arithmetic(self) -> None:
        """Leaves the decode buckets whose attention computes rows in the order of the widest."""
        arithmetic, decode = self.attention.arithmetic, self.buckets.decode
        widest = self.buckets.widest_decode
        keep = [bucket for bucket in decode if arithmetic(bucket) == arithmetic(widest)]
        dropped = [str(bucket) for bucket in decode if bucket not in keep]
        if dropped:
            logger.info("not used, because their attention is not that of %s: %s", widest, ", ".join(dropped))
        self.buckets.restrict_decode(keep)

    @property
    def num_programs(self) -> int:
        """Buckets in use that run as one program each, on a CPU."""
        return len(self._programs.keys() & set(self.buckets.all))

    @property
    def num_graphs(self) -> int:
        """Buckets in use that are one CUDA graph each."""
        return len(self._captured.intersection(self.buckets.all))

    def _attention_setup(self, exact: bool) -> AttentionSetup:
        adapter = self.adapter
        return AttentionSetup(
            layers=tuple(layer.spec for layer in adapter.layers),
            dtype=adapter.dtype,
            device=adapter.device,
            block_size=self.block_size,
            max_blocks=self.max_blocks,
            max_model_len=self._max_model_len,
            buckets=tuple(self.buckets.all),
            exact=exact,
        )

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compiles every bucket, the largest first, on scratch rows, and captures it where graphs are used.

        Raises:
            CapacityError: the forward of a bucket does not fit beside the cache.
            UnsupportedError: no working compiler; or `compile.strict`, and a bucket is not one CUDA graph.
            NumericsError: the compiled step computes something else than the model.
        """
        for bucket in self.buckets.all:
            watch = compiled.Stopwatch()
            with torch.no_grad(), compiled.clear_compile_errors(), _clear_memory_errors(bucket):
                if self.uses_graphs:
                    self._capture(bucket)
                else:
                    self._call(bucket, [])
                    if self._uses_programs:
                        self._record(bucket)
            if progress is not None and self._mode != "none":
                progress(str(bucket), watch.seconds)
        if self._mode != "none":
            check_compiled(self)

    def _capture(self, bucket: Bucket) -> None:
        """Warms up, captures, and replays once."""
        calls: list[graphs.GraphCounts] = []
        with graphs.no_omission(self._strict), graphs.clear_capture_errors(str(bucket)):
            for _ in range(_CAPTURE_CALLS):
                before = graphs.graph_counts()
                self._call(bucket, [])
                calls.append(graphs.graph_counts() - before)
        problem = graphs.capture_problem(calls)
        self.num_skips += sum(call.skips for call in calls)
        if problem is None:
            self._captured.add(bucket)
        elif self._strict:
            raise graphs.not_captured(str(bucket), problem)
        else:
            logger.warning("bucket %s was not captured as a CUDA graph: %s", bucket, problem)

    def _record(self, bucket: Bucket) -> None:
        """Makes a program of a bucket's step, if it can be one, and sees that it computes the same."""
        first, second = self._probe(bucket, 1), self._probe(bucket, 2)
        wanted = self._call(bucket, second).clone()
        buffers = self._buffers[bucket]
        inputs = buffers.fill(first)
        plan = self.attention.plan(bucket, buffers.block_table, buffers.starts)
        try:
            with in_force(plan):
                module, together = self.adapter.module, bucket.num_tokens <= compiled.FEW_ROWS
                known = [*module.parameters(), *module.buffers()]
                program, logits = record(self._steps[bucket], inputs, known, together=together)
        except NotRecordable as reason:
            logger.info("%s does not run as one program: %s", bucket, reason)
            return
        program.forget()
        buffers.fill(second)
        program.run()
        if not torch.equal(logits.view(wanted.shape), wanted):
            logger.warning("%s does not run as one program: the program computes something else", bucket)
            return
        self._programs[bucket] = program, logits

    def _probe(self, bucket: Bucket, factor: int) -> list[Query]:
        """As many rows as there can be, of other tokens for another factor."""
        rows = min(bucket.query_len, (self.num_blocks - 1) * self.block_size, self._max_model_len)
        tokens = [factor * token % self.adapter.vocab_size for token in range(rows)]
        return [Query(token_ids=tokens, start=0, block_ids=list(range(1, self.num_blocks)))] * bucket.num_requests

    @torch.no_grad()
    def run(self, bucket: Bucket, queries: Sequence[Query]) -> Tensor:
        """Runs one batch and writes its keys and values into the cache.

        Args:
            bucket: one of `buckets`; holds at least `queries`.
            queries: the rows of each request.

        Returns:
            logits [R, Q, V] of a decode bucket, [R, 1, V] (each request's last row) of a prefill bucket, in
            the model's dtype. Rows and requests beyond `queries` hold junk. Valid until the next run: it may be the
            same memory.
        """
        self.num_eager_runs += self._mode == "none"
        before = graphs.graph_counts() if self.uses_graphs else graphs.GraphCounts()
        if bucket in self._programs:
            return self._run_program(bucket, queries)
        with compiled.no_recompilation(self._mode):
            logits = self._call(bucket, queries)
        if self.uses_graphs:
            self.late_graphs += graphs.graph_counts() - before
        return logits

    @torch.no_grad()
    def run_eager(self, bucket: Bucket, queries: Sequence[Query]) -> Tensor:
        """As `run`, without the compiler."""
        return self._call(bucket, queries, self._make_step())

    def _call(self, bucket: Bucket, queries: Sequence[Query], step: compiled.StepFunction | None = None) -> Tensor:
        buffers = self._buffers[bucket]
        inputs = buffers.fill(queries)
        plan = self.attention.plan(bucket, buffers.block_table, buffers.starts)
        if self.adapter.layers[0].module.compspec_k_cache is not self.k_caches[0]:
            self.adapter.set_kv_buffers(self.k_caches, self.v_caches)  # another engine of the same model has run
        if self.uses_graphs:
            self._begin_step()
        with in_force(plan):
            logits = (step or self._steps[bucket])(*inputs)
        return logits.view(bucket.num_requests, bucket.num_logits, -1)

    def _run_program(self, bucket: Bucket, queries: Sequence[Query]) -> Tensor:
        self._buffers[bucket].fill(queries)
        program, logits = self._programs[bucket]
        program.run()
        return logits.view(bucket.num_requests, bucket.num_logits, -1)

    def _begin_step(self) -> None:
        """Tells CUDA graphs that the last step's outputs are no longer needed."""
        if threading.current_thread() is not self._thread:
            raise UnsupportedError(
                "CUDA graphs belong to the thread that made the engine, this is another one; make the engine in the "
                "thread that runs it, or set compile.mode: default"
            )
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]

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
