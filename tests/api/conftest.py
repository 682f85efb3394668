"""What tests of the Python API share: a small corpus, small models, and nothing drawn."""

import pytest
import torch

from api.small_comparison import leave_out_figures
from depthmix.mixers import registry as rules

torch.set_num_threads(1)  # for tensors this small, threads only get into each other's way


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(rules, "_MIXERS", dict(rules._MIXERS))


@pytest.fixture
def undrawn(monkeypatch):
    """Comparisons without figures."""
    leave_out_figures(monkeypatch)
