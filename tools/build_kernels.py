"""Compiles FlashInfer's attention kernels ahead of time, on a machine with nvcc and ninja; it needs no GPU.

    python tools/build_kernels.py -c configs/quickstart.yaml --arch 9.0a
    python tools/build_kernels.py --head-dim 64 --head-dim 128 --arch 8.0 --arch 9.0a --output kernels
    python tools/build_kernels.py -c configs/quickstart.yaml --arch 9.0a --list

Libraries go to the cache folder of the configuration, or to --output, which is then the cache folder of the machine
that runs them (cache_dir or $COMPSPEC_CACHE). What is there already is not compiled again. On a machine with GPUs
--arch is theirs. One line per kernel goes to standard output.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from compspec.attention import flashinfer
from compspec.attention.backend import LayerSpec, layer_options
from compspec.attention.prebuilt import KernelModule, add_library, arch_name, kernel_folder, missing, needed
from compspec.config import EngineConfig, ModelSection, default_cache_path, load_config
from compspec.errors import CompspecError, ConfigError, UnsupportedError

EXIT_ERROR = 2
_ARCH = re.compile(r"(\d+)\.(\d)([af]?)")
_RECORDER = "compspec_layer_recorder"
# What compilers, linkers and ninja write before their reasons, and what a shell writes of a command it lacks.
_FAILURE = re.compile(r"\b(error|fatal)( error)?\s*:|cannot find -l|: not found$", re.IGNORECASE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = _parser().parse_args(arguments)
    if args.worker:
        return _work(json.loads(sys.stdin.read()))
    try:
        wanted = _wanted(args)
        if args.list:
            _list(wanted)
        else:
            _build(wanted, args.jobs)
    except (CompspecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-c", "--config", type=Path, action="append", default=[], help="what its model needs")
    parser.add_argument("--arch", action="append", default=[], help="of the GPU: 8.0, 8.6, 8.9, 9.0a, 10.0a, 12.0f")
    parser.add_argument("--head-dim", type=int, action="append", default=[], help="instead of a configuration")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="with --head-dim")
    parser.add_argument("--window", action="store_true", help="with --head-dim: of layers with a sliding window")
    parser.add_argument("--softcap", action="store_true", help="with --head-dim: of layers with a soft cap")
    parser.add_argument("--fast", action="store_true", help="for numerics: fast as well")
    parser.add_argument("--output", type=Path, help="cache folder to fill")
    parser.add_argument("--list", action="store_true", help="say what is needed and whether it is there")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at once")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


# --- what is wanted ---------------------------------------------------------------------------------------------------

Wanted = dict[tuple[Path, str], set[KernelModule]]
"""Kernels by cache folder and architecture."""


def _wanted(args: argparse.Namespace) -> Wanted:
    reason = flashinfer.unavailable()
    if reason is not None:
        raise UnsupportedError(reason)
    if args.jobs < 1:
        raise ConfigError(f"--jobs is {args.jobs}, at least one compiler has to run")
    if not args.config and not args.head_dim:
        raise ConfigError("nothing to compile: give -c CONFIG.yaml, or --head-dim")
    if not args.head_dim and (args.window or args.softcap):
        raise ConfigError("--window and --softcap go with --head-dim; a configuration's model has its own")
    archs = _archs(args.arch)
    wanted: Wanted = {}
    for path in args.config:
        config = load_config(path)
        layers, dtype = _layers_of(path, config)
        for arch in archs:
            modules = needed(layers, dtype, config.numerics.mode == "exact" and not args.fast, arch)
            wanted.setdefault((args.output or config.cache_path, arch), set()).update(modules)
    for head_dim in args.head_dim:
        if head_dim not in flashinfer.HEAD_DIMS:
            raise ConfigError(f"--head-dim is {head_dim}, FlashInfer has kernels for {_dims(flashinfer.HEAD_DIMS)}")
        layer = LayerSpec(
            num_heads=1,
            num_kv_heads=1,
            head_dim=head_dim,
            scale=1.0,
            window=int(args.window),
            softcap=float(args.softcap),
        )
        for arch in archs:
            modules = needed([layer], getattr(torch, args.dtype), not args.fast, arch)
            wanted.setdefault((args.output or default_cache_path(), arch), set()).update(modules)
    return wanted


def _archs(given: list[str]) -> list[str]:
    """The architectures by FlashInfer's names."""
    if not given:
        given = [arch_name(torch.cuda.get_device_capability(index)) for index in range(torch.cuda.device_count())]
    if not given:
        raise ConfigError("there is no GPU here whose architecture could be taken; give one, as --arch 9.0a")
    archs = []
    for text in given:
        match = _ARCH.fullmatch(text)
        if match is None:
            raise ConfigError(f"--arch is '{text}', it is a compute capability: 8.0, 8.6, 8.9, 9.0a, 10.0a, 12.0f")
        capability = int(match[1]), int(match[2])
        if capability < flashinfer.OLDEST_GENERATION:
            raise ConfigError(f"--arch is '{text}', FlashInfer needs compute capability 8.0 or newer")
        name = arch_name(capability)
        if match[3] and text != name:
            raise ConfigError(f"--arch is '{text}', kernels for compute capability {match[1]}.{match[2]} are '{name}'")
        archs.append(name)
    return archs


