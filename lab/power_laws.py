"""Power laws of loss over compute, and how much compute an arm saves.

    L = a C^-b,  by least squares on log L over log C, one point per size: the mean over its seeds
    advantage = C' / C,  where the baseline's law at C' has the loss that the arm's has at C, the largest of the comparison

The interval is that of the jackknife over sizes: both laws are fitted without each size in turn, so what they have in common does
not count as uncertainty. It says how much the answer depends on single sizes, not how it would continue beyond them. Size by size,
the factor is read off between the baseline's own sizes, which no law has to fit. The interval of their mean in logarithms is
Student's, and assumes one factor at all sizes.

python -m lab.power_laws lab/recipes/scaling.yaml    writes power-laws.md and a figure beside the table
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthmix.compare.columns import DASH, bullets, markdown_table
from depthmix.compare.interval import half_width, student_t
from depthmix.compare.recipe import Recipe, load_recipe
from depthmix.compare.records import RUNS, read_records
from depthmix.compare.results import Results
from depthmix.compare.rows import Run
from depthmix.files import write_text
from depthmix.report.figures import COLOURS, INK, legend_below, load, panels_of, save_figure

# Sizes that a law needs: two points always lie on a line.
FEWEST = 3
# By size: compute (or seconds) and loss.
Points = Mapping[str, tuple[float, float]]
PETAFLOP_DAY = 1e15 * 86400


@dataclass(frozen=True)
class PowerLaw:
    """L = a C^-b."""

    a: float
    b: float

    def loss(self, compute: float) -> float:
        """Return the loss at a compute."""
        return float(self.a * compute**-self.b)

    def compute(self, loss: float) -> float:
        """Return the compute that a loss takes."""
        return float((self.a / loss) ** (1 / self.b))


@dataclass(frozen=True)
class Advantage:
    """A factor on compute at equal loss, with the ends of its 95% interval."""

    factor: float
    low: float
    high: float


def fit(points: Sequence[tuple[float, float]]) -> PowerLaw:
    """Fit the law through (compute, loss). Points of one compute alone give a constant."""
    x, y = [math.log(c) for c, _ in points], [math.log(loss) for _, loss in points]
    slope, start = statistics.linear_regression(x, y) if len(set(x)) > 1 else (0.0, statistics.fmean(y))
    return PowerLaw(math.exp(start), -slope)


def advantage(first: Points, own: Points) -> tuple[PowerLaw, Advantage] | None:
    """Return the arm's law and its advantage over the baseline.

    Returns None for too few sizes, and where a law does not fall, since no compute has a given loss then.
    """
    sizes = [size for size in first if size in own]
    if len(sizes) < FEWEST:
        return None

    def log_factor(chosen: Sequence[str]) -> float | None:
        plain, law = fit([first[s] for s in chosen]), fit([own[s] for s in chosen])
        if plain.b <= 0 or law.b <= 0:
            return None
        most = max(own[s][0] for s in sizes)
        return math.log(plain.compute(law.loss(most)) / most)

    whole = log_factor(sizes)
    parts = [log_factor([s for s in sizes if s != left_out]) for left_out in sizes]
    known = [part for part in parts if part is not None]
    if whole is None or len(known) < len(sizes):
        return None
    n, mean = len(known), statistics.fmean(known)
    half = student_t(n - 1) * math.sqrt((n - 1) / n * sum((part - mean) ** 2 for part in known))
    return fit([own[s] for s in sizes]), Advantage(math.exp(whole), math.exp(whole - half), math.exp(whole + half))


def by_size(first: Points, own: Points) -> dict[str, float]:
    """Return how much more the baseline needs, at each size, for the loss that an arm has there.

    The baseline's need is read off between its own sizes around that loss, by the power law through both, so no law has to fit all
    sizes. Returns nothing for too few sizes, or where a larger size is no better.
    """
    known = sorted(first.values())
    if len(known) < FEWEST or any(later[1] >= before[1] for before, later in itertools.pairwise(known)):
        return {}

    def needed(loss: float) -> float:
        place = next((i for i, (_, other) in enumerate(known) if other <= loss), len(known) - 1)
        return fit(known[max(place - 1, 0) :][:2]).compute(loss)

    return {size: needed(own[size][1]) / own[size][0] for size in first if size in own}


def over_sizes(factors: Sequence[float]) -> Advantage | None:
    """Return the mean of factors in logarithms, with its interval; None for too few sizes."""
    logs = [math.log(factor) for factor in factors]
    half = half_width(logs) if len(logs) >= FEWEST else None
    if half is None:
        return None
    mean = statistics.fmean(logs)
    return Advantage(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def points(results: Results, domain: str, timed: bool = False) -> dict[str, Points]:
    """Return {arm: {size: (petaFLOP/s-days, or seconds of GPU time, and loss)}}.

    The baseline's loss is its mean over seeds. Another arm's loss is that plus its mean difference, seed by seed, so a seed that
    one of them lacks counts for neither.
    """
    study, used, by_cell = results.recipe, results.used, results.runs
    found: dict[str, dict[str, tuple[float, float]]] = {arm: {} for arm in study.labels}
    for cell in (cell for cell in study.cells if cell.domain == domain):
        runs = [run for run in by_cell[cell.name] if not (timed and run.shared)]
        base = {run.seed: run.val_loss for run in runs if run.arm == study.labels[0]}
        for arm in study.labels:
            own = [run for run in runs if run.arm == arm and run.seed in base]
            if own:
                x = own[0].train_seconds if timed else 6 * weights(used, own[0]) * own[0].tokens / PETAFLOP_DAY
                difference = statistics.fmean(run.val_loss - base[run.seed] for run in own)
                found[arm][cell.size] = x, statistics.fmean(base.values()) + difference
    return {arm: sizes for arm, sizes in found.items() if sizes}


def weights(used: Sequence[Mapping[str, Any]], run: Run) -> int:
    """Count the parameters that a token is multiplied with: all but the embedding."""
    for record in used:
        if (record["arm"], record["seed"]) == (run.arm, run.seed) and "result" in record:
            counts = record["result"].get("parameters", {})
            if counts.get("total") == run.parameters:
                return int(counts["total"] - counts.get("embedding", 0))
    return run.parameters


def section(results: Results) -> list[str]:
    """Return the lines of the section on power laws."""
    study, text = results.recipe, ["## Power laws", ""]
    for domain in study.domains:
        plain, clock = (points(results, domain, timed) for timed in (False, True))
        lines = []
        for arm in study.labels:
            law = fit(list(plain[arm].values())) if len(plain.get(arm, {})) >= FEWEST else None
            lines.append(
                [
                    arm,
                    str(len(plain.get(arm, {}))),
                    _law(law),
                    *(_missed(p.get(arm, {})) for p in (plain, clock)),
                    *(_saved(p, study.labels[0], arm) for p in (plain, clock)),
                    *(_saved_by_size(p, study.labels[0], arm) for p in (plain, clock)),
                ]
            )
        heading = [
            f"arm, {domain}" if domain else "arm",
            "sizes",
            "loss",
            "misses by up to",
            "in GPU time",
            "compute advantage",
            "GPU time advantage",
            "of compute, size by size",
            "of GPU time, size by size",
        ]
        text += [*markdown_table(heading, lines), ""]
    notes = [
        f"“loss”: a power law of C = 6 N D in petaFLOP/s-days, N without the embedding, by least squares in logarithms; an arm's loss at a size is {study.labels[0]}'s mean over seeds and the mean of its differences to it, seed by seed.",
        "“misses by up to”: nats between the law and what was measured at a size, where they are furthest apart; “in GPU time”: of the law in that.",
        f"“advantage”: how much more {study.labels[0]} needs for the loss that the arm's law has at the largest size, by the two laws; in brackets the 95% interval of the jackknife over sizes.",
        f"“size by size”: how much more {study.labels[0]} needs for the loss that the arm has there, read off between its own losses at the sizes around, and beyond the last two; their mean is one of logarithms, with Student's interval.",
        f"It takes {FEWEST} sizes whose losses fall, without any one of them too, and for GPU time step times of a machine that was not shared. Of images D counts images, whatever their patches.",
    ]
    return [*text, *bullets(notes)]


def _law(law: PowerLaw | None) -> str:
    return DASH if law is None else f"{law.a:.3f} C^{-law.b:+z.4f}"


def _missed(measured: Points) -> str:
    if len(measured) < FEWEST:
        return DASH
    law = fit(list(measured.values()))
    return f"{max(abs(law.loss(c) - loss) for c, loss in measured.values()):.3f}"


def _saved(found: Mapping[str, Points], first: str, arm: str) -> str:
    if arm == first or first not in found or arm not in found:
        return DASH
    saved = advantage(found[first], found[arm])
    return _factor(None if saved is None else saved[1])


def _factor(saved: Advantage | None) -> str:
    return DASH if saved is None else f"{saved.factor:.2f} ({saved.low:.2f} to {saved.high:.2f})"


def _saved_by_size(found: Mapping[str, Points], first: str, arm: str) -> str:
    if arm == first or first not in found or arm not in found:
        return DASH
    factors = by_size(found[first], found[arm])
    mean = over_sizes(list(factors.values()))
    every = ", ".join(f"{size} {factor:.2f}" for size, factor in factors.items())
    return f"{every}; mean {_factor(mean)}" if mean else every or DASH


def plot_laws(study: Recipe, laws: Mapping[str, Mapping[str, Points]]) -> Any:
    """Plot loss over compute and the laws through it, a panel per domain; below, what an arm gains at each size."""
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


def main() -> None:
    """Write the section and the figure of one comparison."""
    recipe = load_recipe(sys.argv[1])
    out = Path(recipe.config.out)
    results = Results(recipe, read_records([out / RUNS]))
    write_text(out / "power-laws.md", "\n".join(section(results)) + "\n")
    if load():
        laws = {domain: points(results, domain) for domain in recipe.domains}
        save_figure(lambda: plot_laws(recipe, laws), out / "power-laws", "power-laws")
    print(out / "power-laws.md")


if __name__ == "__main__":
    main()
