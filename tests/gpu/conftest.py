"""Everything in this folder needs an NVIDIA GPU, and nothing beyond torch, triton and pytest: `make test-gpu`.

With pytest-xdist, `make test-gpu PYTEST_ARGS="-n 8"` takes three minutes on an H200: most of the time goes into compiling kernels.
Tests that compare times may fail beside others. Run these again alone.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Without a GPU the files are not even imported, unless somebody asks for this folder, who then sees why they are skipped."""
    asked = any(HERE in (p := Path(a.split("::")[0]).resolve()).parents or p == HERE for a in config.args)
    return None if asked or torch.cuda.is_available() else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _no_memory_kept() -> Iterator[None]:
    """Return PyTorch's cached memory after each test, which other processes on the same GPU may need."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