def _layers_of(path: Path, config: EngineConfig) -> tuple[list[LayerSpec], torch.dtype]:
    """The layers of a configuration's model and its dtype; no layers, and a line, where FlashInfer will not run it."""
    reason = None
    if config.model.attention not in ("auto", "flashinfer"):
        reason = f"model.attention is {config.model.attention}"
    elif config.model.device == "cpu":
        reason = "model.device is cpu"
    layers: list[LayerSpec] = []
    dtype = torch.float32
    if reason is None:
        layers, dtype = read_layers(config.model, config.cache_path)
        others = sorted({layer.head_dim for layer in layers} - set(flashinfer.HEAD_DIMS))
        if dtype not in flashinfer.DTYPES:
            reason = f"the model is {dtype}, FlashInfer has kernels for bfloat16 and float16"
        elif others:
            reason = f"the model has head dim {_dims(others)}, FlashInfer has kernels for {_dims(flashinfer.HEAD_DIMS)}"
    if reason is None:
        return layers, dtype
    print(f"{path}: FlashInfer does not run this model: {reason}", file=sys.stderr)
    return [], dtype


def _dims(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def read_layers(section: ModelSection, cache_path: Path) -> tuple[list[LayerSpec], torch.dtype]:
    """What the attention layers of a model ask for, and its dtype.

    The model runs without weights, on shapes alone; one that cannot is loaded.

    Args:
        section: the `model` section of a configuration.
        cache_path: where converted GGUF weights live.

    Raises:
        CompspecError: as `compspec.models.loader.load_model`.
    """
    # transformers takes seconds to import, and the compiling process does without it.
    from compspec.models import loader
    from compspec.models.gguf import convert_gguf
    from compspec.models.source import resolve_source
    from compspec.models.support import check_config

    section = section.model_copy(update={"device": "cpu", "cpu_linear": "native"})
    files = resolve_source(section.source, revision=section.revision, trust_remote_code=section.trust_remote_code)
    folder = files.folder
    if files.gguf is not None:
        folder = convert_gguf(files.gguf, loader.DTYPES.get(section.dtype), cache_path)
    config = loader.read_config(folder, section)
    check_config(config)
    dtype = loader.choose_dtype(config, section.dtype)
    try:
        layers = _run_on_shapes(config, dtype, section.trust_remote_code)
    except Exception as error:  # whatever a model does that needs values
        print(f"loading {section.source}, it does not run on shapes alone: {type(error).__name__}", file=sys.stderr)
        layers = [layer.spec for layer in loader.load_model(section, cache_path).adapter.layers]
    return layers, dtype


def _run_on_shapes(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> list[LayerSpec]:
    """Runs a model of this configuration on the meta device, and records what its layers ask for."""
    import transformers

    from compspec.models.quiet import quiet_transformers
    from compspec.models.rope import freeze_rope

    layers: list[LayerSpec] = []

    def record(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        scale, window, softcap = layer_options(module, query, options)
        layers.append(
            LayerSpec(
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[-1],
                scale=scale,
                window=window,
                softcap=softcap,
            )
        )
        return query.transpose(1, 2), None

    transformers.AttentionInterface.register(_RECORDER, record)
    with quiet_transformers(), torch.no_grad(), torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=_RECORDER, trust_remote_code=trust_remote_code
        )
        freeze_rope(module)
        if module._can_set_experts_implementation():
            module.set_experts_implementation("batched_mm")  # the others look at who chose which expert
        rows = torch.arange(4)[None]
        module.eval()(input_ids=rows, position_ids=rows, use_cache=False)
    if len(layers) != config.get_text_config(decoder=True).num_hidden_layers:
        raise UnsupportedError("not every layer calls the attention function")
    return layers


# --- building ---------------------------------------------------------------------------------------------------------


def _list(wanted: Wanted) -> None:
    for (cache_path, arch), modules in sorted(wanted.items()):
        flaws = missing(modules, arch, cache_path)
        for module in sorted(modules):
            print(f"{arch} {module}: {module.name}: {flaws.get(module, 'there')}")


def _build(wanted: Wanted, jobs: int) -> None:
    todo: dict[tuple[Path, str], list[KernelModule]] = {}
    for (cache_path, arch), modules in sorted(wanted.items()):
        lacking = sorted(missing(modules, arch, cache_path))
        for module in sorted(modules - set(lacking)):
            print(f"{arch} {module}: there already", flush=True)
        if lacking:
            todo[cache_path, arch] = lacking
    if not todo:
        return
    cuda_home, nvcc = find_nvcc()
    cxx = _find_programs()
    temporary = tempfile.TemporaryDirectory(prefix="compspec-kernels-", ignore_cleanup_errors=True)
    with temporary as folder, _libcuda(cxx, cuda_home) as libraries:
        for number, ((cache_path, arch), lacking) in enumerate(todo.items()):
            kernel_folder(arch, cache_path).mkdir(parents=True, exist_ok=True)  # fails before minutes of compiling
            environment = _environment(arch, cuda_home, jobs, Path(folder) / str(number), libraries)
            with contextlib.closing(_run_worker(lacking, environment)) as results:
                for module, result in zip(lacking, results, strict=True):
                    library = add_library(Path(result["library"]), module.name, arch, nvcc, cache_path)
                    size = library.stat().st_size / 1e6
                    print(f"{arch} {module}: {result['seconds']:.1f} s, {size:.1f} MB", flush=True)


def find_nvcc() -> tuple[Path, str]:
    """CUDA's folder, and the version of its compiler.

    Raises:
        UnsupportedError: there is none, it does not run, or torch here could not load what it makes.
    """
    given = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    homes = [Path(given)] if given else [Path("/usr/local/cuda")]
    if on_path and not given:
        homes.insert(0, Path(on_path).resolve().parents[1])
    # A wrapper on the path lies in no CUDA folder.
    home = next((home for home in homes if _has_compiler(home)), None)
    if home is None:
        looked = " and ".join(map(str, homes))
        raise UnsupportedError(f"there is no nvcc with its headers in {looked}; install CUDA, or set CUDA_HOME")
    nvcc = os.environ.get("FLASHINFER_NVCC", str(home / "bin" / "nvcc"))  # as FlashInfer looks for it
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnsupportedError(f"'{nvcc}' does not run: {error}") from None
    version = re.search(r"\bV(\d+\.\d+\.\d+)", said)
    if version is None:
        raise UnsupportedError(f"'{nvcc} --version' names no version")
    if torch.version.cuda is not None and torch.version.cuda.split(".")[0] != version[1].split(".")[0]:
        raise UnsupportedError(
            f"nvcc is {version[1]} and torch has CUDA {torch.version.cuda}, whose libraries do not fit together; "
            "set CUDA_HOME to a CUDA of torch's major version"
        )
    return home, version[1]


def _has_compiler(home: Path) -> bool:
    return (home / "bin" / "nvcc").is_file() and (home / "include" / "cuda_runtime.h").is_file()


def _find_programs() -> str:
    """Checks for ninja and a C++ compiler; returns the latter."""
    if shutil.which("ninja", path=_path_with_python()) is None:
        raise UnsupportedError("there is no ninja; install it (pip install ninja)")
    cxx = os.environ.get("CXX", "c++")
    if shutil.which(cxx) is None:
        raise UnsupportedError(f"there is no C++ compiler '{cxx}'; install g++ or set CXX")
    return cxx


def _path_with_python() -> str:
    """$PATH, and the folder of this Python, where pip puts ninja."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


@contextlib.contextmanager
def _libcuda(cxx: str, cuda_home: Path) -> Iterator[Path | None]:
    """A folder with a stand-in for the driver's library, which the linker asks for; None where a real one is found."""
    found = subprocess.run([cxx, "-print-file-name=libcuda.so"], capture_output=True, text=True).stdout.strip()
    places = [Path(found), *(cuda_home / folder / "libcuda.so" for folder in ("lib64", "lib64/stubs"))]
    if any(place.is_absolute() and place.exists() for place in places):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="compspec-libcuda-") as folder:
        command = [cxx, "-shared", "-x", "c", "-", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so"]
        done = subprocess.run(command, input="", capture_output=True, text=True)
        if done.returncode != 0:
            raise UnsupportedError(f"'{cxx}' cannot link a library: {first_failure(done.stderr)}")
        yield Path(folder)


def _environment(arch: str, cuda_home: Path, jobs: int, workspace: Path, libraries: Path | None) -> dict[str, str]:
    """What the worker reads: FlashInfer looks at most of it when it is imported."""
    environment = dict(os.environ)
    environment |= {
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "FLASHINFER_WORKSPACE_BASE": str(workspace),
        "FLASHINFER_LOGGING_LEVEL": "error",
        "CUDA_HOME": str(cuda_home),
        "MAX_JOBS": str(jobs),
        "PATH": _path_with_python(),
    }
    for name in ("FLASHINFER_DISABLE_JIT", "FLASHINFER_JIT_VERBOSE", "FLASHINFER_JIT_DEBUG"):
        environment.pop(name, None)
    if libraries is not None:
        paths = [str(libraries), environment.get("LIBRARY_PATH", "")]
        environment["LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    return environment


def _run_worker(modules: Sequence[KernelModule], environment: dict[str, str]) -> Generator[dict[str, Any]]:
    """Compiles in a process of its own; yields each module's library and seconds as soon as it is there."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        worker = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            start_new_session=True,
        )
        assert worker.stdin is not None and worker.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(json.dumps([asdict(module) for module in modules]))
            worker.stdin.close()
        count = 0
        try:
            for line in worker.stdout:
                if not line.startswith("{"):
                    continue
                result = json.loads(line)
                if "error" in result:
                    raise UnsupportedError(f"{modules[count]} does not compile: {result['error']}")
                count += 1
                yield result
        finally:
            worker.stdout.close()
            if worker.poll() is None and count < len(modules):
                os.killpg(worker.pid, signal.SIGTERM)  # ninja stops its compilers
            worker.wait()
        if count < len(modules):
            complaints.seek(0)
            reason = first_failure(complaints.read())
            raise UnsupportedError(f"the compiling process ended with exit code {worker.returncode}: {reason}")


def _work(modules: list[dict[str, Any]]) -> int:
    """The compiling process: one line of JSON per module, the last one with the reason if one fails."""
    gen = importlib.import_module("flashinfer.jit.attention.modules").gen_batch_prefill_module
    for fields in modules:
        started = time.perf_counter()
        try:
            spec = gen(*KernelModule(**fields).arguments)
            spec.build()
        except Exception as error:
            print(json.dumps({"error": first_failure(str(error))}), flush=True)
            return 1
        seconds = time.perf_counter() - started
        print(json.dumps({"library": str(spec.jit_library_path), "seconds": seconds}), flush=True)
    return 0


def first_failure(output: str) -> str:
    """The first line with an error in the output of compilers; the last line where none says so."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no message"]
    return next((line for line in lines if _FAILURE.search(line)), lines[-1])


if __name__ == "__main__":
    if "--worker" not in sys.argv:  # whoever stops this process stops the compilers with it
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
