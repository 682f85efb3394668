"""The style of all figures, and what they share: panels, legends, and files that are the same byte for byte when drawn again."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from depthmix.files import write_file, writing
from depthmix.ownership import DRAWN

MISSING = "No figures: matplotlib is not installed (pip install matplotlib). Everything else is complete."
# Text, axes and the baseline; the background.
INK, PAPER = "#1f2428", "#ffffff"
# Okabe and Ito's colours without yellow, which is too pale for a line. Dashes tell arms apart without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.", ":")


def load() -> bool:
    """Load matplotlib. Returns whether it is installed."""
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def save_figure(make: Callable[[], Any], stem: Path, salt: str, endings: Sequence[str] = ("svg", "png")) -> None:
    """Make a figure in the common style and save it.

    Args:
        make: Makes the figure.
        stem: Path without its ending.
        salt: Seeds the ids in an SVG: the same figure with the same salt gives the same file.
        endings: File formats.
    """
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
    how: dict[str, dict[str, Any]] = {
        "svg": {"metadata": {"Date": None, "Creator": DRAWN}},
        "png": {"metadata": {"Software": DRAWN}, "dpi": 160},
    }
    with matplotlib.rc_context(style):
        figure = make()
        for ending in endings:
            path, picture = stem.with_name(f"{stem.name}.{ending}"), io.BytesIO()
            figure.savefig(picture, format=ending, **how[ending])
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, picture.getvalue())


def panels_of(names: Sequence[str], width: float, height: float, rows: int = 1) -> tuple[Any, list[Any]]:
    """Make a figure with axes side by side, each with its title. Axes of further rows come after."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * len(names), height), layout="constrained")
    FigureCanvasAgg(figure)
    share: dict[str, Any] = {"sharex": "col" if rows > 1 else False, "sharey": "row"}
    panels = list(figure.subplots(rows, len(names), squeeze=False, **share).flat)
    for axes, name in zip(panels, names, strict=False):
        axes.set_title(name, fontsize=10.5)
    for axes in panels:
        axes.grid(color="#8a9199", alpha=0.25, linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """Label one row per name, the first on top."""
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_yticks(range(len(names)), names)
    for text in axes.get_yticklabels():
        text.set_parse_math(False)
    axes.invert_yaxis()


def legend_below(figure: Any, axes: Any, title: str | None = None, order: Sequence[int] | None = None) -> None:
    """Put the legend of some axes below the figure, where it hides nothing.

    Args:
        figure: The figure.
        axes: Axes with labels.
        title: Title of the legend.
        order: Places of the labels in the legend; by default as they were drawn.
    """
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    chosen = range(len(labels)) if order is None else order
    place: dict[str, Any] = {"loc": "outside lower left", "alignment": "left", "title": title, "title_fontsize": 9.5}
    legend = figure.legend(
        [handles[i] for i in chosen], [labels[i] for i in chosen], ncols=2, frameon=False, fontsize=9.5, **place
    )
    for text in (*legend.get_texts(), legend.get_title()):
        text.set_parse_math(False)  # a label is text, whatever it contains


def style_of(place: int) -> tuple[str, str]:
    """Return colour and dashes of an arm by its place; the baseline comes first."""
    if place == 0:
        return INK, "-"
    return COLOURS[(place - 1) % len(COLOURS)], DASHES[(place - 1) // len(COLOURS) % len(DASHES)]
