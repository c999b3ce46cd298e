"""Checks compspec on one CUDA GPU in a few minutes: kernels, graphs, the law, then speed. Needs no network.

    python tools/gpu_check.py --output result.json      on a machine with a GPU
    python tools/gpu_check.py --dry-run                 on any machine: the same code at toy sizes on the CPU

Each section runs in a process of its own, with a limit of time: one that fails, crashes or hangs is reported, and the
next one runs. What does not fit into --budget seconds is reported as not run. The result is written after each section.
Exits with 1 if a check failed or did not run. Kernels that the attention section alone needs are not compiled here
unless --jit is given: tools/build_kernels.py compiles them ahead of time.
"""

import argparse
import functools
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig

from compspec import doctor
from compspec.attention import prebuilt, varlen
from compspec.attention.backend import AttentionBackend, AttentionSetup, LayerSpec, in_force
from compspec.attention.cpu import CpuBackend
from compspec.attention.flashinfer import FlashInferBackend
from compspec.attention.flashinfer import refusal as flashinfer_refusal
from compspec.attention.sdpa import SdpaBackend
from compspec.batch import Batch, Bucket, DraftTokens
from compspec.config import EngineConfig, make_config
from compspec.engine import Engine
from compspec.errors import CompspecError
from compspec.models.loader import LoadedModel, random_model
from compspec.proposers.proposer import Proposer
from compspec.request import Request
from compspec.runner import compiled
from compspec.runner.buckets import Buckets
from compspec.runner.inputs import InputBuffers, Query
from compspec.runner.model_runner import ModelRunner
from compspec.sampling.metadata import group_sizes
from compspec.sampling.noise import GumbelNoise
from compspec.sampling.params import SamplingParams

BLOCK_SIZE = 16
DRAFTS = (3, 5, 7)

