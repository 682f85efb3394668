"""Documents that runs keep: those of an older version are measured again, or refused where nothing can be measured."""

import json
import shutil
from dataclasses import asdict

import pytest

from depthmix.config import InspectConfig
from depthmix.errors import CHECKPOINT
from depthmix.insight.document import SCHEMA
from depthmix.report import measure
from depthmix.runs.folder import RunFolder
from train import small
from train.refused import refused


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder with a document of schema 1, and no need to measure anything."""
    folder = shutil.copytree(small.run().path, tmp_path / "run")
    monkeypatch.setattr("depthmix.train.inspect.inspect_run", lambda config, _: {"schema": SCHEMA, "text": None})
    key = measure.newest(RunFolder.open(folder))
    asked = {k: v for k, v in asdict(InspectConfig(str(folder))).items() if k not in measure.IRRELEVANT}
    old = {"schema": 1, "checkpoint": key, "asked": asked, "document": {"schema": 1}}
    (folder / measure.INSIGHT).write_text(json.dumps(old))
    return folder


def test_an_older_document_is_measured_again(run):
    assert measure.known(run) is None
    assert measure.measured(InspectConfig(str(run)))["schema"] == SCHEMA
    assert measure.known(run) == {"schema": SCHEMA, "text": None, "run": str(run)}


def test_without_weights_it_is_refused(run):
    shutil.rmtree(run / "checkpoints")
    said = "has no weights any more, and another version of depthmix made its measurements: train the model again, or"
    refused(lambda: measure.measured(InspectConfig(str(run))), said, code=CHECKPOINT)


def test_the_text_has_thirty_two_tokens_at_most(monkeypatch):
    trained = small.load_run()
    monkeypatch.setattr(measure, "read_train_config", lambda folder: trained.config)
    trained.config.seq_len = 1000
    text = measure.opening_text(small.run().path)
    assert 16 < len(trained.tokenizer.encode(text).ids) <= 32
