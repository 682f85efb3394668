"""Tests of the laboratory."""

import pytest

from depthmix.mixers import base


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Drop what a study's modules register after each test."""
    monkeypatch.setattr(base, "_MIXERS", dict(base._MIXERS))
