"""Proves on the loaded model, at the shapes in use, that a row depends on nothing but its own request.

Exact numerics rest on two facts about kernels that no specification promises: within one shape a row's bits
depend neither on its place nor on its neighbours, and some shapes agree with each other bit for bit.
Both are measured here with the compiled steps that will serve requests.
"""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compspec.batch import SCRATCH_BLOCK, Bucket
from compspec.runner.inputs import Query
from compspec.runner.linear_test import products, rows_differ
from compspec.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Changes with what is tested, so that results of another test are not taken over.
_VERSION = "4"

# Rows that are probed after each context, where a step has fewer.
_FEWEST_ROWS = 8

# Inside a kernel's first run of keys, and across the ends of runs of 64 and of 512: drafts reach beyond the end.
_CONTEXTS = (21, 60, 508)

# So far behind the first token that leaves a layer's window.
_BEYOND_WINDOW = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestResult:
    """What the self-test found.

    Attributes:
        equal: decode buckets in which a row is independent and whose bits agree with the largest bucket's.
        different: decode buckets that are independent but have other bits; exact numerics does not use them.
        dependent: buckets in which a row's bits change with its place or its neighbours: a broken promise.
    """

    equal: tuple[Bucket, ...]
    different: tuple[Bucket, ...]
    dependent: tuple[Bucket, ...]


def run_self_test(runner: ModelRunner) -> SelfTestResult:
    """Measures every decode bucket; a few forwards each. Uses KV blocks, so no request may be running."""
    widest = max(bucket.query_len for bucket in runner.buckets.decode)
    contexts, num_rows = _contexts(runner, max(widest, _FEWEST_ROWS))
    layers = products(runner.adapter.module)
    most = runner.buckets.widest_decode.num_tokens
    buckets = sorted(runner.buckets.decode, key=lambda bucket: -bucket.num_tokens)
    dtype = runner.adapter.dtype
    agrees = {
        bucket: not any(rows_differ(layer, dtype, bucket.num_tokens, most) for layer in layers) for bucket in buckets
    }
    # In the reference itself a difference is one between places.
    independent = {bucket: agrees[bucket] or bucket.num_tokens < most for bucket in buckets}
    for context in contexts:
        reference: Tensor | None = None
        for bucket in buckets:
            probe = _Probe(runner, bucket, context, num_rows, contexts)
            if reference is None:
                probe.fill()  # once for all buckets: they write what comes after the context alone
            one_by_one = probe.one_by_one()
            independent[bucket] &= all(torch.equal(rows, one_by_one) for rows in probe.variations())
            reference = one_by_one if reference is None else reference
            agrees[bucket] &= torch.equal(one_by_one, reference)
    return SelfTestResult(
        equal=tuple(bucket for bucket in buckets if independent[bucket] and agrees[bucket]),
        different=tuple(bucket for bucket in buckets if independent[bucket] and not agrees[bucket]),
        dependent=tuple(bucket for bucket in buckets if not independent[bucket]),
    )


def _contexts(runner: ModelRunner, num_rows: int) -> tuple[list[int], int]:
    """Context lengths at which the probe fits the cache, and how many rows are probed after each."""
    usable = min(min(runner.num_blocks - 1, runner.max_blocks) * runner.block_size, runner.adapter.max_model_len)
    windows = {layer.spec.window for layer in runner.adapter.layers if 0 < layer.spec.window < usable}
    # As far beyond as there is room. A short window is left in the longest of the others already.
    beyond = {min(window + _BEYOND_WINDOW, usable - num_rows) for window in windows}
    beyond = {context for context in beyond if context > max(_CONTEXTS)}
    fitting = [context for context in (*_CONTEXTS, *sorted(beyond)) if context + num_rows <= usable]
    return (fitting, num_rows) if fitting else ([0], min(num_rows, usable))


