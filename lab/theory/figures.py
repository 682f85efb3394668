"""The figures of lab/theory/README.md, one function each."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

from depthmix.errors import UserError
from depthmix.report.figures import COLOURS, INK, load, save_figure
from lab.theory.rank import gain, threshold
from lab.theory.results import DIMS, HIGH, LOW, Results, init_name
from lab.theory.risk import RULES
from lab.theory.toy import Init, Setting

RULE_COLOURS = dict(zip(RULES, (INK, *COLOURS), strict=False))
DASHED = (0, (4, 2))
# Settings of the toy: some give the paper's result and some do not.
SHOWN: tuple[tuple[str, Init, float], ...] = (
    ("identity", 0.2, 0.003),
    ("identity", "torch", 0.3),
    ("random", "torch", 0.01),
    ("random", 0.1, 0.1),
)


def draw(results: Results, folder: Path) -> list[Path]:
    """Write every figure as .png and return the paths."""
    if not load():
        raise UserError("matplotlib is not installed, and figures need it: pip install matplotlib")
    plots = (risk_figure, constant_figure, threshold_figure, gain_figure, equal_figure, toy_figure)
    paths = []
    for plot in plots:
        stem = folder / plot.__name__.removesuffix("_figure")
        save_figure(partial(plot, results), stem, stem.name, ["png"])
        paths.append(stem.with_suffix(".png"))
    return paths


def _axes(rows: int, columns: int, height: float = 3.9) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for one in axes:
        one.grid(color="#8a9199", alpha=0.25, linewidth=0.7)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(axes: Any, **how: Any) -> None:
    axes.legend(frameon=False, fontsize=9, **how)


def risk_figure(results: Results) -> Any:
    """Draw Theorem 4.2: the risks that alternating minimisation finds, and the bounds, as shares of the residual network's risk."""
    figure, axes = _axes(1, 2)
    fields = {"grn-v1": "v1", "grn-v2": "v2", "grn-v3": "v3"}
    for panel, (name, target_risks) in zip(axes, results.risks.items(), strict=True):
        plain = target_risks.by_rule["residual"]
        panel.axhline(1, color=INK, label="residual")
        for rule, field in fields.items():
            # GRN-v3 lies on GRN-v2.
            width, faint = (4.5, 0.45) if rule == "grn-v2" else (1.7, 1.0)
            share = [value / base for value, base in zip(target_risks.by_rule[rule], plain, strict=True)]
            panel.plot(target_risks.ranks, share, color=RULE_COLOURS[rule], linewidth=width, alpha=faint, label=rule)
            bound = [getattr(b, field) / base for b, base in zip(target_risks.bounds, plain, strict=True)]
            panel.plot(target_risks.ranks, bound, linestyle=DASHED, color=RULE_COLOURS[rule], linewidth=1.1)
        panel.plot([], [], linestyle=DASHED, color=INK, linewidth=1.1, label="bounds")
        panel.set(xlabel="collective rank r*, d = 40", ylabel="share of the residual network's excess risk", title=name)
        panel.title.set_fontsize(10.5)
        _legend(panel, loc="lower left")
    axes[0].set_yscale("log")
    return figure


def constant_figure(results: Results) -> Any:
    """Draw where the paper's constant and the Gaussian moment disagree, and how small the consequence is."""
    figure, (left, right) = _axes(1, 2)
    dims = list(results.moments)
    left.axhline(2, color=COLOURS[0], label="Gaussian moment, c = d + 2")
    left.axhline(1, color=COLOURS[1], linestyle=DASHED, label="the paper's ξ, c = d + 1")
    left.plot(dims, [results.moments[d] - d for d in dims], "o", color=INK, markersize=5, label="Monte Carlo")
    left.set(xlabel="d", ylabel="c - d", ylim=(0, 3))
    _legend(left, loc="upper right")
    kappas = [i / 100 for i in range(1, 100)]
    for d, colour in zip((10, 30, 100), COLOURS, strict=False):
        gap = [threshold("grn-v3", k, d, paper=True) - threshold("grn-v3", k, d) for k in kappas]
        right.plot(kappas, [abs(g) for g in gap], color=colour, label=f"d = {d}")
    right.set(xlabel="κ", ylabel="|difference| in v3's threshold r*/d", yscale="log")
    _legend(right, loc="lower left")
    return figure


