"""The callback of the training loop: what it is told, and a run that it ends."""

import json

import pytest

from depthmix.train.loop import train
from train import small


def metrics(folder):
    return (folder.path / "metrics.jsonl").read_text()


def test_every_step_is_told_with_its_loss_and_evaluations(tmp_path):
    events = []
    folder = train(small.config(tmp_path / "run", eval_every=2), on_step=events.append)
    logged = [json.loads(line) for line in metrics(folder).splitlines()]
    losses = {line["step"]: line["loss"] for line in logged if "loss" in line}
    evaluated = {line["step"]: line["val_loss"] for line in logged if "val_loss" in line}
    assert {event.step: event.loss for event in events} == losses
    assert {event.step: event.val_loss for event in events if event.val_loss is not None} == evaluated
    assert {(event.arm, event.seed, event.steps) for event in events} == {("residual", 0, 6)}


@pytest.mark.parametrize(
    ("error", "at"), [(ValueError, 3), (KeyboardInterrupt, 4)], ids=["at a checkpoint", "between checkpoints"]
)
def test_an_exception_in_the_callback_saves_that_step_and_the_run_goes_on_to_the_same_numbers(tmp_path, error, at):
    plain = train(small.config(tmp_path / "plain"))

    def stop(event):
        if event.step == at:
            raise error("enough")

    with pytest.raises(error, match="enough"):
        train(small.config(tmp_path / "run"), on_step=stop)
    steps = []
    again = train(small.config(tmp_path / "run"), on_step=lambda event: steps.append(event.step))
    assert steps == list(range(at + 1, 7))
    assert metrics(again) == metrics(plain)
    assert f"stopped by {error.__name__} in on_step after step {at}" in (again.path / "log.txt").read_text()
