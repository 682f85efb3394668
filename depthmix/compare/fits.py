"""Power laws of loss over compute, and how much of it an arm saves.

    L = a C^-b,  by least squares on log L over log C, one point a size: the mean over its seeds
    advantage = C' / C,  where the first arm's law at C' has the loss that the arm's has at C, the largest of the study

The interval is that of the jackknife over sizes: both laws are fitted without each size in turn, so that what they have in common
does not count as uncertainty. It says how much the answer hangs on single sizes, not how it would go on beyond them.
Size by size it is read off between the first arm's own sizes, which no law has to fit; of their mean in logarithms the interval is
Student's, and asks for one factor at all sizes.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from depthmix.compare.interval import half_width, student_t

FEWEST = 3  # sizes: two points always lie on a line
Points = Mapping[str, tuple[float, float]]  # by size: compute, or seconds, and loss


@dataclass(frozen=True)
class PowerLaw:
    """L = a C^-b."""

    a: float
    b: float

    def loss(self, compute: float) -> float:
        """The loss at so much compute."""
        return float(self.a * compute**-self.b)

    def compute(self, loss: float) -> float:
        """What it takes to that loss."""
        return float((self.a / loss) ** (1 / self.b))


@dataclass(frozen=True)
class Advantage:
    """A factor on compute at equal loss, with the ends of its 95% interval."""

    factor: float
    low: float
    high: float


def fit(points: Sequence[tuple[float, float]]) -> PowerLaw:
    """The law through (compute, loss); of one compute alone a constant."""
    x, y = [math.log(c) for c, _ in points], [math.log(loss) for _, loss in points]
    slope, start = statistics.linear_regression(x, y) if len(set(x)) > 1 else (0.0, statistics.fmean(y))
    return PowerLaw(math.exp(start), -slope)


def advantage(first: Points, own: Points) -> tuple[PowerLaw, Advantage] | None:
    """The arm's law and its advantage over the first arm; None for too few sizes.

    None also where a law does not fall, since no compute has a given loss then.
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
    """How much more the first arm needs for the loss that an arm has at a size, by its own losses at the sizes around that loss.

    Between two sizes, and beyond the last, it is a power law through both, so that no law has to fit all sizes. Nothing for too
    few of them, or where a larger one is no better.
    """
    known = sorted(first.values())
    if len(known) < FEWEST or any(later[1] >= before[1] for before, later in itertools.pairwise(known)):
        return {}

    def needed(loss: float) -> float:
        place = next((i for i, (_, other) in enumerate(known) if other <= loss), len(known) - 1)
        return fit(known[max(place - 1, 0) :][:2]).compute(loss)

    return {size: needed(own[size][1]) / own[size][0] for size in first if size in own}


def over_sizes(factors: Sequence[float]) -> Advantage | None:
    """Their mean; None for too few sizes."""
    logs = [math.log(factor) for factor in factors]
    half = half_width(logs) if len(logs) >= FEWEST else None
    if half is None:
        return None
    mean = statistics.fmean(logs)
    return Advantage(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
