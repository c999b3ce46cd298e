"""Logits of prompt rows, for prompt log-probabilities.

A prefill step scores its last row alone. The others are scored afterwards, through the decode shapes that exist
already: the rows attend to the prompt's keys and values and write none, so asking for them changes no output, and rows
whose keys and values came from the prefix cache can be scored as well.
"""

from collections.abc import Iterator

from torch import Tensor

from compspec.batch import Batch, ScheduledRequest
from compspec.runner.inputs import Query
from compspec.runner.model_runner import ModelRunner
from compspec.sampling.logprobs import token_logprobs


class PromptScorer:
    """Scores rows of prompts whose keys and values are in the cache."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def report(self, batch: Batch) -> None:
        """Adds to each request's `prompt_logprobs`, where asked for, after a prefill step."""
        for entry in batch.scheduled:
            request, num_top = entry.request, entry.request.params.prompt_logprobs
            if not batch.is_prefill or num_top is None or request.prompt_logprobs is None:
                continue
            # The entry of the first token, which nothing predicts, is there from the beginning.
            for start, logits in self.score(entry, len(request.prompt_logprobs) - 1):
                follow = request.token_ids[start + 1 : start + 1 + len(logits)].tolist()
                request.prompt_logprobs += token_logprobs(logits, range(len(logits)), follow, [num_top] * len(follow))

    def score(self, entry: ScheduledRequest, begin: int) -> Iterator[tuple[int, Tensor]]:
        """Scores the rows up to the end of a prefill chunk that has just run, as far as a prompt token follows them.

        Args:
            begin: the position of the first row; its keys and values, and those before it, are in the cache.

        Yields:
            The position of the first of some rows, and their logits [rows, V], valid until the next.
        """
        request, bucket = entry.request, self._runner.buckets.widest_decode
        end = min(entry.num_computed_tokens + entry.num_new_tokens, request.num_prompt_tokens - 1)
        for start in range(begin, end, bucket.num_tokens):
            last = min(start + bucket.num_tokens, end)
            queries = [
                Query(
                    token_ids=request.token_ids[first : min(first + bucket.query_len, last)].tolist(),
                    start=first,
                    block_ids=request.block_ids,
                    writes=False,
                )
                for first in range(start, last, bucket.query_len)
            ]
            # All queries but the last are full, so their rows follow one another.
            yield start, self._runner.run(bucket, queries).flatten(0, 1)[: last - start]
