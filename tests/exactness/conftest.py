"""The model and the plain engine that most tests of the law compare with."""

from pathlib import Path

import pytest

from compspec.engine import Engine
from tests.law import make_engine
from tests.tiny_models import tiny_model_folder


@pytest.fixture(scope="module")
def folder(models: Path) -> Path:
    return tiny_model_folder("llama", models)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Engine:
    return make_engine(folder)
