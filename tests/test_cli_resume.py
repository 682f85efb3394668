"""`depthmix train --out RUN` alone goes on with the run that lies there."""

import dataclasses
import shutil

import pytest
import yaml

from depthmix.cli import main
from depthmix.errors import CHECKPOINT, DATA, USAGE
from depthmix.runs.folder import RunFolder
from depthmix.train.loop import train
from train import bad, small
from train.bad import table

fails = bad.fails
SHAPE = {"dim": 24, "mixer": "attnres", "mixer_options": {"block_size": 1}, "schedule": "rsqrt", "seed": 3}


@pytest.fixture
def run(tmp_path):
    """A run of three steps that says little of itself by default."""
    return train(small.config(tmp_path / "run", steps=3, **SHAPE))


def test_a_run_goes_on_as_recorded(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    whole = (run.path / "metrics.jsonl").read_bytes()
    recipe = run.read_recipe()
    for name in ("result.json", "metrics.jsonl"):
        (run.path / name).unlink()
    shutil.rmtree(run.checkpoints)
    assert main(["train", "--out", "run", "--keep", "5"]) == 0
    assert (run.path / "metrics.jsonl").read_bytes() == whole
    assert run.read_recipe() == {**recipe, "out": "run", "keep": 5}


def test_a_finished_run_says_what_it_came_to_and_takes_more_steps(run, capsys):
    assert main(["train", "--out", str(run.path)]) == 0
    assert "validation loss" in capsys.readouterr().out
    assert main(["train", "--steps", "6", "--out", str(run.path)]) == 0
    assert run.read_result()["steps"] == 6
    assert run.read_recipe()["dim"] == 24


def test_a_recipe_without_data_comes_on_top(run, tmp_path, capsys):
    recipe = tmp_path / "more.yaml"
    recipe.write_text(f"out: {run.path}\nsteps: 6\n")
    assert main(["train", "--recipe", str(recipe)]) == 0
    assert run.read_result()["steps"] == 6


@table(
    [
        ("train --out {run} --lr 0.5", CHECKPOINT, "another recipe: lr was 0.01 and is 0.5"),
        ("train --out {run} --mixer dca", CHECKPOINT, "mixer was 'attnres' and is 'dca'"),
        # Whoever says which data to take says everything.
        ("train --out {run} --data {data}", CHECKPOINT, "mixer was 'attnres' and is 'residual'"),
        ("train --out {corpus}", USAGE, "data is needed"),
        ("train --out nowhere", USAGE, "data is needed"),
        ("train --out ''", USAGE, "data is needed"),
        ("compare --out {run} --arms residual", USAGE, "data is needed"),
    ]
)
def test_what_is_not_as_recorded_is_refused(case, fails, run):
    line, *rest = case
    fails(line, *rest, run=run.path)


def test_a_rule_of_ones_own_and_data_that_moved_are_named(fails, run, tmp_path):
    recipe = run.read_recipe()
    (run.path / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "mixer": "mine"}))
    fails(f"train --out {run.path}", USAGE, "with the rule 'mine'", "with --modules FILE")
    shutil.copytree(small.data(), tmp_path / "moved")
    (run.path / "environment.json").write_text("{}")
    (run.path / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "data": "gone/data"}))
    (run.path / "result.json").unlink()
    words = "was trained on gone/data, which is not there as it was: say where it lies now"
    again = f"--recipe {run.path}/recipe.yaml --out {run.path} --data FOLDER"
    fails(f"train --out {run.path}", DATA, words, again)
    assert main(["train", *again.replace("FOLDER", str(tmp_path / "moved")).split()]) == 0
    assert RunFolder(run.path).has_result()


def test_data_is_found_from_another_folder(tmp_path, monkeypatch):
    project = tmp_path / "project"
    shutil.copytree(small.data(), project / "data")
    monkeypatch.chdir(project)
    config = small.config("runs/first", data="data", steps=3)
    train(config)
    (project / "runs" / "first" / "result.json").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["train", "--out", "../project/runs/first"]) == 0
    monkeypatch.chdir(project)
    assert train(dataclasses.replace(config)).has_result()
