"""Comparisons without training."""

import pytest

from compare import recipes
from compare.fake_training import Trainer
from depthmix.mixers import registry as rules


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Forget what a recipe's modules register after each test."""
    monkeypatch.setattr(rules, "_MIXERS", dict(rules._MIXERS))


@pytest.fixture
def light(monkeypatch):
    """Leave out what takes most of the time and has tests of its own: figures, and the inside of models."""
    monkeypatch.setattr("depthmix.compare.engine.draw_figures", lambda *_: ([], []))
    monkeypatch.setattr("depthmix.compare.engine.release_memory", lambda device: None)


@pytest.fixture
def trainer(light, monkeypatch):
    """Runs with folders, whose training is a fake."""
    fake = Trainer()
    monkeypatch.setattr("depthmix.train.loop.train", fake.train)
    monkeypatch.setattr("depthmix.train.step_times.measure_step_times", fake.measure_step_times)
    monkeypatch.setattr("depthmix.train.generate.generate_text", fake.generate_text)
    return fake


@pytest.fixture
def training(light, monkeypatch, tmp_path):
    """Runs without folders, whose training is a fake."""
    fake = recipes.Training()
    monkeypatch.setattr("depthmix.train.brief.train_briefly", fake)
    monkeypatch.chdir(tmp_path)
    return fake
