"""Tests of the laboratory."""

import pytest

from compare.conftest import light, training  # noqa: F401  # fixtures
from depthmix.mixers import registry as rules


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Drop what a study's modules register after each test."""
    monkeypatch.setattr(rules, "_MIXERS", dict(rules._MIXERS))
