"""The model and the plain engine that most tests of the law compare with."""

from pathlib import Path

import pytest

from compspec.engine import Engine
from tests.law import Solo, make_engine, with_noise, with_weak_end
from tests.tiny_models import tiny_model_folder


@pytest.fixture(scope="module")
def folder(models: Path) -> Path:
    return tiny_model_folder("llama", models)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Engine:
    return make_engine(folder)


@pytest.fixture(scope="module")
def target(models: Path) -> Path:
    """A model that repeats itself, and whose first layer drafts well for it."""
    return with_weak_end(tiny_model_folder("llama", models, gain=0.8))


@pytest.fixture(scope="module")
def other(target: Path) -> Path:
    """A model that often agrees with the target, and often not."""
    return with_noise(target)


@pytest.fixture(scope="module")
def solo(target: Path) -> Solo:
    """What requests to the target give alone."""
    return Solo(target)
