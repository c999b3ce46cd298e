"""What counts as compspec's own in a cache folder, and that nothing else is ever removed."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from compspec import cache
from compspec.errors import ConfigError

DAY_S = 24 * 3600.0
MODEL = "SmolLM2.Q4_1-0123456789abcdef"

OURS = {
    f"models/{MODEL}/compspec.json": "models",
    f"models/{MODEL}/model.safetensors": "models",
    "packed/0123456789abcdef0123456789abcdef.safetensors": "packed",
    "kernels/attention-0123456789abcdef.so": "kernels",
    "self_test/0123456789abcdef0123456789abcdef.json": "self_test",
    "inductor/ab/cabc.py": "inductor",
    "inductor/fxgraph/ab/fabc/n123": "inductor",
    "flashinfer/0.6.18/9.0a/manifest.json": "flashinfer",
    "flashinfer/0.6.18/9.0a/batch/batch.so": "flashinfer",
    f"models/{MODEL}.partial-01234567/model.safetensors": "leftovers",
    "kernels/.build-abc_1234/attention.so": "leftovers",
    "self_test/0123456789abcdef0123456789abcdef.123.tmp": "leftovers",
    "packed/0123456789abcdef0123456789abcdef.123.tmp": "leftovers",
    "flashinfer/0.6.18/9.0a/.new-abcd/batch.so": "leftovers",
}
# What a home folder can hold under the same names.
FOREIGN = [
    "thesis.tex",
    "models/my-model/model.safetensors",
    f"models/{MODEL}-mine/model.safetensors",
    "models/other-0123456789abcdef/model.safetensors",
    "models/notes.tmp",
    "packed/suitcase.txt",
    "packed/weights.safetensors",
    "kernels/linux-6.1.so",
    "kernels/attention.cpp",
    "self_test/exam.json",
    "inductor/datasheet.pdf",
    "inductor/designs/coil.txt",
    "flashinfer/README.md",
    "flashinfer/src/flashinfer/api.py",
]


def write(path: Path, text: str = "x", age_s: float = 2 * 3600.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    when = time.time() - age_s
    os.utime(path, (when, when))
    return path


@pytest.fixture(autouse=True)
def _nobody_chose_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with one of everything, and other people's files among it."""
    for name in [*OURS, *FOREIGN]:
        write(tmp_path / name)
    note = {"gguf": "/some/where/SmolLM2.Q4_1.gguf", "dtype": "bfloat16", "transformers": "5.24.0"}
    write(tmp_path / f"models/{MODEL}/compspec.json", json.dumps(note))
    return tmp_path


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_every_kind_is_found_and_nothing_else(folder: Path) -> None:
    found = cache.find(folder)
    assert {entry.kind for entry in found} == set(cache.KINDS)
    for entry in found:
        for name in files(folder):
            if (folder / name).is_relative_to(entry.path):
                assert entry.kind in (OURS[name], "flashinfer")
    covered = {name for name in files(folder) for entry in found if (folder / name).is_relative_to(entry.path)}
    assert covered == set(OURS)


def test_removing_everything_leaves_what_is_not_ours(folder: Path) -> None:
    removed = cache.remove(cache.find(folder))
    assert removed.failures == ()
    assert files(folder) == set(FOREIGN)
    assert not (folder / "inductor/fxgraph").exists()
    assert cache.find(folder) == []


def test_a_missing_folder_is_empty(tmp_path: Path) -> None:
    assert cache.find(tmp_path / "nowhere") == []


def test_sizes_and_names_are_those_of_the_files(folder: Path) -> None:
    (model,) = cache.select(cache.find(folder), ["models"])
    assert model.name == "SmolLM2.Q4_1, bfloat16, transformers 5.24.0"
    assert (model.num_files, model.num_bytes) == (2, 1 + len((model.path / "compspec.json").read_text()))
    names = {entry.kind: entry.name for entry in cache.find(folder)}
    assert names["kernels"] == "attention"
    assert names["packed"] == "packed weights"
    assert names["flashinfer"] == "FlashInfer 0.6.18, architecture 9.0a"


def test_a_model_whose_note_cannot_be_read_goes_by_its_folder(folder: Path) -> None:
    write(folder / f"models/{MODEL}/compspec.json", "[]")
    (model,) = cache.select(cache.find(folder), ["models"])
    assert model.name == "SmolLM2.Q4_1"


def test_rows_add_up_entries_of_one_name(folder: Path) -> None:
    write(folder / "kernels/attention-fedcba9876543210.so", "xyz", age_s=DAY_S)
    write(folder / "kernels/linear-fedcba9876543210.so")
    rows = [row for row in cache.summarise(cache.find(folder)) if row.kind == "kernels"]
    assert [(row.name, row.number, row.num_bytes) for row in rows] == [("attention", 2, 4), ("linear", 1, 1)]
    assert time.time() - rows[0].used_at == pytest.approx(2 * 3600.0, abs=60)


def test_last_use_is_the_last_read_but_not_of_the_note(folder: Path) -> None:
    now = time.time()
    weights, note = (folder / "models" / MODEL / name for name in ("model.safetensors", "compspec.json"))
    os.utime(note, (now, now - 9 * DAY_S))
    os.utime(weights, (now - 3 * DAY_S, now - 9 * DAY_S))
    (model,) = cache.select(cache.find(folder), ["models"])
    assert now - model.used_at == pytest.approx(3 * DAY_S, abs=60)
    assert now - model.written_at == pytest.approx(9 * DAY_S, abs=60)


