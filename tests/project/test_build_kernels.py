"""tools/build_kernels.py: what it takes from configurations, what it says, and the way from a compiler to the folder.

No test needs nvcc: where one compiles, a script stands for it, and the host's C++ compiler makes empty objects.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from compspec.attention import flashinfer, prebuilt
from compspec.attention.backend import LayerSpec
from compspec.attention.prebuilt import KernelModule
from compspec.config import ModelSection, load_config
from compspec.models import loader
from tests.tiny_models import tiny_model_folder

TOOL = Path(__file__).parents[2] / "tools" / "build_kernels.py"
KERNELS = {
    "llama": ["fa2 bfloat16 head dim 64 plain"],
    "gemma2": ["fa2 bfloat16 head dim 64 soft cap", "fa2 bfloat16 head dim 64 window and soft cap"],
    "gemma3_text": ["fa2 bfloat16 head dim 64 plain", "fa2 bfloat16 head dim 64 window"],
}


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_kernels", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = _load()

Run = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the tool; returns its exit code, the lines it printed, and what it complained of."""

    def run(*arguments: Any) -> tuple[int, list[str], str]:
        capsys.readouterr()
        code = tool.main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err

    return run


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer 1.2.3, which is not there."""
    names = SimpleNamespace(get_batch_prefill_uri=lambda *args: "-".join(map(str, args)).replace(".", "_"))
    monkeypatch.setitem(sys.modules, "flashinfer.jit.attention.modules", names)  # type: ignore[arg-type]
    monkeypatch.setattr(flashinfer, "unavailable", lambda: None)
    monkeypatch.setattr(prebuilt, "installed_version", lambda: "1.2.3")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A CUDA folder whose nvcc is a script: it compiles nothing, and fails where FAKE_NVCC says how."""
    home = tmp_path / "cuda"
    for folder in ("bin", "include", "lib64"):
        (home / folder).mkdir(parents=True)
    (home / "include" / "cuda_runtime.h").touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0; fi\n'
        'if [ -n "$FAKE_NVCC" ]; then echo "$FAKE_NVCC"; exit 1; fi\n'
        'while [ $# -gt 0 ]; do case "$1" in -o) out=$2;; -MF) deps=$2;; -gencode=*) arch=$1;; esac; shift; done\n'
        'touch "$deps"; echo "static const char arch[] __attribute__((used)) = \\"$arch\\";" | c++ -c -x c - '
        '-o "$out"\n'
    )
    nvcc.chmod(0o755)
    for name in ("CUDA_PATH", "FLASHINFER_NVCC", "FAKE_NVCC", "CXX", "LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return home


def config_file(folder: Path, model: Path, **sections: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"model": {"source": str(model), "dtype": "bfloat16"}, **sections}))
    return path


def descriptions(lines: Sequence[str]) -> list[str]:
    """The kernels of some lines, without their architecture."""
    return [line.split(":")[0].partition(" ")[2] for line in lines]


# --- what is needed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen2_moe"])
def test_layers_read_without_weights_are_those_of_the_loaded_model(
    family: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = ModelSection(source=str(tiny_model_folder(family, models)), device="cpu")
    loaded = loader.load_model(section, tmp_path).adapter
    monkeypatch.setattr(loader, "load_model", lambda *args: pytest.fail("loads the weights"))
    layers, dtype = tool.read_layers(section, tmp_path)
    assert layers == [layer.spec for layer in loaded.layers]
    assert dtype == loaded.dtype


def test_a_model_that_does_not_run_on_shapes_alone_is_loaded(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any) -> list[LayerSpec]:
        raise NotImplementedError("aten::nonzero on meta")

    monkeypatch.setattr(tool, "_run_on_shapes", fail)
    section = ModelSection(source=str(tiny_model_folder("llama", models)), device="cuda")
    layers, _ = tool.read_layers(section, tmp_path)
    assert len(layers) == 2 and layers[0].head_dim == 16
    assert "NotImplementedError" in capsys.readouterr().err


@pytest.mark.parametrize("family", KERNELS)
def test_a_configuration_needs_the_kernels_of_its_model(
    family: str, models: Path, tmp_path: Path, run: Run, version: None
) -> None:
    # Of six layers of gemma3 one sees all tokens.
    config = config_file(tmp_path, tiny_model_folder(family, models, head_dim=64, num_hidden_layers=6))
    code, lines, complaints = run("-c", config, "--arch", "9.0", "--list", "--output", tmp_path)
    assert (code, complaints) == (0, "")
    assert descriptions(lines) == KERNELS[family]
    assert all(line.startswith("9.0a ") and line.endswith(": not compiled") for line in lines)


def test_fast_numerics_need_fa3_on_hopper_and_nowhere_else(
    models: Path, tmp_path: Path, run: Run, version: None
) -> None:
    folder = tiny_model_folder("llama", models, head_dim=64)
    fast = config_file(tmp_path, folder, numerics="fast")
    _, lines, _ = run("-c", fast, "--arch", "8.0", "--arch", "9.0a", "--list", "--output", tmp_path)
    assert [line.split(" head dim")[0] for line in lines] == [
        "8.0 fa2 bfloat16",
        "9.0a fa2 bfloat16",
        "9.0a fa3 bfloat16",
    ]
    exact = config_file(tmp_path, folder)
    assert run("-c", exact, "--fast", "--arch", "9.0a", "--list", "--output", tmp_path)[1] == lines[1:]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({}, "the model has head dim 16, FlashInfer has kernels for 64, 128, 256"),
        ({"dtype": "float32"}, "the model is torch.float32, FlashInfer has kernels for bfloat16 and float16"),
        ({"attention": "sdpa"}, "model.attention is sdpa"),
        ({"device": "cpu"}, "model.device is cpu"),
    ],
)
def test_a_model_that_flashinfer_does_not_run_needs_nothing_and_is_named(
    model: dict[str, str], reason: str, models: Path, tmp_path: Path, run: Run, version: None
) -> None:
    path = config_file(tmp_path, tiny_model_folder("llama", models))
    data = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({"model": {**data["model"], **model}}))
    code, lines, complaints = run("-c", path, "--arch", "9.0a", "--list")
    assert (code, lines) == (0, [])
    assert complaints == f"{path}: FlashInfer does not run this model: {reason}\n"


