"""Fixtures for tests of models: tiny models and how they load."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compspec.config import ModelSection
from compspec.models import LoadedModel, load_model
from tests.tiny_models import tiny_model_folder


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., LoadedModel]:
    """Loads a folder, or a tiny model of a family, with options of the `model` section."""

    def loader(source: Path | str, **options: object) -> LoadedModel:
        return load_model(ModelSection(source=str(source), device="cpu", **options), tmp_path / "cache")

    return loader


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """The folder of a tiny llama, free to be damaged."""
    return tiny_model_folder("llama", tmp_path)


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """Changes keys of a folder's config.json."""

    def edit(folder: Path, **changes: object) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


@pytest.fixture
def edit_weights() -> Callable[..., None]:
    """Applies a function to the name -> tensor dict of a folder's weights."""

    def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        path = folder / "model.safetensors"
        weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
        change(weights)
        save_file(weights, path, metadata={"format": "pt"})

    return edit
