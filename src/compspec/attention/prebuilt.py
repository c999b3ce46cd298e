"""FlashInfer's kernels, compiled ahead of time: which a model needs, where they lie, and how FlashInfer finds them.

FlashInfer compiles a kernel when it is first wanted, which takes a minute, nvcc and ninja. It takes one that lies in
its folder for compiled kernels as it is. `tools/build_kernels.py` fills such a folder, on any machine:

    <cache>/flashinfer/<FlashInfer's version>/<architecture>/manifest.json
    <cache>/flashinfer/<FlashInfer's version>/<architecture>/<name>/<name>.so

A library counts only with the hash that the manifest has for it. FlashInfer is imported inside functions alone.
"""

import hashlib
import importlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from compspec.attention.backend import AttentionSetup, LayerSpec
from compspec.config import default_cache_path
from compspec.errors import UnsupportedError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
ABSENT = "not compiled"

_chosen: list[Path] = []
# FlashInfer's own folder, while ours stands in for it.
_replaced: list[Any] = []


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class KernelModule:
    """One library of FlashInfer: attention of several query rows per request over paged keys and values.

    Attributes:
        backend: FlashInfer's, fa2 or fa3.
        dtype: of queries, keys, values and outputs, by torch's name ("bfloat16").
        head_dim: D.
        window: whether queries see a window of the tokens before them, and not all.
        softcap: whether scores are capped.
    """

    backend: str
    dtype: str
    head_dim: int
    window: bool
    softcap: bool

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What FlashInfer's `gen_batch_prefill_module` and `get_batch_prefill_uri` take."""
        dtype = getattr(torch, self.dtype)
        # dtype of indices, D of queries and of values, no position encoding, ..., no fp16 in q @ k
        shape = (torch.int32, self.head_dim, self.head_dim, 0)
        return (self.backend, dtype, dtype, dtype, *shape, self.window, self.softcap, False)

    @property
    def name(self) -> str:
        """FlashInfer's name of the library; asks FlashInfer."""
        modules = importlib.import_module("flashinfer.jit.attention.modules")
        return str(modules.get_batch_prefill_uri(*self.arguments))

    def __str__(self) -> str:
        extras = [text for text, on in (("window", self.window), ("soft cap", self.softcap)) if on]
        return f"{self.backend} {self.dtype} head dim {self.head_dim} {' and '.join(extras) or 'plain'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """What the manifest says of a library.

    Attributes:
        sha256: of the file.
        nvcc: version of the compiler, "13.0.88".
        machine: what its host code runs on, "x86_64".
    """

    sha256: str
    nvcc: str
    machine: str

    def __post_init__(self) -> None:
        if not all(isinstance(value, str) for value in (self.sha256, self.nvcc, self.machine)):
            raise TypeError("every value is a text")


def arch_name(capability: tuple[int, int]) -> str:
    """What FlashInfer compiles for on a GPU of this compute capability: (9, 0) -> "9.0a".

    Source: `CompilationContext` in flashinfer/compilation_context.py.
    """
    major, minor = capability
    if major < 9:
        return f"{major}.{minor}"
    return f"{major}.{minor}{'f' if capability == (12, 0) else 'a'}"


def needed(layers: Iterable[LayerSpec], dtype: torch.dtype, exact: bool, arch: str) -> list[KernelModule]:
    """The libraries that attention of these layers loads, sorted.

    Decode steps run on fa2, and so do prompt chunks of exact numerics. Prompt chunks of fast numerics run on what
    FlashInfer prefers: fa3 on Hopper, fa2 elsewhere.

    Args:
        layers: what the layers ask for.
        dtype: of queries, keys and values.
        exact: as in `AttentionSetup`.
        arch: as from `arch_name`.
    """
    backends = ("fa2",) if exact or not arch.startswith("9.") else ("fa2", "fa3")
    name = str(dtype).removeprefix("torch.")
    found = {
        KernelModule(
            backend=backend,
            dtype=name,
            head_dim=layer.head_dim,
            window=layer.window > 0,
            softcap=layer.softcap > 0,
        )
        for layer in layers
        for backend in backends
    }
    return sorted(found)


def installed_version() -> str:
    """The version of flashinfer-python; imports nothing.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError('flashinfer is not installed (pip install "compspec[cuda]")') from None


def choose_cache_path(path: Path) -> None:
    """Makes `path` the cache folder below which compiled kernels are looked for from now on."""
    _chosen[:] = [path]


def kernel_folder(arch: str, cache_path: Path | None = None) -> Path:
    """Where libraries for an architecture and the installed FlashInfer lie.

    Args:
        arch: as from `arch_name`.
        cache_path: default: the chosen cache folder, or that of compspec.
    """
    cache_path = cache_path or (_chosen[0] if _chosen else default_cache_path())
    return cache_path / "flashinfer" / installed_version() / arch


def stored(arch: str, cache_path: Path | None = None) -> dict[str, str | None]:
    """The libraries of the manifest, by name, each with what is wrong with it, or None. For `compspec doctor`."""
    folder = kernel_folder(arch, cache_path)
    libraries = _read_manifest(folder, arch)
    return {name: _flaw(folder, name, library) for name, library in sorted(libraries.items())}


