"""Figures of a study: every arm's difference to the first; where on the way it arises; and power laws."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthmix.compare.figures import COLOURS, DASHES, INK, MISSING, load, save_figure
from depthmix.compare.fits import FEWEST, Points, fit
from depthmix.compare.recipe import Study
from depthmix.compare.rows import Run
from depthmix.compare.spread import around, spreads
from depthmix.compare.table import human

DIFFERENCES, LOSSES, LAWS = "differences", "training", "power-laws"
LATER = "; `depthmix study NAME --report` draws them later from the results."
Curves = Mapping[tuple[str, str, int], Sequence[tuple[float, float]]]  # (cell, arm, seed): (tokens, loss)


def draw_study(
    study: Study,
    by_cell: Mapping[str, Sequence[Run]],
    curves: Curves,
    folder: Path,
    laws: Mapping[str, Mapping[str, Points]] | None = None,
) -> tuple[list[str], list[str]]:
    """Write differences and training, and power laws if given, as .svg and .png; return the names that the table shows, and notes for the user.

    laws: by domain and arm, the points of each.
    """
    if not load():
        return [], [MISSING.rstrip(".") + LATER]
    drawn = []
    by_cell = {name: runs for name, runs in by_cell.items() if runs}
    counted = "images" if any(run.accuracy is not None for runs in by_cell.values() for run in runs) else "tokens"
    if len(study.arms) > 1:
        save_figure(lambda: plot_differences(study, by_cell), folder / DIFFERENCES, DIFFERENCES)
        save_figure(lambda: plot_training(study, list(by_cell), curves, counted), folder / LOSSES, LOSSES)
        # The table shows one figure per question. Curves lie beside it and are not committed.
        drawn.append(DIFFERENCES)
    if laws and any(laws.values()):
        save_figure(lambda: plot_laws(study, laws), folder / LAWS, LAWS)
        drawn.append(LAWS)
    return drawn, []


def panels_of(names: Sequence[str], width: float, height: float, rows: int = 1) -> tuple[Any, list[Any]]:
    """A figure with axes side by side, each with its title; those of more rows, below them, come after."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * len(names), height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(
        figure.subplots(rows, len(names), squeeze=False, sharex="col" if rows > 1 else False, sharey="row").flat
    )
    for axes, name in zip(panels, names, strict=False):
        axes.set_title(name, fontsize=10.5)
    for axes in panels:
        axes.grid(color="#8a9199", alpha=0.25, linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """A row for each name, the first on top."""
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_yticks(range(len(names)), names)
    for text in axes.get_yticklabels():
        text.set_parse_math(False)
    axes.invert_yaxis()


def plot_differences(study: Study, by_cell: Mapping[str, Sequence[Run]]) -> Any:
    """A row an arm: small dots are seeds, the large one their mean with its 95% interval."""
    names, others = list(by_cell), study.labels[1:]
    figure, panels = panels_of(names, 6.4 if len(names) == 1 else 5.0, 1.4 + 0.32 * len(others))
    by_chance = spreads(study, by_cell)
    for axes, name in zip(panels, names, strict=True):
        runs = by_cell[name]
        base = {run.seed: run.val_loss for run in runs if run.arm == study.labels[0]}
        for place, label in enumerate(others):
            own = [r.val_loss - base[r.seed] for r in runs if r.arm == label and r.seed in base]
            axes.plot(own, [place] * len(own), "o", color=COLOURS[0], markersize=3, alpha=0.6, zorder=3)
            if own:
                half, _ = around(own, by_chance[name])
                axes.errorbar(
                    [statistics.fmean(own)], [place], xerr=None if half is None else [half], fmt="o", color=COLOURS[0],
                    markersize=6, linewidth=1.4, capsize=3, zorder=4,
                )  # fmt: skip
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_xlabel(f"nats against {study.labels[0]}").set_parse_math(False)
        axes.margins(x=0.1)
    name_rows(panels[0], others)
    legend_below(figure, panels[0])
    return figure


def plot_training(study: Study, names: Sequence[str], curves: Curves, counted: str = "tokens") -> Any:
    """The training loss of every arm minus the first's, on the same batches, over the tokens; mean over seeds."""
    figure, panels = panels_of(names, 6.4 if len(names) == 1 else 5.0, 4.2 + 0.12 * len(study.arms))
    settled: list[float] = [0.0]  # what there is to see: the steep start would flatten it
    for axes, name in zip(panels, names, strict=True):
        for i, label in enumerate(study.labels[1:]):
            x, y = mean_difference(curves, name, label, study.labels[0])
            if x:
                dashes, colour = DASHES[i // len(COLOURS) % len(DASHES)], COLOURS[i % len(COLOURS)]
                axes.plot(x, y, dashes, color=colour, linewidth=1.6, label=label)
                settled += y[len(y) // 5 :]
        axes.axhline(0, color=INK, linewidth=1)
        axes.set_xlabel(f"training {counted}")
        axes.xaxis.set_major_formatter(lambda value, _: human(value) if value > 0 else "0")
    margin = 0.06 * (max(settled) - min(settled)) or 0.01
    panels[0].set_ylim(min(settled) - margin, max(settled) + margin)
    panels[0].set_ylabel(f"training loss minus {study.labels[0]}'s").set_parse_math(False)
    legend_below(figure, panels[0])
    return figure


def plot_laws(study: Study, laws: Mapping[str, Mapping[str, Points]]) -> Any:
    """Loss over compute, a panel a domain: a point a size, and the power law through them; below, what an arm gains at each size."""
    figure, panels = panels_of(list(laws), 6.4 if len(laws) == 1 else 5.0, 6.6, rows=2)
    for axes, below, by_arm in zip(panels, panels[len(laws) :], laws.values(), strict=False):
        base = by_arm.get(study.labels[0], {})
        for i, label in enumerate(label for label in study.labels if label in by_arm):
            found = sorted(by_arm[label].values())
            colour = INK if label == study.labels[0] else COLOURS[(i - 1) % len(COLOURS)]
            gains = sorted(
                (base[size][0], loss - base[size][1]) for size, (_, loss) in by_arm[label].items() if size in base
            )
            below.plot(
                [c for c, _ in gains], [gain for _, gain in gains], "o-", color=colour, markersize=5, linewidth=1.3
            )
            axes.plot([c for c, _ in found], [loss for _, loss in found], "o", color=colour, markersize=5, label=label)
            if len(found) >= FEWEST:
                law = fit(found)
                axes.plot([c for c, _ in found], [law.loss(c) for c, _ in found], color=colour, linewidth=1.3)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:.3g}")
        for size, (c, _) in base.items():
            where = {"transform": below.get_xaxis_transform(), "ha": "center", "fontsize": 8.5}
            below.text(c, 1.02, size, **where).set_parse_math(False)  # above the panel, where no point is
        below.set_xlabel("petaFLOP/s-days")
    panels[0].set_ylabel("validation loss, nats per token")
    panels[len(laws)].set_ylabel(f"against {study.labels[0]} of that size").set_parse_math(False)
    legend_below(figure, panels[0])
    return figure


def mean_difference(curves: Curves, cell: str, arm: str, first: str) -> tuple[list[float], list[float]]:
    """Tokens and the arm's training loss minus the first's, mean over the seeds that both have; nothing if there are none.

    Only at the same steps of the same schedule: an arm with another number of steps is at another point of its own.
    """
    keys = [(key, (cell, first, key[2])) for key in curves if key[:2] == (cell, arm)]
    pairs = [(curves[key], curves[base]) for key, base in keys if base in curves]
    same = [
        (own, base) for own, base in pairs if [p[0] for p in own] == [p[0] for p in base] == [p[0] for p in pairs[0][0]]
    ]
    if not same:
        return [], []
    x = [tokens for tokens, _ in same[0][0]]
    return x, [statistics.fmean(own[k][1] - base[k][1] for own, base in same) for k in range(len(x))]


def legend_below(figure: Any, axes: Any, title: str | None = None) -> None:
    """What the axes have labels for, below the figure."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        place: dict[str, Any] = {"loc": "outside lower left", "alignment": "left", "title": title}
        legend = figure.legend(handles, labels, ncols=2, frameon=False, fontsize=9.5, **place)
        for text in legend.get_texts():
            text.set_parse_math(False)  # a label is text, whatever it holds
