"""Kernels compiled ahead of time: which are needed, and when FlashInfer is pointed at them."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compspec.attention import prebuilt
from compspec.attention.backend import AttentionSetup, LayerSpec
from compspec.attention.prebuilt import KernelModule, add_library, arch_name, missing, needed, stored, use
from compspec.batch import Bucket

ARCH = "9.0a"


def layer(head_dim: int = 64, window: int = 0, softcap: float = 0.0, num_heads: int = 4) -> LayerSpec:
    return LayerSpec(
        num_heads=num_heads, num_kv_heads=2, head_dim=head_dim, scale=0.125, window=window, softcap=softcap
    )


LLAMA = (layer(128), layer(128))
GEMMA2 = (layer(256, window=4096, softcap=50.0), layer(256, softcap=50.0)) * 2
GEMMA3 = (*(layer(256, window=512),) * 5, layer(256))


def module(backend: str = "fa2", head_dim: int = 64, window: bool = False, softcap: bool = False) -> KernelModule:
    return KernelModule(backend=backend, dtype="bfloat16", head_dim=head_dim, window=window, softcap=softcap)


def attention_setup(*layers: LayerSpec, exact: bool = True, device: str = "cuda") -> AttentionSetup:
    return AttentionSetup(
        layers=layers or (layer(),),
        dtype=torch.bfloat16,
        device=torch.device(device),
        block_size=16,
        max_blocks=4,
        max_model_len=64,
        buckets=(
            Bucket(num_requests=2, query_len=4, num_logits=4),
            Bucket(num_requests=1, query_len=32, num_logits=1),
        ),
        exact=exact,
    )


# --- which are needed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "exact", "arch", "expected"),
    [
        (LLAMA, True, "8.0", [module(head_dim=128)]),
        (LLAMA, True, "9.0a", [module(head_dim=128)]),
        (LLAMA, False, "8.0", [module(head_dim=128)]),
        (LLAMA, False, "10.0a", [module(head_dim=128)]),
        (LLAMA, False, "9.0a", [module(head_dim=128), module("fa3", head_dim=128)]),
        (GEMMA2, True, "9.0a", [module("fa2", 256, False, True), module("fa2", 256, True, True)]),
        (
            GEMMA2,
            False,
            "9.0a",
            [module(backend, 256, window, True) for backend in ("fa2", "fa3") for window in (False, True)],
        ),
        (GEMMA3, True, "8.9", [module(head_dim=256), module(head_dim=256, window=True)]),
        (GEMMA3, False, "8.9", [module(head_dim=256), module(head_dim=256, window=True)]),
        ((), True, "9.0a", []),
    ],
)
def test_each_kind_of_layer_needs_one_kernel_and_on_hopper_fast_numerics_one_more(
    layers: tuple[LayerSpec, ...], exact: bool, arch: str, expected: list[KernelModule]
) -> None:
    assert needed(layers, torch.bfloat16, exact, arch) == expected
    assert needed(reversed(layers), torch.bfloat16, exact, arch) == expected


def test_the_dtype_of_the_model_is_that_of_its_kernels() -> None:
    assert [each.dtype for each in needed(LLAMA, torch.float16, True, ARCH)] == ["float16"]


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "8.0"),
        ((8, 6), "8.6"),
        ((8, 9), "8.9"),
        ((9, 0), "9.0a"),
        ((10, 0), "10.0a"),
        ((10, 3), "10.3a"),
        ((12, 0), "12.0f"),
        ((12, 1), "12.1a"),
    ],
)
def test_an_architecture_has_the_name_that_flashinfer_gives_it(
    capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert arch_name(capability) == name
    pytest.importorskip("flashinfer")
    from flashinfer.compilation_context import CompilationContext
    from flashinfer.jit import cpp_ext

    monkeypatch.setattr(cpp_ext, "is_cuda_version_at_least", lambda version: True)
    assert "{}.{}".format(*CompilationContext._normalize_cuda_arch(*capability)) == name


def test_importing_the_module_imports_no_flashinfer() -> None:
    code = "import sys, compspec.attention.prebuilt; print('flashinfer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# --- what FlashInfer itself loads -------------------------------------------------------------------------------------


class _RecordedModule:
    """Stands for a compiled library: every function of it does nothing."""

    def plan(self, *args: Any) -> list[int]:
        return []

    def ragged_run(self, *args: Any) -> None: ...

    def paged_run(self, *args: Any) -> None: ...


@pytest.fixture
def loaded_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The names of the libraries that FlashInfer would load, wrappers running on the CPU."""
    pytest.importorskip("flashinfer")
    import flashinfer.prefill
    from flashinfer.jit import core, env

    names: list[str] = []

    def build_and_load(spec: Any) -> _RecordedModule:
        names.append(spec.name)
        return _RecordedModule()

    monkeypatch.setattr(env, "FLASHINFER_GEN_SRC_DIR", tmp_path)
    monkeypatch.setattr(core, "check_cuda_arch", lambda: None)
    monkeypatch.setattr(core.JitSpec, "build_and_load", build_and_load)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    monkeypatch.setattr(prebuilt, "use", lambda setup, **options: None)
    flashinfer.prefill.get_batch_prefill_module.cache_clear()
    yield names
    flashinfer.prefill.get_batch_prefill_module.cache_clear()


