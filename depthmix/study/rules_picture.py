"""The figure of docs/results.md: what every rule gains, by column of its table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from depthmix.study.claims import Found
from depthmix.study.figures import COLOURS, INK, PAPER
from depthmix.study.pictures import name_rows, panels_of

WIDE = 30  # characters of a label beside the panels; the arm of a longer one has a line of its own


def plot_rules(labels: Mapping[str, str], gains: Mapping[str, Mapping[str, Found]]) -> Any:
    """A row a rule, a panel a column of the page of results: the difference to plain with its 95% interval.

    labels: of the arms. An interval that says little ends at the edge, so that the others can be told apart.
    """
    shown = {title: by_arm for title, by_arm in gains.items() if by_arm}
    figure, panels = panels_of([title.replace(", ", ",\n") for title in shown], 2.3, 1.6 + 0.36 * len(labels))
    values = [found.value for by_arm in shown.values() for found in by_arm.values()]
    low, high = min(0.0, *values), max(0.0, *values)
    margin = 0.15 * (high - low) or 0.01
    for axes, by_arm in zip(panels, shown.values(), strict=True):
        for place, arm in enumerate(labels):
            if (found := by_arm.get(arm)) is not None:
                ends = [max(found.low, low - margin), min(found.high, high + margin)]
                axes.plot(ends, [place, place], color=COLOURS[0], linewidth=1.4, zorder=3)
                full = COLOURS[0] if found.seeds > 1 else PAPER
                axes.plot([found.value], [place], "o", color=COLOURS[0], mfc=full, markersize=6, zorder=4)
        axes.axvline(0, color=INK, linewidth=1)
        axes.set_xlim(low - margin, high + margin)
    panels[0].set_xlabel("nats against plain; hollow: one seed", loc="left")
    name_rows(panels[0], [label if len(label) <= WIDE else label.replace(" (", "\n(") for label in labels.values()])
    return figure