def test_kernels_go_to_the_cache_folder_of_the_configuration(
    models: Path, tmp_path: Path, version: None, run: Run
) -> None:
    folder = tiny_model_folder("llama", models, head_dim=64)
    config = config_file(tmp_path, folder, cache_dir=str(tmp_path / "mine"))
    assert load_config(config).cache_path == tmp_path / "mine"
    assert run("-c", config, "--arch", "9.0a", "--list")[1][0].endswith(": not compiled")
    (module,) = prebuilt.needed([_layer(64)], torch.bfloat16, True, "9.0a")
    prebuilt.add_library(config, module.name, "9.0a", "13.0.88", tmp_path / "mine")
    assert run("-c", config, "--arch", "9.0a", "--list")[1][0].endswith(": there")


def _layer(head_dim: int) -> LayerSpec:
    return LayerSpec(num_heads=1, num_kv_heads=1, head_dim=head_dim, scale=1.0, window=0, softcap=0.0)


def test_the_list_names_each_kernel_and_says_whether_it_is_there(tmp_path: Path, run: Run, version: None) -> None:
    options = ["--head-dim", "64", "--head-dim", "128", "--window", "--dtype", "float16", "--arch", "8.6"]
    module = KernelModule(backend="fa2", dtype="float16", head_dim=128, window=True, softcap=False)
    built = tmp_path / "built.so"
    built.write_text("code")
    library = prebuilt.add_library(built, module.name, "8.6", "13.0.88", tmp_path)
    code, lines, _ = run(*options, "--list", "--output", tmp_path)
    assert code == 0
    assert [line.rpartition(": ")[2] for line in lines] == ["not compiled", "there"]
    assert lines[1] == f"8.6 fa2 float16 head dim 128 window: {module.name}: there"
    library.write_text("other code")
    assert "its hash is not the one in manifest.json" in run(*options, "--list", "--output", tmp_path)[1][1]


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "nothing to compile: give -c CONFIG.yaml, or --head-dim"),
        (
            ["-c", "none.yaml", "--arch", "9.0a"],
            "cannot read configuration file 'none.yaml': No such file or directory",
        ),
        (["--head-dim", "64", "--arch", "sm90"], "--arch is 'sm90', it is a compute capability: 8.0, 8.6, 8.9, "),
        (["--head-dim", "64", "--arch", "7.5"], "--arch is '7.5', FlashInfer needs compute capability 8.0 or newer"),
        (["--head-dim", "64", "--arch", "9.0f"], "--arch is '9.0f', kernels for compute capability 9.0 are '9.0a'"),
        (["--head-dim", "96", "--arch", "9.0a"], "--head-dim is 96, FlashInfer has kernels for 64, 128, 256"),
        (["-c", "none.yaml", "--window"], "--window and --softcap go with --head-dim; "),
        (["--head-dim", "64", "--arch", "9.0a", "--jobs", "0"], "--jobs is 0, at least one compiler has to run"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(
    arguments: list[str], complaint: str, run: Run, version: None
) -> None:
    code, lines, complaints = run(*arguments)
    assert (code, lines) == (2, [])
    assert complaints.startswith(f"error: {complaint}") and complaints.count("\n") == 1


def test_without_a_gpu_the_architecture_has_to_be_given(
    run: Run, version: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    code, _, complaints = run("--head-dim", "64")
    assert code == 2 and "give one, as --arch 9.0a" in complaints


def test_with_gpus_theirs_is_the_architecture(
    tmp_path: Path, run: Run, version: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9) if index == 1 else (9, 0))
    _, lines, _ = run("--head-dim", "64", "--list", "--output", tmp_path)
    assert [line.split()[0] for line in lines] == ["8.9", "9.0a"]


def test_what_is_lacking_is_said_before_anything_is_compiled(
    run: Run, version: None, cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--head-dim", "64", "--arch", "9.0a", "--output", tmp_path)
    monkeypatch.setattr(tool, "_run_worker", lambda *args: pytest.fail("compiles"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(tool.shutil, "which", lambda name, path=None: None if name == "no-such-compiler" else name)
    assert run(*options)[::2] == (
        2,
        "error: there is no C++ compiler 'no-such-compiler'; install g++ or set CXX\n",
    )
    monkeypatch.setattr(tool.shutil, "which", lambda name, path=None: None)
    assert run(*options)[::2] == (2, "error: there is no ninja; install it (pip install ninja)\n")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert run(*options)[::2] == (
        2,
        "error: nvcc is 13.0.88 and torch has CUDA 12.8, whose libraries do not fit together; "
        "set CUDA_HOME to a CUDA of torch's major version\n",
    )
    (cuda / "bin" / "nvcc").unlink()
    assert run(*options)[::2] == (
        2,
        f"error: there is no nvcc with its headers in {cuda}; install CUDA, or set CUDA_HOME\n",
    )
    monkeypatch.setattr(flashinfer, "unavailable", lambda: "flashinfer is not installed")
    assert run(*options)[::2] == (2, "error: flashinfer is not installed\n")


def test_a_wrapper_of_nvcc_on_the_path_is_not_taken_for_cuda(
    cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrappers = tmp_path / "wrappers" / "bin"
    wrappers.mkdir(parents=True)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", f"{wrappers}{os.pathsep}{os.environ['PATH']}")
    (wrappers / "nvcc").symlink_to(cuda / "bin" / "nvcc")
    assert tool.find_nvcc() == (cuda.resolve(), "13.0.88")
    (wrappers / "nvcc").unlink()
    shutil.copy(cuda / "bin" / "nvcc", wrappers / "nvcc")
    assert tool._has_compiler(cuda) and not tool._has_compiler(wrappers.parent)
    monkeypatch.setattr(tool, "_has_compiler", lambda home: home == cuda)
    with pytest.raises(tool.UnsupportedError, match=r"no nvcc with its headers in .*wrappers and /usr/local/cuda"):
        tool.find_nvcc()


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (
            "Ninja build failed. Ninja output:\n[1/11] nvcc -Werror=all -c a.cu\nFAILED: a.o\n"
            "a.cu(12): error: no such name\na.cu(13): error: nor this\nninja: build stopped: subcommand failed.\n",
            "a.cu(12): error: no such name",
        ),
        (
            "FAILED: a.o\nnvcc fatal   : Unsupported gpu architecture 'compute_120f'\nninja: build stopped",
            "nvcc fatal   : Unsupported gpu architecture 'compute_120f'",
        ),
        (
            "a.cu:1:10: fatal error: x.h: No such file or directory\n",
            "a.cu:1:10: fatal error: x.h: No such file or directory",
        ),
        (
            "FAILED: a.so\n/usr/bin/ld: cannot find -lcudart: No such file or directory\ncollect2: error: ld",
            "/usr/bin/ld: cannot find -lcudart: No such file or directory",
        ),
        ("/bin/sh: 1: /cuda/bin/nvcc: not found\nninja: build stopped", "/bin/sh: 1: /cuda/bin/nvcc: not found"),
        (
            "Traceback:\n  line\nModuleNotFoundError: No module named 'tvm_ffi'\n",
            "ModuleNotFoundError: No module named 'tvm_ffi'",
        ),
        ("Killed\n", "Killed"),
        ("", "no message"),
    ],
)
def test_of_a_failed_build_the_first_line_with_an_error_is_quoted(output: str, line: str) -> None:
    assert tool.first_failure(output) == line


# --- from the compiler to the folder ----------------------------------------------------------------------------------


def test_each_kernel_is_installed_as_soon_as_it_is_there_and_not_compiled_again(
    run: Run, version: None, cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[KernelModule] = []

    def work(modules: Sequence[KernelModule], environment: dict[str, str]) -> Generator[dict[str, Any]]:
        assert environment["FLASHINFER_CUDA_ARCH_LIST"] == "8.0"
        for module in modules:
            if len(compiled) == 2:
                raise tool.UnsupportedError("nvcc broke")
            compiled.append(module)
            library = tmp_path / "built.so"
            library.write_bytes(bytes(2_000_000))
            yield {"library": str(library), "seconds": 61.25}

    monkeypatch.setattr(tool, "_run_worker", work)
    monkeypatch.setattr(tool.shutil, "which", lambda name, path=None: f"/usr/bin/{name}")
    options = [f"--head-dim={size}" for size in (64, 128, 256)] + ["--arch", "8.0", "--output", tmp_path / "out"]
    code, lines, complaints = run(*options)
    assert (code, complaints) == (2, "error: nvcc broke\n")
    assert lines == [f"8.0 fa2 bfloat16 head dim {size} plain: 61.2 s, 2.0 MB" for size in (64, 128)]
    compiled.clear()
    code, lines, _ = run(*options)
    assert code == 0
    assert [module.head_dim for module in compiled] == [256]
    assert [line.rpartition(": ")[2] for line in lines] == ["there already", "there already", "61.2 s, 2.0 MB"]
    assert run(*options)[1][-1] == "8.0 fa2 bfloat16 head dim 256 plain: there already"
    content = json.loads((tmp_path / "out" / "flashinfer" / "1.2.3" / "8.0" / "manifest.json").read_text())
    assert {entry["nvcc"] for entry in content["libraries"].values()} == {"13.0.88"}


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_compiled(
    run: Run, version: None, cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "_run_worker", lambda *args: pytest.fail("compiles"))
    monkeypatch.setattr(tool, "_find_programs", lambda: "c++")
    (tmp_path / "file").touch()
    code, _, complaints = run("--head-dim", "64", "--arch", "9.0a", "--output", tmp_path / "file")
    assert code == 2 and complaints.startswith("error: ") and "Not a directory" in complaints


@pytest.fixture
def real_flashinfer() -> None:
    pytest.importorskip("flashinfer")
    if shutil.which("ninja") is None or shutil.which("c++") is None:
        pytest.skip("needs ninja and a C++ compiler")


def test_a_build_goes_from_flashinfers_sources_to_the_folder(
    real_flashinfer: None, run: Run, cuda: Path, tmp_path: Path
) -> None:
    """All but the compiler is real: FlashInfer's sources, ninja, the linker, the stand-in for libcuda."""
    _empty_library(cuda / "lib64" / "libcudart.so", "libcudart.so.13")
    out = tmp_path / "out"
    code, lines, complaints = run("--head-dim", "64", "--arch", "8.0", "--arch", "9.0", "--fast", "--output", out)
    assert (code, complaints) == (0, "")
    assert descriptions(lines) == [f"{name} bfloat16 head dim 64 plain" for name in ("fa2", "fa2", "fa3")]
    for arch, count in (("8.0", 1), ("9.0a", 2)):
        folder = out / "flashinfer" / prebuilt.installed_version() / arch
        content = json.loads((folder / "manifest.json").read_text())
        assert len(content["libraries"]) == count
        for module in prebuilt.needed([_layer(64)], torch.bfloat16, False, arch):
            library = (folder / module.name / f"{module.name}.so").read_bytes()
            assert f"sm_{arch.replace('.', '')}".encode() in library
            assert str(tmp_path).encode() not in library
    assert prebuilt.missing(prebuilt.needed([_layer(64)], torch.bfloat16, False, "9.0a"), "9.0a", out) == {}


def test_a_compiler_that_fails_is_quoted_in_one_line(
    real_flashinfer: None, run: Run, cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NVCC", "nvcc fatal   : Unsupported gpu architecture 'compute_90a'")
    code, lines, complaints = run("--head-dim", "64", "--arch", "9.0a", "--output", tmp_path)
    assert (code, lines) == (2, [])
    assert complaints == (
        "error: fa2 bfloat16 head dim 64 plain does not compile: "
        "nvcc fatal   : Unsupported gpu architecture 'compute_90a'\n"
    )


def test_whoever_stops_the_tool_stops_its_compilers(real_flashinfer: None, cuda: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    nvcc = cuda / "bin" / "nvcc"
    nvcc.write_text(
        nvcc.read_text().replace("touch ", f"echo $$ > {started}.new; mv {started}.new {started}; exec sleep 60; ")
    )
    command = [sys.executable, str(TOOL), "--head-dim=64", "--arch=8.0", "--jobs=1", f"--output={tmp_path}"]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 60
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 143
    compiler = Path("/proc") / started.read_text().strip() / "cmdline"
    deadline = time.monotonic() + 10
    while _sleeps(compiler) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _sleeps(compiler)


def _sleeps(command_line: Path) -> bool:
    """Whether a process is there still; a dead one that nobody waited for has no command line."""
    try:
        return b"sleep" in command_line.read_bytes()
    except OSError:
        return False


def _empty_library(path: Path, soname: str) -> None:
    subprocess.run(
        ["c++", "-shared", "-x", "c", "-", f"-Wl,-soname,{soname}", "-o", str(path)], input="", text=True, check=True
    )
