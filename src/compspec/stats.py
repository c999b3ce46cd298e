"""Statistics of an engine: the sum over its requests, and what its steps cost."""

from dataclasses import dataclass, field

from compspec.request import RequestStats


@dataclass(slots=True, kw_only=True)
class SpecStats:
    """Sums over finished requests and over the engine's steps.

    Attributes:
        num_requests: finished requests.
        num_prompt_tokens, num_output_tokens: of those requests.
        num_cached_tokens: prompt tokens of them whose keys and values came from the prefix cache.
        num_preemptions: how often a request lost its blocks, as a rule to an older one, and resumed later.
        num_undrafted_steps, num_probes: request-steps in which nothing was drafted because drafts did not pay, and how
            often it was tried again.
        num_decode_steps, num_decode_tokens: request-steps after the prompt, and the tokens they gave.
        num_draft_tokens, num_accepted_tokens: drafts verified and kept.
        drafted_per_position, accepted_per_position: by position in the window.
        num_forwards: forwards of the target model, and of them `num_prefill_forwards` for prompts.
        forward_s, propose_s, sample_s, step_s: seconds in the model, in drafting, in sampling and
            verifying, and in whole steps. A GPU works on while the host goes ahead: then these are the host's.
        verify_s: seconds of `sample_s` in the verifier, where the host waits for the device.
        prefill_s, prefill_tokens: seconds and prompt tokens of prefill steps.
        num_compiled_buckets, compile_s: static shapes compiled at start-up, and how long that took.
        first_token_at: when the first output token of all was there, on the clock of `time.perf_counter`; None before.
        num_recompilations: compilations after start-up; anything but 0 is a bug.
        num_cuda_graphs: static shapes that are one CUDA graph each; all of them on CUDA under `reduce-overhead`.
        num_cuda_graph_skips: graphs that torch left out, at start-up or later.
        num_cuda_graph_rerecordings: captures after start-up; anything but 0 is a bug.
        num_eager_steps: forwards that ran without a compiled bucket: none, or all under `compile.mode: none`.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_undrafted_steps: int = 0
    num_probes: int = 0
    num_decode_steps: int = 0
    num_decode_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    num_forwards: int = 0
    num_prefill_forwards: int = 0
    forward_s: float = 0.0
    propose_s: float = 0.0
    sample_s: float = 0.0
    verify_s: float = 0.0
    step_s: float = 0.0
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    num_compiled_buckets: int = 0
    compile_s: float = 0.0
    first_token_at: float | None = None
    num_recompilations: int = 0
    num_cuda_graphs: int = 0
    num_cuda_graph_skips: int = 0
    num_cuda_graph_rerecordings: int = 0
    num_eager_steps: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verified request-step, the extra token included."""
        return self.num_decode_tokens / self.num_decode_steps if self.num_decode_steps else 1.0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """The share of prompt tokens that the prefix cache had; 0.0 before the first request is finished."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Of the drafts verified at each position, the share that was kept."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]

    @property
    def decode_s(self) -> float:
        """Seconds in steps that were not prefill."""
        return self.step_s - self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Output tokens after each request's first, per second of decode steps."""
        return self.num_decode_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second of prefill steps."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def host_ms_per_step(self) -> float:
        """Milliseconds of a step outside the model's forward."""
        return (self.step_s - self.forward_s) / self.num_forwards * 1e3 if self.num_forwards else 0.0

    def add_request(self, stats: RequestStats, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Adds a finished request."""
        self.num_requests += 1
        self.num_prompt_tokens += num_prompt_tokens
        self.num_output_tokens += num_output_tokens
        self.num_cached_tokens += stats.num_cached_tokens
        self.num_preemptions += stats.num_preemptions
        self.num_undrafted_steps += stats.num_undrafted_steps
        self.num_probes += stats.num_probes
        self.num_decode_steps += stats.num_decode_steps
        self.num_decode_tokens += stats.num_decode_tokens
        self.num_draft_tokens += stats.num_draft_tokens
        self.num_accepted_tokens += stats.num_accepted_tokens
        missing = len(stats.drafted_per_position) - len(self.drafted_per_position)
        self.drafted_per_position.extend([0] * missing)
        self.accepted_per_position.extend([0] * missing)
        for position, drafted in enumerate(stats.drafted_per_position):
            self.drafted_per_position[position] += drafted
            self.accepted_per_position[position] += stats.accepted_per_position[position]
