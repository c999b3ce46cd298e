"""A model runner without a model: what a row computes is a function of every key and value that it reads."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from compspec.batch import Bucket
from compspec.config import EngineConfig
from compspec.request import Request
from compspec.runner.buckets import Buckets
from compspec.runner.inputs import Query


def chained(tokens: Sequence[int]) -> list[int]:
    """What stands in the cache at each position after these tokens."""
    values: list[int] = []
    for token in tokens:
        values.append(hash((*values, token)))
    return values


def logits_after(tokens: Sequence[int], vocab_size: int) -> Tensor:
    """The model's logits [V] after these tokens."""
    return _logits(chained(tokens)[-1], vocab_size)


def _logits(value: int, vocab_size: int) -> Tensor:
    return 2 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(value & (2**63 - 1)))


class FakeModelRunner:
    """Takes the place of a `ModelRunner`.

    Attributes:
        cache: by (block, place), what was computed there.
        calls: every bucket that was run, and its queries.
        made_with: how it was constructed.
    """

    def __init__(
        self, adapter: Any, config: EngineConfig, max_model_len: int, *, buckets: Buckets, **made_with: Any
    ) -> None:
        self.adapter = adapter
        self.buckets = buckets
        self.block_size = config.cache.block_size
        self.max_model_len = max_model_len
        self.cache: dict[tuple[int, int], int] = {}
        self.calls: list[tuple[Bucket, list[Query]]] = []
        self.made_with: dict[str, Any] = {"config": config, **made_with}

    def warm_up(self, progress: Any = None) -> None:
        if progress is not None:
            progress("shape", 1.0)

    def run(self, bucket: Bucket, queries: Sequence[Query]) -> Tensor:
        assert bucket in self.buckets.all
        assert len(queries) <= bucket.num_requests
        self.calls.append((bucket, list(queries)))
        logits = torch.full((bucket.num_requests, bucket.num_logits, self.adapter.vocab_size), float("nan"))
        for number, query in enumerate(queries):
            assert 1 <= len(query.token_ids) <= bucket.query_len
            assert query.start + len(query.token_ids) <= self.max_model_len, "beyond the model's context"
            values = [self.cache[self._place(query.block_ids, position)] for position in range(query.start)]
            for row, token in enumerate(query.token_ids):
                values.append(hash((*values, token)))
                self.cache[self._place(query.block_ids, query.start + row)] = values[-1]
            kept = values[-len(query.token_ids) :] if bucket.is_decode else values[-1:]
            logits[number, : len(kept)] = torch.stack([_logits(each, self.adapter.vocab_size) for each in kept])
        return logits

    def holds(self, request: Request, num_tokens: int) -> bool:
        """Whether the first tokens of a request are computed, in its blocks."""
        places = [self._place(request.block_ids, position) for position in range(num_tokens)]
        return [self.cache.get(place) for place in places] == chained(request.token_ids[:num_tokens].tolist())

    def store(self, request: Request, num_tokens: int) -> None:
        """Computes the first tokens of a request."""
        for position, value in enumerate(chained(request.token_ids[:num_tokens].tolist())):
            self.cache[self._place(request.block_ids, position)] = value

    def _place(self, block_ids: Sequence[int], position: int) -> tuple[int, int]:
        return block_ids[position // self.block_size], position % self.block_size


def fake_adapter(vocab_size: int, max_model_len: int = 1000) -> Any:
    """What a runner and a proposer ask of a loaded model."""
    return SimpleNamespace(vocab_size=vocab_size, max_model_len=max_model_len, device=torch.device("cpu"), layers=())
