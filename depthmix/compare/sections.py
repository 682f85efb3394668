"""Further sections of a table, where the recipe asks for them: stability over learning rates, and magnitudes over depth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from depthmix.compare.columns import DASH, bullets, markdown_table
from depthmix.compare.recipe import Recipe

# A sublayer whose gradient norm is below this fraction of the largest has hardly any gradient.
SILENT = 1e-3
# A learning rate is too large where the loss is this many nats above that of the arm's best rate.
WORSE = 0.1
Records = Sequence[Mapping[str, Any]]


def sections(recipe: Recipe, used: Records) -> list[str]:
    """Return the lines of all sections, each after a blank line."""
    made = {"stability": _stability, "depth": _depth}
    return [line for name in recipe.config.sections for line in ["", *made[name](recipe, used)]]


def _table(heading: Sequence[str], lines: Iterable[Sequence[str]], notes: Iterable[str]) -> list[str]:
    return [*markdown_table(heading, list(lines)), "", *bullets(notes)]


# Stability.


def rates(used: Records, arm: str) -> dict[float, list[Mapping[str, Any]]]:
    """Group an arm's runs by learning rate, lowest first."""
    by_rate: dict[float, list[Mapping[str, Any]]] = {}
    for record in used:
        if record["arm"] == arm:
            by_rate.setdefault(float(record["config"]["lr"]), []).append(record)
    return dict(sorted(by_rate.items()))


def largest_stable(used: Records, arm: str) -> float | None:
    """Find the largest rate up to which every seed finishes near the arm's best loss; None if there is none."""
    by_rate = rates(used, arm)
    means = _means(by_rate)
    stable = None
    for lr, runs in by_rate.items():
        if len(_losses(runs)) < len(runs):
            break
        if means[lr] <= min(means.values()) + WORSE:
            stable = lr
        elif stable is not None:
            break
    return stable


def _means(by_rate: Mapping[float, Records]) -> dict[float, float]:
    """Return the mean loss at each rate at which a seed finishes."""
    return {lr: statistics.fmean(losses) for lr, runs in by_rate.items() if (losses := _losses(runs))}


def _losses(runs: Records) -> list[float]:
    return [run["result"]["val_loss"] for run in runs if "result" in run]


def spikes(runs: Records) -> int:
    """Count the loss spikes of all runs together."""
    return sum(len(run["result"].get("spikes", [])) for run in runs if "result" in run)


def _stability(recipe: Recipe, used: Records) -> list[str]:
    text = ["## Stability", ""]
    for domain in recipe.domains:
        of_domain = [record for record in used if record["domain"] == domain]
        by_arm = {arm: rates(of_domain, arm) for arm in recipe.labels}
        all_rates = sorted({lr for by_rate in by_arm.values() for lr in by_rate})
        lines = []
        base = _at_best(by_arm[recipe.labels[0]])
        for arm, by_rate in by_arm.items():
            shown = [_at_rate(by_rate.get(lr, [])) for lr in all_rates]
            stable = largest_stable(of_domain, arm)
            best = _at_best(by_rate)
            differences = [best[seed] - base[seed] for seed in best if seed in base] if arm != recipe.labels[0] else []
            difference = f"{statistics.fmean(differences):+z.4f}" if differences else DASH
            lines.append([arm, *shown, difference, DASH if stable is None else f"{stable:g}"])
        at_rates = [f"lr {lr:g}" for lr in all_rates]
        heading = [f"arm, {domain}" if domain else "arm", *at_rates, "each at its best", "stable up to"]
        text += [*_table(heading, lines, []), ""]
    notes = [
        "A loss at each learning rate, mean over seeds, and in brackets the loss spikes of all of them: steps far above the median of the 50 before (depthmix/train/spikes.py).",
        f"“each at its best”: the arm's loss at its best rate here less {recipe.labels[0]}'s at its own, seed by seed.",
        f"“stable up to”: the largest rate up to which every seed finishes and the loss is within {WORSE:g} nats of the arm's best.",
    ]
    return [*text[:-1], *bullets(notes)]


def _at_best(by_rate: Mapping[float, Records]) -> dict[int, float]:
    """Return the losses by seed at the rate with the lowest mean."""
    means = _means(by_rate)
    runs = by_rate[min(means, key=lambda lr: means[lr])] if means else []
    return {run["seed"]: run["result"]["val_loss"] for run in runs if "result" in run}


def _at_rate(runs: Records) -> str:
    losses = _losses(runs)
    if not losses:
        return "diverged" if runs else DASH
    gone = len(runs) - len(losses)
    return f"{statistics.fmean(losses):.4f} ({spikes(runs)}{f'; {gone} diverged' if gone else ''})"


# Depth.


def growth(result: Mapping[str, Any]) -> float | None:
    """Return the RMS of the last block's output over that of the first; None if one of them is zero."""
    depth = result.get("depth")
    if not depth or min(depth["block_rms"][0], depth["block_rms"][-1]) <= 0:  # a block that adds nothing
        return None
    return depth["block_rms"][-1] / depth["block_rms"][0]


def silent(result: Mapping[str, Any]) -> int:
    """Count the sublayers that have hardly any gradient."""
    norms = result["depth"]["gradient_norm"]
    return sum(norm < SILENT * max(norms) for norm in norms)


def _depth(recipe: Recipe, used: Records) -> list[str]:
    lines = []
    for arm in recipe.labels:
        for cell in recipe.cells:
            key = arm, cell.domain, cell.size
            place = ", ".join(word for word in (cell.domain if len(recipe.domains) > 1 else "", cell.size) if word)
            of_cell = [r.get("result", {}) for r in used if (r["arm"], r["domain"], r["size"]) == key]
            if results := [result for result in of_cell if result.get("depth")]:
                lines.append([f"{arm}, {place}" if place else arm, *_over_depth(results), str(len(results))])
    heading = ["arm", "outputs, last / first", "gradients, largest / median", "sublayers without gradients", "seeds"]
    notes = [
        "At the last step: RMS of what a block adds to the residual stream, over the tokens of a few rows, last block over first; and the norm of a sublayer's gradients, largest over median.",
        f"“sublayers without gradients”: those whose gradients are below {SILENT:g} of the largest, in the mean over seeds.",
    ]
    return ["## Magnitudes and gradients over depth", "", *_table(heading, lines, notes)]


def _over_depth(results: Records) -> list[str]:
    """Return the cells of one line of the section on depth."""
    norms = [result["depth"]["gradient_norm"] for result in results]
    ratios = [max(n) / middle if (middle := statistics.median(n)) else math.inf for n in norms]
    grown = [g for result in results if (g := growth(result)) is not None]
    return [
        f"{statistics.fmean(grown):.2f}" if grown else DASH,
        f"{ratio:.2f}" if (ratio := statistics.fmean(ratios)) < 1 / SILENT else f"over {1 / SILENT:,.0f}",
        f"{statistics.fmean(map(silent, results)):.3g} of {len(norms[0])}",
    ]
