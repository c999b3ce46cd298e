"""What compspec keeps in its cache folder, and how to remove it. Nothing here needs torch.

Only what carries a name that compspec gives is found, so whatever else lies there, in a home folder that was named as
cache by mistake for one, stays. Symbolic links are not followed.
"""

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compspec.errors import ConfigError

LEFTOVERS = "leftovers"
KINDS = {
    "models": "converted GGUF files",
    "packed": "packed weights",
    "kernels": "C++ kernels",
    "inductor": "code compiled by torch.compile",
    "self_test": "self-test results",
    "flashinfer": "FlashInfer kernels",
    LEFTOVERS: "of killed processes",
}

_SECONDS_PER_DAY = 24 * 3600
# What is younger may belong to a process at work: a compilation; or a conversion, which can be silent for long.
_SETTLED_S = 60.0
_ABANDONED_S = 3600.0

_NOTE = "compspec.json"  # in the folder of a converted model
_NAMES = {
    "models": r"(?P<name>.+)-[0-9a-f]{16}",
    "packed": r"((?P<name>.+)-)?[0-9a-f]{16,64}\.safetensors",
    "kernels": r"(?P<name>\w+)-[0-9a-f]{16}\.so",
    "self_test": r"[0-9a-f]{32}\.json",
}
_PARTIAL = ".partial-"
_LEFTOVER = rf".+{re.escape(_PARTIAL)}[0-9a-f]{{8}}|\.(build|new)-\w+|.*[0-9a-f]{{16}}[\w.]*\.tmp"
_INDUCTOR = r"[a-z0-9]{2}|aotautograd|cache|dynamo|fxgraph|gcc|locks|precompiled_headers|triton"
_INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file or folder that is removed as a whole.

    Attributes:
        kind: one of `KINDS`.
        name: what it is, for people.
        path: where it lies.
        num_bytes, num_files: all files in it.
        written_at: when a file in it was last written, seconds since the epoch.
        used_at: when one was last read or written, as far as the file system keeps that (to a day, as a rule).
    """

    kind: str
    name: str
    path: Path
    num_bytes: int
    num_files: int
    written_at: float
    used_at: float

    @property
    def may_be_at_work(self) -> bool:
        """Whether a running process may be writing it."""
        age = time.time() - self.written_at
        return 0 <= age < (_ABANDONED_S if self.kind == LEFTOVERS else _SETTLED_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Entries of one kind and name: how many, their bytes together, and when the last of them was used."""

    kind: str
    name: str
    number: int
    num_bytes: int
    used_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """What `remove` did; `failures` has a line for each entry that is still there."""

    num_entries: int
    num_bytes: int
    failures: tuple[str, ...]


def chosen_inductor_folder() -> Path | None:
    """The folder for compiled code that the user chose through the environment, or None.

    torch writes its own default into the same variable as soon as `torch._dynamo` is imported: a folder
    `torchinductor_<user>` among the temporary files, which is nobody's choice.
    """
    value = os.environ.get(_INDUCTOR_VARIABLE)
    if not value:
        return None
    path = Path(value).expanduser().absolute()
    is_default = path.parent == Path(tempfile.gettempdir()) and path.name.startswith("torchinductor_")
    return None if is_default else path


def find(cache_path: Path) -> list[Entry]:
    """What is there, by kind; none where the folder is missing. Files that vanish meanwhile are left out.

    Raises:
        ConfigError: a folder cannot be read.
    """
    try:
        found = [entry for kind in _NAMES for entry in _named(cache_path / kind, kind)]
        found += _inductor(cache_path / "inductor")
        found += _flashinfer(cache_path / "flashinfer")
    except OSError as error:
        raise ConfigError(f"cannot read cache folder '{error.filename or cache_path}': {error.strerror}") from None
    order = list(KINDS)
    return sorted(found, key=lambda entry: (order.index(entry.kind), entry.name, entry.path))


def linked_kinds(cache_path: Path) -> list[str]:
    """The kinds whose folder is a symbolic link; what it points to is neither found nor removed."""
    return [kind for kind in KINDS if (cache_path / kind).is_symlink()]


