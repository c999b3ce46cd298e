"""The engine: token ids in, token ids out. `Engine.step` is the whole algorithm."""

import itertools
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from compspec.batch import Batch, DraftTokens, StepOutput
from compspec.config import EngineConfig
from compspec.errors import ConfigError, NumericsError, RequestError, UnsupportedError
from compspec.models.loader import LoadedModel, load_model
from compspec.proposers.proposer import Proposer, Target, check_drafts, make_proposer
from compspec.request import EndCheck, FinishReason, Request, TokenDelta
from compspec.runner import compiled
from compspec.runner.model_runner import ModelRunner, Progress
from compspec.runner.self_test import SelfTestResult, StoredSelfTest, run_self_test
from compspec.sampling.logprobs import step_logprobs
from compspec.sampling.metadata import MetadataState, group_sizes
from compspec.sampling.noise import DRAFT_STREAM, TARGET_STREAM, GumbelNoise
from compspec.sampling.params import SamplingParams
from compspec.sampling.rejection import RejectionVerifier
from compspec.sampling.sampler import Sampler
from compspec.sampling.verifier import EqualityVerifier, Verifier
from compspec.scheduling.admission import Limits, check_request
from compspec.scheduling.block_pool import BlockPool
from compspec.scheduling.draft_length import DraftLengths
from compspec.scheduling.prefix_cache import PrefixCache
from compspec.scheduling.scheduler import Scheduler
from compspec.scoring.batch_expansion import BatchExpansionScorer
from compspec.scoring.multi_query import MultiQueryScorer
from compspec.scoring.prompt import PromptScorer
from compspec.scoring.scorer import Scorer
from compspec.stats import SpecStats
from compspec.version import __version__

logger = logging.getLogger(__name__)


