"""Finished runs, and the rows of a table: one per arm, over its seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthmix.compare.interval import half_width
from depthmix.compare.recipe import Cell
from depthmix.compare.records import find_problem
from depthmix.errors import CHECKPOINT, DIVERGED, UserError
from depthmix.runs.agreement import check_run_files
from depthmix.runs.folder import METRICS, RunFolder

Point = tuple[float, float, float]  # tokens or images, seconds, validation loss


@dataclass(frozen=True)
class Run:
    """A finished training of an arm with one seed."""

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
    core_wait: float | None = None  # share of the wanted CPU time that other processes had
    accuracy: float | None = None  # of images
    shared: bool = False  # the machine ran others, too: its times and memory are no costs

    @property
    def train_seconds(self) -> float:
        """Training time: steps at the median step time, without compilation, evaluation and pauses."""
        return self.steps * self.step_seconds


@dataclass(frozen=True)
class Row:
    """An arm over its seeds. A spread is half the range over seeds. None stands for a number that is not known."""

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


def as_run(arm: str, seed: int, result: Mapping[str, Any], path: str = "", shared: bool = False) -> Run:
    """Convert a result, as a record holds it, to a run. The result counts as the last point of its curve."""
    counted = result["images"] if "images" in result else result["tokens"]
    parameters, quartiles = result.get("parameters", {}), result.get("step_quartiles")
    steps, step_seconds, loss = result["steps"], result["step_seconds"], result["val_loss"]
    curve = [
        (step * counted / steps, step * step_seconds, y) for step, y in result.get("val_curve", []) if step < steps
    ]
    return Run(
        arm=arm,
        seed=seed,
        path=path,
        steps=steps,
        tokens=counted,
        val_loss=loss,
        bits_per_byte=result.get("bits_per_byte"),
        parameters=parameters.get("total", 0),
        added_by_mixer=parameters.get("added_by_mixer", 0),
        step_seconds=step_seconds,
        seconds=result["seconds"],
        peak_memory=result.get("peak_memory"),
        curve=[*curve, (counted, steps * step_seconds, loss)],
        step_quartiles=(quartiles[0], quartiles[1]) if quartiles else None,
        core_wait=result.get("core_wait"),
        accuracy=result.get("accuracy"),
        shared=shared,
    )


def as_runs(used: Iterable[Mapping[str, Any]], cell: Cell, out: Path | None = None) -> list[Run]:
    """Return the finished runs of one cell.

    Args:
        used: Records of runs.
        cell: The cell.
        out: The comparison's folder, which the paths of run folders are relative to.
    """
    runs = []
    for record in used:
        if (record["domain"], record["size"]) == (cell.domain, cell.size) and "result" in record:
            path = str(out / record["path"]) if out and "path" in record else ""
            runs.append(as_run(record["arm"], record["seed"], record["result"], path, record.get("lanes", 1) > 1))
    return runs


def read_run(path: str | Path, arm: str) -> Run:
    """Read a finished run folder.

    Raises:
        UserError: The run has not finished or cannot be used, or its loss is not a number (DIVERGED).
    """
    path = Path(path)
    return as_run(arm, *result_of_folder(RunFolder(path)), path=str(path))


def result_of_folder(folder: RunFolder) -> tuple[int, dict[str, Any]]:
    """Return the seed and the result of a finished run folder with its curve, as a record holds it.

    Raises:
        UserError: The run has not finished or cannot be used, or its loss is not a number (DIVERGED).
    """
    check_run_files(folder)
    result = folder.read_result()
    loss = math.nan if result.get("val_loss", 0.0) is None else result.get("val_loss")  # JSON has no NaN
    if isinstance(loss, float) and not math.isfinite(loss):
        raise UserError(f"the validation loss at the end of {folder.path} is {loss}", DIVERGED)
    if not (folder.path / METRICS).exists():
        raise UserError(f"{folder.path} has no {METRICS}; delete the folder and run again", CHECKPOINT)
    # `read_metrics` drops a torn last line, which a running training may have. A finished run has none.
    if not folder.read_file(METRICS).endswith(b"\n"):
        raise UserError(f"{folder.path / METRICS} does not end with a whole line; put it back from a copy", CHECKPOINT)
    lines = [line for line in folder.read_metrics() if line.get("val_loss") is not None]
    try:
        lines = [line for line in lines if math.isfinite(line["val_loss"])]
        curve = [[line["step"], line["val_loss"]] for line in lines]
        recorded = {**result, "wall_seconds": result["seconds"], "val_curve": curve}
        problem = find_problem(recorded)
        seed = int(result["seed"])
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        what = f"{folder.path / 'result.json'} is not the result of a training ({problem})"
        raise UserError(f"{what}; delete {folder.path} and run again", CHECKPOINT)
    return seed, recorded


def reach(curve: Sequence[Point], target: float) -> tuple[float, float] | None:
    """Find the tokens and seconds at which a curve first reaches a target, linear between evaluations; None if never.

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
    """Make one row per arm that has runs, in the order given. The first arm is the baseline."""
    base = {run.seed: run for run in runs if arms and run.arm == arms[0]}
    rows = []
    for arm in arms:
        runs_of_arm = sorted((run for run in runs if run.arm == arm), key=lambda run: run.seed)
        if runs_of_arm:
            rows.append(_row(runs_of_arm, base, arms[0]))
    return rows