@pytest.mark.parametrize("layers", [LLAMA, GEMMA2, GEMMA3], ids=["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize(("exact", "arch"), [(True, "9.0a"), (False, "9.0a"), (True, "8.0"), (False, "8.0")])
def test_the_backend_loads_what_is_needed_and_nothing_else(
    layers: tuple[LayerSpec, ...],
    exact: bool,
    arch: str,
    loaded_names: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flashinfer import utils

    from compspec.attention.flashinfer import FlashInferBackend

    monkeypatch.setattr(utils, "is_sm90a_supported", lambda device: arch == "9.0a")
    FlashInferBackend(attention_setup(*layers, exact=exact, device="cpu"))
    assert sorted(loaded_names) == sorted(each.name for each in needed(layers, torch.bfloat16, exact, arch))


# --- the folder -------------------------------------------------------------------------------------------------------


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A FlashInfer 1.2.3 that is not there, one Hopper GPU that is not there, and a cache folder."""
    env = SimpleNamespace(FLASHINFER_AOT_DIR=tmp_path / "of-flashinfer")
    names = SimpleNamespace(get_batch_prefill_uri=lambda *args: "-".join(map(str, args)).replace(".", "_"))
    monkeypatch.setitem(sys.modules, "flashinfer.jit.env", env)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "flashinfer.jit.attention.modules", names)  # type: ignore[arg-type]
    monkeypatch.setattr(prebuilt, "installed_version", lambda: "1.2.3")
    monkeypatch.setattr(prebuilt, "_chosen", [])
    monkeypatch.setattr(prebuilt, "_replaced", [])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("COMPSPEC_CACHE", str(tmp_path / "cache"))
    return env


def build(tmp_path: Path, *modules: KernelModule, nvcc: str = "13.0.88", arch: str = ARCH) -> list[Path]:
    built = tmp_path / "built.so"
    paths = []
    for each in modules:
        built.write_text(f"code of {each} for {arch}")
        paths.append(add_library(built, each.name, arch, nvcc))
    return paths


def test_a_library_lies_where_flashinfer_looks_and_the_manifest_describes_it(
    env: SimpleNamespace, tmp_path: Path
) -> None:
    first, second = build(tmp_path, module(), module(head_dim=128))
    folder = tmp_path / "cache" / "flashinfer" / "1.2.3" / "9.0a"
    assert first == folder / module().name / f"{module().name}.so"
    assert first.read_text() == "code of fa2 bfloat16 head dim 64 plain for 9.0a"
    assert sorted(path.name for path in folder.iterdir()) == sorted([first.stem, second.stem, "manifest.json"])
    content = json.loads((folder / "manifest.json").read_text())
    assert (content["flashinfer"], content["arch"]) == ("1.2.3", "9.0a")
    assert set(content["libraries"]) == {first.stem, second.stem}
    assert content["libraries"][first.stem]["nvcc"] == "13.0.88"


def test_flashinfer_is_pointed_at_the_folder_where_all_is_there(
    env: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    build(tmp_path, *needed(GEMMA2, torch.bfloat16, False, ARCH))
    assert use(attention_setup(*GEMMA2, exact=False)) == "nvcc 13.0.88"
    assert tmp_path / "cache" / "flashinfer" / "1.2.3" / "9.0a" == env.FLASHINFER_AOT_DIR
    assert "fa3 bfloat16 head dim 256 window and soft cap" in caplog.text


def test_flashinfer_is_left_alone_where_one_is_lacking(
    env: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    build(tmp_path, *needed(GEMMA2, torch.bfloat16, True, ARCH))
    assert use(attention_setup(*GEMMA2, exact=False)) is None
    assert tmp_path / "of-flashinfer" == env.FLASHINFER_AOT_DIR
    assert "'fa3 bfloat16 head dim 256 soft cap'" in caplog.text
    assert "'fa2 bfloat16 head dim 256 soft cap'" not in caplog.text
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_libraries_of_another_architecture_do_not_count(env: SimpleNamespace, tmp_path: Path) -> None:
    build(tmp_path, module(), arch="8.0")
    assert use(attention_setup()) is None
    assert tmp_path / "of-flashinfer" == env.FLASHINFER_AOT_DIR


def test_a_library_that_was_changed_is_not_used_and_warned_of(
    env: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (library,) = build(tmp_path, module())
    library.write_text("other code")
    assert use(attention_setup()) is None
    assert tmp_path / "of-flashinfer" == env.FLASHINFER_AOT_DIR
    (record,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "hash is not the one in manifest.json" in record.getMessage()
    assert "fa2 bfloat16 head dim 64 plain" in record.getMessage()


def test_a_second_model_gets_flashinfers_own_folder_back_where_its_kernels_are_lacking(
    env: SimpleNamespace, tmp_path: Path
) -> None:
    """Else FlashInfer would load a changed library of the second model, the folder being set already."""
    _, changed = build(tmp_path, module(), module(head_dim=128))
    changed.write_text("other code")
    assert use(attention_setup()) is not None
    assert use(attention_setup(layer(128))) is None
    assert tmp_path / "of-flashinfer" == env.FLASHINFER_AOT_DIR
    assert use(attention_setup()) is not None
    assert use(attention_setup()) is not None


def test_compiled_kernels_that_flashinfer_brings_stay_in_use(env: SimpleNamespace, tmp_path: Path) -> None:
    build(tmp_path, module())
    env.FLASHINFER_AOT_DIR.mkdir()
    assert use(attention_setup()) is None
    assert tmp_path / "of-flashinfer" == env.FLASHINFER_AOT_DIR


def test_gpus_of_two_architectures_compile_for_both(
    env: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path, module())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0) if device == 1 else (9, 0))
    assert use(attention_setup()) is None


def test_on_the_cpu_flashinfer_is_left_alone(
    env: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path, module())
    monkeypatch.setitem(sys.modules, "flashinfer.jit.env", None)  # importing it fails
    assert use(attention_setup(device="cpu")) is None


def test_the_cache_folder_can_be_chosen(env: SimpleNamespace, tmp_path: Path) -> None:
    build(tmp_path, module())
    prebuilt.choose_cache_path(tmp_path / "elsewhere")
    assert use(attention_setup()) is None
    build(tmp_path, module())
    assert use(attention_setup()) is not None
    assert tmp_path / "elsewhere" / "flashinfer" / "1.2.3" / "9.0a" == env.FLASHINFER_AOT_DIR


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("cuda", "12.8", "compiled by nvcc 13.0.88, torch has CUDA 12.8"),
        ("machine", "aarch64", "this machine is aarch64"),
    ],
)
def test_libraries_for_another_cuda_or_machine_do_not_count(
    env: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    build(tmp_path, module())
    assert missing([module()], ARCH) == {}
    monkeypatch.setattr(
        *((torch.version, "cuda", value) if name == "cuda" else (prebuilt.platform, name, lambda: value))
    )
    assert reason in missing([module()], ARCH)[module()]
    assert reason in str(stored(ARCH)[module().name])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"flashinfer": "1.2.3", "arch": "9.0a", "libraries": {"x": {"sha256": "0"}}}', "cannot be read"),
        (
            '{"flashinfer": "1.2.3", "arch": "9.0a", "libraries": {"x": {"sha256": "0", "nvcc": 13, "machine": "x"}}}',
            "cannot be read",
        ),
        ('{"flashinfer": "1.2.2", "arch": "9.0a", "libraries": {}}', "is for FlashInfer 1.2.2, architecture 9.0a"),
        ('{"flashinfer": "1.2.3", "arch": "8.0", "libraries": {}}', "is for FlashInfer 1.2.3, architecture 8.0"),
    ],
)
def test_a_manifest_that_is_broken_or_of_another_folder_counts_as_none(
    env: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str, complaint: str
) -> None:
    (library,) = build(tmp_path, module())
    (library.parents[1] / "manifest.json").write_text(content)
    assert missing([module()], ARCH) == {module(): "not compiled"}
    assert complaint in caplog.text
    assert use(attention_setup()) is None
    build(tmp_path, module())
    assert use(attention_setup()) is not None


def test_doctor_sees_every_library_and_what_is_wrong_with_it(env: SimpleNamespace, tmp_path: Path) -> None:
    assert stored(ARCH) == {}
    good, changed, gone = build(tmp_path, module(), module(head_dim=128), module(head_dim=256))
    changed.write_text("other code")
    gone.unlink()
    found = stored(ARCH)
    assert set(found) == {good.stem, changed.stem, gone.stem}
    assert found[good.stem] is None
    assert "hash" in str(found[changed.stem])
    assert found[gone.stem] == "not compiled"
