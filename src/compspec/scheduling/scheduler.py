"""Continuous batching: which requests run in the next step, and what a step's tokens do to them."""

import bisect
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from compspec.batch import Batch, ScheduledRequest, StepOutput
from compspec.errors import CapacityError, one_line
from compspec.request import FinishReason, Request, TokenDelta, TokenLogprobs
from compspec.scheduling.block_pool import BlockPool
from compspec.scheduling.prefix_cache import PrefixCache


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


class Scheduler:
    """First come, first served, over a fixed number of slots and a pool of KV blocks.

    A request takes blocks as it needs them. Where none are left, the youngest request that runs gives all of its
    blocks back and waits; it resumes from its tokens. The oldest never has to, and every request fits into the pool
    on its own, so the oldest always goes on, and in time each request is the oldest.

    A request that is behind catches up: with its prompt in chunks, which depend on the prompt's length alone, and with
    an output that lost its blocks in decode steps, whose rows get the bits that they had when they were sampled.
    Where prompts and decoding requests are both there, prompt chunks and decode steps take turns.

    Args:
        pool: the KV blocks.
        prefix_cache: where requests find the beginnings of others; None for no sharing.
        max_num_seqs: slots.
        prefill_chunk: tokens per prompt chunk.
        query_len: rows that a decode step has for a request.
        max_draft_tokens: K.
        eos_token_ids: the model's end tokens.
        num_final_tokens: of a request that has blocks, how many of its tokens from the first are computed for whatever
            uses the blocks beside the target.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        prefix_cache: PrefixCache | None = None,
        max_num_seqs: int,
        prefill_chunk: int,
        query_len: int,
        max_draft_tokens: int,
        eos_token_ids: frozenset[int],
        num_final_tokens: Callable[[Request], int] = lambda request: request.num_computed_tokens,
    ) -> None:
        self.pool = pool
        self.waiting: list[Request] = []  # both in order of rank
        self.running: list[Request] = []
        self._prefix_cache = prefix_cache
        self._prefill_chunk = prefill_chunk
        self._query_len = query_len
        self._max_draft_tokens = max_draft_tokens
        self._eos_token_ids = eos_token_ids
        self._num_final_tokens = num_final_tokens
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._numbers = itertools.count()
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
        request.rank = (request.params.priority, next(self._numbers))
        self._wait(request)

    def abort(self, request: Request) -> None:
        """Ends a request now; its slot and blocks are free when this returns."""
        if request.finish_reason is None:
            request.finish_reason = FinishReason.ABORT
            self.drop(request)

    def drop(self, request: Request) -> None:
        """Takes an aborted request's slot and blocks, or its place among those that wait."""
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self._retire(request)

    def preempt(self, request: Request) -> bool:
        """Takes the blocks and the slot of a request that runs; it waits, and resumes with the tokens it has.

        Returns:
            Whether it was running.
        """
        if request.slot is None:
            return False
        self._retire(request)
        request.num_computed_tokens = 0
        request.num_kept_blocks = 0
        request.stats.num_preemptions += 1
        self._wait(request)
        return True

    def schedule(self) -> Batch | None:
        """Chooses the next step, or None when nothing can run."""
        self._admit()
        if not self.running:
            assert not self.waiting, "a request that fits an empty cache was not admitted"
            return None
        if self._prefix_cache is not None:
            for request in self.running:
                if request.is_behind:
                    self._prefix_cache.take(request)
        preempted: list[Request] = []
        kinds = (
            (self._decode_rows, self._prompt_chunk)
            if self._last_was_prefill
            else (self._prompt_chunk, self._decode_rows)
        )
        for kind in kinds:
            scheduled = kind(preempted)
            if scheduled:
                self._last_was_prefill = kind == self._prompt_chunk
                return Batch(scheduled=tuple(scheduled), is_prefill=self._last_was_prefill, preempted=tuple(preempted))
        raise AssertionError("the oldest request can always run")

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
            if request.finish_reason is not None or request.slot is None:
                continue  # aborted or preempted while the step ran: a dropped stream can be collected at any moment
            request.num_computed_tokens += entry.num_new_tokens + num_accepted
            if not entry.samples:
                self._keep_prefix(request)
                continue
            kept, finish_reason = self._cut(request, token_ids)
            if request.finish_reason is not None:
                continue  # aborted by its own check for stop texts
            if finish_reason is None and error is not None:
                finish_reason, request.error = FinishReason.ERROR, error
            request.append(kept)
            num_kept = min(num_accepted, len(kept))
            kept_logprobs = None if reported is None else tuple(reported[: len(kept)])
            if kept_logprobs is not None and request.logprobs is not None:
                request.logprobs += kept_logprobs
            if batch.is_prefill:
                request.first_token_at = now
                request.stats.num_steps += 1
                request.stats.prefill_s = now - request.admitted_at
            else:
                request.stats.count_step(num_drafts, num_kept, len(kept))
                request.stats.decode_s = now - request.first_token_at
            self._keep_prefix(request)
            request.finish_reason = finish_reason
            if finish_reason is not None:
                self._retire(request)
            deltas.append(
                TokenDelta(
                    request=request,
                    token_ids=tuple(kept),
                    finish_reason=finish_reason,
                    logprobs=kept_logprobs,
                    num_draft_tokens=num_drafts,
                    num_accepted_tokens=num_kept,
                )
            )
        return deltas

    def _wait(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=_rank)

    def _admit(self) -> None:
        """Starts those that wait, in their order, while there are slots, and blocks for all that is known of them."""
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            if self._num_missing(request) + self._num_promised(self.running) > self.pool.num_free:
                return
            self.waiting.pop(0)
            request.slot = self._free_slots.pop()
            now = time.perf_counter()
            if request.stats.num_preemptions == 0:
                request.admitted_at = now
                request.stats.queue_s = now - request.arrived_at
            bisect.insort(self.running, request, key=_rank)

    def _num_promised(self, requests: Iterable[Request]) -> int:
        """Blocks that requests which run will need: for what is known of them, and one to go on."""
        return sum(max(0, self._num_missing(request)) + 1 for request in requests)

    def _num_missing(self, request: Request) -> int:
        """Blocks to be taken until the next token is sampled; those that others hold as well need not be."""
        needed = self.pool.blocks_for(request.num_tokens) - len(request.block_ids)
        found = self._prefix_cache.find(request) if self._prefix_cache is not None and needed > 0 else []
        return needed - sum(self.pool.num_holders(block) > 0 for block in found)

    def _reserve(self, request: Request, num_tokens: int, preempted: list[Request]) -> bool:
        """Makes room for so many tokens of a request, at the cost of younger ones; False if those are not enough."""
        while True:
            missing = self.pool.blocks_for(num_tokens) - len(request.block_ids)
            if missing <= self.pool.num_free:
                self._add_blocks(request, missing)
                return True
            youngest = self.running[-1]
            if youngest is request:
                return False
            self.preempt(youngest)
            preempted.append(youngest)

    def _add_blocks(self, request: Request, count: int) -> None:
        """In a new list, and only where there is something to add: whoever knows the old one knows its blocks."""
        if count > 0:
            request.block_ids = [*request.block_ids, *self.pool.allocate(count)]

    def _prompt_chunk(self, preempted: list[Request]) -> list[ScheduledRequest]:
        """The next chunk of the first request whose prompt is not computed; none if it has to wait for blocks."""
        request = next((each for each in self.running if each.is_prefilling), None)
        if request is None:
            return []
        length = min(self._prefill_chunk, request.num_prompt_tokens - request.num_computed_tokens)
        if not self._reserve(request, request.num_computed_tokens + length, preempted):
            return []
        return [self._entry(request, num_new_tokens=length, max_draft_tokens=0)]

    def _decode_rows(self, preempted: list[Request]) -> list[ScheduledRequest]:
        """Every request whose prompt is computed, the oldest first."""
        entries = []
        for request in [each for each in self.running if not each.is_prefilling]:
            if request.slot is None:
                continue  # gave way to an older one just now
            count = min(self._query_len, request.num_tokens - request.num_computed_tokens)
            if self._reserve(request, request.num_computed_tokens + count, preempted):
                entries.append(self._entry(request, num_new_tokens=count, max_draft_tokens=0))
            else:
                self.preempt(request)
                preempted.append(request)
        promised = self._num_promised(self.running)
        return [self._with_drafts(entry, promised - 1) for entry in entries]

    def _with_drafts(self, entry: ScheduledRequest, promised: int) -> ScheduledRequest:
        """Adds room for drafts, as far as there are blocks that nobody needs: nobody is preempted for a guess.

        Args:
            promised: free blocks that the others need.
        """
        request = entry.request
        if request.is_behind:
            return entry
        # One token always comes from the target itself, so drafts beyond the limit can never be kept.
        room = request.max_tokens - request.num_output_tokens - 1
        asked = request.params.speculative
        drafts = min(self._max_draft_tokens if asked is None else int(asked), self._max_draft_tokens, room)
        missing = self.pool.blocks_for(request.num_tokens + drafts) - len(request.block_ids)
        if missing > 0:
            missing = min(missing, max(0, self.pool.num_free - promised))
            blocks = len(request.block_ids) + missing
            drafts = min(drafts, blocks * self.pool.block_size - request.num_tokens)
        self._add_blocks(request, missing)
        return replace(entry, max_draft_tokens=drafts) if drafts else entry

    @staticmethod
    def _entry(request: Request, *, num_new_tokens: int, max_draft_tokens: int) -> ScheduledRequest:
        assert request.slot is not None
        return ScheduledRequest(
            request=request,
            slot=request.slot,
            num_computed_tokens=request.num_computed_tokens,
            num_new_tokens=num_new_tokens,
            max_draft_tokens=max_draft_tokens,
            samples=request.num_computed_tokens + num_new_tokens == request.num_tokens,
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

    def _keep_prefix(self, request: Request) -> None:
        if self._prefix_cache is not None:
            final = min(request.num_computed_tokens, self._num_final_tokens(request))
            self._prefix_cache.keep(request, final)

    def _retire(self, request: Request) -> None:
        assert request.slot is not None
        self.running.remove(request)
        self.pool.release(request.block_ids)
        request.block_ids = []
        self._free_slots.append(request.slot)
        request.slot = None