# Tokens that a request of the attention checks can have.
_CAPACITY = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One result; `good` is None where there is nothing to judge. A detail is left out of the table if it is good."""

    section: str
    name: str
    value: str
    good: bool | None = None
    detail: bool = False
    data: dict[str, Any] = field(default_factory=dict)


class Report:
    """Collects results, and shows each as it comes.

    Args:
        lines: a file that gets every result at once, one line each: what a process leaves behind, however it ends.
    """

    def __init__(self, lines: Path | None = None) -> None:
        self.rows: list[Row] = []
        self.seconds: dict[str, float] = {}
        self._lines = lines
        self._section = ""

    def begin(self, section: str) -> None:
        """All that follows belongs to `section`."""
        self._section = section

    def add(self, name: str, value: str, good: bool | None = None, *, detail: bool = False, **data: Any) -> None:
        """Notes one result."""
        row = Row(section=self._section, name=name, value=value, good=good, detail=detail, data=data)
        self.rows.append(row)
        print(f"   {name}: {value}" + {True: "  ok", False: "  FAILED", None: ""}[good], flush=True)
        if self._lines is not None:
            with self._lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    def write(self, output: Path) -> None:
        """Writes everything so far."""
        content = {"rows": [asdict(row) for row in self.rows], "seconds": self.seconds}
        partial = output.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
        os.replace(partial, output)

    def table(self) -> Table:
        """The short summary."""
        table = Table(title="compspec gpu check", show_lines=False)
        for name in ("section", "what", "value", ""):
            table.add_column(name)
        for row in self.rows:
            if not row.detail or row.good is False:
                mark = {True: "ok", False: "FAILED", None: ""}[row.good]
                table.add_row(row.section, row.name, row.value, mark)
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the checks run, and how large they are."""

    device: torch.device
    dry: bool
    jit: bool = False

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Dotted configuration keys, `__` for the dot. A dry run does not compile."""
        common = {
            "model.source": "random",
            "model.device": str(self.device),
            "compile.mode": "none" if self.dry else "reduce-overhead",
            "speculative.adaptive": False,  # every width runs
        }
        return common | {name.replace("__", "."): value for name, value in changes.items()}

    def config(self, **changes: Any) -> EngineConfig:
        """A configuration for this machine."""
        return make_config({}, self.settings(**changes))


Section = Callable[[Machine, Report], None]


def versions(machine: Machine, report: Report) -> None:
    """What is installed, and what the doctor says."""
    names = ("torch", "transformers", "accelerate", "flashinfer-python", "apache-tvm-ffi", "triton", "numpy")
    found = {name: doctor.package_version(name) for name in names}
    report.add("packages", ", ".join(f"{name} {value}" for name, value in found.items()), detail=True, versions=found)
    host = f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    report.add("host", host, detail=True)
    if machine.device.type == "cuda":
        properties = torch.cuda.get_device_properties(machine.device)
        generation = f"{properties.major}.{properties.minor}"
        driver = _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        value = f"{properties.name}, capability {generation}, {properties.multi_processor_count} multiprocessors"
        report.add("gpu", f"{value}, CUDA {torch.version.cuda}, driver {driver}", memory=properties.total_memory)
    for finding in doctor.examine():
        report.add(f"doctor: {finding.name}", finding.value, detail=True)


def _command(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def noise(machine: Machine, report: Report) -> None:
    """The noise has the same bits on the device, compiled and not, as on the CPU."""
    vocab = 517 if machine.dry else 128_256
    on_cpu, on_device = GumbelNoise(vocab, torch.device("cpu")), GumbelNoise(vocab, machine.device)
    fused = compiled.compile_noise(on_device, "none" if machine.dry else "default")
    for size in sorted({*group_sizes(machine.device), *group_sizes(torch.device("cpu"))}):
        generator = torch.Generator().manual_seed(size)
        seeds = torch.randint(0, 2**62, (size,), generator=generator)
        positions = torch.randint(0, 100_000, (size,), generator=generator)
        wanted = on_cpu(seeds, positions, torch.zeros_like(seeds))
        arguments = [each.to(machine.device) for each in (seeds, positions, torch.zeros_like(seeds))]
        for name, function in (("eager", on_device), ("compiled", fused)):
            with torch.no_grad():
                made = function(*arguments).cpu()
            different = int((made.view(torch.int32) != wanted.view(torch.int32)).sum())
            report.add(f"{size} rows, {name}", f"{different} of {made.numel()} values differ", different == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """A batch for one bucket."""

    name: str
    requests: int
    rows: int
    contexts: tuple[int, ...]
    real_rows: tuple[int, ...]
    is_prefill: bool = False


CASES = (
    AttentionCase(name="decode", requests=4, rows=1, contexts=(0, 17, 300, 511), real_rows=(1, 1, 1, 1)),
    AttentionCase(name="verify", requests=4, rows=8, contexts=(0, 9, 250, 500), real_rows=(8, 3, 1, 6)),
    AttentionCase(name="verify, padded batch", requests=8, rows=6, contexts=(40, 129), real_rows=(2, 6)),
    AttentionCase(name="prompt chunk", requests=1, rows=64, contexts=(200,), real_rows=(50,), is_prefill=True),
)


KINDS: tuple[tuple[torch.dtype, int, dict[str, Any]], ...] = (
    (torch.bfloat16, 128, {}),
    (torch.bfloat16, 128, {"window": 33}),
    (torch.bfloat16, 128, {"softcap": 20.0}),
    (torch.bfloat16, 64, {}),
    (torch.bfloat16, 256, {}),
    (torch.float16, 128, {}),
)


def attention(machine: Machine, report: Report) -> None:
    """Every backend that can serve here against the reference in float32."""
    for dtype, head_dim, changes in KINDS:
        options = {"window": 0, "softcap": 0.0} | changes
        spec = LayerSpec(num_heads=8, num_kv_heads=2, head_dim=head_dim, scale=head_dim**-0.5, **options)
        label = f"{str(dtype).removeprefix('torch.')} D={head_dim} {changes or ''}".strip()
        _compare_backends(machine, report, spec, dtype, label)
    _summarise(report)


def _summarise(report: Report) -> None:
    """One line per backend that ran, and one per backend that did not."""
    rows = [row for row in report.rows if row.detail]
    for kind in dict.fromkeys(row.data["kind"] for row in rows):
        own = [row for row in rows if row.data["kind"] == kind]
        ran = [row for row in own if "error" in row.data]
        if ran:
            worst = max(row.data["error"] for row in ran)
            same = sum(row.data["independent"] for row in ran)
            value = f"worst relative error {worst:.1e}; rows alone have the same bits in {same} of {len(ran)} kinds"
            report.add(kind, value, all(row.good for row in ran))
        if len(ran) < len(own):
            reasons = "; ".join(dict.fromkeys(row.value for row in own if "error" not in row.data))
            # Without FlashInfer the check is not of what it is for.
            report.add(f"{kind}: {len(own) - len(ran)} kinds", reasons, False if "flashinfer" in kind else None)


def _compare_backends(machine: Machine, report: Report, spec: LayerSpec, dtype: torch.dtype, label: str) -> None:
    tolerance = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-9
    for kind, make, block_size, reason in _backends(machine, spec, dtype):
        if reason is not None:
            report.add(f"{kind} {label}", f"not run: {reason}", detail=True, kind=kind)
            continue
        try:
            backend = make()
            found = [_compare(machine, case, backend, spec, dtype, block_size) for case in CASES]
        except CompspecError as problem:
            report.add(f"{kind} {label}", str(problem), False, detail=True, kind=kind)
            continue
        error, independent = max(one[0] for one in found), all(one[1] for one in found)
        value = f"relative error {error:.1e}, rows alone have {'the same' if independent else 'OTHER'} bits"
        good = error <= tolerance and (independent or not kind.endswith("exact"))
        report.add(f"{kind} {label}", value, good, detail=True, kind=kind, error=error, independent=independent)


Maker = Callable[[], AttentionBackend]


def _backends(machine: Machine, spec: LayerSpec, dtype: torch.dtype) -> list[tuple[str, Maker, int, str | None]]:
    """Kind, how it is made, a block size that fits, and why it cannot serve here."""
    found: list[tuple[str, Maker, int, str | None]] = []
    for exact in (True, False):
        mode = "exact" if exact else "fast"
        setup = _setup(machine, spec, dtype, BLOCK_SIZE, exact)
        if machine.device.type == "cuda":
            reason = flashinfer_refusal(setup) or _kernels_to_compile(machine, setup)
            make = functools.partial(FlashInferBackend, setup, "fa2")
            # A window that exact numerics refuse is as it should be.
            if not (exact and spec.window):
                found.append((f"flashinfer {mode}", make, BLOCK_SIZE, reason))
            pages = _setup(machine, spec, dtype, varlen.PAGE_MULTIPLE, exact)
            other = functools.partial(varlen.VarlenBackend, pages)
            found.append((f"varlen {mode}", other, varlen.PAGE_MULTIPLE, varlen.refusal(pages)))
    if machine.device.type == "cpu":
        found.append(("cpu exact", functools.partial(CpuBackend, dtype), BLOCK_SIZE, None))
    found.append(("sdpa", functools.partial(SdpaBackend, _CAPACITY), BLOCK_SIZE, None))
    return found


def _kernels_to_compile(machine: Machine, setup: AttentionSetup) -> str | None:
    """Why FlashInfer would have to compile first, unless that is wanted."""
    arch = prebuilt.arch_name(torch.cuda.get_device_capability(machine.device))
    lacking = prebuilt.missing(prebuilt.needed(setup.layers, setup.dtype, True, arch), arch)
    if machine.jit or not lacking:
        return None
    return f"kernels are not compiled ahead of time ({'; '.join(lacking.values())}), and --jit is not given"


def _setup(machine: Machine, spec: LayerSpec, dtype: torch.dtype, block_size: int, exact: bool) -> AttentionSetup:
    return AttentionSetup(
        layers=(spec,),
        dtype=dtype,
        device=machine.device,
        block_size=block_size,
        max_blocks=_CAPACITY // block_size,
        max_model_len=_CAPACITY,
        buckets=tuple(_bucket(case) for case in CASES),
        exact=exact,
    )


def _bucket(case: AttentionCase) -> Bucket:
    return Bucket(num_requests=case.requests, query_len=case.rows, num_logits=1 if case.is_prefill else case.rows)


def _compare(
    machine: Machine,
    case: AttentionCase,
    backend: AttentionBackend,
    spec: LayerSpec,
    dtype: torch.dtype,
    block_size: int,
) -> tuple[float, bool]:
    """The largest error relative to the largest value; and whether each request alone gives the same bits."""
    generator = torch.Generator().manual_seed(7)
    num_blocks = case.requests * (_CAPACITY // block_size) + 1
    shape = (num_blocks * block_size, spec.num_kv_heads, spec.head_dim)
    k_cache, v_cache = (torch.randn(shape, generator=generator).to(machine.device, dtype) for _ in range(2))
    # What nobody wrote may be anything finite.
    k_cache[:block_size], v_cache[:block_size] = 3e4, -3e4
    q = torch.randn(case.requests, case.rows, spec.num_heads, spec.head_dim, generator=generator)
    q = q.to(machine.device, dtype)
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    queries = []
    for index, (context, count) in enumerate(zip(case.contexts, case.real_rows, strict=True)):
        blocks = order[index * (_CAPACITY // block_size) :][: -(-(context + count) // block_size)]
        queries.append(Query(token_ids=[0] * count, start=context, block_ids=blocks))
    buffers = InputBuffers(_bucket(case), block_size, _CAPACITY // block_size, machine.device)
    run = _Attend(backend, buffers, k_cache, v_cache, spec, block_size)
    found = run(q, queries)
    wanted = _Attend(SdpaBackend(), buffers, k_cache.float(), v_cache.float(), spec, block_size)(q.float(), queries)
    real = [(index, slice(count)) for index, count in enumerate(case.real_rows)]
    error = max(float((found[at].float() - wanted[at]).abs().max() / wanted[at].abs().max()) for at in real)
    independent = True
    for index, query in enumerate(queries):
        moved = torch.roll(q, -index, 0)  # the request at place 0, with nobody beside it
        alone = run(moved, [query])
        independent &= torch.equal(alone[0, : case.real_rows[index]], found[index, : case.real_rows[index]])
    return error, independent


class _Attend:
    """The operator over one bucket's inputs."""

    def __init__(
        self, backend: AttentionBackend, buffers: InputBuffers, k: Tensor, v: Tensor, spec: LayerSpec, block_size: int
    ) -> None:
        self._backend, self._buffers, self._caches = backend, buffers, (k, v)
        self._options = (block_size, spec.scale, spec.window, spec.softcap)

    def __call__(self, q: Tensor, queries: Sequence[Query]) -> Tensor:
        _, positions, _, table, seq_lens, _ = self._buffers.fill(queries)
        plan = self._backend.plan(self._buffers.bucket, self._buffers.block_table, self._buffers.starts)
        with in_force(plan):
            out: Tensor = torch.ops.compspec.paged_attention(
                q.flatten(0, 1), *self._caches, table, seq_lens, positions[0], *self._options
            )
        return out.view(q.shape)


