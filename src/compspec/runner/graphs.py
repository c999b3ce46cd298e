"""CUDA graphs: what torch captures, and proof that every bucket is one.

A log line that says that graphs are on proves nothing: torch leaves a graph out for many reasons, with one warning,
and then runs the same code five times slower. So recordings and omissions are counted where torch makes them.
"""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._dynamo import callback
from torch._dynamo.utils import counters

from compspec.errors import UnsupportedError, one_line

_ADVICE = (
    "set compile.mode: default to run without graphs, or compile.strict: false to go on with what could be captured"
)

# Inductor's reasons to leave a graph out, and CUDA's own complaints during a capture.
_ABOUT_CAPTURE = re.compile("cudagraph|captur")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCounts:
    """What torch did in this process.

    Attributes:
        recordings: CUDA graphs captured.
        skips: compiled graphs that were left out.
    """

    recordings: int = 0
    skips: int = 0

    def __add__(self, other: "GraphCounts") -> "GraphCounts":
        return GraphCounts(recordings=self.recordings + other.recordings, skips=self.skips + other.skips)

    def __sub__(self, other: "GraphCounts") -> "GraphCounts":
        return GraphCounts(recordings=self.recordings - other.recordings, skips=self.skips - other.skips)


class _Recordings:
    """Counts captures, from the first time that it is asked."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self) -> None:
        handler = callback.callback_handler  # a reset of Dynamo empties it
        if self._started not in handler.start_callbacks:
            handler.register_start_callback(self._started)

    def _started(self, arguments: Any) -> None:
        self.count += arguments.callback_trigger == callback.CallbackTrigger.CUDAGRAPH_RECORDING


_recordings = _Recordings()


def graph_counts() -> GraphCounts:
    """The counts now. Recordings are counted from the first call on.

    Raises:
        UnsupportedError: this torch does not say when it captures.
    """
    if not hasattr(callback, "CallbackTrigger"):
        raise UnsupportedError(
            f"torch {torch.__version__} does not say when it captures a CUDA graph; set compile.mode: default"
        )
    _recordings.watch()
    return GraphCounts(recordings=_recordings.count, skips=int(counters["inductor"]["cudagraph_skips"]))


def capture_problem(calls: list[GraphCounts]) -> str | None:
    """Why a bucket is not one CUDA graph, or None if it is.

    Args:
        calls: what each of its calls added to the counts: the first warms up, a later one captures, the last replays.
    """
    skips = sum(call.skips for call in calls)
    if skips:
        return f"torch left out {skips} of its graphs"
    recordings = sum(call.recordings for call in calls)
    if recordings != 1:
        return f"{recordings} CUDA graphs were captured where one was expected"
    return "its last warm-up call captured again instead of replaying" if calls[-1].recordings else None


def no_omission(strict: bool) -> AbstractContextManager[Any]:
    """Inside, a graph that torch would leave out is an error, with torch's reason, if `strict`."""
    if not strict or not hasattr(inductor_config.triton, "cudagraph_or_error"):
        return nullcontext()
    patch: AbstractContextManager[Any] = inductor_config.patch({"triton.cudagraph_or_error": True})
    return patch


@contextmanager
def clear_capture_errors(bucket: str) -> Iterator[None]:
    """Names the bucket and the way out where torch gives a reason not to capture.

    Raises:
        UnsupportedError: torch would leave out the graph.
    """
    try:
        yield
    except Exception as error:
        chain = (error, error.__cause__, getattr(error, "inner_exception", None))
        reason = next((one for one in chain if one is not None and _ABOUT_CAPTURE.search(str(one))), None)
        if reason is None:
            raise
        raise not_captured(bucket, one_line(reason)) from error


def not_captured(bucket: str, reason: str) -> UnsupportedError:
    """The error of a bucket that is not one CUDA graph."""
    return UnsupportedError(f"bucket {bucket} was not captured as a CUDA graph: {reason}; {_ADVICE}")


def keep_addresses(tensors: list[Tensor]) -> None:
    """Tells torch that these tensors stay where they are: graphs read and write them in place."""
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor, guard=False)
