"""Figures for papers of what is inside models: one depth map per model, and magnitudes and gradients over depth."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from depthmix.report.documents import largest, mean, names_of, of_way, square, way_names
from depthmix.report.figures import MISSING, legend_below, load, save_figure, style_of

Document = Mapping[str, Any]
MAP, OVER_DEPTH = "depth-map", "over-depth"
# What the colours of a map show.
COLOURS = {"contribution": "share of what is read", "weight": "weight"}
QUANTITIES = {"input_rms": "RMS read", "output_rms": "RMS output", "gradient_norm": "gradient norm"}
# Most names on an axis.
EVERY = 26


def draw_insides(documents: Sequence[Document], folder: Path) -> list[str]:
    """Draw a depth map per document and one figure over depth, as .svg and .png. Returns notes for the user."""
    if not load():
        return [MISSING]
    for document, stem in zip(documents, file_names([d["label"] for d in documents]), strict=True):
        save_figure(lambda own=document: plot_map(own), folder / f"{MAP}-{stem}", stem)  # type: ignore[misc]
    if documents:
        save_figure(lambda: plot_over_depth(documents), folder / OVER_DEPTH, OVER_DEPTH)
    return []


def file_names(labels: Sequence[str]) -> list[str]:
    """Turn labels into different file names of characters that every file system accepts."""
    found: list[str] = []
    for label in labels:
        name = re.sub(r"[^A-Za-z0-9._=+-]+", "-", label).strip("-.")[:80] or "model"
        same = sum(other == name or other.startswith(f"{name}-again") for other in found)
        found.append(f"{name}-again{same}" if same else name)
    return found


def plot_map(document: Document) -> Any:
    """Plot contributions, mean over tokens, a panel per way: readers downwards, sources to the right."""
    readers, ways = document["readers"], way_names(document)
    figure, panels = _panels(len(ways), 1.9 + 0.19 * len(readers), 1.4 + 0.19 * len(readers))
    shown = None
    for way, (axes, name) in enumerate(zip(panels, ways, strict=True)):
        shown = draw_map(axes, document, way)
        axes.set_title(name, fontsize=10.5)
    figure.colorbar(shown, ax=panels, shrink=0.8, label=COLOURS["contribution"])
    return figure


def draw_map(axes: Any, document: Document, way: int, values: str = "contribution") -> Any:
    """Draw one way of a model's contributions or weights on matplotlib's axes.

    Contributions have the same scale in every model, from 0 to 1. It grows with the root, so that small shares can be told apart.

    Args:
        axes: matplotlib's axes.
        document: the model's document (docs/guides/inspecting.md).
        way: which mixture of attention.
        values: "contribution" or "weight".

    Returns:
        The image, for a colour bar.
    """
    from matplotlib.colors import Normalize, PowerNorm

    readers, sources = names_of(document)
    mixing = document["mixing"]
    by_reader = mixing["contribution" if values == "contribution" else "mean"]
    size = largest(by_reader)
    scale = PowerNorm(0.5, 0, 1) if values == "contribution" else Normalize(-size if mixing["signed"] else 0.0, size)
    colours = "RdBu" if scale.vmin else "Blues"
    drawn = [[float("nan") if v is None else v for v in row] for row in square(of_way(by_reader, way))]
    shown = axes.imshow(drawn, cmap=colours, norm=scale, aspect="equal", interpolation="nearest")
    _names(axes, "x", sources, 90)
    _names(axes, "y", readers, 0)
    axes.spines[["top", "right"]].set_visible(False)
    return shown


def plot_over_depth(documents: Sequence[Document]) -> Any:
    """Plot a panel per quantity with a line per model."""
    figure, panels = _panels(len(QUANTITIES), 4.4, 3.6 + 0.1 * len(documents))
    for axes, (name, title) in zip(panels, QUANTITIES.items(), strict=True):
        values: list[float] = []
        for i, document in enumerate(documents):
            by_site = document["dynamics"][name]
            y = [mean(v) if isinstance(v, list) else v for v in by_site]
            values += [v for v in y if v is not None]
            colour, dashes = style_of(i)
            drawn = [float("nan") if v is None else v for v in y]
            axes.plot(
                range(len(y)),
                drawn,
                dashes,
                color=colour,
                linewidth=1.7,
                marker="o",
                markersize=3,
                label=document["label"],
            )
        if values and min(values) > 0 and max(values) / min(values) > 20:
            axes.set_yscale("log")
        axes.set_title(title, fontsize=10.5)
        axes.set_xlabel("site")
        axes.grid(color="#8a9199", alpha=0.25, linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    legend_below(figure, panels[0])
    return figure


def _panels(n: int, width: float, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * n, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, n, squeeze=False)[0])


def _names(axes: Any, axis: str, names: Sequence[str], angle: float) -> None:
    places = range(0, len(names), -(-len(names) // EVERY))
    getattr(axes, f"set_{axis}ticks")(places, [names[i] for i in places], rotation=angle, fontsize=8)
    for text in getattr(axes, f"get_{axis}ticklabels")():
        text.set_parse_math(False)