def graphs(machine: Machine, report: Report) -> None:
    """A tiny model: every shape is one CUDA graph, and nothing is captured or compiled later."""
    settings: dict[str, object] = {"compile.mode": "none"} if machine.dry else {}
    for finding in doctor.examine_gpu(machine.device, settings):
        # Without a GPU there are no graphs to prove.
        good = None if machine.dry and "graphs" in finding.name else finding.good
        report.add(finding.name, finding.value, good)


class _Scripted(Proposer):
    """Drafts what the request is known to generate, right or wrong."""

    def __init__(self, known: dict[tuple[int, ...], list[int]], num_draft_tokens: int, error_every: int) -> None:
        self._known, self._width, self._error_every = known, num_draft_tokens, error_every

    def propose(self, batch: Batch) -> DraftTokens:
        return DraftTokens.from_lists(
            [self._draft(e.request, e.max_draft_tokens) for e in batch.scheduled], self._width
        )

    def _draft(self, request: Request, most: int) -> list[int]:
        done = request.num_output_tokens
        right = self._known[tuple(request.token_ids[: request.num_prompt_tokens].tolist())][done : done + most]
        wrong = self._error_every and (done // 3) % self._error_every == 0
        return [(token + 1) % 512 for token in right] if wrong else right


def _law_model(machine: Machine) -> LoadedModel:
    size = 64 if machine.dry else 512
    config = LlamaConfig(
        vocab_size=512 if machine.dry else 32_000,
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=2 if machine.dry else 4,
        num_attention_heads=size // 64 * 2,
        num_key_value_heads=size // 64,
        head_dim=64,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
    )
    return random_model(config, torch.bfloat16, machine.device)


def _requests(machine: Machine) -> tuple[list[list[int]], list[SamplingParams]]:
    count, length = (6, 12) if machine.dry else (16, 60)
    rng = np.random.default_rng(5)
    prompts = [np.resize(rng.integers(3, 500, 4 + index), 5 + 11 * index).tolist() for index in range(count)]
    params = [
        SamplingParams(
            max_tokens=length - index,
            ignore_eos=True,
            seed=index,
            logprobs=2,
            temperature=(0.0, 0.8)[index % 2],
            repetition_penalty=(1.0, 1.15, 1.0)[index % 3],
            frequency_penalty=(0.0, 0.0, 0.3)[index % 3],
            top_p=(1.0, 1.0, 1.0, 0.9)[index % 4],
        )
        for index in range(count)
    ]
    return prompts, params


def _run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Request]:
    requests = [engine.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    while engine.has_work:
        engine.step()
    return requests


def law_exact(machine: Machine, report: Report) -> None:
    """numerics: exact. Tokens and log-probabilities, bit for bit, alone and in batches that shrink and grow."""
    loaded = _law_model(machine)
    prompts, params = _requests(machine)
    common = {"scheduler__max_num_seqs": 8, "cache__num_blocks": 500, "speculative__num_draft_tokens": 5}
    engine = Engine(machine.config(speculative__method="ngram", **common), loaded=loaded)
    shapes = ", ".join(map(str, engine.runner.buckets.all))
    report.add("attention", engine.runner.attention.implementation)
    report.add("shapes in use", shapes, detail=True)
    plain = [one.model_copy(update={"speculative": False}) for one in params]
    alone = [_run(engine, [prompt], [one])[0] for prompt, one in zip(prompts, plain, strict=True)]
    _compare_outputs(report, "n-gram, together", alone, _run(engine, prompts, params), bits=True)
    backwards = _run(engine, prompts[::-1], params[::-1])[::-1]
    _compare_outputs(report, "n-gram, other order", alone, backwards, bits=True)
    _poison(machine, report, engine, alone, prompts, params)
    _graph_rows(machine, report, engine)
    known = {tuple(prompt): one.output_token_ids for prompt, one in zip(prompts, alone, strict=True)}
    # The largest shapes alone: those that the others are equal to.
    config = machine.config(speculative__method="ngram", compile__decode_buckets=(8,), **common)
    for name, error_every in (("right drafts", 0), ("right and wrong drafts", 2)):
        scripted = Engine(config, loaded=loaded, proposer=_Scripted(known, 5, error_every))
        _compare_outputs(report, name, alone, _run(scripted, prompts, params), bits=True)
        report.add(f"{name}: kept", f"{scripted.stats.num_accepted_tokens} of {scripted.stats.num_draft_tokens}")


def _poison(
    machine: Machine,
    report: Report,
    engine: Engine,
    wanted: list[Request],
    prompts: list[list[int]],
    params: list[SamplingParams],
) -> None:
    """All blocks are filled with numbers that would be seen: huge ones; on a CPU with NaN."""
    engine.reset()  # nobody may find a prompt in a block that is no longer what it was
    on_cpu = machine.device.type == "cpu"
    key, value = (float("nan"),) * 2 if on_cpu else (torch.finfo(torch.bfloat16).max, 1e30)
    for cache in engine.runner.k_caches:
        cache.fill_(key)
    for cache in engine.runner.v_caches:
        cache.fill_(value)
    _compare_outputs(report, f"all blocks hold {value:g}", wanted, _run(engine, prompts, params), bits=True)


def _graph_rows(machine: Machine, report: Report, engine: Engine) -> None:
    stats, shapes = engine.stats, len(engine.runner.buckets.all)
    later = stats.num_cuda_graph_skips + stats.num_cuda_graph_rerecordings + stats.num_recompilations
    value = f"{stats.num_cuda_graphs} of {shapes} shapes captured, {stats.num_cuda_graph_skips} left out; "
    value += f"after start-up {stats.num_cuda_graph_rerecordings} captured, {stats.num_recompilations} compiled"
    report.add("CUDA graphs", value, None if machine.dry else stats.num_cuda_graphs == shapes and later == 0)


def _compare_outputs(report: Report, name: str, wanted: list[Request], found: list[Request], *, bits: bool) -> None:
    """Tokens, and with `bits` log-probabilities too; shows the first place where an output leaves the other."""
    different: list[dict[str, Any]] = []
    for index, (a, b) in enumerate(zip(wanted, found, strict=True)):
        if a.output_token_ids != b.output_token_ids or (bits and a.logprobs != b.logprobs):
            different.append({"request": index, **_divergence(a, b)})
    value = f"{len(wanted) - len(different)} of {len(wanted)} outputs are the same"
    for one in different[:4]:
        what = "token" if one["is_token"] else "log-probability"
        value += f"; {one['request']} has another {what} at {one['position']} (margin {one['margin']:.1e})"
    # Fast numerics promises equality up to near-ties alone.
    good = not different if bits else all(one["margin"] < 0.1 for one in different)
    report.add(name, value, good, different=different)


def _divergence(wanted: Request, found: Request) -> dict[str, Any]:
    """Where two outputs part, and by how much the best token led the second there."""
    assert wanted.logprobs is not None and found.logprobs is not None
    ours = list(zip(wanted.output_token_ids, wanted.logprobs, strict=True))
    theirs = list(zip(found.output_token_ids, found.logprobs, strict=True))
    pairs = zip(ours, theirs, strict=False)
    shorter = min(len(ours), len(theirs))
    position = next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)
    if position == shorter:
        return {"position": position, "is_token": True, "margin": 1e9}  # one goes on where the other ends
    values = sorted((entry.logprob for entry in ours[position][1].values()), reverse=True)
    is_token = ours[position][0] != theirs[position][0]
    return {"position": position, "is_token": is_token, "margin": values[0] - values[1]}


