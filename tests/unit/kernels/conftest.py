"""One build of the kernel for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compspec.kernels import build, linear


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds the compiled library, and nothing else."""
    folder = tmp_path_factory.mktemp("kernels")
    if build.load_library("linear", folder) is None:
        pytest.skip("there is no C++ compiler here")
    assert linear._KERNEL.load(folder)
    return folder


@pytest.fixture(autouse=True)
def inference(cache_dir: Path) -> Iterator[None]:
    """The kernel has no gradients."""
    with torch.no_grad():
        yield
