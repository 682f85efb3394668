"""The number of paired seeds that a difference needs: the power of Student's paired test, exactly.

    T = (Z + δ) / S,   δ = difference √n / sd,   S² = χ²(ν) / ν,   ν = n - 1, or more
    where the seeds of other arms also estimate the sd, as they do below OWN_SEEDS
    power = P(|T| > t) = E[Φ(δ - t S) + Φ(-δ - t S)],   t of the 95% interval

sd is the standard deviation of the differences taken seed by seed.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left

from depthmix.compare.interval import OWN_SEEDS, student_t

POWER = 0.8
# Nobody runs more seeds.
MOST = 200
# Pieces of the integral over S.
PIECES = 200


def power(difference: float, sd: float, seeds: int, freedom: int | None = None) -> float:
    """Return the chance that the 95% interval over `seeds` paired seeds excludes zero if the difference is real."""
    df = seeds - 1 if seeds >= OWN_SEEDS else max(seeds - 1, freedom or 0)
    if df < 1 or seeds < 1:
        return 0.0
    if sd <= 0:
        return 1.0 if difference else 0.05
    # Φ(x) = (1 + erf(x / √2)) / 2
    delta, erf = abs(difference) * math.sqrt(seeds) / sd / math.sqrt(2), math.erf
    return min(1.0, sum(weight * (2 + erf(delta - edge) + erf(-delta - edge)) / 2 for edge, weight in _pieces(df)))


@functools.cache
def _pieces(df: int) -> list[tuple[float, float]]:
    """Return t S / √2 and the probability of each piece of the integral over S.

    Bisections ask for the same pieces some forty times.
    """
    # The density of S is 2 (ν/2)^(ν/2) / Γ(ν/2) s^(ν-1) exp(-ν s²/2); beyond 1 + 8/√ν it is negligible.
    width, t = (1 + 8 / math.sqrt(df)) / PIECES, student_t(df)
    constant = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
    centres = [(i + 0.5) * width for i in range(PIECES)]
    return [
        (t * s / math.sqrt(2), width * math.exp(constant + (df - 1) * math.log(s) - df * s * s / 2)) for s in centres
    ]


@functools.lru_cache(1000)
def seeds_needed(difference: float, sd: float, freedom: int | None = None) -> int | None:
    """Return the fewest paired seeds that show the difference with the chance POWER; None if more than anyone runs."""

    def is_enough(seeds: int) -> bool:
        return power(difference, sd, seeds, freedom) >= POWER

    if few := next(filter(is_enough, range(1, OWN_SEEDS)), None):
        return few
    # From OWN_SEEDS on, power grows with the seeds.
    most = OWN_SEEDS + bisect_left(range(OWN_SEEDS, MOST + 1), True, key=is_enough)
    return most if most <= MOST else None


def detectable(sd: float, seeds: int, freedom: int | None = None) -> float | None:
    """Return the smallest difference that `seeds` paired seeds show with the chance POWER; None for one seed alone."""
    if seeds < 2 and not freedom:
        return None
    return sd * _detectable_per_sd(seeds, freedom)


@functools.lru_cache(1000)
def _detectable_per_sd(seeds: int, freedom: int | None) -> float:
    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle, 1.0, seeds, freedom) >= POWER else (middle, high)
    return high
