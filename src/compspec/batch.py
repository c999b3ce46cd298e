"""The records that the parts of one step hand over to each other. Frozen, complete when made.

Legend: R requests in the batch, K most drafts per request, Q query rows per request.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compspec.request import Request

SCRATCH_BLOCK = 0
"""Never handed out: padded rows write their keys and values here."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Bucket:
    """One static shape of the model's forward: R requests of Q query rows, `num_logits` rows scored each."""

    num_requests: int
    query_len: int
    num_logits: int

    @property
    def num_tokens(self) -> int:
        """R * Q."""
        return self.num_requests * self.query_len

    @property
    def is_decode(self) -> bool:
        """Whether every row is scored; a prefill chunk scores its last row alone."""
        return self.num_logits == self.query_len

    def __str__(self) -> str:
        kind = "decode" if self.is_decode else "prefill"
        return f"{kind} {self.num_requests}x{self.query_len}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """A request's part of one step.

    Attributes:
        request: the request itself; only the scheduler changes it.
        slot: its place in the per-slot device state.
        num_computed_tokens: tokens in the KV cache before this step.
        num_new_tokens: known tokens (prompt or already sampled) this step runs.
        max_draft_tokens: how many drafts may follow them.
        samples: whether the step reaches the request's last known token and so samples a new one.
    """

    request: Request
    slot: int
    num_computed_tokens: int
    num_new_tokens: int
    max_draft_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the scheduler chose: either prompt chunks or decode rows, never both.

    The two are different shapes, and a row's bits are a function of its shape, so a step is all of one.

    Attributes:
        scheduled: the requests that run.
        preempted: those that gave their blocks back for this step.
    """

    scheduled: tuple[ScheduledRequest, ...]
    is_prefill: bool
    preempted: tuple[Request, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTokens:
    """What a proposer guessed.

    Attributes:
        token_ids: [R, K] int64, -1 where absent.
        num_draft_tokens: [R] int64, how many of each row are drafts; they stand first.
        probs: [R, K, V] float32, the distribution each draft was sampled from; None where drafts are not
            sampled but chosen. The rejection verifier alone uses it.
    """

    token_ids: NDArray[np.int64]
    num_draft_tokens: NDArray[np.int64]
    probs: Tensor | None = None

    @staticmethod
    def from_lists(drafts: list[list[int]], max_draft_tokens: int) -> "DraftTokens":
        """Pads one list of drafts per request to [R, max_draft_tokens]."""
        token_ids = np.full((len(drafts), max_draft_tokens), -1, dtype=np.int64)
        for row, draft in enumerate(drafts):
            token_ids[row, : len(draft)] = draft
        return DraftTokens(
            token_ids=token_ids, num_draft_tokens=np.array([len(draft) for draft in drafts], dtype=np.int64)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The target's logits for one step.

    Attributes:
        logits: [*, V], the model's dtype; more rows than asked for, the rest is junk. Valid until the next forward.
        first_row: row j of request r (after its newest token and j drafts) is logits[first_row[r] + j].
    """

    logits: Tensor
    first_row: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What verification left of one step.

    Attributes:
        token_ids: per request, the accepted drafts and one more target token; empty where nothing sampled.
        num_draft_tokens, num_accepted_tokens: per request.
        errors: per request, why no token followed `token_ids`; None where one did.
    """

    token_ids: tuple[tuple[int, ...], ...]
    num_draft_tokens: tuple[int, ...]
    num_accepted_tokens: tuple[int, ...]
    errors: tuple[str | None, ...]
