"""How long a training step takes, for comparisons at equal time."""

from __future__ import annotations

import statistics
import time

from depthmix.config import TrainConfig
from depthmix.data.prepared import open_data
from depthmix.device import choose_device, release_memory
from depthmix.runs.init import settled
from depthmix.train.check import check_config
from depthmix.train.deterministic import deterministic
from depthmix.train.loop import Trainer

A_SECOND = 1.0  # of steps at least: a few short ones would measure what else the machine does at that moment


def measure_step_times(configs: list[TrainConfig], warmup: int = 3, steps: int = 5, rounds: int = 3) -> list[float]:
    """Median seconds of a training step for each configuration: the median of its rounds.

    One model at a time is in memory. Rounds go to and fro, so that all see the same machine, one that slows down too.
    """
    times: list[list[float]] = [[] for _ in configs]
    turns = list(zip(configs, times, strict=True))
    for _ in range(rounds):
        for config, taken in turns:
            taken.append(_step_seconds(config, warmup, steps))
            release_memory(choose_device(config.device))
        turns.reverse()
    return [statistics.median(taken) for taken in times]


def _step_seconds(config: TrainConfig, warmup: int, steps: int) -> float:
    check_config(config)
    with deterministic(config.deterministic):
        trainer = Trainer(settled(config), open_data(config.data), choose_device(config.device))
        for step in range(warmup):
            trainer.step(step)
        begun, done = time.perf_counter(), warmup
        while done < warmup + steps or time.perf_counter() - begun < A_SECOND:
            trainer.step(done)
            done += 1
    return statistics.median(trainer.clock.seconds()[warmup:])
