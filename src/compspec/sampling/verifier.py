"""Accept iff equal: a draft is kept when it is the token the target itself chose at that row."""

from typing import Protocol

from torch import Tensor

from compspec.batch import Batch, DraftTokens, StepOutput


class Verifier(Protocol):
    """Turns the target's tokens and the drafts into what the step adds to each output."""

    def verify(self, target_token_ids: Tensor, batch: Batch, drafts: DraftTokens) -> StepOutput:
        """See `EqualityVerifier.verify`."""
        ...


class EqualityVerifier:
    """Keeps the leading run of drafts that equal the target's tokens, and one more target token."""

    def verify(self, target_token_ids: Tensor, batch: Batch, drafts: DraftTokens) -> StepOutput:
        """Verifies one step. Moves the target's tokens to the host: the one synchronisation of a step.

        Args:
            target_token_ids: [R', Q] int64, R' >= R padded; row j is the target's token after j drafts.
            batch: the step.
            drafts: [R, K].

        Returns:
            The tokens of each request: accepted drafts, then the correction or bonus token.
        """
        targets = target_token_ids.tolist()
        token_ids: list[tuple[int, ...]] = []
        num_accepted: list[int] = []
        for row, entry in enumerate(batch.scheduled):
            if not entry.samples:
                token_ids.append(())
                num_accepted.append(0)
                continue
            target = targets[row]
            accepted = 0
            for draft in drafts.token_ids[row, : drafts.num_draft_tokens[row]]:
                if draft != target[accepted]:
                    break
                accepted += 1
            token_ids.append(tuple(target[: accepted + 1]))
            num_accepted.append(accepted)
        return StepOutput(
            token_ids=tuple(token_ids),
            num_draft_tokens=tuple(int(count) for count in drafts.num_draft_tokens),
            num_accepted_tokens=tuple(num_accepted),
        )
