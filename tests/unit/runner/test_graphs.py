"""CUDA graphs without a GPU: what is counted, when a bucket is refused, and that torch could capture what we compile.

Where a test needs torch to capture on a CPU, `Capture` takes the place of its CUDA graph trees; everything up to them,
and what they are told of a graph, is torch's own.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._dynamo import callback
from torch._dynamo.utils import counters
from torch._inductor import compile_fx, cpu_vec_isa, cudagraph_utils, scheduler
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.output_code import CompiledFxGraph
from transformers import PreTrainedModel

from compspec.batch import Bucket
from compspec.config import EngineConfig, make_config
from compspec.errors import UnsupportedError
from compspec.models.loader import LoadedModel, load_model
from compspec.runner import compiled, graphs, kv_cache
from compspec.runner.graphs import GraphCounts, capture_problem, clear_capture_errors, graph_counts, no_omission
from compspec.runner.inputs import InputBuffers, Query
from compspec.runner.model_runner import ModelRunner
from tests.tiny_models import FAMILIES, tiny_model_folder
from tests.unit.attention.test_sdpa_static import OnDevice

RECORDING = callback.CallbackTrigger.CUDAGRAPH_RECORDING
CUDA = torch.device("cuda")
QUERY = Query(token_ids=[5], start=0, block_ids=[1])


def announce(trigger: callback.CallbackTrigger = RECORDING) -> None:
    """What torch does around a recording, or a compilation."""
    with callback.callback_handler.install_callbacks(trigger, "0/0"):
        pass


def counted(act: Callable[[], None]) -> GraphCounts:
    before = graph_counts()
    act()
    return graph_counts() - before


def calls(*pairs: tuple[int, int]) -> list[GraphCounts]:
    """Recordings and skips of each call."""
    return [GraphCounts(recordings=recordings, skips=skips) for recordings, skips in pairs]


def skip_one() -> None:
    """Torch leaves a graph out; it raises where that is an error."""
    cudagraph_utils.log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to mutated inputs")


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    """Two buckets: decode 1x8 and prefill 1x32."""
    return make_config(
        {},
        {
            "model.source": str(folder),
            "model.device": "cpu",
            "model.attention": "sdpa",
            "compile.mode": "none",
            "cache.num_blocks": 40,
            "scheduler.max_num_seqs": 1,
            "numerics.prefill_chunk": 32,
            "numerics.plain_width": None,
            **{name.replace("__", "."): value for name, value in settings.items()},
        },
    )


@pytest.fixture(scope="module")
def folder(models: Path) -> Path:
    return tiny_model_folder("llama", models)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    config = config_of(folder)
    return load_model(config.model, config.cache_path)


@pytest.fixture
def runner(loaded: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """An eager runner that believes it uses graphs."""
    runner = ModelRunner(loaded.adapter, config_of(folder), loaded.adapter.max_model_len)
    monkeypatch.setattr(runner, "uses_graphs", True)
    return runner


def test_recordings_are_counted() -> None:
    assert counted(lambda: None) == GraphCounts(recordings=0, skips=0)
    assert counted(announce) == GraphCounts(recordings=1, skips=0)
    assert counted(lambda: [announce(), announce(), announce()]) == GraphCounts(recordings=3, skips=0)


@pytest.mark.parametrize("trigger", [each for each in callback.CallbackTrigger if each is not RECORDING])
def test_compilations_are_no_recordings(trigger: callback.CallbackTrigger) -> None:
    assert counted(lambda: announce(trigger)).recordings == 0


def test_recordings_are_counted_once_each_after_dynamo_was_reset() -> None:
    """A reset forgets who listens."""
    for _ in range(3):
        graph_counts()
    torch._dynamo.reset()
    assert counted(announce) == GraphCounts(recordings=1, skips=0)
    assert counted(announce) == GraphCounts(recordings=1, skips=0)


def test_skips_are_those_that_torch_counts() -> None:
    assert counted(lambda: [skip_one(), skip_one()]) == GraphCounts(recordings=0, skips=2)


def test_counts_are_plain_numbers_that_do_not_change_later() -> None:
    before = graph_counts()
    announce()
    skip_one()
    after = graph_counts()
    assert (after.recordings - before.recordings, after.skips - before.skips) == (1, 1)


def test_a_torch_that_does_not_announce_recordings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(callback, "CallbackTrigger")
    with pytest.raises(UnsupportedError, match=r"does not say when it captures .* compile\.mode: default"):
        graph_counts()


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (calls((0, 0), (1, 0), (0, 0)), None),
        (calls((1, 0), (0, 0), (0, 0)), None),
        (calls((0, 0), (0, 0), (0, 0)), "0 CUDA graphs were captured where one was expected"),
        (calls((0, 0), (2, 0), (0, 0)), "2 CUDA graphs were captured where one was expected"),
        (calls((0, 0), (1, 0), (1, 0)), "2 CUDA graphs were captured where one was expected"),
        (calls((0, 1), (0, 0), (0, 0)), "torch left out 1 of its graphs"),
        (calls((0, 1), (1, 2), (0, 0)), "torch left out 3 of its graphs"),
        (calls((0, 0), (0, 0), (1, 0)), "its last warm-up call captured again instead of replaying"),
    ],
)
def test_a_bucket_is_captured_if_it_is_one_graph_that_replays(seen: list[GraphCounts], problem: str | None) -> None:
    assert capture_problem(seen) == problem


def test_inside_no_omission_a_skip_is_an_error_with_torchs_reason() -> None:
    assert not inductor_config.triton.cudagraph_or_error
    with no_omission(True):
        assert inductor_config.triton.cudagraph_or_error
        with pytest.raises(RuntimeError, match="mutated inputs"):
            skip_one()
    assert not inductor_config.triton.cudagraph_or_error
    with pytest.raises(KeyError), no_omission(True):
        raise KeyError
    assert not inductor_config.triton.cudagraph_or_error


def test_no_omission_does_nothing_unless_it_is_strict() -> None:
    with no_omission(False):
        assert not inductor_config.triton.cudagraph_or_error
        skip_one()


def test_no_omission_does_without_a_setting_that_torch_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "inductor_config", SimpleNamespace(triton=SimpleNamespace()))
    with no_omission(True):
        skip_one()


def caused(cause: Exception) -> Exception:
    error = RuntimeError("compilation failed")
    error.__cause__ = cause
    return error


def wrapped(inner: Exception) -> Exception:
    error = RuntimeError("backend failed")
    error.inner_exception = inner  # type: ignore[attr-defined]
    return error


REASON = RuntimeError("skipping cudagraphs due to mutated\n  inputs (1 instances)")


@pytest.mark.parametrize("error", [REASON, caused(REASON), wrapped(REASON)], ids=["itself", "cause", "inner"])
def test_an_omission_is_an_error_that_names_the_bucket_and_the_way_out(error: Exception) -> None:
    with pytest.raises(UnsupportedError) as caught, clear_capture_errors("decode 4x8"):
        raise error
    assert str(caught.value) == (
        "bucket decode 4x8 was not captured as a CUDA graph: skipping cudagraphs due to mutated inputs (1 instances); "
        "set compile.mode: default to run without graphs, or compile.strict: false to go on with what could be captured"
    )
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [RuntimeError("out of memory"), caused(ValueError("x")), wrapped(ValueError("x")), UnsupportedError("other")],
    ids=["itself", "cause", "inner", "ours"],
)
def test_other_errors_pass_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, clear_capture_errors("decode 4x8"):
        raise error
    assert caught.value is error


def test_addresses_are_kept_without_a_guard() -> None:
    """A guard on them would be a compilation more for every other address."""
    tensors = [torch.zeros(2), torch.zeros(3, dtype=torch.int32)]
    graphs.keep_addresses(tensors)
    assert [tensor._dynamo_static_input_type for tensor in tensors] == ["unguarded"] * 2


SCRIPTS = [
    pytest.param([(0, 0), (0, 0), (0, 0)], "0 CUDA graphs were captured", id="not captured"),
    pytest.param([(0, 0), (2, 0), (0, 0)], "2 CUDA graphs were captured", id="captured in parts"),
    pytest.param([(0, 1), (0, 0), (0, 0)], "torch left out 1 of its graphs", id="left out"),
    pytest.param([(0, 0), (0, 0), (1, 0)], "captured again instead of replaying", id="captured in the last call"),
]


class Script:
    """Takes the place of `ModelRunner._call`: what torch does at each call."""

    def __init__(self, script: list[tuple[int, int]], *, raises: bool = False) -> None:
        self._script = script
        self._raises = raises
        self.seen: list[tuple[Bucket, list[Query], bool]] = []

    def __call__(self, bucket: Bucket, queries: list[Query]) -> None:
        strict = inductor_config.triton.cudagraph_or_error
        recordings, skips = self._script[len(self.seen) % len(self._script)]
        self.seen.append((bucket, queries, strict))
        for _ in range(recordings):
            announce()
        for _ in range(skips):
            if self._raises:
                skip_one()
            else:
                counters["inductor"]["cudagraph_skips"] += 1


@pytest.mark.parametrize("strict", [True, False])
def test_warm_up_captures_and_replays_every_bucket(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    script = Script([(0, 0), (1, 0), (0, 0)])
    monkeypatch.setattr(runner, "_call", script)
    monkeypatch.setattr(runner, "_strict", strict)
    assert runner.num_graphs == 0
    runner.warm_up()
    assert runner.num_graphs == len(runner.buckets.all) == 2
    assert script.seen == [(bucket, [], strict) for bucket in runner.buckets.all for _ in range(3)]
    assert not inductor_config.triton.cudagraph_or_error
    assert runner.num_skips == 0
    monkeypatch.setattr(runner, "buckets", SimpleNamespace(all=runner.buckets.decode))
    assert runner.num_graphs == 1, "a bucket that is not in use counts no more"


@pytest.mark.parametrize(("script", "problem"), SCRIPTS)
def test_a_bucket_that_is_not_captured_is_an_error_if_strict(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, script: list[tuple[int, int]], problem: str
) -> None:
    monkeypatch.setattr(runner, "_call", Script(script))
    first = runner.buckets.all[0]
    with pytest.raises(UnsupportedError) as caught:
        runner.warm_up()
    assert str(first) in str(caught.value) and problem in str(caught.value)
    assert "compile.mode: default" in str(caught.value) and "compile.strict: false" in str(caught.value)
    assert runner.num_graphs == 0


@pytest.mark.parametrize(("script", "problem"), SCRIPTS)
def test_a_bucket_that_is_not_captured_is_a_warning_if_not_strict(
    runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: list[tuple[int, int]],
    problem: str,
) -> None:
    monkeypatch.setattr(runner, "_call", Script([*script, (0, 0), (1, 0), (0, 0)]))
    monkeypatch.setattr(runner, "_strict", False)
    with caplog.at_level(logging.WARNING, logger="compspec"):
        runner.warm_up()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(runner.buckets.all[0]) in record.getMessage() and problem in record.getMessage()
    assert runner.num_graphs == 1, "the second bucket was captured"
    assert runner.num_skips == sum(skips for _, skips in script)


def test_a_skip_that_torch_raises_names_the_bucket(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_call", Script([(0, 1)], raises=True))
    with pytest.raises(UnsupportedError, match="prefill 1x32 was not captured as a CUDA graph: skipping cudagraphs"):
        runner.warm_up()


def test_without_graphs_a_bucket_is_called_once_and_nothing_is_counted(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script([(0, 1)])
    monkeypatch.setattr(runner, "_call", script)
    monkeypatch.setattr(runner, "uses_graphs", False)
    runner.warm_up()
    assert [bucket for bucket, _, _ in script.seen] == runner.buckets.all
    assert runner.num_graphs == 0


def test_every_call_begins_a_step_of_the_graphs(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch keeps the outputs of the last step, or captures again."""
    marked: list[str] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marked.append("begin"))
    bucket = runner.buckets.decode[0]
    step = runner._steps[bucket]

    def noted(*arguments: Tensor) -> Tensor:
        marked.append("step")
        return step(*arguments)

    monkeypatch.setitem(runner._steps, bucket, noted)
    for _ in range(2):
        runner.run(bucket, [QUERY])
    assert marked == ["begin", "step"] * 2
    monkeypatch.setattr(runner, "uses_graphs", False)
    runner.run(bucket, [QUERY])
    assert marked == ["begin", "step"] * 2 + ["step"]


