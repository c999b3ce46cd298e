"""Finds the files that `model.source` names: a folder, a hub id, a `.gguf` file, or a file in a package."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from compspec.errors import ConfigError, ModelError, UnsupportedError
from compspec.models.quiet import one_line, quiet_transformers

PACKAGE_PREFIX = "package:"
_PACKAGE = f"{PACKAGE_PREFIX}<import_name>/<file>"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where a model lies on disk.

    Attributes:
        folder: holds config, tokenizer and weights.
        gguf: the GGUF file in `folder` that holds all of these instead, or None.
    """

    folder: Path
    gguf: Path | None


def resolve_source(source: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelFiles:
    """Turns `model.source` into files on disk; downloads a hub model if it is not cached.

    Raises:
        ModelError: nothing is there, or the weights are neither safetensors nor GGUF.
        ConfigError: `revision` with a source that is not a hub id.
    """
    packaged = source.startswith(PACKAGE_PREFIX)
    path = _in_package(source) if packaged else Path(source).expanduser()
    local = packaged or path.exists()
    if local and revision is not None:
        raise ConfigError(f"model.revision is '{revision}', but '{source}' is not a hub id; remove model.revision")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model.source '{source}' is a file that is not .gguf; name its folder instead")
        return ModelFiles(folder=path.parent, gguf=path)
    if not local:
        if path.suffix == ".gguf" or not _HUB_ID.fullmatch(source):
            raise ModelError(
                f"model.source '{source}' does not exist; give a hub id, a folder, a .gguf file or {_PACKAGE}"
            )
        path = _from_hub(source, revision, trust_remote_code)
    _check_folder(path, source)
    return ModelFiles(folder=path, gguf=None)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted; those of another layout (subfolders) do not count."""
    return sorted(folder.glob("*.safetensors"))


def _in_package(source: str) -> Path:
    """`package:name/file` -> the file, without importing the package."""
    name, _, file = source.removeprefix(PACKAGE_PREFIX).partition("/")
    if not name or not file:
        raise ModelError(f"model.source '{source}' is not of the form {_PACKAGE}")
    try:
        # find_spec imports the parents of a dotted name, so only the top package is looked up this way.
        top, *rest = name.split(".")
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"model.source '{source}': no Python package '{top}' is installed; pip install the one that has it"
        )
    folders = [Path(location, *rest) for location in spec.submodule_search_locations]
    for folder in folders:
        path = (folder / file).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ModelError(f"model.source '{source}' leaves the package's folder")
        if path.exists():
            return path
    models = sorted(path.name for folder in folders for path in folder.glob("*.gguf"))
    models += sorted(path.parent.name for folder in folders for path in folder.glob("*/config.json"))
    raise ModelError(
        f"model.source '{source}': the package has no such file; it has: {', '.join(models) or 'no model'}"
    )


def _from_hub(source: str, revision: str | None, trust_remote_code: bool) -> Path:
    """Downloads (or finds in the cache) what a model needs, pickles left out."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = [*_HUB_PATTERNS, "*.py"] if trust_remote_code else _HUB_PATTERNS
    try:
        with quiet_transformers():
            return Path(
                snapshot_download(
                    source,
                    revision=revision,
                    allow_patterns=patterns,
                    ignore_patterns=["*/*", "consolidated*"],
                )
            )
    except LocalEntryNotFoundError:
        reason = "it is neither a folder here nor in the hub's cache, and the hub cannot be reached"
    except GatedRepoError:
        reason = "the hub lets only accepted users read it; accept its terms and log in with `hf auth login`"
    except RepositoryNotFoundError:
        reason = "the hub has no such model (a private one needs `hf auth login`), and there is no such folder"
    except RevisionNotFoundError:
        reason = f"the hub's repository has no revision '{revision}'"
    except Exception as error:
        reason = one_line(error)
    raise ModelError(f"cannot load model '{source}': {reason}")


def _check_folder(folder: Path, source: str) -> None:
    """Refuses a folder without config or safetensors before anything is read from it."""
    if not (folder / "config.json").is_file():
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; name one of its GGUF files: {', '.join(ggufs)}" if ggufs else ""
        raise ModelError(f"model '{source}' has no config.json{hint}")
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedError(f"model '{source}' is a LoRA adapter; merge it into its base model and load the result")
    if not weight_files(folder):
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        if pickles:
            raise ModelError(
                f"model '{source}' has only pickled weights ({pickles[0]}), which can run code when they are read; "
                "convert them to safetensors"
            )
        raise ModelError(f"model '{source}' has no .safetensors weights")
