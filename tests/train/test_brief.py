"""A training without a folder is the training with one, less what stands around it."""

import json
import math
from pathlib import Path

import pytest

from depthmix.data.dataset import TokenData
from depthmix.errors import DIVERGED
from depthmix.train.brief import thinned, train_briefly
from depthmix.train.loop import Trainer, train
from train import small
from train.refused import refused
from train.runs import losses


def brief(config, **more):
    return train_briefly(config, TokenData.open(config.data), **more)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_numbers_are_those_of_a_training_with_a_folder(tmp_path, deterministic):
    config = small.config(tmp_path / "run", mixer="attnres", deterministic=deterministic)
    folder = train(config)
    found = brief(small.config("nowhere", mixer="attnres", deterministic=deterministic))
    kept = folder.read_result()
    assert not Path("nowhere").exists()
    for key in ("val_loss", "tokens", "steps", "bits_per_byte", "parameters", "skipped_batches"):
        assert found[key] == kept[key], key
    assert set(kept) < set(found)
    assert [loss for _, loss in found["train_curve"]] == losses(folder)
    assert found["val_curve"] == [[step, loss] for step, loss in zip((5, 6), losses(folder, "val_loss"), strict=True)]
    assert found["wall_seconds"] >= found["seconds"] + found["eval_seconds"] > 0


def test_it_is_evaluated_as_often_as_asked():
    assert [step for step, _ in brief(small.config("nowhere", eval_every=100))["val_curve"]] == [6]


def test_it_can_be_stopped_and_is_told_how_long_it_will_take():
    told = []

    def stop(left):
        told.append(left)
        return len(told) == 9

    assert brief(small.config("nowhere", steps=20), stop=stop) is None
    assert told[:4] == [0.0] * 4  # while compilers work, nothing is known
    assert 0 < told[8] < 60
    told.clear()
    brief(small.config("nowhere"), stop=stop)
    assert len(told) == 5  # not after the last step


def test_a_loss_beyond_use_ends_it():
    config = small.config("nowhere", lr=1e30, warmup=0, steps=30, qk_norm=False)
    refused(lambda: brief(config), "at step", code=DIVERGED)


def test_a_step_that_is_skipped_leaves_numbers_behind(monkeypatch):
    """Which a study's file takes: NaN is no JSON."""
    step = Trainer.step

    def spoiled(self, number):
        loss, norm = step(self, number)
        return (math.nan, math.nan) if number in (6, 58) else (loss, norm)

    monkeypatch.setattr(Trainer, "step", spoiled)
    found = brief(small.config("nowhere", steps=60, on_nan="skip"))
    json.dumps(found, allow_nan=False)
    assert found["skipped_batches"] == 2
    assert [59, None] in found["spikes"]
    assert math.isfinite(found["largest_gradient"])


def test_curves_are_thinned_to_means():
    assert thinned([1.0, 2.0, 3.0, 5.0, 8.0], 2) == [[2, 1.5], [5, pytest.approx(16 / 3)]]
    assert thinned([1.0, 2.0], 60) == [[1, 1.0], [2, 2.0]]
    assert thinned([1.0, math.nan, math.inf, 5.0], 2) == [[2, 1.0], [4, 5.0]]  # steps that were skipped
    assert thinned([math.nan, 2.0], 60) == [[2, 2.0]]
    long = thinned([float(i) for i in range(1200)])
    assert len(long) == 60
    assert long[0] == [20, 9.5]
    assert long[-1] == [1200, 1189.5]
    assert math.isclose(sum(loss for _, loss in long) / 60, 599.5)