def in_thread(act: Callable[[], Any]) -> Any:
    """Its result, or its error, from a thread that is over."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


def test_graphs_run_in_the_thread_that_made_the_engine_alone(runner: ModelRunner) -> None:
    """Torch keeps captured graphs per thread, and would capture again without a word."""
    bucket = runner.buckets.decode[0]
    with pytest.raises(UnsupportedError, match=r"belong to the thread that made the engine.*compile\.mode: default"):
        in_thread(lambda: runner.run(bucket, [QUERY]))
    assert runner.run(bucket, [QUERY]).isfinite().any()


def test_without_graphs_any_thread_will_do(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "uses_graphs", False)
    bucket = runner.buckets.decode[0]
    assert in_thread(lambda: runner.run(bucket, [QUERY])).isfinite().any()


def test_a_later_thread_with_the_number_of_an_ended_one_is_another(loaded: LoadedModel, folder: Path) -> None:
    """The system hands such numbers out again."""
    made_in: list[int] = []

    def make() -> ModelRunner:
        made_in.append(threading.get_ident())
        return ModelRunner(loaded.adapter, config_of(folder), loaded.adapter.max_model_len)

    runner = in_thread(make)
    runner.uses_graphs = True
    bucket = runner.buckets.decode[0]
    numbers: list[int] = []

    def run() -> None:
        numbers.append(threading.get_ident())
        runner.run(bucket, [QUERY])

    for _ in range(10):
        with pytest.raises(UnsupportedError, match="belong to the thread"):
            in_thread(run)
    if made_in[0] not in numbers:
        pytest.skip("no number was handed out again")


class Capture:
    """Stands in for torch's CUDA graphs of one compiled function: warms up, announces a recording, replays.

    As torch does, it records again where an address changes that was said to stay, and leaves out a function that
    writes to an input that was not.
    """

    def __init__(self, model: Callable[..., Any], static_input_idxs: tuple[int, ...], **options: Any) -> None:
        self.model = model
        self.static_input_idxs = static_input_idxs
        self.mutated_input_idxs: tuple[int, ...] = options["mutated_input_idxs"]
        self.placeholders = options["placeholders"]
        self.num_calls = 0
        self.addresses: list[int] = []
        self._recorded: list[int] | None = None

    def __call__(self, inputs: list[Any]) -> Any:
        self.num_calls += 1
        assert all(isinstance(each, Tensor) for each in inputs)
        reason = cudagraph_utils.check_for_mutation(self, inputs, lambda tensor: False)
        if reason is not None:
            cudagraph_utils.log_cudagraph_skip_and_bump_counter(reason)
            return self.model(inputs)
        self.addresses = [each.data_ptr() for each in inputs]
        static = [self.addresses[index] for index in self.static_input_idxs]
        if self.num_calls > 1 and static != self._recorded:
            self._recorded = static
            announce()
        return self.model(inputs)

    def addresses_of(self, indices: tuple[int, ...]) -> set[int]:
        return {self.addresses[index] for index in indices}


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are neither compiled nor run: what matters is the graph."""
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *args, **kwargs: lambda *arguments: None)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Capture]]:
    """Inside, torch compiles for CUDA graphs on a CPU; all functions that it would capture, in order.

    A runner believes that it uses graphs.
    """
    found: list[Capture] = []

    def cudagraphify(*args: Any, **kwargs: Any) -> Capture:
        found.append(Capture(*args, **kwargs))
        return found[-1]

    step_options, post_compile = compiled.step_options, CompiledFxGraph.post_compile
    should_partition = scheduler.Scheduler.should_partition

    def step_options_for_cuda(mode: str, device: torch.device, exact: bool) -> dict[str, Any]:
        return step_options(mode, CUDA, exact)

    def post_compile_for_cuda(graph: CompiledFxGraph, *args: Any) -> None:
        graph.device_idxs.add(0)
        post_compile(graph, *args)

    def should_partition_on_cuda(self: Any, node: Any) -> str | None:
        with mock.patch.object(scheduler.BaseSchedulerNode, "is_gpu", lambda node: True):
            return should_partition(self, node)

    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        ModelRunner, "uses_graphs", property(lambda self: True, lambda self, value: None), raising=False
    )
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    monkeypatch.setattr(compiled, "step_options", step_options_for_cuda)
    monkeypatch.setattr(compile_fx, "cudagraphify", cudagraphify)
    monkeypatch.setattr(CompiledFxGraph, "post_compile", post_compile_for_cuda)
    monkeypatch.setattr(scheduler.Scheduler, "should_partition", should_partition_on_cuda)
    monkeypatch.setattr(cudagraph_utils, "check_lowering_disable_cudagraph", lambda devices: None)
    without_kernels(monkeypatch)
    yield found
    torch._dynamo.reset()


