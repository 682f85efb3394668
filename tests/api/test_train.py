"""dm.train: one run, with data and folders as Python has them."""

import pytest

import depthmix as dm
from depthmix.train.loop import train
from train import small


def test_it_is_the_training_of_the_command_line(tmp_path):
    events = []
    engine = train(small.config(tmp_path / "engine", mixer="attnres", mixer_options={"block_size": 1}))
    config = small.config("", mixer="attnres:block_size=1", data=dm.PreparedData(small.data()))
    config.out = tmp_path / "run"
    run = dm.train(config, on_step=events.append)
    assert (run.path / "metrics.jsonl").read_bytes() == (engine.path / "metrics.jsonl").read_bytes()
    assert [event.step for event in events] == [1, 2, 3, 4, 5, 6]
    assert dm.load(run.path).step == 6
    assert config.data.folder == small.data()  # what was passed in is left alone
    assert dm.train(config).path == run.path  # finished: nothing to do


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"steps": 3}, "train takes a depthmix.TrainConfig, got dict"),
        (dm.TrainConfig(data=["a text"], out="run"), "data is list: give what depthmix.prepare returns"),
    ],
)
def test_what_cannot_be_used(config, said):
    with pytest.raises(dm.UserError, match=said):
        dm.train(config)
