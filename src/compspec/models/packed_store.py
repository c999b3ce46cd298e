"""Quantised weights in the order of the kernel, kept in a file so that a later start does not make them again."""

import hashlib
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from compspec.kernels.packing import Format

logger = logging.getLogger(__name__)

# Changes with the order of bytes, with how weights are rounded, and with where blocks are looked for.
_VERSION = "1"


class PackedStore:
    """The packed weights of one model in one quantisation.

    Args:
        folder: of all of them.
        name: of the model, for people.
        key_parts: what identifies the model's weights and what was wanted of them.
    """

    def __init__(self, folder: Path, name: str, key_parts: Sequence[str]) -> None:
        digest = hashlib.sha256("|".join([_VERSION, *key_parts]).encode()).hexdigest()[:32]
        plain_name = re.sub(r"[^\w.-]", "_", name)
        self._path = folder / f"{plain_name}-{digest}.safetensors"
        self._known = self._read()
        self._made: dict[str, tuple[Format, Tensor]] = {}

    def get(self, name: str) -> tuple[Format, Tensor] | None:
        """What is known of a layer."""
        return self._known.get(name)

    def put(self, name: str, form: Format, packed: Tensor) -> None:
        """Remembers what was made for a layer."""
        self._made[name] = form, packed

    def save(self) -> None:
        """Writes what was made, if anything; a folder that cannot be written is a warning."""
        if not self._made:
            return
        everything = self._known | self._made
        partial = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            save_file(
                {name: packed for name, (_, packed) in everything.items()},
                partial,
                metadata={name: form.name for name, (form, _) in everything.items()},
            )
            os.replace(partial, self._path)
        except (OSError, SafetensorError) as error:
            logger.warning("cannot store packed weights in %s: %s", self._path.parent, error)
            partial.unlink(missing_ok=True)

    def _read(self) -> dict[str, tuple[Format, Tensor]]:
        try:
            with safe_open(self._path, framework="pt") as file:
                forms = file.metadata() or {}
                return {name: (Format[form], file.get_tensor(name)) for name, form in forms.items()}
        except FileNotFoundError:
            return {}
        except (OSError, SafetensorError, KeyError) as error:
            logger.warning("ignoring unreadable packed weights %s: %s", self._path, error)
            return {}
