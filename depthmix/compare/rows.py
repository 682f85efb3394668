"""What finished run folders say, run by run and arm by arm."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthmix.compare.interval import half_width
from depthmix.errors import CHECKPOINT, DIVERGED, UserError
from depthmix.runs.agreement import check_run_files
from depthmix.runs.folder import RunFolder, opened_result

Point = tuple[float, float, float]  # tokens or images, seconds, validation loss


@dataclass(frozen=True)
class Run:
    """One finished training: one arm with one seed."""

    arm: str
    seed: int
    path: str
    steps: int
    tokens: int  # or images
    val_loss: float
    bits_per_byte: float | None
    parameters: int
    added_by_mixer: int
    step_seconds: float
    seconds: float | None  # by the clock, with compilation and pauses
    peak_memory: int | None
    curve: list[Point]
    step_quartiles: tuple[float, float] | None = None
    core_wait: float | None = None  # share of the CPU time wanted that others had
    accuracy: float | None = None  # of images
    shared: bool = False  # whether other runs had the machine, too: its times and memory are no costs

    @property
    def train_seconds(self) -> float:
        """Steps at the median step time: compilation, other processes and pauses do not count."""
        return self.steps * self.step_seconds


@dataclass(frozen=True)
class Row:
    """One arm over its seeds. A spread is half the range over seeds; None where there is nothing to say."""

    arm: str
    baseline: str  # the first arm, which the others are compared with
    seeds: int
    steps: int
    tokens: int  # or, where there is an accuracy, images
    val_loss: float
    val_loss_spread: float | None
    difference: float | None  # to the baseline, seed by seed
    difference_spread: float | None
    difference_interval: float | None  # half the width of the 95% interval of the mean difference
    perplexity: float
    bits_per_byte: float | None
    parameters: int
    added_by_mixer: int
    step_ms: float
    step_ratio: float | None
    train_seconds: float
    peak_memory: int | None
    tokens_to_reach: float | None  # the baseline's final loss, as a fraction of the baseline's tokens
    time_to_reach: float | None
    reached: int  # seeds that reached it
    paired: int  # seeds both arms have finished
    accuracy: float | None = None  # of images
    accuracy_spread: float | None = None


def read_run(path: str | Path, arm: str) -> Run:
    """A finished run folder; UserError names the folder when it cannot be used."""
    path = Path(path)
    check_run_files(RunFolder(path))
    result = _read_result(path)
    try:
        accuracy = result.get("accuracy")
        steps, tokens = int(result["steps"]), int(result["tokens" if accuracy is None else "images"])
        parameters = result["parameters"]
        seconds: Any = result.get("seconds")
        step_seconds = float(result.get("step_seconds") or seconds / steps)
        quartiles, wait = result.get("step_quartiles"), result.get("core_wait")
        run = Run(
            arm=arm,
            seed=int(result["seed"]),
            path=str(path),
            steps=steps,
            tokens=tokens,
            val_loss=math.nan if result["val_loss"] is None else float(result["val_loss"]),  # null: not a number
            bits_per_byte=result.get("bits_per_byte"),
            parameters=int(parameters["total"]),
            added_by_mixer=int(parameters.get("added_by_mixer", 0)),
            step_seconds=step_seconds,
            seconds=seconds,
            peak_memory=result.get("peak_memory"),
            curve=[],
            step_quartiles=None if quartiles is None else (float(quartiles[0]), float(quartiles[1])),
            core_wait=None if wait is None else float(wait),
            accuracy=None if accuracy is None else float(accuracy),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{path / 'result.json'} is not the result of a training ({reason}); delete {path} and run again",
            CHECKPOINT,
        ) from None
    if not math.isfinite(run.val_loss):
        raise UserError(f"the validation loss at the end of {path} is {run.val_loss}", DIVERGED)
    if not (math.isfinite(step_seconds) and step_seconds > 0 and steps > 0):
        raise UserError(f"{path / 'result.json'} has no usable step time; delete {path} and run again", CHECKPOINT)
    run.curve.extend(_read_curve(path, run))
    return run


def _read_result(path: Path) -> dict[str, Any]:
    try:
        result = json.loads((path / "result.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path} has no result.json: that run has not finished; run again to resume it", CHECKPOINT
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path / 'result.json'} cannot be read ({error}); delete {path} and run again", CHECKPOINT
        ) from None
    if not isinstance(result, dict):
        raise UserError(
            f"{path / 'result.json'} is not the result of a training; delete {path} and run again", CHECKPOINT
        )
    return opened_result(path / "result.json", result)


def _read_curve(path: Path, run: Run) -> list[Point]:
    """The evaluations by tokens and time; the result is the last of them."""
    points: dict[int, Point] = {}
    try:
        lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        for line in lines:
            entry = json.loads(line)
            loss = entry.get("val_loss")
            if loss is not None and math.isfinite(loss):
                step = int(entry["step"])
                points[step] = (entry["tokens" if run.accuracy is None else "images"], step * run.step_seconds, loss)
    except FileNotFoundError:
        raise UserError(f"{path} has no metrics.jsonl; delete the folder and run again", CHECKPOINT) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path / 'metrics.jsonl'} cannot be read ({error}); delete {path} and run again"
        raise UserError(message, CHECKPOINT) from None
    points[run.steps] = (run.tokens, run.train_seconds, run.val_loss)
    return [points[step] for step in sorted(points)]


def reach(curve: Sequence[Point], target: float) -> tuple[float, float] | None:
    """Tokens and seconds at which a curve first is at the target or below, linear between evaluations; None if never.

    Nothing is known before the first evaluation: a curve that starts below the target gets that point.
    """
    before: Point | None = None
    for tokens, seconds, loss in curve:
        if loss <= target:
            if before is None:
                return tokens, seconds
            share = (before[2] - target) / (before[2] - loss)
            return before[0] + share * (tokens - before[0]), before[1] + share * (seconds - before[1])
        before = (tokens, seconds, loss)
    return None


def make_rows(runs: Sequence[Run], arms: Sequence[str]) -> list[Row]:
    """One row an arm, in the order given, for the arms that have runs; the first arm is what the others are compared with."""
    base = {run.seed: run for run in runs if arms and run.arm == arms[0]}
    rows = []
    for arm in arms:
        own = sorted((run for run in runs if run.arm == arm), key=lambda run: run.seed)
        if own:
            rows.append(_row(own, base, arms[0]))
    return rows


def _row(own: Sequence[Run], base: dict[int, Run], baseline: str) -> Row:
    pairs = [(run, base[run.seed]) for run in own if run.seed in base]
    differences = [run.val_loss - plain.val_loss for run, plain in pairs]
    fractions = [found for run, plain in pairs if (found := _fractions(run, plain))]
    everywhere = bool(pairs) and len(fractions) == len(pairs)
    losses = [run.val_loss for run in own]
    bits = [run.bits_per_byte for run in own if run.bits_per_byte is not None]
    accuracies = [run.accuracy for run in own if run.accuracy is not None]
    memory = [run.peak_memory for run in own if run.peak_memory is not None]
    ratio = [median_seconds([p[i] for p in pairs]) for i in (0, 1)] if pairs else None
    return Row(
        arm=own[0].arm,
        baseline=baseline,
        seeds=len(own),
        steps=own[0].steps,
        tokens=own[0].tokens,
        val_loss=statistics.fmean(losses),
        val_loss_spread=spread(losses),
        difference=statistics.fmean(differences) if pairs and own[0].arm != baseline else None,
        difference_spread=spread(differences) if own[0].arm != baseline else None,
        difference_interval=half_width(differences) if own[0].arm != baseline else None,
        perplexity=math.exp(min(statistics.fmean(losses), 700.0)),
        bits_per_byte=statistics.fmean(bits) if len(bits) == len(own) else None,
        parameters=own[0].parameters,
        added_by_mixer=own[0].added_by_mixer,
        step_ms=1000 * median_seconds(own),
        step_ratio=ratio[0] / ratio[1] if ratio else None,
        train_seconds=statistics.fmean(run.train_seconds for run in own),
        peak_memory=max(memory) if memory else None,
        tokens_to_reach=statistics.fmean(f[0] for f in fractions) if everywhere else None,
        time_to_reach=statistics.fmean(f[1] for f in fractions) if everywhere else None,
        reached=len(fractions),
        paired=len(pairs),
        accuracy=statistics.fmean(accuracies) if len(accuracies) == len(own) else None,
        accuracy_spread=spread(accuracies) if len(accuracies) == len(own) else None,
    )


def _fractions(run: Run, plain: Run) -> tuple[float, float] | None:
    if run.arm == plain.arm:
        return 1.0, 1.0
    found = reach(run.curve, plain.val_loss)
    return None if found is None else (found[0] / plain.tokens, found[1] / plain.train_seconds)


def spread(values: Sequence[float]) -> float | None:
    """Half the range: with two or three seeds it says all there is, and promises no distribution."""
    return (max(values) - min(values)) / 2 if len(values) > 1 else None


def median_seconds(runs: Sequence[Run]) -> float:
    """The median over seeds of the median step time."""
    return statistics.median(run.step_seconds for run in runs)
