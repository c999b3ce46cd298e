"""One forward scores all drafts of all requests: K + 1 query rows per request, no batch expansion."""

from typing import Protocol

from torch import Tensor

from compspec.batch import Batch, DraftTokens
from compspec.runner.inputs import Query
from compspec.runner.model_runner import ModelRunner


class Scorer(Protocol):
    """Computes the logits that verification needs."""

    def score(self, batch: Batch, drafts: DraftTokens) -> Tensor:
        """See `MultiQueryScorer.score`."""
        ...


class MultiQueryScorer:
    """Each request contributes its new tokens and its drafts as rows of one sequence."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def score(self, batch: Batch, drafts: DraftTokens) -> Tensor:
        """Runs the target once.

        Returns:
            [R', Q, V], padded to a bucket: row j of a decode step holds the logits after the newest token and j
            drafts; a prefill step has one row, after the chunk's last token. Valid until the next call.
        """
        queries = []
        for row, entry in enumerate(batch.scheduled):
            start, count = entry.num_computed_tokens, entry.num_new_tokens
            tokens = entry.request.token_ids[start : start + count].tolist()
            tokens += drafts.token_ids[row, : drafts.num_draft_tokens[row]].tolist()
            queries.append(Query(token_ids=tokens, start=start, block_ids=entry.request.block_ids))
        longest = max(len(query.token_ids) for query in queries)
        bucket = self._runner.buckets.select(len(queries), longest, is_prefill=batch.is_prefill)
        return self._runner.run(bucket, queries)
