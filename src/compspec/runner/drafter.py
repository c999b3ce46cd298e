"""Drafts token by token with a model: one forward per draft, for all requests together.

A draft is sampled as the target samples: with the same parameters, penalties and bans, and in the place of an output.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from compspec.batch import Batch, DraftTokens, ScheduledRequest, Scores
from compspec.runner.buckets import DRAFT_ROWS
from compspec.runner.inputs import Query
from compspec.runner.model_runner import ModelRunner
from compspec.sampling.metadata import MetadataState
from compspec.sampling.noise import TARGET_STREAM
from compspec.sampling.sampler import NO_TOKEN, Sampler
from compspec.transfer import upload


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """What a model drafted.

    Attributes:
        tokens: per request.
        num_forwards: per request, the forwards that it took part in: its newest token and so many drafts, less one,
            have keys and values.
        probs: per draft position, the requests that it was sampled for and their distributions [*, V]; where drafts
            share the target's noise it is empty.
    """

    tokens: list[list[int]]
    num_forwards: list[int]
    probs: list[tuple[list[int], Tensor]]


class Drafter:
    """Runs a model that drafts.

    Args:
        runner: of the model; its decode buckets have `DRAFT_ROWS` rows.
        vocab_size: of the target. Ids that the model lacks are never drafted, those that it has beyond are ignored.
        metadata: the target's, which knows what each request has seen.
        sampler: the target's.
        stream: whose noise is drawn.
    """

    def __init__(
        self, runner: ModelRunner, vocab_size: int, metadata: MetadataState, sampler: Sampler, stream: int
    ) -> None:
        self.runner = runner
        self._vocab_size = vocab_size
        self._metadata = metadata
        self._sampler = sampler
        self._stream = stream

    def draft(self, entries: Sequence[ScheduledRequest], starts: Sequence[int], counts: Sequence[int]) -> Drafted:
        """Drafts for some requests of a decode step.

        Args:
            entries: the requests; each has blocks for its drafts.
            starts: the position of the first token whose keys and values the model still lacks: that of the newest
                token, or of the one before it.
            counts: how many drafts each gets, unless no token can be sampled before that.
        """
        tokens: list[list[int]] = [[] for _ in entries]
        num_forwards = [0] * len(entries)
        probs: list[tuple[list[int], Tensor]] = []
        for place in range(max(counts, default=0)):
            active = [index for index, count in enumerate(counts) if count > place and len(tokens[index]) == place]
            if not active:
                break
            queries = [self._query(entries[index], starts[index], tokens[index]) for index in active]
            scores = self._score(queries)
            batch = Batch(scheduled=tuple(entries[index] for index in active), is_prefill=False)
            so_far = DraftTokens.from_lists([tokens[index] for index in active], place)
            metadata = self._metadata.build(batch, so_far, scores, newest_only=True)
            sampled = self._sampler.sample(scores, metadata, self._stream)
            if self._stream != TARGET_STREAM:
                probs.append((active, sampled.logits.softmax(-1)))
            for index, token in zip(active, sampled.token_ids.tolist(), strict=True):
                num_forwards[index] += 1
                if token != NO_TOKEN:
                    tokens[index].append(token)
        return Drafted(tokens=tokens, num_forwards=num_forwards, probs=probs)

    @staticmethod
    def _query(entry: ScheduledRequest, start: int, drafts: list[int]) -> Query:
        request = entry.request
        if drafts:
            return Query(token_ids=drafts[-1:], start=request.num_tokens + len(drafts) - 1, block_ids=request.block_ids)
        assert 1 <= request.num_tokens - start <= DRAFT_ROWS, (
            "a draft model is further behind than one window leaves it"
        )
        return Query(token_ids=request.token_ids[start:].tolist(), start=start, block_ids=request.block_ids)

    def _score(self, queries: list[Query]) -> Scores:
        """One row per request, after its newest token or draft."""
        bucket = self.runner.buckets.select(len(queries), DRAFT_ROWS, is_prefill=False)
        logits = self.runner.run(bucket, queries)
        last = [index * bucket.query_len + len(query.token_ids) - 1 for index, query in enumerate(queries)]
        rows = logits.flatten(0, 1)[upload([np.array(last)], logits.device)[0]]
        # Cuts off where the model has more token ids than the target.
        rows = F.pad(rows, (0, self._vocab_size - rows.shape[-1]), value=float("-inf"))
        return Scores(logits=rows, first_row=tuple(range(len(queries))))


def draft_tokens(drafted: Drafted, rows: Sequence[int], num_requests: int, num_draft_tokens: int) -> DraftTokens:
    """The drafts of a whole batch, of which some requests were drafted for.

    Args:
        rows: which requests of the batch those of `drafted` are.
        num_requests: R.
        num_draft_tokens: K.
    """
    lists: list[list[int]] = [[] for _ in range(num_requests)]
    for row, tokens in zip(rows, drafted.tokens, strict=True):
        lists[row] = tokens
    made = DraftTokens.from_lists(lists, num_draft_tokens)
    if not drafted.probs:
        return made
    like = drafted.probs[0][1]
    probs = torch.zeros(num_requests, num_draft_tokens, like.shape[-1], dtype=torch.float32, device=like.device)
    for place, (active, found) in enumerate(drafted.probs):
        at = upload([np.array([rows[index] for index in active])], like.device)[0]
        probs[at, place] = found
    return DraftTokens(token_ids=made.token_ids, num_draft_tokens=made.num_draft_tokens, probs=probs)
