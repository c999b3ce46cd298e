"""The start-up check sees a compiled step that is not the model: layers mixed up, writes lost, and nothing else."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compspec.engine import Engine
from compspec.errors import NumericsError
from compspec.runner import compiled, model_runner
from compspec.runner.compile_check import check_compiled
from tests.law import make_engine
from tests.tiny_models import tiny_model_folder


@pytest.fixture(scope="module")
def engine(models: Path) -> Engine:
    """Eager; each test puts something in the place of the compiled step."""
    return make_engine(tiny_model_folder("llama", models), model__dtype="float32")


def stand_in(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Any, tuple[Tensor, ...]], Tensor]
) -> None:
    runner = engine.runner
    right = {bucket: runner._make_step() for bucket in runner.buckets.decode}
    steps = {bucket: (lambda *inputs, step=step: wrong(step, inputs)) for bucket, step in right.items()}
    monkeypatch.setattr(runner, "_steps", {**runner._steps, **steps})


def test_the_right_step_passes_whatever_the_cache_held(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for cache in (*engine.runner.k_caches, *engine.runner.v_caches):
        cache.normal_()
    stand_in(engine, monkeypatch, lambda step, inputs: step(*inputs))
    check_compiled(engine.runner)


def test_layers_that_run_with_the_first_ones_weights_are_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer for layer in engine.loaded.adapter.module.modules() if "DecoderLayer" in type(layer).__name__]

    def mixed_up(step: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        first, last = layers[0].mlp, layers[-1].mlp
        layers[-1].mlp = first
        try:
            return step(*inputs)
        finally:
            layers[-1].mlp = last

    stand_in(engine, monkeypatch, mixed_up)
    with pytest.raises(NumericsError, match=r"compiles LlamaForCausalLM into something else.*compile\.mode: none"):
        check_compiled(engine.runner)


@pytest.mark.parametrize(("share", "passes"), [(24, True), (3, False)])
def test_a_few_rows_may_differ_more_as_with_experts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, share: int, passes: bool
) -> None:
    """One of 24 rows far off, or one of three."""
    rows = itertools.count()

    def off(step: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        out = step(*inputs).clone()
        for row in range(min(engine.runner.buckets.decode, key=lambda bucket: bucket.num_tokens).query_len):
            if next(rows) % share == 0:
                out[row] = -out[row]
        return out

    stand_in(engine, monkeypatch, off)
    if passes:
        check_compiled(engine.runner)
    else:
        with pytest.raises(NumericsError):
            check_compiled(engine.runner)


def test_writes_that_go_into_a_copy_of_the_cache_are_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = [*engine.runner.k_caches, *engine.runner.v_caches]
    for cache in caches:
        cache.zero_()  # as at a start: earlier runs may have written the very same

    def lost(step: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        caches = [*engine.runner.k_caches, *engine.runner.v_caches]
        before = [cache.clone() for cache in caches]
        out: Tensor = step(*inputs)
        for cache, kept in zip(caches, before, strict=True):
            cache.copy_(kept)
        return out

    stand_in(engine, monkeypatch, lost)
    with pytest.raises(NumericsError, match="logits differ"):
        check_compiled(engine.runner)


def test_it_runs_at_every_start_that_compiles(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(model_runner, "check_compiled", seen.append)
    monkeypatch.setattr(compiled, "compile_step", lambda step, *_, **__: step)
    folder = tiny_model_folder("llama", models)
    eager = make_engine(folder)
    assert not seen
    other = make_engine(folder, compile__mode="default")
    assert seen == [other.runner] and eager.runner not in seen


def test_a_cache_with_room_for_little_is_enough(models: Path) -> None:
    engine = make_engine(
        tiny_model_folder("llama", models), cache__num_blocks=2, cache__block_size=4, model__max_model_len=4
    )
    check_compiled(engine.runner)


class Layer(nn.Module):
    """As plain as a layer can be: nothing of transformers stands between its caller and its forward."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), weight), requires_grad=False)
        self.register_buffer("cache", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.cache.copy_(x)
        return x * self.weight


def test_each_region_runs_with_its_own_weights_and_cache() -> None:
    torch._dynamo.reset()
    layers = nn.ModuleList([Layer(float(index + 2)) for index in range(12)])
    assert compiled.mark_regions(layers, (Layer,)) == 12
    assert compiled.mark_regions(layers, (Layer,)) == 12, "a second mark changes nothing"

    def step(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
        return x

    with torch.no_grad():
        out = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")(
            torch.ones(4, dtype=torch.float64)
        )
    values = torch.cumprod(torch.tensor([float(index + 2) for index in range(12)], dtype=torch.float64), 0)
    assert out[0] == values[-1]
    assert [float(layer.cache[0]) for layer in layers] == [1.0, *values[:-1].tolist()]


def test_the_mark_leaves_other_models_of_the_class_alone() -> None:
    marked, other = Layer(2.0), Layer(3.0)
    compiled.mark_regions(nn.ModuleList([marked]), (Layer,))
    assert type(other) is Layer and type(marked) is not Layer and isinstance(marked, Layer)
    assert type(marked).__name__ == "Layer" and list(marked.state_dict()) == list(other.state_dict())


@pytest.mark.parametrize(
    ("mode", "device", "exact", "expected"),
    [
        ("reduce-overhead", "cuda", True, {"triton.cudagraphs": True, "deterministic": True, "shape_padding": False}),
        ("reduce-overhead", "cuda", False, {"triton.cudagraphs": True}),
        ("default", "cuda", True, {"deterministic": True, "shape_padding": False}),
        ("default", "cuda", False, {}),
        ("reduce-overhead", "cpu", True, {}),
    ],
)
def test_options_are_those_of_the_mode_and_of_exactness(
    mode: str, device: str, exact: bool, expected: dict[str, Any]
) -> None:
    assert compiled.step_options(mode, torch.device(device), exact) == expected
