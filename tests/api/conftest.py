"""What tests of the Python API share: a small corpus, small models, and nothing drawn."""

import sys

import pytest
import torch

from depthmix.mixers import base

torch.set_num_threads(1)  # for tensors this small, threads only get into each other's way


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(base, "_MIXERS", dict(base._MIXERS))


@pytest.fixture
def undrawn(monkeypatch):
    """Comparisons without figures and cut connections, which take most of the time and have tests of their own."""
    module = sys.modules["depthmix.study.compare"]
    monkeypatch.setattr(module, "draw_figures", lambda *_: [])
    monkeypatch.setattr(module, "_look_inside", lambda *_: [])
    monkeypatch.setattr(module, "release_memory", lambda device: None)