class _Probe:
    """Decodes the same N tokens of one request in many ways; the logits [N, V] must never change."""

    def __init__(
        self, runner: ModelRunner, bucket: Bucket, context: int, num_rows: int, contexts: Sequence[int]
    ) -> None:
        self._runner = runner
        self._bucket = bucket
        self._width = bucket.query_len
        self._num_rows = num_rows
        self._context = context
        generator = torch.Generator().manual_seed(20_24)
        vocab_size = runner.adapter.vocab_size
        self._starts = (0, *contexts)
        length = max(self._starts) + num_rows
        self._tokens = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        self._other = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        self._blocks = list(range(1, runner.num_blocks))
        # Neighbours live in the scratch block alone; what they read is junk, and that must not matter.
        self._other_blocks = [SCRATCH_BLOCK] * (-(-length // runner.block_size))

    def one_by_one(self) -> Tensor:
        """Plain decoding: one real row per step, alone."""
        return torch.cat([self._rows(self._context + row, 1) for row in range(self._num_rows)])

    def variations(self) -> list[Tensor]:
        """The same rows in windows of several sizes, at other places, beside other requests."""
        strides = {self._width, max(1, self._width // 2), min(3, self._width)}
        found = [self._windows(stride) for stride in sorted(strides)]
        place = self._bucket.num_requests - 1
        if place:
            found.append(self._windows(self._width, place=place))
            found.append(self._windows(max(1, self._width // 2), place=place // 2, alone=True))
        return found

    def _windows(self, stride: int, place: int = 0, alone: bool = False) -> Tensor:
        parts = []
        for first in range(0, self._num_rows, stride):
            count = min(stride, self._num_rows - first)
            parts.append(self._rows(self._context + first, count, place, beside=not alone))
        return torch.cat(parts)

    def _rows(self, start: int, count: int, place: int = 0, beside: bool = False) -> Tensor:
        """Logits [count, V] of our request at `place`, real neighbours elsewhere if `beside`."""
        ours = Query(token_ids=self._tokens[start : start + count], start=start, block_ids=self._blocks)
        queries = [self._neighbour(index) for index in range(self._bucket.num_requests if beside else place)]
        queries[place : place + 1] = [ours]
        logits = self._runner.run(self._bucket, queries)
        return logits[place, :count].clone()

    def _neighbour(self, index: int) -> Query:
        """Another request: other tokens, length and row count."""
        count = index % self._width + 1
        start = self._starts[(index + 1) % len(self._starts)]
        return Query(token_ids=self._other[start : start + count], start=start, block_ids=self._other_blocks)

    def fill(self) -> None:
        """Writes the context into the cache."""
        largest = self._runner.buckets.prefill[-1].query_len
        for start in range(0, self._context, largest):
            part = self._tokens[start : min(start + largest, self._context)]
            bucket = self._runner.buckets.select(1, len(part), is_prefill=True)
            self._runner.run(bucket, [Query(token_ids=part, start=start, block_ids=self._blocks)])


class StoredSelfTest:
    """The result for one model, set of versions and machine, kept in a file.

    Args:
        runner: whose buckets the result is about.
        key_parts: what else decides the bits: the model's fingerprint, the compile mode.
        folder: where results are kept.
    """

    def __init__(self, runner: ModelRunner, key_parts: Sequence[str], folder: Path) -> None:
        self._buckets = {str(bucket): bucket for bucket in runner.buckets.decode}
        machine = _machine(runner.adapter.device)
        length = runner.adapter.max_model_len
        sizes = map(str, (_VERSION, runner.block_size, runner.num_blocks, runner.max_blocks, length, *_CONTEXTS))
        parts = [torch.__version__, *machine, *key_parts, *sizes, *self._buckets]
        self._path = folder / f"{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:32]}.json"

    def load(self) -> SelfTestResult | None:
        """What an earlier start found, or None."""
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            return SelfTestResult(
                **{name: tuple(map(self._buckets.__getitem__, found)) for name, found in stored.items()}
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("ignoring unreadable self-test result %s: %s", self._path, error)
            return None

    def store(self, result: SelfTestResult) -> None:
        """Keeps a result; a folder that cannot be written is a warning."""
        found = {name: [str(b) for b in getattr(result, name)] for name in ("equal", "different", "dependent")}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_suffix(f".{os.getpid()}.tmp")
            partial.write_text(json.dumps(found), encoding="utf-8")
            os.replace(partial, self._path)
        except OSError as error:
            logger.warning("cannot store the self-test result in %s: %s", self._path.parent, error)


def _machine(device: torch.device) -> list[str]:
    """What decides which kernels run."""
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), str(torch.version.cuda)]
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line for line in lines if line.startswith("model name")), model)
        model += next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        pass
    return [model, torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]
