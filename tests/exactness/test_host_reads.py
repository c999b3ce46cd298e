"""A decode step waits for the device once. On a CPU nothing waits, so what would wait on a GPU is counted."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from compspec.sampling import transforms
from compspec.sampling.params import SamplingParams
from tests.law import make_engine, make_prompts
from tests.tiny_models import tiny_model_folder

READS = {Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.numpy}
# Operators whose result has a size that only the device knows, or that read a value.
SIZED_BY_VALUES = {"nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "repeat_interleave"}
# Copies from pageable memory, for which the host waits. `upload` is the way instead. (The model itself calls `to`.)
COPIES = {torch.tensor, torch.as_tensor, Tensor.cuda, Tensor.cpu}


class Waits(TorchFunctionMode):
    """Counts what would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in READS or func in COPIES:
            self.seen[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class SizedByValues(TorchDispatchMode):
    """Counts operators that a GPU has to finish before the host knows the shape of their result."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__
        if name in SIZED_BY_VALUES:
            self._seen[name] += 1
        if name == "index" and any(isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1]):
            self._seen["index by a mask"] += 1
        return func(*args, **(kwargs or {}))


CASES = [
    pytest.param({}, 1, id="greedy"),
    pytest.param({"temperature": 0.8}, 1, id="sampled"),
    pytest.param({"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01}, 1, id="filtered"),
    pytest.param(
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.2, "temperature": 1.0},
        1,
        id="penalties",
    ),
    pytest.param(
        {
            "logit_bias": {5: 2.0},
            "bad_words": ((7,), (8, 9)),
            "allowed_token_ids": tuple(range(3, 90)),
            "min_tokens": 9,
        },
        1,
        id="edits",
    ),
    pytest.param({"logprobs": 3}, 2, id="log-probabilities are a second read"),
]


@pytest.fixture(scope="module")
def folder(models: Path) -> Path:
    return tiny_model_folder("llama", models)


@pytest.mark.parametrize(("options", "expected"), CASES)
def test_a_decode_step_reads_once(
    folder: Path, options: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transforms, "_sort_on_host", transforms._sort)  # as where the rows are on a GPU
    engine = make_engine(folder, speculative__method="ngram", speculative__num_draft_tokens=4)
    for prompt in make_prompts(4):
        engine.add_request(prompt, SamplingParams(max_tokens=24, seed=3, ignore_eos=True, **options))
    steps = 0
    while engine.has_work:
        prefills = engine.stats.num_prefill_forwards
        waits = Waits()
        with waits, SizedByValues(waits.seen):
            engine.step()
        if engine.stats.num_prefill_forwards == prefills:
            steps += 1
            assert sum(waits.seen.values()) == waits.seen["tolist"] == expected, waits.seen
    assert steps > 5
    assert engine.stats.num_draft_tokens > 0