def law_fast(machine: Machine, report: Report) -> None:
    """numerics: fast. Greedy outputs; each that differs is shown with its top-2 margin."""
    prompts, params = _requests(machine)
    # Without penalties, so that the margin of the log-probabilities is that of the choice.
    plain_choice = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0}
    greedy = [one.model_copy(update=plain_choice) for one in params]
    config = machine.config(
        numerics__mode="fast",
        speculative__method="ngram",
        speculative__num_draft_tokens=5,
        scheduler__max_num_seqs=8,
        cache__num_blocks=500,
    )
    engine = Engine(config, loaded=_law_model(machine))
    plain = [one.model_copy(update={"speculative": False}) for one in greedy]
    wanted = _run(engine, prompts, plain)
    _compare_outputs(report, "n-gram, greedy", wanted, _run(engine, prompts, greedy), bits=False)
    _graph_rows(machine, report, engine)


def _timed_buckets(config: EngineConfig, widths: Sequence[int]) -> Buckets:
    """Decode shapes of one request with so many rows, and one prompt chunk."""
    decode = [Bucket(num_requests=1, query_len=width, num_logits=width) for width in widths]
    return Buckets(decode, Buckets.of_target(config).prefill[-1:])


SHAPES = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
}


def speed_1b(machine: Machine, report: Report) -> None:
    """Step times of a Llama of about one billion random weights."""
    _speed(machine, report, "1B", graphs_off=True)