@pytest.mark.parametrize("regions", [True, False], ids=["layers are nested regions", "one flat graph"])
def test_every_bucket_is_one_graph_that_reads_and_writes_in_place(
    folder: Path, captures: list[Capture], monkeypatch: pytest.MonkeyPatch, regions: bool
) -> None:
    """Nothing is copied for a replay, and least of all a KV cache: what is written to a copy is lost."""
    if not regions:
        monkeypatch.setattr(compiled, "mark_regions", lambda module, classes: 0)
    config = config_of(folder, compile__mode="reduce-overhead")
    adapter = load_model(config.model, config.cache_path).adapter
    runner = ModelRunner(adapter, config, adapter.max_model_len)
    assert any(hasattr(layer, compiled.REGION_MARK) for layer in adapter.module.modules()) == regions
    buckets = runner.buckets.all if regions else runner.buckets.all[1:]
    with torch.no_grad():
        for bucket in buckets:
            runner._capture(bucket)
    assert runner.num_graphs == len(captures) == len(buckets)
    caches = {cache.data_ptr() for cache in (*runner.k_caches, *runner.v_caches)}
    for bucket, capture in zip(buckets, captures, strict=True):
        assert capture.num_calls == 3
        inputs = {tensor.data_ptr() for tensor in runner._buffers[bucket].tensors}
        static = capture.addresses_of(capture.static_input_idxs)
        assert caches <= static, "the caches would be copied"
        assert inputs <= static, "the inputs would be copied"
        assert sorted(capture.static_input_idxs) == list(range(len(capture.addresses))), "something would be copied"
        written = capture.addresses_of(capture.mutated_input_idxs)
        assert written <= caches if regions else written == caches, "torch need not see what a nested region writes to"


