"""Figures of a comparison: differences to the baseline, where in training they arise, and loss against tokens and time."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from depthmix.compare.columns import human
from depthmix.compare.results import Results
from depthmix.compare.rows import Run
from depthmix.compare.spread import around
from depthmix.report.content import time_unit
from depthmix.report.figures import (
    COLOURS,
    DASHES,
    INK,
    MISSING,
    legend_below,
    load,
    name_rows,
    panels_of,
    save_figure,
    style_of,
)

DIFFERENCES, TRAINING = "differences", "training"
# Loss curves by what is on the x axis.
CURVES = {"tokens": "loss-tokens", "time": "loss-time"}
FIGURES = (DIFFERENCES, TRAINING, *CURVES.values())
TrainCurves = Mapping[tuple[str, str, int], Sequence[tuple[float, float]]]  # (cell, arm, seed): (tokens, loss)


def draw_figures(results: Results, folder: Path) -> tuple[list[str], list[str]]:
    """Draw all figures into a folder, as .svg and .png.

    Returns:
        Names of the figures that the table shows, and notes for the user.
    """
    if not load():
        return [], [f"{MISSING} The same command with --report draws them later."]
    by_cell = {name: runs for name, runs in results.runs.items() if runs}
    labels, drawn = results.recipe.labels, []
    if not by_cell:
        return [], []
    if {run.arm for runs in by_cell.values() for run in runs} - {labels[0]}:
        save_figure(lambda: plot_differences(results), folder / DIFFERENCES, DIFFERENCES)
        drawn.append(DIFFERENCES)
        if curves := train_curves(results.used):
            counted = (
                "images" if any(run.accuracy is not None for runs in by_cell.values() for run in runs) else "tokens"
            )
            save_figure(lambda: plot_training(list(by_cell), labels, curves, counted), folder / TRAINING, TRAINING)
    if len(by_cell) == 1:
        (runs,) = by_cell.values()
        draw_curves(runs, labels, folder)
    return drawn, []


def draw_curves(runs: Sequence[Run], arms: Sequence[str], folder: Path) -> list[str]:
    """Draw loss against tokens and against time into a folder, if the runs were evaluated on the way. Returns notes."""
    if not load():
        return [MISSING]
    if runs and all(len(run.curve) > 1 for run in runs):
        for axis, name in CURVES.items():
            save_figure(lambda axis=axis: plot_curves(runs, arms, axis), folder / name, axis)  # type: ignore[misc]
    return []


def plot_differences(results: Results) -> Any:
    """Plot a row per arm that has runs, a panel per cell: small dots are seeds, the large one their mean with its 95% interval."""
    by_cell = {name: runs for name, runs in results.runs.items() if runs}
    first, *others = results.recipe.labels
    finished = {run.arm for runs in by_cell.values() for run in runs}
    others = [label for label in others if label in finished]
    figure, panels = panels_of(list(by_cell), 6.4 if len(by_cell) == 1 else 5.0, 1.4 + 0.32 * len(others))
    for axes, (name, runs) in zip(panels, by_cell.items(), strict=True):
        base = {run.seed: run.val_loss for run in runs if run.arm == first}
        for place, label in enumerate(others):
            differences = [r.val_loss - base[r.seed] for r in runs if r.arm == label and r.seed in base]
            axes.plot(differences, [place] * len(differences), "o", color=COLOURS[0], markersize=3, alpha=0.6, zorder=3)
            if differences:
                half, _ = around(differences, results.spreads[name])
                interval: dict[str, Any] = {"xerr": None if half is None else [half], "capsize": 3, "linewidth": 1.4}
                mean = [statistics.fmean(differences)]
                axes.errorbar(mean, [place], fmt="o", color=COLOURS[0], markersize=6, zorder=4, **interval)
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_xlabel(f"nats against {first}").set_parse_math(False)
        axes.margins(x=0.1)
    name_rows(panels[0], others)
    return figure


def train_curves(used: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, int], list[tuple[float, float]]]:
    """Return {(cell, arm, seed): [(tokens, training loss)]} for the runs that have training curves."""
    return {
        (" ".join(w for w in (r["domain"], r["size"]) if w), r["arm"], r["seed"]): [
            (step * r["result"].get("images", r["result"].get("tokens", 0)) / r["result"]["steps"], loss)
            for step, loss in r["result"]["train_curve"]
        ]
        for r in used
        if r.get("result", {}).get("train_curve")
    }


def plot_training(names: Sequence[str], labels: Sequence[str], curves: TrainCurves, counted: str = "tokens") -> Any:
    """Plot the training loss of every arm minus the baseline's on the same batches, mean over seeds, a panel per cell."""
    figure, panels = panels_of(names, 6.4 if len(names) == 1 else 5.0, 4.2 + 0.12 * len(labels))
    settled: list[float] = [0.0]  # without the steep start, which would flatten the rest
    for axes, name in zip(panels, names, strict=True):
        for i, label in enumerate(labels[1:]):
            x, y = mean_difference(curves, name, label, labels[0])
            if x:
                dashes, colour = DASHES[i // len(COLOURS) % len(DASHES)], COLOURS[i % len(COLOURS)]
                axes.plot(x, y, dashes, color=colour, linewidth=1.6, label=label)
                settled += y[len(y) // 5 :]
        axes.axhline(0, color=INK, linewidth=1)
        axes.set_xlabel(f"training {counted}")
        axes.xaxis.set_major_formatter(lambda value, _: human(value) if value > 0 else "0")
    margin = 0.06 * (max(settled) - min(settled)) or 0.01
    panels[0].set_ylim(min(settled) - margin, max(settled) + margin)
    panels[0].set_ylabel(f"training loss minus {labels[0]}'s").set_parse_math(False)
    legend_below(figure, panels[0])
    return figure


def mean_difference(curves: TrainCurves, cell: str, arm: str, first: str) -> tuple[list[float], list[float]]:
    """Return tokens, and the arm's training loss minus the baseline's, mean over the seeds that both have.

    Only curves with the same steps are compared: an arm with another number of steps is at another point of its schedule.
    """
    keys = [(key, (cell, first, key[2])) for key in curves if key[:2] == (cell, arm)]
    pairs = [(curves[key], curves[base]) for key, base in keys if base in curves]
    if not pairs:
        return [], []
    x = [tokens for tokens, _ in pairs[0][0]]
    aligned = [pair for pair in pairs if all([tokens for tokens, _ in curve] == x for curve in pair)]
    if not aligned:
        return [], []
    return x, [statistics.fmean(curve[k][1] - base[k][1] for curve, base in aligned) for k in range(len(x))]


def curve_over_seeds(runs: Sequence[Run], axis: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return x, mean, lowest and highest loss over the seeds of one arm, at the evaluations that all of them have."""
    by_tokens = [{point[0]: point for point in run.curve} for run in runs]
    shared = sorted(set.intersection(*(set(points) for points in by_tokens)))
    groups = [[points[tokens] for points in by_tokens] for tokens in shared]
    x = [float(g[0][0]) if axis == "tokens" else statistics.fmean(p[1] for p in g) for g in groups]
    losses = [[p[2] for p in g] for g in groups]
    return x, [statistics.fmean(v) for v in losses], [min(v) for v in losses], [max(v) for v in losses]


def plot_curves(runs: Sequence[Run], arms: Sequence[str], axis: str) -> Any:
    """Plot the loss of every arm, mean and range over seeds, against "tokens" or "time"."""
    finished = {arm: [run for run in runs if run.arm == arm] for arm in arms}
    curves = {arm: curve_over_seeds(of_arm, axis) for arm, of_arm in finished.items() if of_arm}
    figure, (axes,) = panels_of([""], 8.4, 4.8 + 0.2 * -(-len(curves) // 2))
    longest = max(x[-1] for x, *_ in curves.values())
    scale, unit = time_unit(longest) if axis == "time" else (1.0, "")
    for place, arm in enumerate(arms):
        if arm not in curves:
            continue
        x, mean, low, high = curves[arm]
        x = [value / scale for value in x]
        colour, dashes = style_of(place)
        width = 1.7 if place else 2.2
        axes.plot(x, mean, dashes, color=colour, linewidth=width, label=f"{mean[-1]:.4f}  {arm}", zorder=3)
        axes.plot(x[-1:], mean[-1:], "o", color=colour, markersize=4.5, zorder=4)
        if any(a < b for a, b in zip(low, high, strict=True)):
            axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0, zorder=2)
    _limit(axes, curves)
    first = next(iter(curves))
    axes.axhline(curves[first][1][-1], color=INK, linewidth=0.9, linestyle=(0, (2, 3)), alpha=0.7, zorder=1)
    counted = "images" if any(run.accuracy is not None for run in runs) else "tokens"
    axes.set_xlabel(f"training {counted}" if axis == "tokens" else f"training time, {unit}")
    axes.set_ylabel(f"validation loss, nats per {counted[:-1]}")
    if axis == "tokens":
        axes.xaxis.set_major_formatter(lambda value, _: human(value) if value > 0 else "0")
    finals = [mean[-1] for _, mean, _, _ in curves.values()]
    order = sorted(range(len(finals)), key=lambda i: finals[i], reverse=True)
    legend_below(figure, axes, f"final loss (dotted: {first}'s)", order)
    return figure


def _limit(axes: Any, curves: dict[str, Any]) -> None:
    """Leave out the first fifth of the baseline's evaluations, whose steep start would flatten the rest."""
    lowest = min(min(low) for _, _, low, _ in curves.values())
    first = next(iter(curves.values()))[1]
    top = first[min(len(first) // 5, len(first) - 1)]
    highest = max(high[-1] for _, _, _, high in curves.values())
    margin = 0.06 * (max(top, highest) - lowest) or 0.1
    axes.set_ylim(lowest - margin, max(top, highest) + margin)
    axes.set_xlim(left=0)
