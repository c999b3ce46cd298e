"""No drafts: plain decoding through the same path."""

from compspec.batch import Batch, DraftTokens
from compspec.proposers.proposer import Options as BaseOptions
from compspec.proposers.proposer import Proposer


class Options(BaseOptions):
    """Takes none."""


class NoProposer(Proposer):
    """Proposes nothing."""

    def propose(self, batch: Batch) -> DraftTokens:
        """Returns token_ids [R, 0]."""
        return DraftTokens.from_lists([[] for _ in batch.scheduled], 0)


def make(options: Options, num_draft_tokens: int) -> NoProposer:
    """See `compspec.proposers.proposer.Proposer`."""
    return NoProposer()
