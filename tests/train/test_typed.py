"""A configuration made in Python: what is not of its field's type is refused in a sentence, and numpy's numbers are numbers."""

from pathlib import Path

import numpy as np
import pytest

from depthmix.compare.engine import compare
from depthmix.config import CompareConfig, TrainConfig
from depthmix.errors import USAGE
from depthmix.train.loop import train
from depthmix.values import typed
from train import small
from train.refused import refused

WRONG = [
    ({"steps": "10"}, "steps must be a whole number, got '10'"),
    ({"steps": 10.5}, "steps must be a whole number, got 10.5"),
    ({"lr": "0.1"}, "lr must be a number, got '0.1'"),
    ({"quiet": "yes"}, "quiet must be true or false, got 'yes'"),
    ({"dim": True}, "dim must be a whole number, got True"),
    ({"mixer_options": None}, "mixer_options must be written as option=value option=value, got None"),
    ({"groups": None}, "groups must be a list, got None"),
    ({"mixer": None}, "mixer must be text, got None"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=str)
def test_training_says_what_is_wrong(tmp_path, changes, said):
    refused(lambda: train(small.config(tmp_path / "run", **changes)), f"train: {said}", code=USAGE)
    assert not (tmp_path / "run").exists()


def test_a_comparison_says_what_is_wrong(tmp_path):
    config = CompareConfig(data=str(small.data()), out=str(tmp_path / "runs"), arms=["residual"], steps="10")
    refused(lambda: compare(config), "compare: steps must be a whole number, got '10'", code=USAGE)


def test_numbers_of_numpy_and_paths_train(tmp_path):
    changes = {"steps": np.int64(2), "warmup": np.int32(1), "dim": np.int64(16), "lr": np.float32(0.01)}
    options = {"block_size": np.int64(2)}
    config = small.config(Path(tmp_path / "run"), mixer="attnres", mixer_options=options, **changes)
    config.out = Path(config.out)
    recipe = train(config).read_recipe()
    assert (recipe["steps"], recipe["dim"], recipe["mixer_options"]["block_size"]) == (2, 16, 2)


def test_what_is_right_stays_as_it_is():
    for config in (TrainConfig(), CompareConfig(), TrainConfig(lr=1, parallel={"dp": 2}, micro_batch_size=None)):
        assert typed("train", config) == config
