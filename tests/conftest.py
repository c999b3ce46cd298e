"""Shared fixtures. Nothing here reaches the network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Converted weights and self-test results of tests go to a folder of their own, unless one is set."""
    os.environ.setdefault("COMPSPEC_CACHE", str(tmp_path_factory.mktemp("compspec-cache")))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny models run faster on one thread than two threads take to meet."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory):
    """The folder for tiny models."""
    return tmp_path_factory.mktemp("models")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
