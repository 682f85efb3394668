"""A training that leaves no folder: final numbers and thinned curves, for studies of many short runs.

The steps are the trainer's own; what a study asks of them, spikes and the last step's magnitudes and gradients over depth (where
`dynamics_every` is given), is kept as well. Left out is what stands around them in `depthmix train`: a run folder, checkpoints, and
evaluations on the way unless eval_every asks for them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from depthmix.config import TrainConfig
from depthmix.data.dataset import TokenData
from depthmix.data.images import ImageData
from depthmix.device import PeakMemory, choose_device
from depthmix.errors import DIVERGED, UserError
from depthmix.train.check import check_config
from depthmix.train.clock import CoreWait
from depthmix.train.loop import Trainer, result_of
from depthmix.train.progress import TrainingProgress
from depthmix.train.sharing import settings_of
from depthmix.train.spikes import find_spikes

POINTS = 60  # of a curve of training losses, each the mean of its part of the steps
SETTLED = 5  # steps after which the compilers are done


def train_briefly(
    config: TrainConfig,
    data: TokenData | ImageData,
    *,
    label: str = "",
    stop: Callable[[float], bool] = lambda left: False,
) -> dict[str, Any] | None:
    """The result of a training, with its curves; None if `stop`, which is told how many seconds are left, ended it.

    The numbers are those of `train`'s result.json. UserError, with exit code DIVERGED, if the loss is beyond use.
    """
    check_config(config)
    with settings_of(config):
        return _train(config, data, label, stop)


def _train(
    config: TrainConfig, data: TokenData | ImageData, label: str, stop: Callable[[float], bool]
) -> dict[str, Any] | None:
    begun = time.perf_counter()
    device = choose_device(config.device)
    memory, waiting = PeakMemory(device), CoreWait()
    trainer = Trainer(config, data, device)
    built = time.perf_counter() - begun
    progress = TrainingProgress(label or config.mixer, 0, config.steps, config.quiet, trainer.task.unit)
    losses: list[float] = []
    norms: list[float] = []
    depth: dict[str, Any] = {}
    took: list[float] = []
    evaluations: list[tuple[int, float]] = []
    skipped = 0
    try:
        for step in range(config.steps):
            done = step + 1
            if done == config.steps and trainer.watches(step):
                depth = trainer.magnitudes(step)
            started = time.perf_counter()
            loss, norm = trainer.step(step)
            took.append(time.perf_counter() - started)
            losses.append(loss)
            norms.append(norm)
            if not trainer.usable(loss, norm):
                if config.on_nan == "stop" or trainer.astray():
                    raise UserError(f"the {trainer.complaint(loss, norm)} at step {done}", DIVERGED)
                skipped += 1
            if done % config.eval_every == 0 or done == config.steps:
                started = time.perf_counter()
                found = trainer.evaluate()
                evaluating = time.perf_counter() - started
                if not trainer.usable(found.loss):
                    raise UserError(f"the validation {trainer.complaint(found.loss)} at step {done}", DIVERGED)
                evaluations.append((done, found.loss))
            progress.update(done, loss, trainer.task.per_step / statistics.mean(took[-20:]), None, None)
            known = took[SETTLED:][-100:]
            if done < config.steps and stop((config.steps - done) * statistics.median(known) if known else 0.0):
                return None
    finally:
        progress.close()
    result = result_of(trainer, found, waiting.share(), sum(took), skipped, memory.read())
    if depth and trainer.gradients is not None:
        depth = {"block_rms": depth["block_rms"], "gradient_norm": trainer.gradients.tolist()}
        result["depth"] = {name: [float(f"{value:.4g}") for value in values] for name, values in depth.items()}
    return {
        **result,
        # What is no number, at a step that was skipped, is none in a file either.
        "spikes": [
            [step + 1, float(f"{above:.3g}") if math.isfinite(above) else None] for step, above in find_spikes(losses)
        ],
        # After the first steps, which are steep for all.
        "largest_gradient": max(filter(math.isfinite, norms[len(norms) // 10 :]), default=0.0),
        "wall_seconds": time.perf_counter() - begun,
        "build_seconds": built,
        "first_seconds": sum(took[:SETTLED]),  # with what is compiled and recorded
        "eval_seconds": evaluating,
        "train_curve": thinned(losses),
        "val_curve": [[step, loss] for step, loss in evaluations],
    }


def thinned(losses: Sequence[float], points: int = POINTS) -> list[list[float]]:
    """[step, mean loss of the steps since the point before] at up to so many points, the last at the last step.

    A loss that is no number counts for nothing, and a point of none but such is left out.
    """
    points = min(points, len(losses))
    ends = [(i + 1) * len(losses) // points for i in range(points)]
    parts = [(end, losses[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    known = [(end, [loss for loss in part if math.isfinite(loss)]) for end, part in parts]
    return [[end, statistics.fmean(part)] for end, part in known if part]
