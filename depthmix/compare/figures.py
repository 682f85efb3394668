"""Loss against tokens and against training time, one line an arm."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from depthmix.compare.rows import Run
from depthmix.compare.table import human
from depthmix.files import write_file, writing
from depthmix.ownership import DRAWN

MISSING = "No figures: matplotlib is not installed (pip install matplotlib), everything else is complete."
INK, PAPER = "#1f2428", "#ffffff"  # text, axes and the first arm; the background
# Okabe and Ito's colours without yellow, which is too pale for a line; dashes tell arms apart without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.", ":")
LEGEND_COLUMNS = 2
AXES = {"tokens": "training {unit}", "time": "training time"}
NAMES = {"tokens": "loss-tokens", "time": "loss-time"}


def draw_figures(runs: Sequence[Run], arms: Sequence[str], folder: Path) -> list[str]:
    """Write loss-tokens and loss-time as .svg and .png into the folder; returns notes for the user (none: all is well)."""
    if not load():
        return [MISSING]
    if runs:
        for axis, name in NAMES.items():
            draw(runs, arms, axis, folder / name)
    return []


def load() -> bool:
    """Load matplotlib; whether there is one."""
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def draw(runs: Sequence[Run], arms: Sequence[str], axis: str, stem: Path) -> None:
    """One figure as files: axis is "tokens" or "time", stem the path without its ending."""
    save_figure(lambda: plot(runs, arms, axis), stem, axis)


def save_figure(make: Callable[[], Any], stem: Path, salt: str, endings: Sequence[str] = ("svg", "png")) -> None:
    """A figure, made in the style of all of them, as files; the same figure with the same salt gives the same files."""
    import matplotlib

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "font.family": "sans-serif",
        "font.size": 10.5,
        "text.color": INK,
        "axes.labelcolor": INK,
        "figure.facecolor": PAPER,
        "axes.facecolor": PAPER,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with matplotlib.rc_context(style):
        _save(make(), stem, endings)


def plot(runs: Sequence[Run], arms: Sequence[str], axis: str) -> Any:
    """One figure: the axes, and below them the legend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = -(-len({run.arm for run in runs}) // LEGEND_COLUMNS)
    figure = Figure(figsize=(8.4, 4.8 + 0.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    _plot(figure.add_subplot(), runs, arms, axis)
    return figure


def curve_over_seeds(runs: Sequence[Run], axis: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """x, mean, lowest and highest loss over the seeds of one arm, at the evaluations all of them have."""
    by_tokens = [{point[0]: point for point in run.curve} for run in runs]
    shared = sorted(set.intersection(*(set(points) for points in by_tokens)))
    groups = [[points[tokens] for points in by_tokens] for tokens in shared]
    x = [float(g[0][0]) if axis == "tokens" else statistics.fmean(p[1] for p in g) for g in groups]
    losses = [[p[2] for p in g] for g in groups]
    return x, [statistics.fmean(v) for v in losses], [min(v) for v in losses], [max(v) for v in losses]


def _plot(axes: Any, runs: Sequence[Run], arms: Sequence[str], axis: str) -> None:
    curves = {arm: curve_over_seeds(own, axis) for arm in arms if (own := [r for r in runs if r.arm == arm])}
    scale, unit = _time_unit(max(x[-1] for x, *_ in curves.values())) if axis == "time" else (1.0, "")
    for i, arm in enumerate(arms):
        if arm not in curves:
            continue
        x, mean, low, high = curves[arm]
        x = [value / scale for value in x]
        colour = INK if i == 0 else COLOURS[(i - 1) % len(COLOURS)]
        dashes = DASHES[(i - 1) // len(COLOURS) % len(DASHES)] if i else "-"
        axes.plot(
            x, mean, dashes, color=colour, linewidth=2.2 if i == 0 else 1.7, label=f"{mean[-1]:.4f}  {arm}", zorder=3
        )
        axes.plot(x[-1:], mean[-1:], "o", color=colour, markersize=4.5, zorder=4)
        if any(a < b for a, b in zip(low, high, strict=True)):
            axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0, zorder=2)
    _limits(axes, curves)
    first = next(iter(curves))
    axes.axhline(curves[first][1][-1], color=INK, linewidth=0.9, linestyle=(0, (2, 3)), alpha=0.7, zorder=1)
    seen = "images" if any(run.accuracy is not None for run in runs) else "tokens"
    axes.set_xlabel(AXES[axis].format(unit=seen) + (f", {unit}" if unit else ""))
    axes.set_ylabel(f"validation loss, nats per {seen[:-1]}")
    if axis == "tokens":
        axes.xaxis.set_major_formatter(lambda value, _: human(value) if value > 0 else "0")
    axes.grid(color="#8a9199", alpha=0.25, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes, curves, first)


def _legend(axes: Any, curves: dict[str, Any], first: str) -> None:
    """Below the axes, where it hides no curve."""
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: list(curves.values())[i][1][-1], reverse=True)
    legend = axes.figure.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        title=f"final loss (dotted: {first}'s)",
        loc="outside lower left",
        ncols=LEGEND_COLUMNS,
        frameon=False,
        alignment="left",
        fontsize=9.5,
        title_fontsize=9.5,
    )
    for text in (*legend.get_texts(), legend.get_title()):
        text.set_parse_math(False)  # a label is text, whatever it holds


def _limits(axes: Any, curves: dict[str, Any]) -> None:
    """Begin where a fifth of the first arm's evaluations is over: the steep start would flatten what there is to see."""
    lowest = min(min(low) for _, _, low, _ in curves.values())
    first = next(iter(curves.values()))[1]
    top = first[min(len(first) // 5, len(first) - 1)]
    highest = max(high[-1] for _, _, _, high in curves.values())
    margin = 0.06 * (max(top, highest) - lowest) or 0.1
    axes.set_ylim(lowest - margin, max(top, highest) + margin)
    axes.set_xlim(left=0)


def _time_unit(longest: float) -> tuple[float, str]:
    return (1.0, "seconds") if longest < 180 else (60.0, "minutes") if longest < 10800 else (3600.0, "hours")


def _save(figure: Any, stem: Path, endings: Sequence[str]) -> None:
    how: dict[str, dict[str, Any]] = {
        "svg": {"metadata": {"Date": None, "Creator": DRAWN}},
        "png": {"metadata": {"Software": DRAWN}, "dpi": 160},
    }
    for ending, options in ((ending, how[ending]) for ending in endings):
        path, picture = stem.with_name(f"{stem.name}.{ending}"), io.BytesIO()
        figure.savefig(picture, format=ending, **options)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, picture.getvalue())
