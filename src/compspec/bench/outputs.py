"""The files of a benchmark: that they can be written is made sure of before it runs."""

import importlib.util
from pathlib import Path

from compspec.errors import ConfigError, UnsupportedError
from compspec.jsonl import OutputError


def check_outputs(json: Path | None, html: Path | None) -> None:
    """Refuses what could not be written after a long run.

    Raises:
        OutputError: a file that cannot be opened for writing.
        ConfigError: both are the same file.
        UnsupportedError: an HTML report is wanted, and there is nothing to draw its charts.
    """
    if json is not None and html is not None and json.resolve() == html.resolve():
        raise ConfigError(f"--json and --html are the same file, '{json}'")
    if html is not None and importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("--html draws with matplotlib, which is not installed: pip install 'compspec[bench]'")
    for path in (json, html):
        if path is not None:
            _check_writable(path)


def write_output(path: Path, text: str) -> None:
    """Writes a file.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise OutputError(f"cannot write output file '{path}': {error.strerror}") from None


def _check_writable(path: Path) -> None:
    existed = path.exists()
    try:
        with open(path, "ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise OutputError(f"cannot write output file '{path}': {error.strerror}") from None