def threshold_figure(results: Results) -> Any:
    """Draw Theorem 4.3: the collective rank up to which a GRN is better at equal parameters."""
    figure, (left, right) = _axes(1, 2)
    kappas = [i / 200 for i in range(1, 200)]
    for rule in RULES[1:]:
        wide = {"grn-v2": (4.5, 0.45)}.get(rule, (1.8, 1.0))
        values = [threshold(rule, k, 100) for k in kappas]
        left.plot(kappas, values, color=RULE_COLOURS[rule], label=rule, linewidth=wide[0], alpha=wide[1])
    left.set(xlabel="κ = λ_min / λ_max", ylabel="largest r*/d, d = 100", ylim=(0, None))
    _legend(left, loc="upper left")
    right.plot(kappas, [threshold("grn-v1", k, 100) for k in kappas], color=RULE_COLOURS["grn-v1"], label="v1, any d")
    for d, dashes in ((10, "-"), (100, DASHED), (1000, ":")):
        values = [threshold("grn-v2", k, d) for k in kappas]
        right.plot(kappas, values, color=RULE_COLOURS["grn-v2"], linestyle=dashes, label=f"v2, d = {d}")
    right.set(xlabel="κ = λ_min / λ_max", ylabel="largest r*/d", ylim=(0, None))
    _legend(right, loc="upper left")
    return figure


def gain_figure(results: Results) -> Any:
    """Draw Figure 5: the least gain against the collective rank, and against the smallest eigenvalue."""
    figure, (left, right) = _axes(1, 2)
    ranks, lows = list(range(101)), [i / 10 for i in range(101)]
    for d, colour in zip(DIMS, COLOURS, strict=False):
        for rule, dashes in (("grn-v1", "-"), ("grn-v2", DASHED)):
            how = {"color": colour, "linestyle": dashes, "label": f"v{rule[-1]}, d = {d}"}
            left.plot(ranks, [gain(rule, LOW, HIGH, d, r) for r in ranks], **how)
            right.plot(lows, [gain(rule, low, HIGH, d, 50) for low in lows], **how)
    left.set(xlabel="collective rank r*, eigenvalues 5 to 10", ylabel="gain at least")
    right.set(xlabel="λ_min, with λ_max = 10 and r* = 50", ylabel="gain at least")
    for panel in (left, right):
        panel.axhline(0, color=INK, linewidth=0.8)
    _legend(left, loc="lower left")
    return figure


def equal_figure(results: Results) -> Any:
    """Draw the risk at equal parameters for every whole number of layers."""
    figure, axes = _axes(1, 2)
    for panel, (name, equal) in zip(axes, results.equal.items(), strict=True):
        panel.axhline(equal.residual, color=INK, label="residual, 5 layers of rank 3")
        for rule in RULES[1:]:
            layers = [shape.n_layers for shape in equal.shapes[rule]]
            panel.plot(layers, equal.risks[rule], "o-", color=RULE_COLOURS[rule], markersize=4, label=rule)
        panel.set(yscale="log", xlabel="layers, d = 40, as many parameters", ylabel="excess risk", title=name)
        panel.title.set_fontsize(10.5)
        _legend(panel, loc="best")
    return figure


def toy_figure(results: Results) -> Any:
    """Draw Figure 1, with settings that give the paper's result and with settings that do not."""
    figure, axes = _axes(2, 2, height=3.3)
    for panel, (target, init, lr) in zip(axes, SHOWN, strict=True):
        for rule in ("residual", "grn-v1"):
            row = results.toy.settings.index(Setting(target, rule, init, lr))
            losses = [x if math.isfinite(x) and x < 1e4 else math.nan for x in results.toy.losses[row].tolist()]
            diverged = ", diverges" if math.isnan(losses[-1]) else ""
            panel.plot(results.toy.steps, losses, color=RULE_COLOURS[rule], label=rule + diverged)
        panel.set(yscale="log", xlabel="steps", ylabel="loss per channel")
        panel.set_title(f"{target}, U and V {init_name(init)}, lr {lr:g}", fontsize=10.5)
        _legend(panel, loc="best")
    return figure
