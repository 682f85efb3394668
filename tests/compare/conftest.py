"""Comparisons without training."""

import sys

import pytest

from compare import studies
from compare.fake_training import Trainer
from depthmix.mixers import registry as rules


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """What a study's modules register is gone after a test."""
    monkeypatch.setattr(rules, "_MIXERS", dict(rules._MIXERS))


@pytest.fixture
def trainer(monkeypatch):
    fake = Trainer()
    monkeypatch.setattr("depthmix.train.loop.train", fake.train)
    monkeypatch.setattr("depthmix.train.step_times.measure_step_times", fake.measure_step_times)
    monkeypatch.setattr("depthmix.train.generate.generate_text", fake.generate_text)
    monkeypatch.setattr(sys.modules["depthmix.compare.compare"], "release_memory", lambda device: None)  # slow in here
    # Drawing takes most of the time; the figures have tests of their own.
    monkeypatch.setattr(sys.modules["depthmix.compare.compare"], "draw_figures", lambda *_: [])
    monkeypatch.setattr("depthmix.report.page.plotly_source", lambda: "// plotly")  # five megabytes a page
    return fake


@pytest.fixture
def training(monkeypatch, tmp_path):
    """Trainings of a study that are none."""
    fake = studies.Training()
    monkeypatch.setattr("depthmix.train.brief.train_briefly", fake)
    monkeypatch.setattr("depthmix.compare.sheet.draw_study", lambda *_: ([], []))  # figures have a test of their own
    monkeypatch.setattr("depthmix.compare.study.release_memory", lambda device: None)  # slow in here
    monkeypatch.chdir(tmp_path)
    return fake
