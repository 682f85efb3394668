"""How much losses vary by chance, from all arms of a study together.

    loss(arm, seed) = a(arm) + s(seed) + e,     σ² = Σ e² / (runs - arms - seeds + 1),     a difference at one seed varies by √2 σ

by least squares in every cell; squares and degrees of freedom of cells add up. Differences to the first arm, arm by arm, would count
its chance as often as there are other arms. All arms are taken to vary alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from depthmix.study.interval import student_t
from depthmix.study.recipe import Study
from depthmix.study.rows import Run

Number = Callable[[Run], float | None]


@dataclass(frozen=True)
class Spread:
    """The standard deviation of a difference of two arms at one seed, and its degrees of freedom (0: nothing is known)."""

    deviation: float
    freedom: int

    def half_width(self, seeds: int, weight: float = 1.0) -> float | None:
        """Half the width of the 95% interval of a mean over so many seeds; weight: of its deviation to a difference's."""
        return student_t(self.freedom) * self.deviation * weight / math.sqrt(seeds) if self.freedom and seeds else None


def pooled(cells: Iterable[Sequence[Run]], number: Number = lambda run: run.val_loss) -> Spread:
    """The spread in some cells together."""
    squares, freedom = 0.0, 0
    for runs in cells:
        found = [(run.arm, run.seed, value) for run in runs if (value := number(run)) is not None]
        arms, seeds = ({key: i for i, key in enumerate(dict.fromkeys(f[k] for f in found))} for k in (0, 1))
        design = np.zeros((len(found), len(arms) + len(seeds)))
        for i, (arm, seed, _) in enumerate(found):
            design[i, arms[arm]] = design[i, len(arms) + seeds[seed]] = 1
        values = np.array([value for *_, value in found])
        fitted, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
        squares += float(np.sum((values - design @ fitted) ** 2))
        freedom += len(found) - int(rank)
    return Spread(math.sqrt(2 * squares / freedom) if freedom else 0.0, freedom)


def spreads(study: Study, by_cell: Mapping[str, Sequence[Run]]) -> dict[str, Spread]:
    """Of every cell: pooled over the sizes of its domain, unless these are learning rates, of which the large ones vary more."""
    domain = {cell.name: (cell.domain, cell.name if "stability" in study.sections else "") for cell in study.cells}
    groups = dict.fromkeys(domain[name] for name in by_cell)
    found = {group: pooled(runs for name, runs in by_cell.items() if domain[name] == group) for group in groups}
    return {name: found[domain[name]] for name in by_cell}
