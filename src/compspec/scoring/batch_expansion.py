"""The classic scorer: a request with K drafts becomes K + 1 sequences of one query each.

All of them read and write the request's own blocks: each layer stores the keys and values of every sequence before any
of them attends. Kept as the oracle of the tests and as the baseline of the benchmark.
"""

from itertools import accumulate

from compspec.batch import Batch, Bucket, DraftTokens, Scores
from compspec.runner.inputs import Query
from compspec.runner.model_runner import ModelRunner
from compspec.scoring.multi_query import MultiQueryScorer, query_of


class BatchExpansionScorer:
    """Needs a runner whose decode buckets have one query row."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._prefill = MultiQueryScorer(runner)

    def score(self, batch: Batch, drafts: DraftTokens) -> Scores:
        """See `Scorer.score`. A prompt's chunk is one sequence here as well."""
        if batch.is_prefill:
            return self._prefill.score(batch, drafts)
        whole = [query_of(batch, drafts, row) for row in range(len(batch.scheduled))]
        queries = [
            Query(token_ids=[token], start=query.start + place, block_ids=query.block_ids)
            for query in whole
            for place, token in enumerate(query.token_ids)
        ]
        bucket = self._runner.buckets.select(len(queries), 1, is_prefill=False)
        logits = self._runner.run(bucket, queries)
        starts = accumulate([len(query.token_ids) for query in whole[:-1]], initial=0)
        newest = zip(starts, batch.scheduled, strict=True)
        first_row = tuple(start + entry.num_new_tokens - 1 for start, entry in newest)
        return Scores(logits=logits.flatten(0, 1), first_row=first_row)

    def bucket_of(self, num_requests: int, num_rows: int) -> Bucket:
        """See `Scorer.bucket_of`."""
        return self._runner.buckets.select(num_requests * num_rows, 1, is_prefill=False)
