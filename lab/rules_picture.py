"""The figure of docs/results.md: what every rule gains, columns of its table side by side in panels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from depthmix.study.figures import COLOURS, INK, PAPER
from depthmix.study.pictures import legend_below, name_rows, panels_of
from lab.claims import Found

WIDE = 30  # characters of a label beside the panels; the arm of a longer one has a line of its own
APART = 0.2  # of a row, between columns in one panel, if they have room
SERIES = (*COLOURS, "#6B7480")  # as many columns are told apart


def plot_rules(labels: Mapping[str, str], panels: Mapping[str, Mapping[str, Mapping[str, Found]]]) -> Any:
    """A row a rule, by panel and column in it: the difference to plain with its 95% interval. labels: of the arms.

    A panel has its own scale, of the values: an interval that says little ends in an arrow at its edge, so that the others can be
    told apart.
    """
    columns = list(dict.fromkeys(name for by_column in panels.values() for name in by_column))
    most = max(len(by_column) for by_column in panels.values())
    row = 0.36 + 0.06 * max(0, most - 3)  # inches
    figure, drawn = panels_of([title.replace(", ", ",\n", 1) for title in panels], 3.3, 2.0 + row * len(labels))
    for axes, by_column in zip(drawn, panels.values(), strict=True):
        values = [found.value for by_arm in by_column.values() for found in by_arm.values()]
        low, high = min(0.0, *values), max(0.0, *values)
        margin = 0.2 * (high - low) or 0.01
        apart = min(APART, 0.8 / len(by_column))
        for i, (name, by_arm) in enumerate(by_column.items()):
            colour = SERIES[columns.index(name) % len(SERIES)]
            for place, arm in enumerate(labels):
                if (found := by_arm.get(arm)) is not None:
                    y = place + apart * (i - (len(by_column) - 1) / 2)
                    ends = [max(found.low, low - margin), min(found.high, high + margin)]
                    axes.plot(ends, [y, y], color=colour, linewidth=1.4, zorder=3)
                    for end, whole, mark in zip(ends, (found.low, found.high), "<>", strict=True):
                        if end != whole:
                            axes.plot([end], [y], mark, color=colour, markersize=5, zorder=3, clip_on=False)
                    full = colour if found.seeds > 1 else PAPER
                    axes.plot([found.value], [y], "o", color=colour, mfc=full, markersize=5, zorder=4)
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_xlim(low - margin, high + margin)
        axes.locator_params(axis="x", nbins=5)
    for name, colour in zip(columns, SERIES * len(columns), strict=False):
        drawn[0].plot([], [], "o", color=colour, markersize=5, label=name)
    name_rows(drawn[0], [label if len(label) <= WIDE else label.replace(" (", "\n(") for label in labels.values()])
    legend_below(
        figure, drawn[0], "nats against plain, a scale a panel; hollow: one seed; arrows: the interval goes on"
    )
    return figure