def test_a_runner_that_uses_graphs_keeps_caches_and_inputs_where_they_are(
    loaded: LoadedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ModelRunner, "uses_graphs", property(lambda self: True, lambda self, value: None), raising=False
    )
    runner = ModelRunner(loaded.adapter, config_of(folder), loaded.adapter.max_model_len)
    inputs = [tensor for bucket in runner.buckets.all for tensor in runner._buffers[bucket].tensors]
    assert len(inputs) == 12
    for tensor in (*runner.k_caches, *runner.v_caches, *inputs):
        assert getattr(tensor, "_dynamo_static_input_type", None) == "unguarded"
    layers = [layer.module for layer in loaded.adapter.layers]
    assert [layer.compspec_k_cache is cache for layer, cache in zip(layers, runner.k_caches, strict=True)] == [True] * 2


def with_step(runner: ModelRunner, step: compiled.StepFunction, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Gives the runner one bucket, whose step is `step`, compiled."""
    bucket = runner.buckets.decode[0]
    monkeypatch.setattr(runner, "buckets", SimpleNamespace(all=[bucket], decode=[bucket]))
    monkeypatch.setitem(runner._steps, bucket, compiled.compile_step(step, bucket, "reduce-overhead", CUDA, exact=True))
    return bucket


def plain_step(input_ids: Tensor, *others: Tensor) -> Tensor:
    return input_ids[0, :, None] * 2.0


def make_writing_step(kept: Tensor) -> compiled.StepFunction:
    def step(input_ids: Tensor, *others: Tensor) -> Tensor:
        kept.add_(input_ids[0, :, None])
        return kept * 2.0

    return step


@pytest.fixture
def small(captures: list[Capture], loaded: LoadedModel, folder: Path) -> ModelRunner:
    """An eager runner, for a step of its own."""
    return ModelRunner(loaded.adapter, config_of(folder), loaded.adapter.max_model_len)


@pytest.mark.parametrize("writes", [False, True])
def test_the_stand_in_captures_a_step(small: ModelRunner, monkeypatch: pytest.MonkeyPatch, writes: bool) -> None:
    """Without this the refusals below would prove nothing."""
    kept = torch.zeros(8, 1)
    graphs.keep_addresses([kept])
    with_step(small, make_writing_step(kept) if writes else plain_step, monkeypatch)
    small.warm_up()
    assert small.num_graphs == 1


def test_a_step_that_writes_to_an_input_that_may_move_is_refused(
    small: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_step(small, make_writing_step(torch.zeros(8, 1)), monkeypatch)
    with pytest.raises(UnsupportedError, match=r"decode 1x8 .*: skipping cudagraphs due to mutated inputs"):
        small.warm_up()


def test_a_step_that_torch_captures_in_parts_is_refused(small: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(input_ids: Tensor, *others: Tensor) -> Tensor:
        wide = input_ids[0, :, None] * 2.0
        return torch.cdist(wide, wide)[:, :1] * 3.0

    with_step(small, step, monkeypatch)
    with (
        inductor_config.patch(custom_should_partition_ops=["aten::_cdist_forward"]),
        pytest.raises(UnsupportedError) as caught,
    ):
        small.warm_up()
    assert "2 CUDA graphs were captured where one was expected" in str(caught.value)


@pytest.mark.skipif(
    not hasattr(inductor_config, "force_disable_cudagraph_TESTING_ONLY"), reason="this torch cannot be made to"
)
def test_a_graph_that_torch_leaves_out_without_a_word_is_noticed(
    small: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_step(small, plain_step, monkeypatch)
    with inductor_config.patch(force_disable_cudagraph_TESTING_ONLY=True), pytest.raises(UnsupportedError) as caught:
        small.warm_up()
    assert "0 CUDA graphs were captured where one was expected" in str(caught.value)


def test_a_reason_that_torch_finds_while_it_compiles_is_named(
    small: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes wrapped in the errors of the compiler."""

    def refuse(devices: Any) -> None:
        cudagraph_utils.log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to a reason of the test")

    monkeypatch.setattr(cudagraph_utils, "check_lowering_disable_cudagraph", refuse)
    bucket = with_step(small, plain_step, monkeypatch)
    with pytest.raises(UnsupportedError, match=f"{bucket} was not captured .*due to a reason of the test"):
        small.warm_up()


def test_on_a_cpu_torch_captures_nothing_and_that_is_noticed(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Its own decision, without the stand-in."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    monkeypatch.setattr(runner, "_strict", False)
    without_kernels(monkeypatch)
    with_step(runner, plain_step, monkeypatch)
    with caplog.at_level(logging.WARNING, logger="compspec"):
        runner.warm_up()
    assert "torch left out 1 of its graphs" in caplog.text
    assert runner.num_graphs == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_of_the_host_takes_part_in_a_step(family: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a nested region torch does not look for one: it would be read at the capture and never again."""
    # It reads tokens, and is skipped while torch compiles.
    monkeypatch.setattr(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *args: None)
    config = config_of(tiny_model_folder(family, models))
    adapter = load_model(config.model, config.cache_path).adapter
    adapter.set_kv_buffers(*kv_cache.allocate(adapter, 4, 16))
    adapter.use_row_independent_experts()
    adapter.module.to("meta")
    for bucket in (
        Bucket(num_requests=2, query_len=8, num_logits=8),
        Bucket(num_requests=1, query_len=32, num_logits=1),
    ):
        *inputs, logits_to_keep = InputBuffers(bucket, 16, 8, torch.device("meta")).tensors
        with torch.no_grad(), OnDevice() as seen:
            logits = adapter.forward(*inputs, 16, logits_to_keep)
        assert logits.is_meta and logits.shape == (bucket.num_requests * bucket.num_logits, adapter.vocab_size)
        assert seen.num_operators > 50


def test_the_check_above_notices_a_tensor_of_the_host(loaded: LoadedModel, models: Path) -> None:
    config = config_of(tiny_model_folder("gemma", models))
    adapter = load_model(config.model, config.cache_path).adapter
    adapter.set_kv_buffers(*kv_cache.allocate(adapter, 4, 16))
    (rotary,) = (each for name, each in adapter.module.named_modules() if name.endswith("rotary_emb"))
    left_behind = rotary.inv_freq.clone()
    adapter.module.to("meta")
    rotary.inv_freq = left_behind
    bucket = Bucket(num_requests=2, query_len=8, num_logits=8)
    *inputs, logits_to_keep = InputBuffers(bucket, 16, 8, torch.device("meta")).tensors
    with torch.no_grad(), OnDevice(), pytest.raises(AssertionError, match="of the host"):
        adapter.forward(*inputs, 16, logits_to_keep)


def test_what_torch_does_after_the_warm_up_is_counted_by_the_runner_that_ran(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what another engine of the process captures between two of its steps."""
    bucket, call = runner.buckets.decode[0], ModelRunner._call

    def captures_again(*given: Any) -> Tensor:
        announce()
        counters["inductor"]["cudagraph_skips"] += 2
        return call(*given)

    monkeypatch.setattr(runner, "uses_graphs", True)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    runner.run(bucket, [QUERY])
    announce()
    assert runner.late_graphs == graphs.GraphCounts()
    monkeypatch.setattr(ModelRunner, "_call", captures_again)
    runner.run(bucket, [QUERY])
    assert runner.late_graphs == graphs.GraphCounts(recordings=1, skips=2)
