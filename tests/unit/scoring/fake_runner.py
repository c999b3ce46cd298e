"""A runner without a model: a row's logits say which token it follows, where, in whose blocks, and if it was stored."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compspec.batch import Bucket
from compspec.config import make_config
from compspec.runner.buckets import Buckets
from compspec.runner.inputs import Query


class FakeRunner:
    """Logits [token, position, first block, writes]; NaN where no row was asked for.

    Attributes:
        buckets: of the configuration that `settings` (dotted keys with `__` for the dot) make.
        calls: every bucket that was run, and its queries.
    """

    def __init__(self, **settings: object) -> None:
        values = {name.replace("__", "."): value for name, value in settings.items()}
        self.buckets = Buckets.of_target(make_config({"model": {"source": "x"}}, values))
        self.calls: list[tuple[Bucket, list[Query]]] = []

    def run(self, bucket: Bucket, queries: Sequence[Query]) -> Tensor:
        assert len(queries) <= bucket.num_requests
        self.calls.append((bucket, list(queries)))
        logits = torch.full((bucket.num_requests, bucket.num_logits, 4), float("nan"))
        for place, query in enumerate(queries):
            assert 1 <= len(query.token_ids) <= bucket.query_len
            rows = [
                [token, query.start + row, query.block_ids[0], query.writes]
                for row, token in enumerate(query.token_ids)
            ]
            kept = rows if bucket.is_decode else rows[-1:]
            logits[place, : len(kept)] = torch.tensor(kept, dtype=torch.float32)
        return logits
