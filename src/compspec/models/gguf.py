"""Turns a GGUF file, once, into a folder of safetensors with its tokenizer; later starts read the folder."""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

from compspec.errors import ModelError, UnsupportedError
from compspec.models.quiet import one_line, quiet_transformers

_DONE = "compspec.json"
_TEMPORARY = ".partial-"
_STALE_S = 24 * 3600
_SAMPLE_BYTES = 1 << 20
# Raised when the layout of a converted folder changes.
_LAYOUT = 1
_PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def convert_gguf(path: Path, dtype: torch.dtype | None, cache_path: Path) -> Path:
    """Returns a folder with config, tokenizer and safetensors weights of a GGUF file; makes it where it is missing.

    Args:
        path: the `.gguf` file.
        dtype: of the weights; None for the file's own, which is bfloat16 where it is quantised.
        cache_path: converted models live in its `models` folder.

    Raises:
        ModelError: the file is not a complete GGUF file, or the folder cannot be written.
        UnsupportedError: transformers cannot convert its architecture.
    """
    _check_magic(path)
    name = re.sub(r"[^\w.-]", "_", path.stem)
    folder = cache_path / "models" / f"{name}-{_key(path, dtype)}"
    if (folder / _DONE).is_file():
        return folder
    temporary = folder.with_name(f"{folder.name}{_TEMPORARY}{uuid.uuid4().hex[:8]}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder.parent)
        temporary.mkdir()
    except OSError as error:
        raise ModelError(
            f"cannot write converted weights below '{cache_path}': {error.strerror}; set cache_dir"
        ) from None
    try:
        _convert(path, dtype, temporary)
        _publish(temporary, folder)
    except OSError as error:
        raise ModelError(f"cannot write converted weights to '{folder}': {one_line(error)}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _key(path: Path, dtype: torch.dtype | None) -> str:
    """Identifies file, dtype and converter without reading the whole file."""
    stat = path.stat()
    digest = hashlib.sha256(
        json.dumps([_LAYOUT, transformers.__version__, str(dtype), stat.st_size, stat.st_mtime_ns]).encode()
    )
    with open(path, "rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, stat.st_size - _SAMPLE_BYTES))
        digest.update(file.read())
    return digest.hexdigest()[:16]


def _check_magic(path: Path) -> None:
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read GGUF file '{path}': {error.strerror}") from None
    if magic != b"GGUF":
        raise ModelError(f"'{path}' is not a GGUF file: it does not start with the bytes GGUF")


def _convert(path: Path, dtype: torch.dtype | None, into: Path) -> None:
    """Reads the file through transformers and saves model and tokenizer."""
    reader = _read(path)
    dtype = dtype or _own_dtype(reader)
    options: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    with quiet_transformers(), _shared_reader(reader):
        try:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                path.parent,
                dtype=dtype,
                quantization_config=transformers.GgufConfig(dequantize=True),
                output_loading_info=True,
                **options,
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
        except MemoryError:
            raise
        except Exception as error:
            raise UnsupportedError(f"transformers cannot convert GGUF file '{path}': {one_line(error)}") from error
        if info["missing_keys"]:
            raise ModelError(f"GGUF file '{path}' lacks weights of its model: {_some(info['missing_keys'])}")
        model.save_pretrained(into)
        tokenizer.save_pretrained(into)
    note = {
        "gguf": str(path.resolve()),
        "dtype": str(dtype).removeprefix("torch."),
        "transformers": transformers.__version__,
    }
    (into / _DONE).write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")


def _read(path: Path) -> Any:
    """Parses the file's header and checks that every tensor lies inside the file."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        end = max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors), default=0)
    except Exception as error:
        # The reader raises whatever numpy met first: the file ends early or its header is damaged.
        raise ModelError(f"GGUF file '{path}' is corrupt or incomplete: {one_line(error)}") from None
    if not reader.tensors or end > path.stat().st_size:
        raise ModelError(
            f"GGUF file '{path}' is incomplete: its weights end at byte {end}, the file at {path.stat().st_size}"
        )
    return reader


def _own_dtype(reader: Any) -> torch.dtype:
    """The type of most matrix weights, or bfloat16 where that is a quantised one."""
    counts: Counter[str] = Counter()
    for tensor in reader.tensors:
        if len(tensor.shape) > 1:
            counts[tensor.tensor_type.name] += int(tensor.n_elements)
    ((name, _),) = counts.most_common(1) or [("F32", 0)]
    return _PLAIN_TYPES.get(name, torch.bfloat16)


@contextlib.contextmanager
def _shared_reader(reader: Any) -> Iterator[None]:
    """Halves the time that transformers takes, and hides the bar that it draws past its own logging.

    transformers 5.24 parses the header anew for config, weights and tokenizer, and builds the map of
    tensor names for each module. To be removed when it does either once.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as converter

    def silent(iterable: Any, *_: Any, **__: Any) -> Any:
        return iterable

    with (
        mock.patch("gguf.GGUFReader", lambda *_, **__: reader),
        mock.patch("gguf.get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        mock.patch.object(converter, "tqdm", silent, create=True),
    ):
        yield


def _publish(temporary: Path, folder: Path) -> None:
    """Gives a finished folder its name in one step; whoever comes second keeps the first one's work."""
    for file in temporary.iterdir():
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    try:
        temporary.rename(folder)
    except OSError:
        if (folder / _DONE).is_file():
            return
        # Something without our mark sits in the place, a half-deleted folder for one.
        shutil.rmtree(folder, ignore_errors=True)
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / _DONE).is_file():
                raise


def _remove_stale(models: Path) -> None:
    """Deletes what killed conversions left behind a day ago or earlier."""
    for path in models.glob(f"*{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path, ignore_errors=True)


def _some(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
