"""`depthmix.train`: one training from Python."""

from __future__ import annotations

import dataclasses
import os

from depthmix.api.interruption import as_keyboard_interrupt
from depthmix.api.prepared_data import as_folder
from depthmix.compare.arms import options_apart
from depthmix.config import TrainConfig
from depthmix.errors import UserError
from depthmix.runs.folder import RunFolder
from depthmix.train import loop
from depthmix.train.events import OnStep


def train(config: TrainConfig, *, on_step: OnStep | None = None) -> RunFolder:
    """Train one model, or resume the run in `config.out`. The package `depthmix.train` documents the arguments."""
    if not isinstance(config, TrainConfig):
        raise UserError(f"train takes a depthmix.TrainConfig, got {type(config).__name__}")
    config = dataclasses.replace(config, data=as_folder(config.data), out=os.fspath(config.out))
    with as_keyboard_interrupt():
        return loop.train(options_apart("train", config), on_step=on_step)
