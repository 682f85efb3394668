"""How long a training step takes, for comparisons at equal time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from depthmix.config import TrainConfig
from depthmix.data.prepared import open_data
from depthmix.device import choose_device, release_memory
from depthmix.runs.init import settled
from depthmix.train.check import check_config
from depthmix.train.loop import Trainer
from depthmix.train.sharing import settings_of

A_SECOND = 1.0  # of steps at least: a few short ones would measure what else the machine does at that moment
# Seconds of steps before they count. A GPU stands idle while a model is built, and not before one that was kept: both shall find it warm.
WARM = {"cuda": 0.5}


def measure_step_times(
    configs: list[TrainConfig],
    warmup: int = 3,
    steps: int = 5,
    rounds: int = 3,
    stopping: Callable[[], bool] = lambda: False,
) -> list[float]:
    """Median seconds of a training step for each configuration: the median of its rounds; nothing if it was stopped before.

    Rounds go to and fro, so that all see the same machine, one that slows down too. One model at a time is in memory, and
    on a GPU those before it, too, as long as they take little of it: they need not be built and compiled again.
    """
    times: list[list[float]] = [[] for _ in configs]
    kept: dict[int, Trainer] = {}
    turns = list(range(len(configs)))
    for _ in range(rounds):
        for i in turns:
            if stopping():
                return []
            config, device = configs[i], choose_device(configs[i].device)
            try:
                with settings_of(config):
                    trainer = kept.get(i) or _trainer(config)
                    times[i].append(_step_seconds(trainer, warmup, steps))
            except Exception as error:
                error.measured = i  # type: ignore[attr-defined]  # for those who can go on without it
                raise
            if mostly_free(device):
                kept[i] = trainer
            del trainer
            release_memory(device)
        turns.reverse()
    return [statistics.median(taken) for taken in times]


def _trainer(config: TrainConfig) -> Trainer:
    check_config(config)
    return Trainer(settled(config), open_data(config.data), choose_device(config.device))


def _step_seconds(trainer: Trainer, warmup: int, steps: int) -> float:
    done = _take(trainer, 0, warmup, WARM.get(trainer.device.type, 0.0))
    before = len(trainer.clock.seconds())
    _take(trainer, done, steps, A_SECOND)
    return statistics.median(trainer.clock.seconds()[before:])


def _take(trainer: Trainer, done: int, steps: int, seconds: float) -> int:
    """At least so many steps more, and so many seconds of them; returns how many are done then."""
    begun, end = time.perf_counter(), done + steps
    while done < end or time.perf_counter() - begun < seconds:
        trainer.step(done)
        done += 1
    return done


def mostly_free(device: torch.device) -> bool:
    """Whether three quarters of a GPU's memory are free; elsewhere nobody knows what others will want of it."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free > 3 * total / 4