def missing(modules: Iterable[KernelModule], arch: str, cache_path: Path | None = None) -> dict[KernelModule, str]:
    """Those of the libraries that cannot be loaded, each with the reason; `ABSENT` where there is none."""
    folder = kernel_folder(arch, cache_path)
    libraries = _read_manifest(folder, arch)
    flaws = {module: _flaw(folder, module.name, libraries.get(module.name)) for module in modules}
    return {module: flaw for module, flaw in flaws.items() if flaw is not None}


def use(setup: AttentionSetup, *, only_fa2: bool = False) -> str | None:
    """Makes FlashInfer load kernels from the cache folder, where all that are needed are there.

    A folder of compiled kernels that FlashInfer has already (the package flashinfer-jit-cache) stays in use.

    Args:
        setup: what the runner needs.
        only_fa2: prompt chunks of fast numerics run on fa2 as well.

    Returns:
        What compiled them ("nvcc 13.0.88"): kernels of another compiler may round differently. None where FlashInfer
        was left alone.
    """
    if setup.device.type != "cuda":
        return None
    env: Any = importlib.import_module("flashinfer.jit.env")
    if _replaced:
        env.FLASHINFER_AOT_DIR = _replaced.pop()
    if Path(env.FLASHINFER_AOT_DIR).is_dir():
        logger.info("FlashInfer has compiled kernels of its own in %s", env.FLASHINFER_AOT_DIR)
        return None
    arch = arch_name(torch.cuda.get_device_capability(setup.device))
    here = {arch_name(torch.cuda.get_device_capability(index)) for index in range(torch.cuda.device_count())}
    if len(here) > 1:  # FlashInfer loads a kernel once per process, for all GPUs
        logger.info("kernels compiled ahead of time are for one architecture, the GPUs here have %s", sorted(here))
        return None
    modules = needed(setup.layers, setup.dtype, setup.exact or only_fa2, arch)
    lacking = missing(modules, arch)
    folder = kernel_folder(arch)
    for module, reason in lacking.items():
        level = logging.INFO if reason == ABSENT else logging.WARNING
        logger.log(level, "FlashInfer kernel '%s' for %s in %s: %s", module, arch, folder, reason)
    if lacking:
        logger.info("FlashInfer compiles its kernels at start; tools/build_kernels.py compiles them ahead of time")
        return None
    _replaced.append(env.FLASHINFER_AOT_DIR)
    env.FLASHINFER_AOT_DIR = folder
    libraries = _read_manifest(folder, arch)
    compilers = sorted({f"nvcc {libraries[module.name].nvcc}" for module in modules})
    logger.info("FlashInfer kernels from %s (%s): %s", folder, ", ".join(compilers), "; ".join(map(str, modules)))
    return ", ".join(compilers)


def add_library(built: Path, name: str, arch: str, nvcc: str, cache_path: Path | None = None) -> Path:
    """Copies a compiled library into the folder and enters it in the manifest; either is replaced in one step.

    Args:
        built: the library.
        name: FlashInfer's name of it.
        arch: as from `arch_name`.
        nvcc: version of the compiler.
        cache_path: as in `kernel_folder`.

    Returns:
        Where it lies now.
    """
    folder = kernel_folder(arch, cache_path)
    library = _path(folder, name)
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as temporary:
        copy, manifest = Path(temporary) / library.name, Path(temporary) / MANIFEST
        shutil.copyfile(built, copy)
        entry = Library(sha256=_sha256(copy), nvcc=nvcc, machine=platform.machine())
        libraries = {**_read_manifest(folder, arch), name: entry}
        described = {key: asdict(libraries[key]) for key in sorted(libraries)}
        content = {"flashinfer": installed_version(), "arch": arch, "libraries": described}
        manifest.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(copy, library)
        os.replace(manifest, folder / MANIFEST)
    return library


def _path(folder: Path, name: str) -> Path:
    """Where FlashInfer looks for a library."""
    return folder / name / f"{name}.so"


def _read_manifest(folder: Path, arch: str) -> dict[str, Library]:
    """The libraries in the manifest, by name; none where it is missing, broken, or that of another folder."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        libraries = {name: Library(**entry) for name, entry in content["libraries"].items()}
        written_for = (content["flashinfer"], content["arch"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("compiled kernels are not used, '%s' cannot be read: %s", path, type(error).__name__)
        return {}
    if written_for != (installed_version(), arch):
        logger.warning("compiled kernels are not used, '%s' is for FlashInfer %s, architecture %s", path, *written_for)
        return {}
    return libraries


def _flaw(folder: Path, name: str, library: Library | None) -> str | None:
    """Why a library cannot be loaded, or None."""
    path = _path(folder, name)
    if library is None or not path.is_file():
        return ABSENT
    if library.machine != platform.machine():
        return f"compiled for {library.machine}, this machine is {platform.machine()}"
    cuda = torch.version.cuda
    if cuda is not None and cuda.split(".")[0] != library.nvcc.split(".")[0]:
        return f"compiled by nvcc {library.nvcc}, torch has CUDA {cuda}, and libraries need the same major version"
    if _sha256(path) != library.sha256:
        return f"its hash is not the one in {MANIFEST}: it was changed or is incomplete"
    return None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
