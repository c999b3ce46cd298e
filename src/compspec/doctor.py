"""What this machine can do: versions, devices, attention, compilers, folders."""

import importlib.metadata
import logging
import os
import shutil
from dataclasses import dataclass

import torch

from compspec.attention import choose, flashinfer, prebuilt, varlen
from compspec.attention.backend import AttentionSetup, LayerSpec
from compspec.cache import chosen_inductor_folder, find
from compspec.config import CacheSection, default_cache_path
from compspec.errors import CompspecError, ConfigError, one_line
from compspec.kernels.linear import has_native_bf16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report; `good` is None where there is nothing to judge."""

    name: str
    value: str
    good: bool | None


def examine() -> list[Finding]:
    """Looks at the machine; changes nothing."""
    return [_versions(), _cpu(), _gpu(), _flashinfer(), _kernels(), _varlen(), _attention(), _compiler(), _cache()]


def examine_gpu(device: torch.device | None = None, settings: dict[str, object] | None = None) -> list[Finding]:
    """Runs a tiny model on the GPU: are all shapes captured, and does speculation change nothing?

    Args:
        device, settings: as in `trial.run_trial`; default: the current GPU.
    """
    from compspec.trial import run_trial  # loads the whole engine

    if device is None and not torch.cuda.is_available():
        return [Finding(name="trial", value="there is no GPU that torch can use", good=False)]
    try:
        trial = run_trial(device or torch.device("cuda", torch.cuda.current_device()), settings)
    except CompspecError as error:
        return [Finding(name="trial", value=str(error), good=False)]
    except Exception as error:  # compilers, drivers and kernels each raise their own; the report is worth having
        logger.debug("the trial failed", exc_info=True)
        return [Finding(name="trial", value=f"{type(error).__name__}: {one_line(error)}", good=False)]
    captured = (
        f"{trial.num_cuda_graphs} of {trial.num_buckets} shapes captured, {trial.num_skips} graphs left out, "
        f"{trial.num_rerecordings} captured and {trial.num_recompilations} compiled after start-up"
    )
    equal = (
        f"{trial.num_equal} of {trial.num_requests} outputs are the same with and without speculation "
        f"({trial.num_accepted} drafts kept)"
    )
    return [
        Finding(name="trial: attention", value=trial.attention, good=None),
        Finding(name="trial: CUDA graphs", value=captured, good=trial.is_captured),
        Finding(name="trial: outputs", value=equal, good=trial.is_lossless),
    ]


def _versions() -> Finding:
    names = ("compspec", "torch", "transformers", "accelerate", "gguf")
    found = [f"{name} {package_version(name)}" for name in names]
    return Finding(name="versions", value=", ".join(found), good=None)


def package_version(name: str) -> str:
    """The installed version of a distribution, or "none"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _cpu() -> Finding:
    native = has_native_bf16()
    value = f"{os.cpu_count()} CPUs, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, "
    return Finding(name="cpu", value=value + ("bf16 instructions" if native else "no bf16 instructions"), good=True)


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return Finding(name="gpu", value="none that torch can use; models run on the CPU", good=False)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding(name="gpu", value=f"{', '.join(names)}; CUDA {torch.version.cuda}", good=True)


def _flashinfer() -> Finding:
    reason = flashinfer.unavailable()
    if reason is not None:
        return Finding(name="flashinfer", value=reason, good=False)
    version = package_version("flashinfer-python")
    if not torch.cuda.is_available():
        return Finding(name="flashinfer", value=f"{version}, without a GPU to run on", good=None)
    return Finding(name="flashinfer", value=version, good=True)


def _kernels() -> Finding:
    """FlashInfer's kernels that were compiled ahead of time for the GPU here."""
    if flashinfer.unavailable() is not None or not torch.cuda.is_available():
        return Finding(name="kernels", value="none are wanted without FlashInfer and a GPU", good=None)
    arch = prebuilt.arch_name(torch.cuda.get_device_capability())
    stored, folder = prebuilt.stored(arch), prebuilt.kernel_folder(arch)
    broken = [f"{name}: {flaw}" for name, flaw in stored.items() if flaw is not None]
    if broken:
        value = f"{len(broken)} of {len(stored)} in {folder} are not used; {broken[0]}"
        return Finding(name="kernels", value=value, good=False)
    if not stored:
        value = f"none for {arch} in {folder}: FlashInfer compiles at start; tools/build_kernels.py does it before"
        return Finding(name="kernels", value=value, good=None)
    return Finding(name="kernels", value=f"{len(stored)} compiled for {arch} in {folder}", good=True)


def _varlen() -> Finding:
    reason = varlen.unavailable()
    value = "torch.nn.attention.varlen with block tables" if reason is None else reason
    return Finding(name="varlen", value=value, good=reason is None)


def _attention() -> Finding:
    """What an engine with the default block size would run here."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    layer = LayerSpec(num_heads=8, num_kv_heads=2, head_dim=128, scale=0.1, window=0, softcap=0.0)
    setup = AttentionSetup(
        layers=(layer,),
        dtype=torch.bfloat16,
        device=device,
        block_size=CacheSection().block_size,
        max_blocks=1,
        max_model_len=1,
        buckets=(),
        exact=True,
    )
    name, refused = choose(setup)
    reasons = "".join(f"; not {other}: {reason}" for other, reason in refused.items())
    return Finding(name="attention", value=f"{name} (bfloat16, head dim 128){reasons}", good=name != "sdpa")


def _compiler() -> Finding:
    chosen = os.environ.get("CXX")
    found = shutil.which(chosen) if chosen else shutil.which("g++") or shutil.which("clang++")
    if found is None:
        value = "no C++ compiler: set compile.mode: none, or install one"
        return Finding(name="compiler", value=value, good=False)
    return Finding(name="compiler", value=found, good=True)


def _cache() -> Finding:
    path = default_cache_path()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(existing).free / 2**30
    writable = os.access(existing, os.W_OK)
    try:
        found = find(path)
    except ConfigError as error:
        return Finding(name="cache", value=str(error), good=False)
    used = sum(entry.num_bytes for entry in found) / 2**30
    kinds = ", ".join(dict.fromkeys(entry.kind for entry in found))
    value = f"{path}: {used:.2f} GiB used" + (f" ({kinds})" if kinds else "") + f", {free:.1f} GiB free"
    chosen = chosen_inductor_folder()
    if chosen is not None:
        value += f"; compiled code in {chosen}"
    return Finding(name="cache", value=value + ("" if writable else "; not writable"), good=writable)
