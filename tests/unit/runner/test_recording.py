"""Forwards as programs: what a program computes is what the compiled forward does, and what cannot be one is not."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.codecache import PyCodeCache

from compspec.attention import cpu
from compspec.engine import Engine
from compspec.kernels.packed import packs_bf16
from compspec.kernels.program import NotRecordable, Program, Recorder
from compspec.runner import model_runner
from compspec.runner.inputs import Query
from compspec.runner.recording import record
from compspec.sampling.params import SamplingParams
from tests.law import make_engine, make_prompts, outputs, run
from tests.tiny_models import tiny_model_folder

pytestmark = pytest.mark.skipif(not Recorder.is_available() or not packs_bf16(), reason="no kernels for this CPU")


@pytest.fixture(scope="module")
def folder(models: Path) -> Path:
    return tiny_model_folder("llama", models)


def compiled_engine(folder: Path, **overrides: Any) -> Engine:
    settings: dict[str, Any] = {
        "model__dtype": "bfloat16",
        "compile__mode": "reduce-overhead",
        "numerics__prefill_chunk": 64,
        "scheduler__max_num_seqs": 5,
        "cache__num_blocks": 100,
    }
    return make_engine(folder, **(settings | overrides))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return compiled_engine(folder)


def test_every_shape_is_a_program_and_equals_the_compiled_forward(engine: Engine) -> None:
    runner = engine.runner
    assert runner.num_programs == len(runner.buckets.all) >= 4
    for seed, bucket in enumerate(runner.buckets.all * 3):
        prompts = make_prompts(bucket.num_requests, seed=seed)
        queries = [
            Query(
                token_ids=prompt[: bucket.query_len], start=11 * seed % 40, block_ids=list(range(8 * i + 1, 8 * i + 9))
            )
            for i, prompt in enumerate(prompts[: 1 + seed % bucket.num_requests])
        ]
        found = runner.run(bucket, queries).clone()
        assert torch.equal(found, runner._call(bucket, queries)), bucket


def test_a_program_reads_and_writes_the_cache(engine: Engine) -> None:
    runner = engine.runner
    bucket = runner.buckets.select(1, 2, is_prefill=False)
    blocks = list(range(1, 9))
    alone = runner.run(bucket, [Query(token_ids=[5], start=1, block_ids=blocks)])[0, 0].clone()
    runner.run(bucket, [Query(token_ids=[9], start=0, block_ids=blocks)])
    after = runner.run(bucket, [Query(token_ids=[5], start=1, block_ids=blocks)])[0, 0]
    assert not torch.equal(alone, after)
    block, size = 1, runner.block_size
    assert runner.k_caches[0][block * size].abs().sum() > 0


def test_without_reduce_overhead_there_are_no_programs(folder: Path) -> None:
    assert compiled_engine(folder, compile__mode="default").runner.num_programs == 0


def test_what_torch_multiplies_is_no_program(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "compspec"):
        engine = compiled_engine(folder, model__dtype="float32")
    assert engine.runner.num_programs == 0
    assert any("does not run as one program" in message and "aten::" in message for message in caplog.messages)


def test_an_operator_that_is_not_recorded_is_named() -> None:
    def step(x: Tensor) -> Tensor:
        return (x + 1) @ x.T

    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    x = torch.randn(4, 64)
    compiled(x)
    with pytest.raises(NotRecordable, match="aten::mm"):
        record(compiled, (x,), (), together=True)


def test_kernels_are_recorded_with_their_buffers_and_inductor_is_left_as_it_was() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        return (x.softmax(-1) + y).sum(0, keepdim=True).sin() * x

    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    x, y = torch.randn(4, 64), torch.randn(4, 64)
    compiled(x, y)
    before = [dict(vars(module)) for module in PyCodeCache.modules]
    program, out = record(compiled, (x, y), (), together=True)
    assert [dict(vars(module)) for module in PyCodeCache.modules] == before
    for _ in range(3):
        x.copy_(torch.randn(4, 64))
        y.copy_(torch.randn(4, 64))
        program.run()
        assert torch.equal(out, compiled(x, y))


def without(program: Program, index: int) -> Program:
    """The program less one call."""
    calls = [(call.kind, call.function, call.arguments) for call in program._calls]
    return Program(calls[:index] + calls[index + 1 :], [program], program._memory, together=True)


def test_no_call_of_a_program_can_be_missing_unnoticed(engine: Engine) -> None:
    runner = engine.runner
    for bucket in (runner.buckets.prefill[-1], runner.buckets.select(1, 2, is_prefill=False)):
        program, logits = runner._programs[bucket]
        wanted = runner._call(bucket, runner._probe(bucket, 2)).clone()
        for index in range(len(program._calls)):
            runner._call(bucket, runner._probe(bucket, 1))
            less = without(program, index)
            less.forget()
            runner._buffers[bucket].fill(runner._probe(bucket, 2))
            less.run()
            assert not torch.equal(logits.view(wanted.shape), wanted), (bucket, index)
        program.run()
        assert torch.equal(logits.view(wanted.shape), wanted)


def test_a_program_that_computes_something_else_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def record_less(*args: Any, **options: Any) -> tuple[Program, Tensor]:
        program, logits = record(*args, **options)
        return without(program, len(program._calls) - 1), logits

    monkeypatch.setattr(model_runner, "record", record_less)
    engine = compiled_engine(folder)
    assert engine.runner.num_programs == 0
    assert any("computes something else" in message for message in caplog.messages)


def test_an_operator_that_does_not_tell_the_recorder_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "active_recorder", lambda: None)
    with caplog.at_level(logging.INFO, "compspec"):
        engine = compiled_engine(folder)
    assert engine.runner.num_programs == 0


def test_under_a_profiler_there_is_no_program_and_no_error(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "compspec"), torch.autograd.profiler.profile():  # type: ignore[no-untyped-call]
        engine = compiled_engine(folder)
    assert engine.runner.num_programs == 0
    assert any("a profiler is at work" in message for message in caplog.messages)


def test_kernels_of_other_threads_are_not_recorded() -> None:
    def step(x: Tensor) -> Tensor:
        return x.softmax(-1).sin()

    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    x, other = torch.randn(4, 64), torch.randn(4, 64)
    compiled(x)

    def with_another_thread(tensor: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: compiled(other))
        thread.start()
        thread.join()
        return compiled(tensor)

    program, out = record(with_another_thread, (x,), (), together=True)
    assert len(program._calls) == 1
    other.fill_(0)
    x.copy_(torch.randn(4, 64))
    program.run()
    assert torch.equal(out, compiled(x))


def test_two_engines_of_one_model_do_not_take_each_others_cache(folder: Path) -> None:
    first = compiled_engine(folder, compile__mode="default")
    alone = outputs(run(first, make_prompts(3), SamplingParams(max_tokens=8)))
    second = Engine(first.config, loaded=first.loaded)
    one, other = (each.add_request(make_prompts(3)[2], SamplingParams(max_tokens=8)) for each in (first, second))
    while first.has_work or second.has_work:
        first.step()
        second.step()
    assert one.output_token_ids == other.output_token_ids == alone[2][0]