def speed_8b(machine: Machine, report: Report) -> None:
    """Step times of a Llama of about eight billion random weights."""
    _speed(machine, report, "8B", graphs_off=False)


def _speed(machine: Machine, report: Report, name: str, *, graphs_off: bool) -> None:
    shape: dict[str, Any] = dict(SHAPES[name], vocab_size=128_256)
    if machine.dry:
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        shape["vocab_size"] = 512
    config = LlamaConfig(
        **shape, num_key_value_heads=shape["num_attention_heads"] // 4, max_position_embeddings=4096, eos_token_id=2
    )
    loaded = random_model(config, torch.bfloat16, machine.device)
    weights = loaded.adapter.weight_bytes - _embedding_bytes(loaded)
    bandwidth = _copy_bandwidth(machine)
    floor = weights / bandwidth * 1e3
    report.add(
        f"{name} floor",
        f"{weights / 2**30:.2f} GiB of weights at {bandwidth / 1e12:.2f} TB/s: {floor:.3f} ms",
        floor_ms=floor,
        weight_bytes=weights,
        bandwidth=bandwidth,
    )
    widths = (1, *(drafts + 1 for drafts in DRAFTS))
    times = _time_buckets(machine, report, name, loaded, machine.settings()["compile.mode"], widths)
    plain = times[1]
    report.add(
        f"{name} plain decode step over floor",
        f"{plain / floor:.2f} ({plain:.3f} ms)",
        _aim(machine, name == "8B", plain <= 1.15 * floor),
    )
    for drafts in DRAFTS:
        ratio = times[drafts + 1] / plain
        good = _aim(machine, drafts == 5, ratio <= 1.10)
        report.add(f"{name} verify K={drafts} over plain decode", f"{ratio:.3f}", good, ratio=ratio)
    if graphs_off:
        mode = "none" if machine.dry else "default"
        off = _time_buckets(machine, report, f"{name} graphs off", loaded, mode, (1, 6))
        for width in (1, 6):
            report.add(f"{name} graphs off over on, {width} rows", f"{off[width] / times[width]:.2f}")
        _host_time(machine, report, name, loaded)


