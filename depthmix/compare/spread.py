"""Variation of losses by chance, estimated from all arms of a comparison together.

    loss(arm, seed) = a(arm) + s(seed) + e,     σ² = Σ e² / (runs - arms - seeds + 1),     a difference at one seed varies by √2 σ

by least squares in every cell; squares and degrees of freedom of cells add up. Taking differences to the baseline arm by arm would
count the baseline's chance once per other arm. All arms are assumed to vary alike, which need not be true, so a contrast with
OWN_SEEDS paired seeds uses its own spread. The spread of s matters for contrasts of arms in different cells, whose seeds differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from depthmix.compare.interval import OWN_SEEDS, half_width, student_t
from depthmix.compare.recipe import Cell, Recipe
from depthmix.compare.rows import Run

Number = Callable[[Run], float | None]


@dataclass(frozen=True)
class Spread:
    """Variation of losses by chance."""

    deviation: float  # standard deviation of a difference of two arms at one seed
    freedom: int  # its degrees of freedom; 0: unknown
    of_seeds: float = 0.0  # standard deviation of s

    def half_width(self, seeds: int, weights: Iterable[Sequence[float]] = ((1, -1),)) -> float | None:
        """Return half the width of the 95% interval of a contrast's mean over seeds; None if nothing is known.

        Args:
            seeds: Number of seeds.
            weights: Weights of the losses in the contrast, by cell.
        """
        if not self.freedom or not seeds:
            return None
        by_cell = [list(cell) for cell in weights]
        by_arms = sum(w * w for cell in by_cell for w in cell) * self.deviation**2 / 2
        by_seeds = sum(math.fsum(cell) ** 2 for cell in by_cell) * self.of_seeds**2
        return student_t(self.freedom) * math.sqrt((by_arms + by_seeds) / seeds)


def around(
    values: Sequence[float], spread: Spread, weights: Iterable[Sequence[float]] = ((1, -1),)
) -> tuple[float | None, int]:
    """Return half the width of the 95% interval of a contrast's mean over seeds, and its degrees of freedom.

    Args:
        values: The contrast at every seed. From OWN_SEEDS values on, their own spread is used.
        spread: The spread of all arms, used for fewer values.
        weights: Weights of the losses in the contrast, by cell.
    """
    if len(values) >= OWN_SEEDS:
        return half_width(values), len(values) - 1
    return spread.half_width(len(values), weights), spread.freedom


def pooled(cells: Iterable[Sequence[Run]], number: Number = lambda run: run.val_loss) -> Spread:
    """Estimate the spread in some cells together."""
    squares, freedom = 0.0, 0
    # The same for a model without s, whose residuals hold the variation of seeds, too.
    squares_with_seeds, freedom_with_seeds = 0.0, 0
    for runs in cells:
        known = [(run.arm, run.seed, value) for run in runs if (value := number(run)) is not None]
        arms, seeds = ({key: i for i, key in enumerate(dict.fromkeys(k[part] for k in known))} for part in (0, 1))
        design = np.zeros((len(known), len(arms) + len(seeds)))
        for i, (arm, seed, _) in enumerate(known):
            design[i, arms[arm]] = design[i, len(arms) + seeds[seed]] = 1
        values = np.array([value for *_, value in known])
        fitted, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
        squares += float(np.sum((values - design @ fitted) ** 2))
        freedom += len(known) - int(rank)
        for name in arms:
            of_arm = np.array([value for arm, _, value in known if arm == name])
            squares_with_seeds += float(np.sum((of_arm - of_arm.mean()) ** 2))
            freedom_with_seeds += len(of_arm) - 1
    if not freedom:
        return Spread(0.0, 0)
    of_seeds = max(squares_with_seeds / freedom_with_seeds - squares / freedom, 0.0)
    return Spread(math.sqrt(2 * squares / freedom), freedom, math.sqrt(of_seeds))


def spreads(recipe: Recipe, by_cell: Mapping[str, Sequence[Run]]) -> dict[str, Spread]:
    """Estimate the spread of every cell from all sizes of its domain. Sizes that are learning rates have a spread each."""
    group = {cell.name: group_of(recipe, cell) for cell in recipe.cells}
    by_group = {g: pooled(runs for name, runs in by_cell.items() if group[name] == g) for g in set(group.values())}
    return {name: by_group[group[name]] for name in by_cell}


def group_of(recipe: Recipe, cell: Cell) -> tuple[str, str]:
    """Return the domain, and the size where it matters, with which a cell shares its spread."""
    return cell.domain, cell.size if "stability" in recipe.config.sections else ""
