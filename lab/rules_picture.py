"""The figure of lab/short-trainings.md: every rule's gain. Columns of the page's table stand side by side in panels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from depthmix.report.figures import COLOURS, INK, PAPER, legend_below, name_rows, panels_of
from lab.claims import Measurement

# Characters of a label beside the panels. In a longer label the arm gets a line of its own.
WIDE = 30
# Distance between the columns of a panel, in rows, if there is room.
APART = 0.2
# One colour per column.
SERIES = (*COLOURS, "#6B7480")


def plot_rules(labels: Mapping[str, str], panels: Mapping[str, Mapping[str, Mapping[str, Measurement]]]) -> Any:
    """Draw a row per rule, by panel and column in it: the difference to plain with its 95% interval.

    A panel has its own scale, which fits the values. A wide interval ends in an arrow at the edge of its panel, so that the other
    intervals can be told apart.

    Args:
        labels: of the arms.
        panels: measurements by panel, column and arm.
    """
    columns = list(dict.fromkeys(name for by_column in panels.values() for name in by_column))
    most_columns = max(len(by_column) for by_column in panels.values())
    row = 0.36 + 0.06 * max(0, most_columns - 3)  # inches
    figure, all_axes = panels_of([title.replace(", ", ",\n", 1) for title in panels], 3.3, 2.0 + row * len(labels))
    for axes, by_column in zip(all_axes, panels.values(), strict=True):
        values = [measured.value for by_arm in by_column.values() for measured in by_arm.values()]
        low, high = min(0.0, *values), max(0.0, *values)
        margin = 0.2 * (high - low) or 0.01
        distance = min(APART, 0.8 / len(by_column))
        for i, (name, by_arm) in enumerate(by_column.items()):
            colour = SERIES[columns.index(name) % len(SERIES)]
            for place, arm in enumerate(labels):
                if (measured := by_arm.get(arm)) is not None:
                    y = place + distance * (i - (len(by_column) - 1) / 2)
                    ends = [max(measured.low, low - margin), min(measured.high, high + margin)]
                    axes.plot(ends, [y, y], color=colour, linewidth=1.4, zorder=3)
                    for end, true_end, mark in zip(ends, (measured.low, measured.high), "<>", strict=True):
                        if end != true_end:
                            axes.plot([end], [y], mark, color=colour, markersize=5, zorder=3, clip_on=False)
                    full = colour if measured.seeds > 1 else PAPER
                    axes.plot([measured.value], [y], "o", color=colour, mfc=full, markersize=5, zorder=4)
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_xlim(low - margin, high + margin)
        axes.locator_params(axis="x", nbins=5)
    for name, colour in zip(columns, SERIES * len(columns), strict=False):
        all_axes[0].plot([], [], "o", color=colour, markersize=5, label=name)
    name_rows(all_axes[0], [label if len(label) <= WIDE else label.replace(" (", "\n(") for label in labels.values()])
    legend_below(
        figure, all_axes[0], "nats against plain, one scale per panel; hollow: one seed; arrows: the interval continues"
    )
    return figure