def _aim(machine: Machine, is_one: bool, reached: bool) -> bool | None:
    return reached if is_one and not machine.dry else None


def _embedding_bytes(loaded: LoadedModel) -> int:
    """The input embedding, of which a step reads a few rows; nothing where it is the output layer as well."""
    module: Any = loaded.adapter.module
    inputs, outputs = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    return 0 if inputs.data_ptr() == outputs.data_ptr() else inputs.numel() * inputs.element_size()


def _copy_bandwidth(machine: Machine) -> float:
    """Bytes read and written per second by a copy on the device."""
    size = 1 << (22 if machine.dry else 31)
    source = torch.zeros(size, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * size / _median_ms(machine, lambda: target.copy_(source), 15) * 1e3


def _median_ms(machine: Machine, call: Callable[[], Any], repeat: int) -> float:
    """Milliseconds on the device, by events; of the host in a dry run."""
    call()
    times: list[float] = []
    for _ in range(3 if machine.dry else repeat):
        if machine.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def _time_buckets(
    machine: Machine, report: Report, label: str, loaded: LoadedModel, mode: str, widths: Sequence[int]
) -> dict[int, float]:
    """Milliseconds by query rows, one request at a context of 512 tokens (32 in a dry run)."""
    context = 32 if machine.dry else 512
    config = machine.config(
        numerics__mode="fast",
        speculative__method="ngram",
        speculative__num_draft_tokens=max(DRAFTS),
        scheduler__max_num_seqs=1,
        cache__num_blocks=65,
        compile__mode=mode,
    )
    runner = ModelRunner(loaded.adapter, config, 1000, buckets=_timed_buckets(config, widths))
    started = time.perf_counter()
    runner.warm_up()
    seconds = time.perf_counter() - started
    if runner.uses_graphs:
        whole = runner.num_graphs == len(runner.buckets.all)
        report.add(f"{label} graphs", f"{runner.num_graphs} of {len(runner.buckets.all)} captured", whole)
    report.add(
        f"{label} start-up", f"{seconds:.0f} s for {len(runner.buckets.all)} shapes", detail=True, seconds=seconds
    )
    times: dict[int, float] = {}
    for bucket in runner.buckets.all:
        start = context if bucket.is_decode else 0
        query = Query(token_ids=[5] * bucket.query_len, start=start, block_ids=list(range(1, 65)))
        ms = _median_ms(machine, functools.partial(runner.run, bucket, [query]), 30)
        times[bucket.query_len] = ms
        report.add(f"{label} {bucket}", f"{ms:.3f} ms", detail=True, ms=ms)
    return times


def _host_time(machine: Machine, report: Report, label: str, loaded: LoadedModel) -> None:
    """What the host does in a step beside waiting for the device, one request, greedy and sampled."""
    config = machine.config(
        speculative__method="ngram", speculative__num_draft_tokens=5, scheduler__max_num_seqs=1, cache__num_blocks=65
    )
    engine = Engine(config, loaded=loaded)
    for name, temperature in (("greedy", 0.0), ("sampled", 0.8)):
        params = SamplingParams(max_tokens=12 if machine.dry else 200, temperature=temperature, seed=1, ignore_eos=True)
        _run(engine, [[5, 6, 7] * 20], [params])
        before = engine.stats.step_s - engine.stats.verify_s, engine.stats.num_forwards, engine.stats.step_s
        _run(engine, [[5, 6, 7] * 20], [params])
        steps = engine.stats.num_forwards - before[1]
        host = (engine.stats.step_s - engine.stats.verify_s - before[0]) / steps * 1e3
        whole = (engine.stats.step_s - before[2]) / steps * 1e3
        value = f"{host:.3f} ms of {whole:.3f} ms a step"
        report.add(f"{label} host time, {name}", value, _aim(machine, True, host < 0.5), host_ms=host, step_ms=whole)


def prefill_kernels(machine: Machine, report: Report) -> None:
    """FlashInfer's fa2 and fa3 on one prompt chunk; fa3 is for Hopper alone."""
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5, window=0, softcap=0.0)
    for context in (0, 768) if machine.dry else (0, 768, 3840):
        rows = 16 if machine.dry else 256
        case = AttentionCase(
            name="chunk", requests=1, rows=rows, contexts=(context,), real_rows=(rows,), is_prefill=True
        )
        blocks = -(-(context + rows) // BLOCK_SIZE)
        setup = AttentionSetup(
            layers=(spec,),
            dtype=torch.bfloat16,
            device=machine.device,
            block_size=BLOCK_SIZE,
            max_blocks=blocks,
            max_model_len=context + rows,
            buckets=(_bucket(case),),
            exact=False,
        )
        caches = torch.randn(2, (blocks + 1) * BLOCK_SIZE, 8, 128, device=machine.device).to(torch.bfloat16)
        q = torch.randn(1, rows, 32, 128, device=machine.device).to(torch.bfloat16)
        query = [Query(token_ids=[0] * rows, start=context, block_ids=list(range(1, blocks + 1)))]
        buffers = InputBuffers(_bucket(case), BLOCK_SIZE, blocks, machine.device)
        kinds: dict[str, AttentionBackend] = {}
        if flashinfer_refusal(setup) is None:
            kinds["fa2"] = FlashInferBackend(setup, prefill="fa2")
            if torch.cuda.get_device_capability(machine.device)[0] == 9:
                kinds["fa3"] = FlashInferBackend(setup, prefill="fa3")
        if machine.dry:
            kinds["cpu"] = CpuBackend(torch.bfloat16)
        for kind, backend in kinds.items():
            attend = _Attend(backend, buffers, caches[0], caches[1], spec, BLOCK_SIZE)
            ms = _median_ms(machine, functools.partial(attend, q, query), 30)
            report.add(f"{kind}, {rows} rows after {context} tokens", f"{ms:.3f} ms with its plan", ms=ms)


# With the seconds that each should take at most on a fast GPU with ready-made kernels. It runs if so much is left, and
# is stopped after twice as much.
SECTIONS: dict[str, tuple[Section, float]] = {
    "versions": (versions, 10),
    "noise": (noise, 20),
    "attention": (attention, 40),
    "graphs": (graphs, 40),
    "law, exact": (law_exact, 85),
    "speed 8B": (speed_8b, 60),
    "law, fast": (law_fast, 35),
    "speed 1B": (speed_1b, 55),
    "prefill kernels": (prefill_kernels, 15),
}


def run_sections(machine: Machine, report: Report, names: Sequence[str], budget: float, output: Path | None) -> None:
    """Runs the sections in turn, each in a process of its own."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            needed = SECTIONS[name][1]
            report.begin(name)
            print(f"== {name}", flush=True)
            started = time.perf_counter()
            left = budget - (started - began)
            if needed > left:
                report.add("not run", f"{needed:.0f} s do not fit into the {budget:.0f} s", False)
            else:
                _run_apart(machine, report, name, min(left, 2 * needed), Path(folder) / str(number))
            report.seconds[name] = time.perf_counter() - started
            if output is not None:
                report.write(output)


def _run_apart(machine: Machine, report: Report, name: str, limit: float, lines: Path) -> None:
    """A CUDA context that is broken, a crash or a hang ends with the process; its results so far are kept."""
    process = multiprocessing.get_context("fork").Process(target=_section, args=(machine, name, lines))
    process.start()
    process.join(limit)
    problem = None
    if process.is_alive():
        process.kill()
        process.join()
        problem = f"stopped after {limit:.0f} s"
    elif process.exitcode:
        problem = f"ended with exit code {process.exitcode}"
    written = lines.read_text(encoding="utf-8").splitlines() if lines.exists() else []
    report.rows += [Row(**json.loads(line)) for line in written]
    if problem is not None:
        report.add("stopped", problem, False)


def _section(machine: Machine, name: str, lines: Path) -> None:
    """The whole life of a section's process."""
    report = Report(lines)
    report.begin(name)
    try:
        SECTIONS[name][0](machine, report)
    except Exception as error:  # the other sections are worth having
        report.add("stopped", f"{type(error).__name__}: {error}", False, traceback=traceback.format_exc())


def main() -> int:
    """Runs the checks; 0 if all of them are good."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--budget", type=float, default=360.0, help="seconds")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS), help="sections")
    parser.add_argument("--jit", action="store_true", help="compile the kernels of the attention section here")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        print("there is no GPU that torch can use; --dry-run runs the same code on the CPU", file=sys.stderr)
        return 2
    device = torch.device("cpu") if arguments.dry_run else torch.device("cuda", 0)
    report = Report()
    machine = Machine(device=device, dry=arguments.dry_run, jit=arguments.jit)
    run_sections(machine, report, arguments.only, arguments.budget, arguments.output)
    Console(width=150).print(report.table())
    failed, judged = (sum(row.good in kinds for row in report.rows) for kinds in ((False,), (True, False)))
    print(f"{device}: {failed} failed of {judged}, {sum(report.seconds.values()):.0f} s")
    return 1 if failed else 0


_WITHOUT_CUDA = "PYTORCH_NVML_BASED_CUDA_CHECK"

if __name__ == "__main__":
    if os.environ.get(_WITHOUT_CUDA) != "1":
        # Processes are forked, so nothing may start CUDA before, not even to ask whether it is there.
        os.environ[_WITHOUT_CUDA] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    sys.exit(main())
