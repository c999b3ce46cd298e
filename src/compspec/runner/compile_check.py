"""Proves at start-up that compiled decoding computes what the model computes, and really writes the KV cache.

What compares compiled steps with one another cannot see a compiler that takes one layer for another, or that writes
keys and values into a copy of the cache.
"""

from typing import Protocol

import torch
from torch import Tensor

from compspec.batch import Bucket
from compspec.errors import NumericsError
from compspec.models.adapter import ModelAdapter
from compspec.models.self_check import TOLERANCE, relative_error
from compspec.runner.buckets import Buckets
from compspec.runner.inputs import Query

# Enough for the few rows that may differ more (see `relative_error`) to be few.
_FEWEST_ROWS = 24


class Runner(Protocol):
    """What the check needs of a `ModelRunner`."""

    adapter: ModelAdapter
    buckets: Buckets
    num_blocks: int
    max_blocks: int
    block_size: int

    def run(self, bucket: Bucket, queries: list[Query]) -> Tensor: ...
    def run_eager(self, bucket: Bucket, queries: list[Query]) -> Tensor: ...


def check_compiled(runner: Runner) -> None:
    """Runs the smallest decode bucket on windows of one request, compiled and not. No request may be running.

    Raises:
        NumericsError: the logits differ by more than kernels round.
    """
    bucket = min(runner.buckets.decode, key=lambda one: one.num_tokens)
    room = min(min(runner.num_blocks - 1, runner.max_blocks) * runner.block_size, runner.adapter.max_model_len)
    rows = min(bucket.query_len, room)
    count = min(max(2, -(-_FEWEST_ROWS // rows)), room // rows)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(runner.adapter.vocab_size, (count * rows,), generator=generator).tolist()
    blocks = list(range(1, runner.num_blocks))
    starts = range(0, count * rows, rows)
    windows = [Query(token_ids=tokens[at : at + rows], start=at, block_ids=blocks) for at in starts]
    # Windows read what those before them have written. The compiled step is first: it must not find the other's.
    found, wanted = (
        torch.cat([run(bucket, [window])[0, :rows].clone() for window in windows])
        for run in (runner.run, runner.run_eager)
    )
    error = relative_error(found, wanted)
    if not error <= TOLERANCE[runner.adapter.dtype]:
        raise NumericsError(
            f"torch {torch.__version__} compiles {type(runner.adapter.module).__name__} into something else: logits "
            f"differ from the model's by {error:.2g} of their size; use another torch, or compile.mode: none"
        )