def _row(runs: Sequence[Run], base: dict[int, Run], baseline: str) -> Row:
    """Make the row of an arm from its runs and the baseline's runs by seed."""
    first = runs[0]
    pairs = [(run, base[run.seed]) for run in runs if run.seed in base]
    differences = [run.val_loss - plain.val_loss for run, plain in pairs]
    fractions = [reached for run, plain in pairs if (reached := _fractions(run, plain))]
    everywhere = bool(pairs) and len(fractions) == len(pairs)
    losses = [run.val_loss for run in runs]
    bits = [run.bits_per_byte for run in runs if run.bits_per_byte is not None]
    accuracies = [run.accuracy for run in runs if run.accuracy is not None]
    memory = [run.peak_memory for run in runs if run.peak_memory is not None]
    ratio = [median_seconds([p[i] for p in pairs]) for i in (0, 1)] if pairs else None
    return Row(
        arm=first.arm,
        baseline=baseline,
        seeds=len(runs),
        steps=first.steps,
        tokens=first.tokens,
        val_loss=statistics.fmean(losses),
        val_loss_spread=spread(losses),
        difference=statistics.fmean(differences) if pairs and first.arm != baseline else None,
        difference_spread=spread(differences) if first.arm != baseline else None,
        difference_interval=half_width(differences) if first.arm != baseline else None,
        perplexity=math.exp(min(statistics.fmean(losses), 700.0)),
        bits_per_byte=statistics.fmean(bits) if len(bits) == len(runs) else None,
        parameters=first.parameters,
        added_by_mixer=first.added_by_mixer,
        step_ms=1000 * median_seconds(runs),
        step_ratio=ratio[0] / ratio[1] if ratio else None,
        train_seconds=statistics.fmean(run.train_seconds for run in runs),
        peak_memory=max(memory) if memory else None,
        tokens_to_reach=statistics.fmean(f[0] for f in fractions) if everywhere else None,
        time_to_reach=statistics.fmean(f[1] for f in fractions) if everywhere else None,
        reached=len(fractions),
        paired=len(pairs),
        accuracy=statistics.fmean(accuracies) if len(accuracies) == len(runs) else None,
        accuracy_spread=spread(accuracies) if len(accuracies) == len(runs) else None,
    )


def _fractions(run: Run, plain: Run) -> tuple[float, float] | None:
    """Return the tokens and the time that a run needs for the baseline's final loss, as fractions of the baseline's."""
    if run.arm == plain.arm:
        return 1.0, 1.0
    reached = reach(run.curve, plain.val_loss)
    return None if reached is None else (reached[0] / plain.tokens, reached[1] / plain.train_seconds)


def spread(values: Sequence[float]) -> float | None:
    """Return half the range of some values: with two or three seeds it assumes no distribution."""
    return (max(values) - min(values)) / 2 if len(values) > 1 else None


def median_seconds(runs: Sequence[Run]) -> float:
    """Return the median over seeds of the median step time."""
    return statistics.median(run.step_seconds for run in runs)