def summarise(entries: Sequence[Entry]) -> list[Row]:
    """A row for each kind and name, in the order of `entries`."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.kind, entry.name), []).append(entry)
    return [
        Row(
            kind=kind,
            name=name,
            number=len(group),
            num_bytes=sum(entry.num_bytes for entry in group),
            used_at=max(entry.used_at for entry in group),
        )
        for (kind, name), group in groups.items()
    ]


def select(entries: Sequence[Entry], kinds: Sequence[str], older_than_days: float | None = None) -> list[Entry]:
    """The entries of these kinds (all, where none is named) that were not used for so many days (if any are given).

    Raises:
        ConfigError: an unknown kind.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise ConfigError(f"there is no kind '{unknown[0]}' in the cache; there are {', '.join(KINDS)}")
    chosen = [entry for entry in entries if not kinds or entry.kind in kinds]
    if older_than_days is None:
        return chosen
    before = time.time() - older_than_days * _SECONDS_PER_DAY
    return [entry for entry in chosen if entry.used_at < before]


def remove(entries: Sequence[Entry]) -> Removed:
    """Removes entries of `find`; what is gone already counts as removed.

    A process that has them open keeps what it has. One that is about to read a folder finds it whole or not at all.
    """
    failures = []
    num_bytes = 0
    for entry in entries:
        try:
            _remove(entry.path)
            num_bytes += entry.num_bytes
        except OSError as error:
            failures.append(f"cannot remove '{entry.path}': {error.strerror}")
    for folder in {entry.path.parent for entry in entries if entry.kind == "inductor"}:
        with contextlib.suppress(OSError):  # not empty
            while folder.name != "inductor":
                folder.rmdir()
                folder = folder.parent
    return Removed(num_entries=len(entries) - len(failures), num_bytes=num_bytes, failures=tuple(failures))


def _remove(path: Path) -> None:
    try:
        if not path.is_dir():
            path.unlink()
            return
        if _PARTIAL not in path.name:
            # A name that marks it as unfinished, should this be killed halfway.
            path = path.rename(path.with_name(f"{path.name}{_PARTIAL}{uuid.uuid4().hex[:8]}"))
        shutil.rmtree(path)
    except FileNotFoundError:
        shutil.rmtree(path, ignore_errors=True)  # another process removes it as well


def _named(folder: Path, kind: str) -> Iterator[Entry]:
    """Entries with a name of the kind, right below its folder."""
    for path in _children(folder):
        match = re.fullmatch(_NAMES[kind], path.name)
        if re.fullmatch(_LEFTOVER, path.name):
            yield from _entry(LEFTOVERS, f"of {kind}", path)
        elif kind == "models":
            if match and (path / _NOTE).is_file():
                yield from _entry(kind, _model_name(path) or match["name"], path)
        elif match:
            yield from _entry(kind, match.groupdict().get("name") or KINDS[kind], path)


def _inductor(folder: Path) -> Iterator[Entry]:
    """Every file of Inductor's: they do without one another."""
    chosen = chosen_inductor_folder()
    if chosen is not None and chosen.resolve() == folder.resolve():
        return
    for child in _children(folder):
        if re.fullmatch(_INDUCTOR, child.name):
            for path in _files(child):
                yield from _entry("inductor", KINDS["inductor"], path)


def _flashinfer(folder: Path) -> Iterator[Entry]:
    """A folder for each version and architecture, with a manifest."""
    for version in _children(folder):
        for arch in _children(version):
            if not (arch / "manifest.json").is_file():
                continue
            yield from _entry("flashinfer", f"FlashInfer {version.name}, architecture {arch.name}", arch)
            for path in _children(arch):
                if re.fullmatch(_LEFTOVER, path.name):
                    yield from _entry(LEFTOVERS, "of flashinfer", path)


def _model_name(folder: Path) -> str | None:
    try:
        note = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
        return f"{Path(note['gguf']).stem}, {note['dtype']}, transformers {note['transformers']}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _entry(kind: str, name: str, path: Path) -> Iterator[Entry]:
    """One entry; none if it vanished."""
    try:
        stats = {file: file.lstat() for file in _files(path)} if path.is_dir() else {path: path.lstat()}
        own = path.lstat()
    except FileNotFoundError:
        return
    # Notes are read to name what is there, which is no use of it.
    read = [each.st_atime for file, each in stats.items() if file.name != _NOTE]
    written = max([each.st_mtime for each in stats.values()] or [own.st_mtime])
    yield Entry(
        kind=kind,
        name=name,
        path=path,
        num_bytes=sum(each.st_size for each in stats.values()),
        num_files=len(stats),
        written_at=written,
        used_at=max(written, *read),
    )


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder, or the file itself."""
    if not folder.is_dir():
        yield folder
        return
    for path in _children(folder):
        yield from _files(path)


def _children(folder: Path) -> list[Path]:
    """What lies in a folder, links left out; nothing if there is no such folder, or it is a link."""
    try:
        if folder.is_symlink():
            return []
        with os.scandir(folder) as found:
            return sorted(Path(entry.path) for entry in found if not entry.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return []
