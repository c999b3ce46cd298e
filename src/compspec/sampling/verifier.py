"""Verifiers decide how many drafts a step keeps. The default one accepts a draft iff the target chose the same."""

from collections.abc import Sequence
from typing import Protocol

import torch

from compspec.batch import Batch, DraftTokens, StepOutput
from compspec.sampling.metadata import SamplingMetadata
from compspec.sampling.sampler import NO_TOKEN, Sampled


class Verifier(Protocol):
    """Turns what was sampled and what was drafted into what the step adds to each output."""

    def verify(self, sampled: Sampled, metadata: SamplingMetadata, batch: Batch, drafts: DraftTokens) -> StepOutput:
        """Verifies one step.

        Args:
            sampled: the target's token of every row.
            metadata: of the same step.
            batch, drafts: the step.

        Returns:
            The tokens of each request: accepted drafts, then one more token; or an error instead of that one.
        """
        ...


class EqualityVerifier:
    """Keeps the leading run of drafts that equal the target's tokens, and one more target token."""

    def verify(self, sampled: Sampled, metadata: SamplingMetadata, batch: Batch, drafts: DraftTokens) -> StepOutput:
        """See `Verifier.verify`. The comparison is made on the device; the step waits for it here, and nowhere else."""
        if not len(sampled.token_ids):  # a chunk inside a prompt: nothing to wait for
            return step_output([[] for _ in batch.scheduled], sampled, metadata, drafts)
        agrees = sampled.token_ids == metadata.next_draft
        # No draft follows a request's last row, so each that samples has a first row that does not agree.
        beyond = metadata.depth.new_full((len(batch.scheduled),), drafts.token_ids.shape[1] + 1)
        ends = torch.where(agrees, beyond[metadata.request], metadata.depth)
        num_kept = beyond.scatter_reduce(0, metadata.request, ends, "amin")
        read = torch.cat((sampled.token_ids, num_kept)).tolist()
        targets, kept = read[: len(sampled.token_ids)], read[len(sampled.token_ids) :]
        starts = zip(metadata.row_starts[:-1], metadata.row_starts[1:], kept, strict=True)
        windows = [targets[first : min(end, first + count + 1)] for first, end, count in starts]
        return step_output(windows, sampled, metadata, drafts)


def step_output(
    windows: Sequence[Sequence[int]], sampled: Sampled, metadata: SamplingMetadata, drafts: DraftTokens
) -> StepOutput:
    """Makes the step's output of each request's accepted drafts and one more token.

    Args:
        windows: per request; empty where nothing was sampled. A last token that is NO_TOKEN becomes an error.
    """
    token_ids: list[tuple[int, ...]] = []
    errors: list[str | None] = []
    for start, window in zip(metadata.row_starts[:-1], windows, strict=True):
        error = None
        if window and window[-1] == NO_TOKEN:
            window = window[:-1]
            error = sampled.failures.get(
                start + len(window), "no token can be sampled: all are forbidden, or the logits are not numbers"
            )
        token_ids.append(tuple(window))
        errors.append(error)
    return StepOutput(
        token_ids=tuple(token_ids),
        num_draft_tokens=tuple(int(count) for count in drafts.num_draft_tokens),
        num_accepted_tokens=tuple(max(0, len(window) - 1) for window in windows),
        errors=tuple(errors),
    )
