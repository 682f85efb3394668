"""A figure of one model's pipelines on 2 to 16 ranks: how long ranks wait, and what a hop carries with caching and without."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from depthmix.config import PlanConfig
from depthmix.errors import UserError
from depthmix.files import write_file, writing
from depthmix.ownership import DRAWN, check_replaceable
from depthmix.parallel.plan.hops import cuts, hop_sizes
from depthmix.parallel.plan.report import Row
from depthmix.parallel.plan.schedule import simulate

RANKS = (2, 4, 8, 16)
COLORS = {1: "#440154", 2: "#31688e", 4: "#35b779", 8: "#e0a800"}
MICROS = 4 * max(RANKS)


def draw(rows: Sequence[Row], config: PlanConfig, path: str) -> None:
    """Write the figure. Its right half shows the rule whose state is largest at the end."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    row = max(rows, key=lambda r: sum(r.counts.states[-1].values()))
    figure = Figure(figsize=(10, 4), layout="constrained")
    waiting_axis, carried_axis = figure.subplots(1, 2)
    for virtual, color in COLORS.items():
        waiting_shares = [100 * simulate(p, virtual, MICROS, 1 / virtual, 2 / virtual).bubble for p in RANKS]
        waiting_axis.plot(
            RANKS,
            waiting_shares,
            color=color,
            marker="o",
            markersize=4,
            label=f"{virtual} stage{'s' * (virtual > 1)} per rank",
        )
    _axis(waiting_axis, f"Time that ranks wait, {MICROS} micro-batches", "% of the step")
    waiting_axis.set_ylim(bottom=0)
    waiting_axis.legend(frameon=False)
    unit = 2e-9 * config.dim * config.seq_len * (config.micro_batch_size or 1)
    for virtual, color in COLORS.items():
        possible = [p for p in RANKS if p * virtual <= config.n_blocks]
        for cached, style in ((False, "--"), (True, "-")):
            sizes = (hop_sizes(row.counts.states, cuts(config.n_blocks, p * virtual), p, cached) for p in possible)
            carried_axis.plot(possible, [unit * sum(s) for s in sizes], style, color=color, marker="o", markersize=4)
    _axis(carried_axis, f"Depth state sent per micro-batch, {row.label}", "GB, all hops, forward")
    carried_axis.set_yscale("log")
    carried_axis.yaxis.set_major_formatter("{x:g}")
    styles: Any = (("--", "every hop carries all"), ("-", "what was received before is kept"))
    carried_axis.legend(handles=[Line2D([], [], color="0.3", linestyle=s, label=t) for s, t in styles], frameon=False)
    buffer, ending = io.BytesIO(), Path(path).suffix
    figure.savefig(buffer, format=ending[1:], dpi=130, metadata={"Software" if ending == ".png" else "Creator": DRAWN})
    # Checked again, since planning took a while.
    check_replaceable(Path(path), "figure")
    with writing(Path(path)):
        write_file(Path(path), buffer.getvalue())


def check_path(path: str) -> None:
    """Check that a figure can be written to a file.

    Raises:
        UserError: the name has another ending, or the file is not ours to replace.
    """
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"plan: figure must end in .png, .svg or .pdf, got {path!r}")
    check_replaceable(Path(path), "figure")


def _axis(axis: Any, title: str, unit: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(RANKS, [str(p) for p in RANKS])
    axis.set_xlabel("ranks of the pipeline")
    axis.set_ylabel(unit)
    axis.set_title(title, fontsize=10)
    axis.grid(axis="y", color="0.92")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
