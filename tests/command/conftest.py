"""A tiny model with a tokenizer, a configuration for it, and the command as a function."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from compspec import cli
from tests.tiny_models import tiny_model_folder, tiny_tokenizer


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model_folder("llama", tmp_path_factory.mktemp("text-model"), vocab_size=512)
    tiny_tokenizer(folder)
    return folder


@pytest.fixture
def config(text_model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    settings = {
        "model": {"source": str(text_model), "device": "cpu"},
        "speculative": {"method": "ngram", "num_draft_tokens": 3, "adaptive": False},
        "compile": {"mode": "none"},
        "scheduler": {"max_num_seqs": 3},
        "sampling": {"max_tokens": 12},
    }
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def error_line(self) -> str:
        """The one line that a failed command says, progress of the start-up left out."""
        lines = [line for line in self.err.splitlines() if line.startswith("error:")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        assert self.err.rstrip().endswith(lines[0])
        return lines[0]


@pytest.fixture
def compspec(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs the command in this process: arguments in; exit code and what it printed out."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["compspec", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return Result(code, printed.out, printed.err)

    return run


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"id": "a", "prompt": "to be or not to be, to be or"},
        {"id": "b", "messages": [{"role": "user", "content": "the quick brown fox"}]},
        {"id": "c", "prompt_token_ids": [1, 5, 6, 7, 5, 6], "params": {"temperature": 0.9, "max_tokens": 5}},
        {"prompt": "the lazy dog"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
