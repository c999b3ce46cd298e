"""One request from submission to its end."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from compspec.sampling.params import SamplingParams


class FinishReason(StrEnum):
    """Why an output ended: a stop token or text, the length limit, the caller, or a failure of this request alone."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Logprob:
    """The model's own log-probability of a token at one place.

    Attributes:
        logprob: natural logarithm, of the raw logits' softmax over the whole vocabulary.
        rank: 1 for the most likely token; of equally likely ones the lowest id comes first.
        token: its text, where a tokenizer is at hand.
    """

    logprob: float
    rank: int
    token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""One place: the token that stands there first, then the most likely ones in order."""

EndCheck = Callable[[int], str | None]
"""Takes each output token in turn; returns the stop text that it completes, if any."""


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """What one request cost. Counts describe the output as delivered, after any stop token cut it.

    Attributes:
        num_steps: forwards that produced output tokens, the last prefill chunk included.
        num_decode_steps: those after the prompt; each yields its accepted drafts and one more token.
        num_draft_tokens, num_accepted_tokens: drafts that were verified, and those that became output.
        drafted_per_position, accepted_per_position: the same by position in the window, first draft first.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        num_preemptions: how often the request gave its blocks back.
        num_undrafted_steps, num_probes: decode steps in which nothing was drafted because drafts did not pay, and how
            often it was tried again.
        speculation_off_because: why nothing was drafted for this request, if so.
        queue_s, prefill_s, decode_s: seconds waiting, until the first token, and after it.
    """

    num_steps: int = 0
    num_decode_steps: int = 0
    num_decode_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_undrafted_steps: int = 0
    num_probes: int = 0
    speculation_off_because: str | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per decode step, the extra token included; 1.0 before the first."""
        return self.num_decode_tokens / self.num_decode_steps if self.num_decode_steps else 1.0

    def count_step(self, num_drafts: int, num_accepted: int, num_tokens: int) -> None:
        """Adds one decode step that verified drafts and gave `num_tokens` output tokens."""
        self.num_steps += 1
        self.num_decode_steps += 1
        self.num_decode_tokens += num_tokens
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        missing = num_drafts - len(self.drafted_per_position)
        self.drafted_per_position.extend([0] * missing)
        self.accepted_per_position.extend([0] * missing)
        for position in range(num_drafts):
            self.drafted_per_position[position] += 1
            self.accepted_per_position[position] += position < num_accepted


class Request:
    """A prompt, its parameters and its state. Mutable; owned by the engine.

    `num_computed_tokens` (KV valid and verified) chases `num_tokens` (prompt and output).

    Attributes:
        rank: of two requests the one with the smaller rank is admitted first and preempted last.
        block_ids: its blocks in logical order; a list is never changed, but replaced by another.
        block_keys, num_kept_blocks: of its full blocks, the names of their contents, and how many from the first are in
            the prefix cache, so complete for every model that uses them.
        end_check: told of every output token in order, but not of one that ends the output by its id.
        stop_reason: the stop token id or text that ended the output; None for the model's EOS.
        error: why the request failed, with finish_reason ERROR.
        logprobs: one entry per output token, if asked for.
        prompt_logprobs: one entry per prompt token that is computed, None for the first, if asked for.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        end_check: EndCheck | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.max_tokens = max_tokens
        self.end_check = end_check
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens
        self.num_computed_tokens = 0
        self.rank = (0, 0)
        self.block_ids: list[int] = []
        self.block_keys: list[bytes] = []
        self.num_kept_blocks = 0
        self.slot: int | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self.stats = RequestStats()
        self.arrived_at = 0.0
        self.admitted_at = 0.0
        self.first_token_at = 0.0
        self._tokens = np.empty(self.num_prompt_tokens + max_tokens, dtype=np.int32)
        self._tokens[: self.num_prompt_tokens] = prompt_token_ids

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Prompt and output, [num_tokens] int32; a view, valid until the next token is appended."""
        return self._tokens[: self.num_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The output so far."""
        output: list[int] = self._tokens[self.num_prompt_tokens : self.num_tokens].tolist()
        return output

    @property
    def num_output_tokens(self) -> int:
        """How many tokens the output has."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output at the longest."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether some of the prompt is not computed yet."""
        return self.num_computed_tokens < self.num_prompt_tokens

    @property
    def is_behind(self) -> bool:
        """Whether tokens before the newest are not computed yet: of the prompt, or of an output that was preempted."""
        return self.num_computed_tokens < self.num_tokens - 1

    def append(self, token_ids: list[int]) -> None:
        """Adds output tokens; never beyond `max_tokens`."""
        end = self.num_tokens + len(token_ids)
        assert end <= self.max_total_tokens
        self._tokens[self.num_tokens : end] = token_ids
        self.num_tokens = end


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """What one step gave one request.

    Attributes:
        request: the request; `request.stats` goes on changing until it is finished.
        token_ids: the new output tokens, cut at the first stop.
        finish_reason: set with the last delta.
        logprobs: one entry per new token, if asked for.
        num_draft_tokens: drafts that the step verified.
        num_accepted_tokens: so many of `token_ids`, from the first, were drafts.
    """

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
