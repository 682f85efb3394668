"""Extend a run by more steps, where every step made so far would have had the same learning rate."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from depthmix.config import TrainConfig
from depthmix.errors import CHECKPOINT, UserError
from depthmix.runs.checkpoint import list_checkpoints
from depthmix.runs.folder import RECIPE, RunFolder
from depthmix.runs.restore import read_train_config
from depthmix.schedule import first_changed_step


def can_take_more_steps(path: Path, config: TrainConfig) -> bool:
    """Tell whether a folder holds a run that `config` extends by more steps. Other changes in `config` are ignored
    here.

    Args:
        path: The run folder.
        config: The training that is asked for.

    Raises:
        UserError: More steps would have changed the learning rate of steps already made, or no checkpoint is left.
    """
    if not (path / RECIPE).is_file():
        return False
    folder = RunFolder.open(path)
    recorded = read_train_config(folder)
    if config.steps <= recorded.steps or config.schedule != recorded.schedule or not folder.has_begun():
        return False
    newest = next(iter(list_checkpoints(folder.checkpoints)), None)
    if newest is None:
        if folder.has_result():
            what = f"{path} has no checkpoint any more, so its {recorded.steps} steps cannot become {config.steps}"
            raise UserError(f"{what}; put one back from a copy, or choose another folder", CHECKPOINT)
        return True  # it starts over
    made = int(newest.name.rpartition("-")[2])
    changed = first_changed_step(recorded, dataclasses.replace(recorded, steps=config.steps), made)
    if changed is not None:
        what = f"{path} has made {made} steps of a {recorded.schedule} schedule over {recorded.steps}"
        why = f"over {config.steps} its learning rate would have been another from step {changed + 1} on"
        rule = "only rsqrt, and wsd before its decay, go on without a break"
        advice = f"start another run from its weights, with --init {path} and another --out"
        raise UserError(f"{what}, and {why}: {rule}; {advice}", CHECKPOINT)
    return True


def set_result_aside(folder: RunFolder, config: TrainConfig) -> None:
    """Rename the result of a finished run that is extended, so that the run can continue.

    The caller holds the folder's lock.
    """
    if not folder.has_result():
        return
    made = folder.read_result().get("steps")
    if isinstance(made, int) and made < config.steps:
        # The order matters: after a kill in between, the run looks like one of `made` steps without its result.
        folder.set_result_aside(made)
        folder.record_steps(config.steps)
        folder.log(f"goes on after {made} steps, to {config.steps}; the result so far is in result-at-{made}.json")
