"""What a study's table says besides, where its file asks for it: power laws over sizes, stability over learning rates, and depth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from depthmix.compare.fits import FEWEST, Advantage, Points, PowerLaw, advantage, by_size, fit, over_sizes
from depthmix.compare.recipe import Study
from depthmix.compare.rows import Run
from depthmix.compare.table import DASH, markdown_line, markdown_text

PETAFLOP_DAY = 1e15 * 86400
SILENT = 1e-3  # of the largest: a sublayer's gradient that is hardly any
WORSE = 0.1  # nats above an arm's best rate: no longer a rate to train with
Records = Sequence[Mapping[str, Any]]


def sections(study: Study, used: Records, by_cell: Mapping[str, Sequence[Run]]) -> list[str]:
    """Markdown lines, each section after a blank line."""
    made = {
        "power-laws": lambda: _power_laws(study, used, by_cell),
        "stability": lambda: _stability(study, used),
        "depth": lambda: _depth(study, used),
    }
    return [line for name in study.sections for line in ["", *made[name]()]]


def _table(heading: Sequence[str], lines: Iterable[Sequence[str]], notes: Iterable[str]) -> list[str]:
    rule = "|---|" + "---:|" * (len(heading) - 1)
    return [markdown_line(heading), rule, *map(markdown_line, lines), "", *(f"* {markdown_text(n)}" for n in notes)]


def _of(what: str, domain: str) -> str:
    return f"{what}, {domain}" if domain else what


# Power laws.


def points(
    study: Study, used: Records, by_cell: Mapping[str, Sequence[Run]], domain: str, timed: bool = False
) -> dict[str, Points]:
    """{arm: {size: (petaFLOP/s-days, or seconds of GPU time, and loss)}}.

    The first arm's loss is its mean over seeds, another's that plus its mean difference, seed by seed: so seeds that it does not
    have count for neither of both.
    """
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


def weights(used: Records, run: Run) -> int:
    """Parameters that a token is multiplied with: all but the embedding."""
    for record in used:
        if (record["arm"], record["seed"]) == (run.arm, run.seed) and "result" in record:
            counts = record["result"].get("parameters", {})
            if counts.get("total") == run.parameters:
                return int(counts["total"] - counts.get("embedding", 0))
    return run.parameters


def _power_laws(study: Study, used: Records, by_cell: Mapping[str, Sequence[Run]]) -> list[str]:
    text = ["## Power laws", ""]
    for domain in study.domains:
        plain, clock = (points(study, used, by_cell, domain, timed) for timed in (False, True))
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
            _of("arm", domain),
            "sizes",
            "loss",
            "misses by up to",
            "in GPU time",
            "compute advantage",
            "GPU time advantage",
            "of compute, size by size",
            "of GPU time, size by size",
        ]
        text += [*_table(heading, lines, []), ""]
    notes = [
        f"“loss”: a power law of C = 6 N D in petaFLOP/s-days, N without the embedding, by least squares in logarithms; an arm's loss at a size is {study.labels[0]}'s mean over seeds and the mean of its differences to it, seed by seed.",
        "“misses by up to”: nats between the law and what was measured at a size, where they are furthest apart; “in GPU time”: of the law in that.",
        f"“advantage”: how much more {study.labels[0]} needs for the loss that the arm's law has at the largest size, by the two laws; in brackets the 95% interval of the jackknife over sizes.",
        f"“size by size”: how much more {study.labels[0]} needs for the loss that the arm has there, read off between its own losses at the sizes around, and beyond the last two; their mean is one of logarithms, with Student's interval.",
        f"It takes {FEWEST} sizes whose losses fall, without any one of them too, and for GPU time step times of a machine that was not shared. Of images D counts images, whatever their patches.",
    ]
    return [*text[:-1], *(f"* {markdown_text(note)}" for note in notes)]


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


# Stability.


def rates(study: Study, used: Records, arm: str) -> dict[float, list[Mapping[str, Any]]]:
    """An arm's runs by learning rate, lowest first."""
    found: dict[float, list[Mapping[str, Any]]] = {}
    for record in used:
        if record["arm"] == arm:
            found.setdefault(float(record["config"]["lr"]), []).append(record)
    return dict(sorted(found.items()))


