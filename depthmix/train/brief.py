"""Train without a run folder, for studies of many short runs: final numbers and thinned loss curves.

`Trainer` takes the steps, as in `depthmix train`. The result also has the loss spikes and, if `dynamics_every` is given, the last
step's magnitudes and gradients over depth. There is no run folder and no checkpoint.
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

# Points of a curve of training losses, each the mean over its part of the steps.
POINTS = 60
# Steps after which torch.compile and the kernels' compilers are done.
WARMUP_STEPS = 5


def train_briefly(
    config: TrainConfig,
    data: TokenData | ImageData,
    *,
    label: str = "",
    stop: Callable[[float], bool] = lambda left: False,
) -> dict[str, Any] | None:
    """Train one model in memory and return its result and curves.

    Args:
        config: The training.
        data: Its data, already open.
        label: Name on the progress bar; by default the mixer's.
        stop: Called after each step with an estimate of the seconds left; return True to give up.

    Returns:
        The numbers of `train`'s result.json and the curves, or None if `stop` ended the training.

    Raises:
        UserError: The configuration is invalid, or the loss diverged (exit code DIVERGED).
    """
    check_config(config)
    with settings_of(config):
        return _train(config, data, label, stop)


def _train(
    config: TrainConfig, data: TokenData | ImageData, label: str, stop: Callable[[float], bool]
) -> dict[str, Any] | None:
    """Train with the process-wide settings in force; arguments as for `train_briefly`."""
    start = time.perf_counter()
    device = choose_device(config.device)
    memory, waiting = PeakMemory(device), CoreWait()
    trainer = Trainer(config, data, device)
    built = time.perf_counter() - start
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
            if done == config.steps and trainer.records_dynamics(step):
                depth = trainer.magnitudes(step)
            started = time.perf_counter()
            loss, norm = trainer.step(step)
            took.append(time.perf_counter() - started)
            losses.append(loss)
            norms.append(norm)
            if not trainer.is_usable(loss, norm):
                if config.on_nan == "stop" or trainer.is_beyond_repair():
                    raise UserError(f"the {trainer.describe_unusable(loss, norm)} at step {done}", DIVERGED)
                skipped += 1
            if done % config.eval_every == 0 or done == config.steps:
                started = time.perf_counter()
                evaluation = trainer.evaluate()
                evaluating = time.perf_counter() - started
                if not trainer.is_usable(evaluation.loss):
                    raise UserError(
                        f"the validation {trainer.describe_unusable(evaluation.loss)} at step {done}", DIVERGED
                    )
                evaluations.append((done, evaluation.loss))
            progress.update(done, loss, trainer.task.per_step / statistics.mean(took[-20:]), None, None)
            recent = took[WARMUP_STEPS:][-100:]
            if done < config.steps and stop((config.steps - done) * statistics.median(recent) if recent else 0.0):
                return None
    finally:
        progress.close()
    result = result_of(trainer, evaluation, waiting.share(), sum(took), skipped, memory.read())
    if depth and trainer.gradients is not None:
        depth = {"block_rms": depth["block_rms"], "gradient_norm": trainer.gradients.tolist()}
        result["depth"] = {name: [float(f"{value:.4g}") for value in values] for name, values in depth.items()}
    return {
        **result,
        # JSON has no infinity: the height of a spike at a skipped step becomes null.
        "spikes": [
            [step + 1, float(f"{above:.3g}") if math.isfinite(above) else None] for step, above in find_spikes(losses)
        ],
        # Without the first tenth of the steps, where gradients are large in every run.
        "largest_gradient": max(filter(math.isfinite, norms[len(norms) // 10 :]), default=0.0),
        "wall_seconds": time.perf_counter() - start,
        "build_seconds": built,
        "first_seconds": sum(took[:WARMUP_STEPS]),  # includes compilation and CUDA graph recording
        "eval_seconds": evaluating,
        "train_curve": thinned(losses),
        "val_curve": [[step, loss] for step, loss in evaluations],
    }


def thinned(losses: Sequence[float], points: int = POINTS) -> list[list[float]]:
    """Average a loss curve into at most `points` points.

    Losses that are not finite are left out, and so is a point without any finite loss.

    Returns:
        [step, mean loss of the steps since the previous point] for each point; the last point is at the last step.
    """
    points = min(points, len(losses))
    ends = [(i + 1) * len(losses) // points for i in range(points)]
    parts = [(end, losses[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    finite = [(end, [loss for loss in part if math.isfinite(loss)]) for end, part in parts]
    return [[end, statistics.fmean(part)] for end, part in finite if part]
