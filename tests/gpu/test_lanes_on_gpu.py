"""Lanes of a study share one GPU, in processes of their own, and find what one process finds."""

import json
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")  # for the data
studies = pytest.importorskip("study.studies")
study = pytest.importorskip("depthmix.study.study").study


def found(folder: Path) -> dict:
    """The losses of every run."""
    lines = map(json.loads, (folder / "runs.jsonl").read_text().splitlines())
    runs = [line for line in lines if line["kind"] == "run"]
    return {(r["arm"], r["seed"]): (r["result"]["val_loss"], r["result"]["train_curve"]) for r in runs}


def test_lanes_give_the_results_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("depthmix.study.sheet.draw_study", lambda *_: ([], []))
    path = studies.write(tmp_path, set={**studies.SIZES, "dim": 64, "steps": 40, "deterministic": True})
    for lanes in (1, 2):
        study(studies.config(path, tmp_path / str(lanes), device="cuda", lanes=lanes))
    assert len(found(tmp_path / "1")) == 6
    assert found(tmp_path / "1") == found(tmp_path / "2")
