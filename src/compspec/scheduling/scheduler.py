"""Continuous batching: which requests run in the next step, and what a step's tokens do to them."""

import time
from collections import deque
from collections.abc import Sequence

from compspec.batch import Batch, ScheduledRequest, StepOutput
from compspec.errors import CapacityError, one_line
from compspec.request import FinishReason, Request, TokenDelta, TokenLogprobs
from compspec.scheduling.block_pool import BlockPool


class Scheduler:
    """First come, first served, over a fixed number of slots and a pool of KV blocks.

    A request is admitted when a slot is free and the pool can hold it at its longest; the blocks are
    taken at once. So a running request never waits for a block, and admission cannot deadlock.
    Where prompts and decoding requests are both there, prompt chunks and decode steps take turns.

    Args:
        pool: the KV blocks.
        max_num_seqs: slots.
        prefill_chunk: tokens per prompt chunk; chunk boundaries are multiples of it.
        max_draft_tokens: K.
        eos_token_ids: the model's end tokens.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        prefill_chunk: int,
        max_draft_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._prefill_chunk = prefill_chunk
        self._max_draft_tokens = max_draft_tokens
        self._eos_token_ids = eos_token_ids
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._last_was_prefill = False

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            CapacityError: it would not fit even into an empty cache.
        """
        needed = self.pool.blocks_for(request.max_total_tokens)
        if needed > self.pool.num_usable:
            raise CapacityError(
                f"request '{request.request_id}' needs {needed} KV blocks for {request.num_prompt_tokens} prompt and "
                f"up to {request.max_tokens} output tokens, the cache has {self.pool.num_usable}; lower max_tokens, "
                f"or raise cache.memory or cache.num_blocks"
            )
        request.arrived_at = time.perf_counter()
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Ends a request now; its slot and blocks are free when this returns."""
        if request.finish_reason is not None:
            return
        request.finish_reason = FinishReason.ABORT
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self._retire(request)

    def schedule(self) -> Batch | None:
        """Chooses the next step, or None when nothing can run."""
        self._admit()
        prefilling = [request for request in self.running if request.is_prefilling]
        decoding = [request for request in self.running if not request.is_prefilling]
        if not self.running:
            assert not self.waiting, "a request that fits an empty cache was not admitted"
            return None
        if prefilling and (not decoding or not self._last_was_prefill):
            self._last_was_prefill = True
            return Batch(scheduled=(self._chunk_of(prefilling[0]),), is_prefill=True)
        self._last_was_prefill = False
        return Batch(scheduled=tuple(map(self._rows_of, decoding)), is_prefill=False)

    def update(
        self, batch: Batch, output: StepOutput, logprobs: Sequence[Sequence[TokenLogprobs] | None] | None = None
    ) -> list[TokenDelta]:
        """Applies a step: counters advance, tokens are cut at the first stop, finished requests leave.

        Args:
            logprobs: per request, one entry for each of its tokens, where asked for.
        """
        now = time.perf_counter()
        deltas = []
        for entry, token_ids, num_drafts, num_accepted, error, reported in zip(
            batch.scheduled,
            output.token_ids,
            output.num_draft_tokens,
            output.num_accepted_tokens,
            output.errors,
            logprobs if logprobs is not None else [None] * len(batch.scheduled),
            strict=True,
        ):
            request = entry.request
            if request.finish_reason is not None:
                continue  # aborted while the step ran: a dropped stream can be collected at any moment
            request.num_computed_tokens += entry.num_new_tokens + num_accepted
            if not entry.samples:
                continue
            kept, finish_reason = self._cut(request, token_ids)
            if finish_reason is None and error is not None:
                finish_reason, request.error = FinishReason.ERROR, error
            request.append(kept)
            kept_logprobs = None if reported is None else tuple(reported[: len(kept)])
            if kept_logprobs is not None and request.logprobs is not None:
                request.logprobs += kept_logprobs
            if batch.is_prefill:
                request.first_token_at = now
                request.stats.num_steps += 1
                request.stats.prefill_s = now - request.admitted_at
            else:
                request.stats.count_step(num_drafts, min(num_accepted, len(kept)), len(kept))
                request.stats.decode_s = now - request.first_token_at
            request.finish_reason = finish_reason
            if finish_reason is not None:
                self._retire(request)
            deltas.append(
                TokenDelta(request=request, token_ids=tuple(kept), finish_reason=finish_reason, logprobs=kept_logprobs)
            )
        return deltas

    def _admit(self) -> None:
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            needed = self.pool.blocks_for(request.max_total_tokens)
            if needed > self.pool.num_free:
                return
            self.waiting.popleft()
            request.block_ids = self.pool.allocate(needed)
            request.slot = self._free_slots.pop()
            request.admitted_at = time.perf_counter()
            request.stats.queue_s = request.admitted_at - request.arrived_at
            self.running.append(request)

    def _chunk_of(self, request: Request) -> ScheduledRequest:
        remaining = request.num_prompt_tokens - request.num_computed_tokens
        length = min(self._prefill_chunk, remaining)
        return self._entry(request, num_new_tokens=length, max_draft_tokens=0, samples=length == remaining)

    def _rows_of(self, request: Request) -> ScheduledRequest:
        assert request.num_tokens - request.num_computed_tokens == 1
        # One token always comes from the target itself, so drafts beyond the limit can never be kept.
        room = request.max_tokens - request.num_output_tokens - 1
        asked = request.params.speculative
        drafts = min(self._max_draft_tokens if asked is None else int(asked), self._max_draft_tokens, room)
        return self._entry(request, num_new_tokens=1, max_draft_tokens=drafts, samples=True)

    @staticmethod
    def _entry(request: Request, *, num_new_tokens: int, max_draft_tokens: int, samples: bool) -> ScheduledRequest:
        assert request.slot is not None
        return ScheduledRequest(
            request=request,
            slot=request.slot,
            num_computed_tokens=request.num_computed_tokens,
            num_new_tokens=num_new_tokens,
            max_draft_tokens=max_draft_tokens,
            samples=samples,
        )

    def _cut(self, request: Request, token_ids: tuple[int, ...]) -> tuple[list[int], FinishReason | None]:
        """The tokens up to and with the first that ends the output, and how it ended."""
        params = request.params
        room = request.max_tokens - request.num_output_tokens
        for index, token in enumerate(token_ids[:room]):
            kept = list(token_ids[: index + 1])
            if token in params.stop_token_ids:
                request.stop_reason = token
                return kept, FinishReason.STOP
            if token in self._eos_token_ids and not params.ignore_eos:
                return kept, FinishReason.STOP
            try:
                text = request.end_check(token) if request.end_check is not None else None
            except Exception as failure:  # a tokenizer's or a caller's code: the other requests go on
                request.error = f"the check for stop texts raised {type(failure).__name__}: {one_line(failure)}"
                return kept, FinishReason.ERROR
            if text is not None:
                request.stop_reason = text
                return kept, FinishReason.STOP
        if len(token_ids) >= room:
            return list(token_ids[:room]), FinishReason.LENGTH
        return list(token_ids), None

    def _retire(self, request: Request) -> None:
        assert request.slot is not None
        self.running.remove(request)
        self.pool.release(request.block_ids)
        request.block_ids = []
        self._free_slots.append(request.slot)
        request.slot = None
