"""What may import what, beyond the layers that import-linter keeps."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "compspec"
FILES = sorted(SRC.rglob("*.py"))


def _imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_only_the_runner_touches_dynamo_and_inductor(path: Path) -> None:
    private = {name for name in _imported(path) if name.startswith(("torch._dynamo", "torch._inductor"))}
    assert not private or path.relative_to(SRC).parts[0] == "runner"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_only_the_command_line_prints(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    prints = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    assert not prints or path.name == "cli.py"


def test_the_scheduler_has_no_tensors() -> None:
    for path in (SRC / "scheduling").glob("*.py"):
        assert not any(name.split(".")[0] == "torch" for name in _imported(path))


def _modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_compspec_never_imports_flashinfer() -> None:
    assert "flashinfer" not in _modules_after("import compspec")


def test_help_and_schema_do_without_torch() -> None:
    assert "torch" not in _modules_after("import compspec.cli, compspec.config")
