"""Measure how long a training step takes, for comparisons at equal time."""

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

# Minimum seconds of a measurement. A few short steps would mostly measure the momentary background load.
A_SECOND = 1.0
# Seconds of warmup steps before a measurement, because a GPU idles and slows down while a model is built.
WARM = {"cuda": 0.5}


def measure_step_times(
    configs: list[TrainConfig],
    warmup: int = 3,
    steps: int = 5,
    rounds: int = 3,
    stopping: Callable[[], bool] = lambda: False,
) -> list[float]:
    """Measure the training steps of several configurations in turn.

    Rounds alternate between forward and backward order, so that a machine that slows down affects all configurations
    alike. One model at a time is in memory. On a GPU, earlier models stay while memory is mostly free, which saves
    building and compiling them again.

    Args:
        configs: The trainings.
        warmup: Steps before each measurement.
        steps: Minimum steps of each measurement.
        rounds: Measurements per configuration.
        stopping: Returns True to give up.

    Returns:
        Seconds per step of each configuration: the median over its rounds' medians. Empty if `stopping` ended the
            measurement.
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
                error.measured = i  # type: ignore[attr-defined]  # the configuration that failed, for callers that continue without it
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
    """Run at least `steps` more steps, and at least `seconds` seconds of them; returns the number of steps done so far."""
    begun, end = time.perf_counter(), done + steps
    while done < end or time.perf_counter() - begun < seconds:
        trainer.step(done)
        done += 1
    return done


def mostly_free(device: torch.device) -> bool:
    """Tell whether three quarters of a GPU's memory are free. False on other devices, whose memory other programs may
    claim.
    """
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free > 3 * total / 4
