"""No drafts: plain decoding through the same path."""

from compspec.batch import Batch, DraftTokens, StepOutput
from compspec.proposers.proposer import Options as BaseOptions


class Options(BaseOptions):
    """Takes none."""


class NoProposer:
    """Proposes nothing."""

    def propose(self, batch: Batch) -> DraftTokens:
        """Returns token_ids [R, 0]."""
        return DraftTokens.from_lists([[] for _ in batch.scheduled], 0)

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """Nothing to learn."""


def make(options: Options, num_draft_tokens: int) -> NoProposer:
    """See `compspec.proposers.proposer.Proposer`."""
    return NoProposer()
