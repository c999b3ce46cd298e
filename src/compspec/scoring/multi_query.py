"""One forward scores all drafts of all requests: K + 1 query rows per request, no batch expansion."""

from compspec.batch import Batch, Bucket, DraftTokens, Scores
from compspec.runner.inputs import Query
from compspec.runner.model_runner import ModelRunner


class MultiQueryScorer:
    """Each request contributes its new tokens and its drafts as rows of one sequence."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def score(self, batch: Batch, drafts: DraftTokens) -> Scores:
        """See `Scorer.score`."""
        queries = [query_of(batch, drafts, row) for row in range(len(batch.scheduled))]
        longest = max(len(query.token_ids) for query in queries)
        bucket = self._runner.buckets.select(len(queries), longest, is_prefill=batch.is_prefill)
        logits = self._runner.run(bucket, queries)
        # A decode step scores every row, and what samples follows the newest token.
        before = [0 if batch.is_prefill else entry.num_new_tokens - 1 for entry in batch.scheduled]
        first_row = tuple(row * bucket.num_logits + skipped for row, skipped in enumerate(before))
        return Scores(logits=logits.flatten(0, 1), first_row=first_row)

    def bucket_of(self, num_requests: int, num_rows: int) -> Bucket:
        """See `Scorer.bucket_of`."""
        return self._runner.buckets.select(num_requests, num_rows, is_prefill=False)


def query_of(batch: Batch, drafts: DraftTokens, row: int) -> Query:
    """A request's new tokens and its drafts, one after the other."""
    entry = batch.scheduled[row]
    start, count = entry.num_computed_tokens, entry.num_new_tokens
    tokens = entry.request.token_ids[start : start + count].tolist()
    tokens += drafts.token_ids[row, : drafts.num_draft_tokens[row]].tolist()
    return Query(token_ids=tokens, start=start, block_ids=entry.request.block_ids)
