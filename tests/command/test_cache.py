"""`compspec cache`: what it shows, and what it asks before it removes."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
import yaml

from compspec.models.gguf import convert_gguf
from tests.unit.models.tiny_gguf import write_tiny_gguf


def old(path: Path, text: str = "x", days: float = 1.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    when = time.time() - days * 24 * 3600
    os.utime(path, (when, when))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default cache folder of the command, with a kernel and a self-test result in it."""
    folder = tmp_path / "cache"
    old(folder / "kernels/attention-0123456789abcdef.so", "x" * 2048)
    old(folder / "self_test/0123456789abcdef0123456789abcdef.json", days=10)
    old(folder / "mine.txt")
    monkeypatch.setenv("COMPSPEC_CACHE", str(folder))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    return folder


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("arguments", [["cache"], ["cache", "show"]])
def test_show_is_a_table_with_a_total(compspec, cache, arguments) -> None:
    result = compspec(*arguments)
    assert result.code == 0
    rows = {cells[0]: cells for cells in map(str.split, re.sub("[│┃]", "", result.out).splitlines()) if cells}
    assert rows["kernels"] == ["kernels", "attention", "2.0", "KiB", "1", "1", "day", "ago"]
    assert rows["self_test"][-6:] == ["1", "bytes", "1", "10", "days", "ago"]
    assert rows["total"] == ["total", "2.0", "KiB", "2"]
    assert str(cache) in result.out.replace("\n", "")


def test_a_converted_model_goes_by_its_name(compspec, cache, tmp_path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    convert_gguf(tmp_path / "tiny.gguf", None, cache)
    out = compspec("cache").out
    assert "models" in out and "tiny," in out


def test_the_folder_can_be_named_or_come_from_a_configuration(compspec, config, tmp_path) -> None:
    other = tmp_path / "other"
    old(other / "kernels/linear-0123456789abcdef.so")
    assert "linear" in compspec("cache", "show", "--dir", other).out
    settings = yaml.safe_load(config.read_text()) | {"cache_dir": str(other)}
    config.write_text(yaml.safe_dump(settings))
    assert "linear" in compspec("cache", "show", "-c", config).out
    assert compspec("cache", "clear", "--yes", "-c", config).code == 0
    assert left(other) == set()
    assert "nothing is cached" in compspec("cache", "show", "-c", config).out
    both = compspec("cache", "show", "-c", config, "--dir", other)
    assert (both.code, "not both" in both.error_line) == (2, True)


def test_show_says_where_compiled_code_goes_by_the_environment(compspec, cache, monkeypatch) -> None:
    old(cache / "inductor/ab/cabc.py")
    assert "TORCHINDUCTOR_CACHE_DIR" not in compspec("cache").out
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    assert f"{cache / 'inductor'} ($TORCHINDUCTOR_CACHE_DIR)" in compspec("cache").out
    assert compspec("cache", "clear", "--yes").code == 0
    assert left(cache) == {"cabc.py", "mine.txt"}


def test_show_says_what_is_a_link(compspec, cache, tmp_path) -> None:
    (cache / "models").symlink_to(tmp_path)
    assert f"{cache / 'models'} is a link" in compspec("cache").out


def test_clear_removes_all_that_is_ours(compspec, cache) -> None:
    result = compspec("cache", "clear", "--yes")
    assert result.code == 0
    assert "removed 2.0 KiB (2 entries)" in result.out
    assert left(cache) == {"mine.txt"}
    assert "nothing to remove" in compspec("cache", "clear").out


def test_clear_of_some_kinds_or_ages(compspec, cache) -> None:
    compspec("cache", "clear", "self_test", "--older-than", 20, "--yes")
    assert len(left(cache)) == 3
    compspec("cache", "clear", "--older-than", 5, "--yes")
    assert left(cache) == {"attention-0123456789abcdef.so", "mine.txt"}
    compspec("cache", "clear", "models", "self_test", "--yes")
    assert len(left(cache)) == 2
    compspec("cache", "clear", "models", "kernels", "--yes")
    assert left(cache) == {"mine.txt"}


def test_what_was_written_just_now_stays_and_is_said(compspec, cache) -> None:
    old(cache / "kernels/linear-0123456789abcdef.so", days=0)
    result = compspec("cache", "clear", "--yes")
    assert "1 stay" in result.err
    assert left(cache) == {"linear-0123456789abcdef.so", "mine.txt"}


@pytest.mark.parametrize("answer", [True, False])
def test_on_a_terminal_it_asks(compspec, cache, monkeypatch, answer) -> None:
    asked = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda text, **options: asked.append(text) or answer)
    assert compspec("cache", "clear", "kernels").code == 0
    (question,) = asked
    assert "2.0 KiB" in question and str(cache) in question
    assert ("attention-0123456789abcdef.so" in left(cache)) is not answer


def test_without_a_terminal_it_removes_nothing_unasked(cache) -> None:
    command = [sys.executable, "-c", "from compspec.cli import main; main()", "cache", "clear"]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("error:") and "--yes" in result.stderr
    assert len(left(cache)) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "--dir", "no/such/folder"], ["no/such/folder"]),
        (["clear", "--yes", "--dir", "no/such/folder"], ["no/such/folder"]),
        (["clear", "--yes", "kernel"], ["'kernel'", "kernels", "leftovers"]),
        (["show", "-c", "no.yaml"], ["no.yaml"]),
    ],
)
def test_mistakes_are_one_line(compspec, cache, arguments, words) -> None:
    result = compspec("cache", *arguments)
    assert result.code == 2
    for word in words:
        assert word in result.error_line
    assert len(left(cache)) == 3


def test_what_cannot_be_removed_is_one_line(compspec, cache, monkeypatch) -> None:
    def refusing(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refusing)
    result = compspec("cache", "clear", "--yes")
    assert result.code == 2
    assert "2 entries are still there" in result.error_line and "Permission denied" in result.error_line


def test_it_does_without_torch() -> None:
    code = "import sys; from compspec import cli; cli.cache_show(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"


def test_generate_makes_again_what_was_removed(compspec, config, cache) -> None:
    arguments = ["generate", "-c", config, "--prompt", "to be or not to be"]
    first = compspec(*arguments)
    for path in cache.rglob("*"):
        os.utime(path, (0, 0))
    assert compspec("cache", "clear", "--yes").code == 0
    assert list((cache / "self_test").iterdir()) == []
    again = compspec(*arguments)
    assert (again.code, again.out) == (0, first.out)
    assert len(list((cache / "self_test").iterdir())) == 1