class Engine:
    """Continuous batching with speculation over one model.

    Args:
        config: everything that can be set.
        loaded: the model, if it is loaded already; else `config.model` is.
        proposer: takes the place of the one that the configuration names.
        progress: told of each step of the start-up.

    Raises:
        ConfigError, ModelError, UnsupportedError, CapacityError, NumericsError: as their names say.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        loaded: LoadedModel | None = None,
        proposer: Proposer | None = None,
        progress: Progress | None = None,
    ) -> None:
        logger.info("configuration: %s", config.model_dump_json())
        speculative = config.speculative
        self.config = config
        # First, because it is cheap and a wrong option should not wait for the weights.
        self._proposer = proposer or make_proposer(
            speculative.method, speculative.options, speculative.num_draft_tokens
        )
        self._max_draft_tokens = speculative.max_draft_tokens
        if proposer is not None and self._max_draft_tokens == 0:
            raise ConfigError("a proposer is given, but speculative.method is none; name the method it stands in for")
        if config.compile.mode != "none":
            compiled.prepare(config.cache_path)
        loaded = loaded or load_model(config.model, config.cache_path)
        beside = self._proposer.load(loaded, config)
        self.loaded = loaded
        adapter = loaded.adapter
        self.max_model_len = adapter.max_model_len
        self.vocab_size = adapter.vocab_size
        self.stats = SpecStats()
        self.runner = ModelRunner(adapter, config, self.max_model_len, beside=beside)
        self.pool = BlockPool(self.runner.num_blocks, config.cache.block_size)
        exact, chunk = config.numerics.mode == "exact", config.numerics.prefill_chunk
        self.scheduler = Scheduler(
            self.pool,
            prefix_cache=PrefixCache(self.pool, chunk if exact else None) if config.cache.prefix_caching else None,
            max_num_seqs=config.scheduler.max_num_seqs,
            prefill_chunk=chunk,
            query_len=config.query_len,
            max_draft_tokens=self._max_draft_tokens,
            eos_token_ids=frozenset(adapter.eos_token_ids),
            num_final_tokens=self._proposer.num_computed_tokens,
        )
        expands = speculative.scorer == "batch_expansion"
        self._scorer: Scorer = BatchExpansionScorer(self.runner) if expands else MultiQueryScorer(self.runner)
        self._prompt_scorer = PromptScorer(self.runner)
        self._metadata = MetadataState(
            config.scheduler.max_num_seqs,
            adapter.vocab_size,
            adapter.device,
            max_model_len=self.max_model_len,
            eos_token_ids=adapter.eos_token_ids,
        )
        self._noise = compiled.compile_noise(GumbelNoise(adapter.vocab_size, adapter.device), config.compile.mode)
        num_token_ids = adapter.vocab_size
        if loaded.tokenizer is not None:
            num_token_ids = min(num_token_ids, max(loaded.tokenizer.get_vocab().values()) + 1)
        self._limits = Limits(
            max_model_len=self.max_model_len,
            vocab_size=adapter.vocab_size,
            num_token_ids=num_token_ids,
            eos_token_ids=frozenset(adapter.eos_token_ids),
        )
        self._sampler = Sampler(self._noise, num_token_ids)
        self._verifier: Verifier = EqualityVerifier()
        if speculative.verifier == "rejection":
            self._verifier = RejectionVerifier(self._noise, block=speculative.block_verification)
        self._draft_lengths = self._make_draft_lengths()
        self._is_stepping = False
        self._deferred: list[Request] = []  # aborted or preempted from within a step
        self._requests: dict[str, Request] = {}
        self.num_aborts = 0
        self._numbers = itertools.count()
        self._start(progress)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        end_check: EndCheck | None = None,
    ) -> Request:
        """Queues a request; it runs as `step` is called.

        Args:
            prompt_token_ids: at least one token, fewer than the model's length.
            params: defaults to the configuration's `sampling`.
            request_id: must not be in use; default: a number.
            end_check: told of each output token in turn, says whether a stop text ends there. Tokens that end the
                output by their id are not shown to it. If it raises, its request alone ends with an error.

        Raises:
            RequestError: an empty or too long prompt, ids outside the vocabulary, an id in use, parameters that leave
                no token to sample.
            UnsupportedError: parameters that need text (`stop` without `end_check`, bad words that are not token
                ids), or more than one sample; `LLM` does these.
            CapacityError: the request could never fit into the KV cache.
        """
        params = params or self.config.sampling
        if request_id is None:
            request_id = next(name for name in map(str, self._numbers) if name not in self._requests)
        elif request_id in self._requests:
            raise RequestError(f"request id '{request_id}' is in use")
        prompt = self.check_request(prompt_token_ids, params)
        if params.stop and end_check is None:
            raise UnsupportedError("stop texts need a tokenizer, the engine knows token ids alone; use LLM")
        if params.n > 1:
            raise UnsupportedError(f"the engine makes one sample per request, n is {params.n}; use LLM")
        request = Request(
            request_id,
            prompt,
            params,
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            max_tokens=min(params.max_tokens, self.max_model_len - len(prompt)),
            end_check=end_check,
        )
        if self._max_draft_tokens == 0:
            request.stats.speculation_off_because = "speculative.method is none"
        elif params.speculative is False:
            request.stats.speculation_off_because = "the request asked for none"
        self.scheduler.add(request)
        self._requests[request_id] = request
        return request

    @torch.no_grad()
    def step(self) -> list[TokenDelta]:
        """Runs one step: a prompt chunk, or one verification of every decoding request.

        Returns:
            What it gave each request that sampled; empty when there was nothing to do.
        """
        with self._deferring():
            return self._step()

    def _step(self) -> list[TokenDelta]:
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        for request in batch.preempted:
            self._forget(request)
        if self._draft_lengths is not None:
            batch = self._draft_lengths.limit(batch)
        drafts = self._propose(batch)
        proposed = time.perf_counter()
        scores = self._scorer.score(batch, drafts)
        scored = time.perf_counter()
        metadata = self._metadata.build(batch, drafts, scores)
        sampled = self._sampler.sample(scores, metadata)
        queued = time.perf_counter()
        output = self._verifier.verify(sampled, metadata, batch, drafts)
        self.stats.verify_s += time.perf_counter() - queued
        logprobs = step_logprobs(batch, scores, metadata, output)
        self._metadata.commit(batch, output)
        self._prompt_scorer.report(batch)
        self._proposer.observe(batch, output)
        deltas = self.scheduler.update(batch, output, logprobs)
        self._account(batch, output, deltas, started, proposed, scored)
        return deltas

    def abort(self, request_id: str) -> TokenDelta | None:
        """Ends a request now and frees what it holds; None if there is no such unfinished request.

        Called from within a step (by a logits processor, a check for stop texts, a stream that is collected), it takes
        effect at once, and what the request holds is free when the step ends.
        """
        request = self._requests.get(request_id)
        if request is None or request.finish_reason is not None:
            return None  # or it ended in this very step, which tells
        del self._requests[request_id]
        if self._is_stepping:
            request.finish_reason = FinishReason.ABORT
            self._deferred.append(request)
        else:
            self.scheduler.abort(request)
            self._forget(request)
        self.num_aborts += 1
        return TokenDelta(request=request, token_ids=(), finish_reason=FinishReason.ABORT)

    def preempt(self, request_id: str) -> bool:
        """Takes the blocks of a request that runs; it resumes later, and its output stays the same.

        Called from within a step, it takes effect when the step ends.

        Returns:
            Whether there is such a request and it was running.
        """
        request = self._requests.get(request_id)
        if request is None or request.slot is None:
            return False
        if self._is_stepping:
            self._deferred.append(request)
        else:
            self.scheduler.preempt(request)
            self._forget(request)
        return True

    def reset(self) -> None:
        """Forgets what ended requests have left: prefix cache, proposers' stores, measured acceptance and times.

        Outputs do not depend on any of it, speed does: a benchmark that runs prompts again needs this.

        Raises:
            RuntimeError: requests are unfinished.
        """
        if self.has_work:
            raise RuntimeError("an engine with unfinished requests cannot be reset")
        self.pool.drop_keys()
        self._proposer.reset()
        self._draft_lengths = self._make_draft_lengths()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def _propose(self, batch: Batch) -> DraftTokens:
        if batch.is_prefill:
            self._proposer.prefill(batch)
            return DraftTokens.from_lists([[] for _ in batch.scheduled], 0)
        drafts = self._proposer.propose(batch)
        check_drafts(batch, drafts, self.vocab_size)
        return drafts

    @contextmanager
    def _deferring(self) -> Iterator[None]:
        """A step, in which no request loses its blocks but by the scheduler."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False
            deferred, self._deferred = self._deferred, []
            for request in dict.fromkeys(deferred):
                if request.finish_reason is FinishReason.ABORT:
                    self.scheduler.drop(request)
                    self._forget(request)
                elif request.finish_reason is None:
                    self.scheduler.preempt(request)
                    self._forget(request)

    def _forget(self, request: Request) -> None:
        """Tells those with state per request that one has ended or was preempted."""
        self._proposer.forget(request)
        if self._draft_lengths is not None:
            self._draft_lengths.forget(request)

    def _make_draft_lengths(self) -> DraftLengths | None:
        if not self.config.speculative.is_adaptive or self._max_draft_tokens == 0:
            return None
        return DraftLengths(self._max_draft_tokens, self._scorer.bucket_of)

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """Refuses a request that this engine cannot run; `add_request` does the same.

        Returns:
            The prompt as a list of plain integers.

        Raises:
            RequestError, UnsupportedError: as `add_request`.
        """
        return check_request(prompt_token_ids, params, self._limits)

    def _account(
        self,
        batch: Batch,
        output: StepOutput,
        deltas: list[TokenDelta],
        started: float,
        proposed: float,
        scored: float,
    ) -> None:
        stats = self.stats
        if self._draft_lengths is not None and not deltas and self.loaded.adapter.device.type == "cuda":
            # Nothing was read, so the device is still at work: the next step must not be charged with it.
            torch.cuda.synchronize()
        ended = time.perf_counter()
        if stats.first_token_at is None and any(delta.token_ids for delta in deltas):
            stats.first_token_at = ended
        stats.num_forwards += 1
        stats.propose_s += proposed - started
        stats.forward_s += scored - proposed
        stats.sample_s += ended - scored
        stats.step_s += ended - started
        if self._draft_lengths is not None:
            self._draft_lengths.observe(batch, output, propose_s=proposed - started, step_s=ended - started)
        if batch.is_prefill:
            stats.num_prefill_forwards += 1
            stats.prefill_s += ended - started
            stats.prefill_tokens += sum(entry.num_new_tokens for entry in batch.scheduled)
        stats.num_recompilations = compiled.num_compilations() - self._compiled_at_start
        runners = self._runners()
        stats.num_eager_steps = sum(runner.num_eager_runs for runner in runners)
        stats.num_cuda_graph_rerecordings = sum(runner.late_graphs.recordings for runner in runners)
        stats.num_cuda_graph_skips = sum(runner.num_skips + runner.late_graphs.skips for runner in runners)
        for delta in deltas:
            if delta.finish_reason is not None:
                request = delta.request
                del self._requests[request.request_id]
                self._forget(request)
                stats.add_request(request.stats, request.num_prompt_tokens, request.num_output_tokens)

    def _runners(self) -> list[ModelRunner]:
        """The target's, and those of models that draft."""
        return [self.runner, *self._proposer.runners]

    def _start(self, progress: Progress | None) -> None:
        """Compiles, warms up and tests; afterwards nothing compiles."""
        watch = compiled.Stopwatch()
        buckets = self.runner.buckets
        exact, policy = self.config.numerics.mode == "exact", self.config.numerics.self_test
        code = self.runner.attention.implementation
        parts = [self.loaded.fingerprint, self.config.compile.mode, code, __version__]
        stored = StoredSelfTest(self.runner, parts, self.config.cache_path / "self_test")
        known = stored.load() if exact and policy != "skip" else None
        if exact and policy == "skip":
            buckets.restrict_decode([buckets.widest_decode])
        elif known is not None:
            self._keep_exact_buckets(known)
        self.runner.warm_up(progress)
        if exact and policy != "skip" and known is None:
            tested = compiled.Stopwatch()
            result = run_self_test(self.runner)
            if progress is not None:
                progress("self-test", tested.seconds)
            stored.store(result)
            self._keep_exact_buckets(result)
        self._warm_up_noise()
        self._proposer.start(
            Target(
                config=self.config,
                runner=self.runner,
                metadata=self._metadata,
                sampler=self._sampler,
                stream=TARGET_STREAM if self.config.speculative.verifier == "equality" else DRAFT_STREAM,
                progress=progress,
            )
        )
        runners = self._runners()
        is_compiled = self.config.compile.mode != "none"
        self.stats.num_compiled_buckets = sum(len(runner.buckets.all) for runner in runners) if is_compiled else 0
        self.stats.compile_s = watch.seconds
        self.stats.num_cuda_graphs = sum(runner.num_graphs for runner in runners)
        self._compiled_at_start = compiled.num_compilations()
        for runner in runners:
            runner.num_eager_runs = 0

    def _keep_exact_buckets(self, result: SelfTestResult) -> None:
        """Keeps the decode buckets that the self-test found bit-equal; the widest is needed in any case.

        Raises:
            NumericsError: in the widest bucket rows depend on their neighbours, and `numerics.self_test` is `error`.
        """
        widest = self.runner.buckets.widest_decode
        keep = list(result.equal)
        if widest in result.dependent:
            message = (
                f"numerics: exact does not hold on this machine with this model: in bucket {widest} a row's bits "
                "depend on its place or its neighbours; use another scheduler.max_num_seqs or model.dtype, "
                "numerics: fast, or numerics.self_test: warn"
            )
            if self.config.numerics.self_test == "error":
                raise NumericsError(message)
            logger.warning(message)
            keep.append(widest)
        dropped = [str(bucket) for bucket in self.runner.buckets.decode if bucket not in keep]
        if dropped:
            logger.info("not used, because their bits are not those of %s: %s", widest, ", ".join(dropped))
        self.runner.buckets.restrict_decode(keep)

    @torch.no_grad()  # as in a step, else that would be another graph
    def _warm_up_noise(self) -> None:
        for size in group_sizes(self.loaded.adapter.device):
            # Three tensors: one given twice would be a graph of its own.
            seeds, positions, salts = torch.zeros(3, size, dtype=torch.int64, device=self.loaded.adapter.device)
            self._noise(seeds.clone(), positions.clone(), salts.clone())
