"""What a scorer is: it computes the target's logits for the newest token and every draft of a batch."""

from typing import Protocol

from compspec.batch import Batch, Bucket, DraftTokens, Scores


class Scorer(Protocol):
    """Computes the logits that verification needs."""

    def score(self, batch: Batch, drafts: DraftTokens) -> Scores:
        """Runs the target once, and writes the keys and values of the batch's tokens and drafts.

        Returns:
            Of a decode step, rows 0 .. number of drafts of each request; of a prefill step one row, after the
            chunk's last token.
        """
        ...

    def bucket_of(self, num_requests: int, num_rows: int) -> Bucket:
        """The static shape of a decode step of so many requests, each with up to so many rows."""
        ...
