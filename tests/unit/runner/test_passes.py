"""Layers that share a packed weight multiply once in a compiled forward, in nested regions too, and the bits stay."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from compspec.batch import Bucket
from compspec.kernels import packed
from compspec.kernels.packing import Format, pack_bf16, pack_quantised, quantise
from compspec.models import linears
from compspec.models.linears import pack_linears
from compspec.runner import compiled
from compspec.runner.compiled import compile_step
from compspec.runner.inputs import Query
from compspec.runner.passes import ShareProducts
from tests.law import make_engine
from tests.tiny_models import tiny_model_folder

CPU = torch.device("cpu")
BUCKET = Bucket(num_requests=1, query_len=4, num_logits=4)
OPERATOR = torch.ops.compspec.packed_linear.default


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[packed._Kernel]:
    """Bf16 weights are packed also where torch has to multiply them."""
    monkeypatch.setattr(linears, "packs_bf16", lambda: True)
    with torch.no_grad():
        yield packed._KERNEL


@pytest.fixture
def count_products(kernel: packed._Kernel, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    """How often something multiplies."""
    asked: list[int] = []
    right = kernel.function
    monkeypatch.setattr(kernel, "function", lambda dtype, form: asked.append(form) or right(dtype, form))

    def count(run: Callable[[], object]) -> int:
        asked.clear()
        run()
        return len(asked)

    return count


class Group(nn.Module):
    """Three layers of one input on one weight, and two of another."""

    def __init__(self, form: Format = Format.BF16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(5))
        self.requires_grad_(False)
        assert pack_linears(self, [("a", "b", "c"), ("d", "e")], form) == 5

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + self.b(x).sin() * self.c(x)
        return self.d(x) - self.e(x)


def some_x(rows: int = 4) -> Tensor:
    return torch.randn(1, rows, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def num_products(graph: Graph) -> int:
    return sum(node.target is OPERATOR for node in graph.nodes)


def product(x: Tensor, weight: Tensor, form: Format = Format.BF16, bias: Tensor | None = None) -> Tensor:
    return torch.ops.compspec.packed_linear(x, weight, bias, 64, form)


def weights(form: Format = Format.BF16) -> tuple[Tensor, Tensor]:
    """Two packed weights [64, 64]."""
    generator = torch.Generator().manual_seed(0)
    both = [torch.randn(64, 64, generator=generator) for _ in range(2)]
    first, second = (
        pack_bf16(one.bfloat16()) if form is Format.BF16 else pack_quantised(quantise(one, form)) for one in both
    )
    return first, second


def shared(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[GraphModule, int]:
    """The graph of a function after the pass, and how many products it had before."""
    module = make_fx(torch.func.functionalize(function))(*inputs)
    before = num_products(module.graph)
    ShareProducts()(module.graph)
    module.graph.lint()
    module.recompile()
    assert torch.equal(module(*inputs), function(*inputs))
    return module, before


@pytest.mark.parametrize("form", Format)
def test_equal_products_are_one(form: Format) -> None:
    def function(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        a, b, c = (product(x, first, form) for _ in range(3))
        x = a[..., :32] + b[..., 32:].sin() * c[..., :32]
        x = torch.cat([x, x], dim=-1)
        return product(x, second, form)[..., :32] - product(x, second, form)[..., 32:]

    module, before = shared(function, some_x(), *weights(form))
    assert before == 5
    assert num_products(module.graph) == 2


def test_products_that_differ_in_anything_stay() -> None:
    def function(x: Tensor, first: Tensor, second: Tensor, bias: Tensor) -> Tensor:
        return product(x, first) + product(x + 1, first) + product(x, second) + product(x, first, bias=bias)

    module, before = shared(function, some_x(), *weights(), torch.ones(64))
    assert num_products(module.graph) == before == 4


def test_a_tensor_that_changes_in_place_between_two_products_is_not_one_input() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = x.clone()
        first = product(y, weight)
        y.mul_(3)
        return first + product(y, weight)

    module, before = shared(function, some_x(), weights()[0])
    assert num_products(module.graph) == before == 2


def test_cached_code_is_that_of_this_pass() -> None:
    assert ShareProducts().uuid() == ShareProducts().uuid()
    assert ShareProducts().uuid()


def test_few_rows_run_on_one_thread_and_share_products() -> None:
    for query_len, threads in ((8, 1), (32, 1), (33, None)):
        bucket = Bucket(num_requests=1, query_len=query_len, num_logits=1)
        options = compiled._cpu_options(bucket)
        assert isinstance(options["post_grad_custom_pre_pass"], ShareProducts)
        assert options.get("cpp.threads") == threads


def test_guards_on_arguments_stay_and_those_on_the_model_go() -> None:
    def step(ids: Tensor, positions: Tensor) -> Tensor:
        return ids + positions

    keep = compiled._guards_of(step)
    names = ["ids", "G['model']", "positions", "", "L['self'].ids", "G['ids']"]
    assert keep([SimpleNamespace(name=name) for name in names]) == [True, False, True, False, False, False]


def test_a_compiled_step_multiplies_once_per_group_and_looks_at_its_arguments(
    count_products: Callable[[Callable[[], object]], int],
) -> None:
    model = Group()

    def step(x: Tensor) -> Tensor:
        return model(x)

    run = compile_step(step, BUCKET, "default", CPU, exact=True)
    x = some_x()
    run(x)
    assert count_products(lambda: model(x)) == 5
    assert count_products(lambda: run(x)) == 2
    torch.testing.assert_close(run(x), model(x), atol=0.02, rtol=0.02)
    with compiled.no_recompilation("default"), pytest.raises(RuntimeError, match="recompil"):
        run(some_x(5))
    assert run(some_x(5)).shape == (1, 5, 64)


def test_nested_regions_share_as_well(
    models: Path, count_products: Callable[[Callable[[], object]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each of two layers one product for queries, keys and values, and one for gate and up; and the head's."""
    engine = make_engine(
        tiny_model_folder("llama", models, dtype="bfloat16"),
        compile__mode="default",
        scheduler__max_num_seqs=1,
        numerics__prefill_chunk=32,
        numerics__plain_width=None,
    )
    runner = engine.runner
    bucket = runner.buckets.widest_decode
    query = [Query(token_ids=[5, 6, 7], start=0, block_ids=[1, 2, 3])]
    assert count_products(lambda: runner.run(bucket, query)) == 2 * 4 + 1
    logits = runner.run(bucket, query).clone()
    monkeypatch.setattr(runner, "_steps", {**runner._steps, bucket: runner._make_step()})
    assert count_products(lambda: runner.run(bucket, query)) == 2 * 7 + 1, "not compiled"
    torch.testing.assert_close(runner.run(bucket, query)[0, :3], logits[0, :3], atol=0.1, rtol=0.05)