def largest_stable(study: Study, used: Records, arm: str) -> float | None:
    """The largest rate up to which every seed finishes and ends near the arm's best loss; None if there is none."""
    by_rate = rates(study, used, arm)
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
    """The mean loss at each rate at which a seed finishes."""
    return {lr: statistics.fmean(losses) for lr, runs in by_rate.items() if (losses := _losses(runs))}


def _losses(runs: Records) -> list[float]:
    return [run["result"]["val_loss"] for run in runs if "result" in run]


def spikes(runs: Records) -> int:
    """Loss spikes of runs, all of them together."""
    return sum(len(run["result"].get("spikes", [])) for run in runs if "result" in run)


def _stability(study: Study, used: Records) -> list[str]:
    text = ["## Stability", ""]
    for domain in study.domains:
        own = [record for record in used if record["domain"] == domain]
        by_arm = {arm: rates(study, own, arm) for arm in study.labels}
        all_rates = sorted({lr for by_rate in by_arm.values() for lr in by_rate})
        lines = []
        base = _at_best(by_arm[study.labels[0]])
        for arm, by_rate in by_arm.items():
            shown = [_at_rate(by_rate.get(lr, [])) for lr in all_rates]
            stable = largest_stable(study, own, arm)
            best = _at_best(by_rate)
            both = [best[seed] - base[seed] for seed in best if seed in base] if arm != study.labels[0] else []
            ahead = f"{statistics.fmean(both):+z.4f}" if both else DASH
            lines.append([arm, *shown, ahead, DASH if stable is None else f"{stable:g}"])
        heading = [_of("arm", domain), *(f"lr {lr:g}" for lr in all_rates), "each at its best", "stable up to"]
        text += [*_table(heading, lines, []), ""]
    notes = [
        "A loss at each learning rate, mean over seeds, and in brackets the loss spikes of all of them: steps far above the median of the 50 before (depthmix/train/spikes.py).",
        f"“each at its best”: the arm's loss at its best rate here less {study.labels[0]}'s at its own, seed by seed.",
        f"“stable up to”: the largest rate up to which every seed finishes and the loss is within {WORSE:g} nats of the arm's best.",
    ]
    return [*text[:-1], *(f"* {markdown_text(note)}" for note in notes)]


def _at_best(by_rate: Mapping[float, Records]) -> dict[int, float]:
    """The losses at the rate with the lowest mean, by seed."""
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
    """How much larger the last block's output is than the first's."""
    depth = result.get("depth")
    if not depth or min(depth["block_rms"][0], depth["block_rms"][-1]) <= 0:  # a block that adds nothing
        return None
    return depth["block_rms"][-1] / depth["block_rms"][0]


def silent(result: Mapping[str, Any]) -> int:
    """How many sublayers have hardly any gradient."""
    norms = result["depth"]["gradient_norm"]
    return sum(norm < SILENT * max(norms) for norm in norms)


def _depth(study: Study, used: Records) -> list[str]:
    lines = []
    for arm in study.labels:
        for cell in study.cells:
            own = [r for r in used if (r["arm"], r["domain"], r["size"]) == (arm, cell.domain, cell.size)]
            place = ", ".join(word for word in (cell.domain if len(study.domains) > 1 else "", cell.size) if word)
            found = [r["result"] for r in own if r.get("result", {}).get("depth")]
            if found:
                lines.append([f"{arm}, {place}" if place else arm, *_over_depth(found), str(len(found))])
    heading = ["arm", "outputs, last / first", "gradients, largest / median", "sublayers without gradients", "seeds"]
    notes = [
        "At the last step: what a block adds to the stream, its root mean square over the tokens of a few rows, last block over first; and the norm of a sublayer's gradients, largest over median.",
        f"“sublayers without gradients”: those whose gradients are below {SILENT:g} of the largest, in the mean over seeds.",
    ]
    return ["## Magnitudes and gradients over depth", "", *_table(heading, lines, notes)]


def _over_depth(found: Records) -> list[str]:
    norms = [result["depth"]["gradient_norm"] for result in found]
    ratios = [max(n) / middle if (middle := statistics.median(n)) else math.inf for n in norms]
    grown = [g for result in found if (g := growth(result)) is not None]
    return [
        f"{statistics.fmean(grown):.2f}" if grown else DASH,
        f"{ratio:.2f}" if (ratio := statistics.fmean(ratios)) < 1 / SILENT else f"over {1 / SILENT:,.0f}",
        f"{statistics.fmean(map(silent, found)):.3g} of {len(norms[0])}",
    ]