@pytest.mark.parametrize(("days", "number"), [(None, 2), (0.0, 2), (4.0, 1), (6.0, 0)])
def test_older_than_looks_at_the_last_use(tmp_path: Path, days: float | None, number: int) -> None:
    write(tmp_path / "kernels/attention-0123456789abcdef.so", age_s=5 * DAY_S)
    write(tmp_path / "kernels/linear-0123456789abcdef.so", age_s=3 * DAY_S)
    assert len(cache.select(cache.find(tmp_path), [], days)) == number


def test_a_time_in_the_future_is_no_reason_to_keep(tmp_path: Path) -> None:
    write(tmp_path / "kernels/attention-0123456789abcdef.so", age_s=-5 * DAY_S)
    (entry,) = cache.select(cache.find(tmp_path), ["kernels"])
    assert not entry.may_be_at_work


def test_an_unknown_kind_is_refused_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'kernel'.*models, packed, kernels.*leftovers"):
        cache.select(cache.find(folder), ["models", "kernel"])


@pytest.mark.parametrize(
    ("name", "age_s", "busy"),
    [
        ("kernels/attention-0123456789abcdef.so", 5, True),
        ("kernels/attention-0123456789abcdef.so", 120, False),
        (f"models/{MODEL}.partial-01234567/model.safetensors", 120, True),
        (f"models/{MODEL}.partial-01234567/model.safetensors", 7200, False),
    ],
)
def test_what_was_written_just_now_may_be_at_work(tmp_path: Path, name: str, age_s: float, busy: bool) -> None:
    write(tmp_path / name, age_s=age_s)
    (entry,) = cache.find(tmp_path)
    assert entry.may_be_at_work is busy


def test_links_are_not_followed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    for name in ("ab/cabc.py", "attention-fedcba9876543210.so", f"{MODEL}/compspec.json"):
        write(outside / name)
    shutil.rmtree(folder / "inductor")
    (folder / "inductor").symlink_to(outside)
    (folder / "kernels/attention-fedcba9876543210.so").symlink_to(outside / "attention-fedcba9876543210.so")
    (folder / "models/link-0123456789abcdef").symlink_to(outside / MODEL)
    (folder / f"models/{MODEL}/more").symlink_to(outside)
    before = files(outside)
    assert cache.linked_kinds(folder) == ["inductor"]
    found = cache.find(folder)
    assert not any(entry.path.is_symlink() or entry.kind == "inductor" for entry in found)
    assert cache.remove(found).failures == ()
    assert files(outside) == before
    assert not (folder / "models" / MODEL).exists()


def test_a_cache_folder_may_itself_be_a_link(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    link = tmp_path_factory.mktemp("links") / "cache"
    link.symlink_to(folder)
    assert len(cache.find(link)) == len(cache.find(folder)) > 0


def test_what_vanishes_while_it_is_looked_at_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = cache._children

    def vanishing(path: Path) -> list[Path]:
        found = children(path)
        if path.name == "kernels":
            for each in found:
                each.unlink(missing_ok=True) if each.is_file() else shutil.rmtree(each)
        return found

    monkeypatch.setattr(cache, "_children", vanishing)
    kinds = {entry.kind for entry in cache.find(folder)}
    assert "kernels" not in kinds and "models" in kinds


def test_what_vanishes_before_it_is_removed_is_no_failure(folder: Path) -> None:
    found = cache.find(folder)
    for entry in found:
        if entry.kind in ("models", "kernels"):
            shutil.rmtree(entry.path) if entry.path.is_dir() else entry.path.unlink()
    assert cache.remove(found).failures == ()
    assert files(folder) == set(FOREIGN)


def test_what_vanishes_from_within_a_folder_is_no_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove: Callable[..., None] = shutil.rmtree

    def racing(path: Path, ignore_errors: bool = False) -> None:
        remove(path, ignore_errors)
        if not ignore_errors:
            raise FileNotFoundError(2, "No such file or directory", "model.safetensors")

    monkeypatch.setattr(shutil, "rmtree", racing)
    assert cache.remove(cache.find(folder)).failures == ()
    assert files(folder) == set(FOREIGN)


def test_a_folder_is_renamed_before_it_is_emptied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that starts finds the model whole or not at all; one killed halfway leaves a leftover."""

    def killed(path: Path, ignore_errors: bool = False) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    models = cache.select(cache.find(folder), ["models"])
    with pytest.raises(KeyboardInterrupt):
        cache.remove(models)
    assert not models[0].path.exists()
    left = cache.find(folder)
    assert not [entry for entry in left if entry.kind == "models"]
    assert len([entry for entry in left if entry.kind == "leftovers" and entry.name == "of models"]) == 2


def test_an_open_file_survives_its_removal(folder: Path) -> None:
    with open(folder / f"models/{MODEL}/model.safetensors", encoding="utf-8") as file:
        cache.remove(cache.find(folder))
        assert file.read() == "x"


def test_what_cannot_be_removed_is_named_and_the_rest_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".so":
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refusing)
    removed = cache.remove(cache.find(folder))
    (failure,) = removed.failures
    assert "attention-0123456789abcdef.so': Permission denied" in failure
    assert {entry.kind for entry in cache.find(folder)} == {"kernels"}


def test_a_folder_that_cannot_be_read_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(ConfigError, match=r"cannot read cache folder '.*': Permission denied"):
        cache.find(folder)


def test_the_folder_for_compiled_code_that_the_user_chose_is_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    assert cache.chosen_inductor_folder() == folder / "inductor"
    assert "inductor" not in {entry.kind for entry in cache.find(folder)}


@pytest.mark.parametrize("value", ["", str(Path(tempfile.gettempdir()) / "torchinductor_somebody")])
def test_torchs_own_default_is_no_choice(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", value)
    assert cache.chosen_inductor_folder() is None


def test_torch_still_writes_its_default_where_we_expect_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    cache_dir()
    assert "TORCHINDUCTOR_CACHE_DIR" in os.environ
    assert cache.chosen_inductor_folder() is None
