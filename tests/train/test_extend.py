"""A run with more steps than it began with: equal to one that had them from the start, or refused."""

import dataclasses
import shutil

import pytest

from depthmix.config import TrainConfig
from depthmix.errors import CHECKPOINT, USAGE, UserError
from depthmix.runs.checkpoint import list_checkpoints
from depthmix.schedule import first_changed_step
from depthmix.train.loop import train
from train import small
from train.refused import refused

POINTS = {"log_every": 1, "eval_every": 3, "save_every": 3}


def outcome(folder):
    newest = list_checkpoints(folder.checkpoints)[0]
    return (folder.path / "metrics.jsonl").read_bytes(), (newest / "model.safetensors").read_bytes()


def test_a_finished_run_with_more_steps_is_one_that_had_them_from_the_start(tmp_path):
    config = small.config(tmp_path / "run", schedule="rsqrt", steps=6, **POINTS)
    short = train(config)
    result, metrics = short.read_result(), (short.path / "metrics.jsonl").read_bytes()
    longer = dataclasses.replace(config, steps=9)
    assert outcome(train(longer)) == outcome(train(dataclasses.replace(longer, out=str(tmp_path / "whole"))))
    assert (short.path / "metrics.jsonl").read_bytes().startswith(metrics)
    assert short.read_recipe()["steps"] == short.read_result()["steps"] == 9
    assert (short.path / "result-at-6.json").is_file()
    assert result["steps"] == 6
    assert (
        "goes on after 6 steps, to 9; the result so far is in result-at-6.json" in (short.path / "log.txt").read_text()
    )
    refused(lambda: train(config), "steps was 9 and is 6", code=CHECKPOINT)


def test_a_kill_before_the_new_recipe_is_written_loses_nothing(tmp_path, monkeypatch):
    config = small.config(tmp_path / "run", schedule="rsqrt", steps=3, **POINTS)
    folder = train(config)
    before = outcome(folder)

    def killed(self, steps):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("depthmix.runs.folder.RunFolder.record_steps", killed)
        with pytest.raises(KeyboardInterrupt):
            train(dataclasses.replace(config, steps=6))
    assert not folder.has_result()
    assert outcome(train(config)) == before  # the run of three steps writes its result again
    whole = train(dataclasses.replace(config, steps=6, out=str(tmp_path / "whole")))
    assert outcome(train(dataclasses.replace(config, steps=6))) == outcome(whole)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_schedule_that_has_begun_to_end_is_not_given_more_steps(tmp_path, schedule):
    config = small.config(tmp_path / "run", schedule=schedule, steps=6, **POINTS)
    folder = train(config)
    before = {p.name: p.read_bytes() for p in folder.path.iterdir() if p.is_file() and p.name != "log.txt"}
    words = (
        f"has made 6 steps of a {schedule} schedule over 6, and over 9 its learning rate would have been another from"
    )
    advice = f"only rsqrt, and wsd before its decay, go on without a break; start another run from its weights, with --init {folder.path}"
    refused(lambda: train(dataclasses.replace(config, steps=9)), words, advice, code=CHECKPOINT)
    assert {p.name: p.read_bytes() for p in folder.path.iterdir() if p.is_file() and p.name != "log.txt"} == before


def test_wsd_goes_on_from_before_its_decay(tmp_path):
    config = small.config(tmp_path / "run", schedule="wsd", steps=10, decay_fraction=0.4, keep=9, **POINTS)
    folder = train(config)
    folder.set_result_aside(10)
    for newer in ("step-00000010", "step-00000009"):
        shutil.rmtree(folder.checkpoints / newer)  # as if it had been stopped after six steps, where the decay begins
    longer = dataclasses.replace(config, steps=15)
    assert outcome(train(longer)) == outcome(train(dataclasses.replace(longer, out=str(tmp_path / "whole"))))


def test_other_changes_are_refused_with_more_steps_as_well(tmp_path):
    config = small.config(tmp_path / "run", schedule="rsqrt", steps=3, **POINTS)
    folder = train(config)
    refused(lambda: train(dataclasses.replace(config, steps=6, lr=0.5)), "lr was 0.01 and is 0.5", code=CHECKPOINT)
    assert folder.has_result()
    shutil.rmtree(folder.checkpoints)
    words = "has no checkpoint any more, so its 3 steps cannot become 6; put one back"
    refused(lambda: train(dataclasses.replace(config, steps=6)), words, code=CHECKPOINT)


@pytest.mark.parametrize(
    ("values", "made", "changed"),
    [
        ({"schedule": "rsqrt"}, 100, None),
        ({"schedule": "wsd"}, 80, None),
        ({"schedule": "wsd"}, 81, 80),
        ({"schedule": "wsd", "decay_fraction": 1.0}, 10, None),
        ({"schedule": "cosine"}, 11, None),  # the warm-up, and the peak after it
        ({"schedule": "cosine"}, 12, 11),
    ],
)
def test_where_schedules_part(values, made, changed):
    then = TrainConfig(warmup=10, steps=100, **values)
    assert first_changed_step(then, dataclasses.replace(then, steps=200), made) == changed


def test_a_run_that_has_lost_nothing_yet_takes_any_number_of_steps(tmp_path, monkeypatch):
    config = small.config(tmp_path / "run", steps=6)
    with monkeypatch.context() as patch:
        patch.setattr("depthmix.train.loop.Trainer.step", lambda *_: (_ for _ in ()).throw(UserError("no memory")))
        refused(lambda: train(config), "no memory", code=USAGE)
    assert train(dataclasses.replace(config, steps=9)).read_result()["steps"] == 9
