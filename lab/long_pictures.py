"""Two figures of docs/results.md: gains against the length of a training, and what gains are worth in tokens and GPU time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from depthmix.report.figures import COLOURS, INK, PAPER, legend_below, name_rows, panels_of
from lab.claims import Measurement
from lab.readme_table import Row


def plot_lengths(gains: Mapping[str, Mapping[int, Measurement]], labels: Mapping[str, str]) -> Any:
    """Draw each rule's difference to plain over the tokens of a training, with 95% intervals; one seed is hollow.

    Args:
        gains: measurements by arm and tokens.
        labels: names of arms; other arms go by themselves.
    """
    figure, (axes,) = panels_of(["validation loss against the residual model"], 6.4, 4.2)
    for i, (arm, by_tokens) in enumerate(gains.items()):
        colour = COLOURS[i % len(COLOURS)]
        # Intervals of several rules at one length would cover each other.
        tokens = [count * 1.03 ** (i - (len(gains) - 1) / 2) for count in by_tokens]
        axes.plot(
            tokens, [m.value for m in by_tokens.values()], color=colour, linewidth=1.3, label=labels.get(arm, arm)
        )
        for x, measured in zip(tokens, by_tokens.values(), strict=True):
            if measured.seeds > 1 and math.isfinite(measured.low):
                axes.plot([x, x], [measured.low, measured.high], color=colour, linewidth=1.3)
            full = colour if measured.seeds > 1 else PAPER
            axes.plot([x], [measured.value], "o", color=colour, mfc=full, markersize=5, zorder=4)
    axes.axhline(0, color=INK, linewidth=1)
    axes.set_xscale("log")
    counts = sorted({count for by_tokens in gains.values() for count in by_tokens})
    axes.set_xticks(counts, [f"{count / 1e6:.3g}M" for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("tokens, each with its whole schedule")
    axes.set_ylabel("nats")
    legend_below(figure, axes, "bars: 95% intervals; hollow: one seed")
    return figure


def plot_factors(rows: Sequence[Row]) -> Any:
    """Draw how many times the tokens and the GPU time the plain model needs for each rule's loss; arrows leave what is known.

    Args:
        rows: of the table, with factors.
    """
    shown = [row for row in rows if row.tokens is not None]
    figure, (axes,) = panels_of(["what the residual model needs, as a multiple"], 6.4, 1.7 + 0.36 * len(shown))
    low, high = 1.0, 1.0
    for place, row in enumerate(shown):
        for i, factor in enumerate((row.tokens, row.time)):
            if factor is None:
                continue
            y, colour = place + 0.24 * (i - 0.5), COLOURS[i]
            # Without an interval the ends are those of the value.
            ends = [factor.low, factor.high] if not row.lead else [factor.value, factor.value]
            inside = [min(max(end, factor.known[0]), factor.known[1]) for end in ends]
            low, high = min(low, inside[0]), max(high, inside[1])
            axes.plot(inside, [y, y], color=colour, linewidth=1.4, zorder=3)
            for end, drawn, mark in zip(ends, inside, "<>", strict=True):
                if end != drawn and (mark == "<") == (end < drawn):
                    axes.plot([drawn], [y], mark, color=colour, markersize=5, zorder=3)
            if factor.known[0] <= factor.value <= factor.known[1]:
                full = PAPER if row.lead else colour
                axes.plot([factor.value], [y], "o", color=colour, mfc=full, markersize=5, zorder=4)
    for i, name in enumerate(("tokens", "GPU time")):
        axes.plot([], [], "o", color=COLOURS[i], markersize=5, label=name)
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_xlim(low - 0.05, high + 0.05)
    name_rows(axes, [row.name for row in shown])
    legend_below(figure, axes, "bars: 95% intervals; hollow: one seed; arrows: beyond the residual model's trainings")
    return figure
