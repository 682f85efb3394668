"""Confidence intervals of means over a few seeds: Student's t, exactly."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95
# From this number of seeds on, a difference uses its own spread: t is 2.6, against 2.0 for many degrees of freedom.
OWN_SEEDS = 6


def student_probability(t: float, df: int) -> float:
    """Return P(|T| <= t) for Student's T with a whole number of degrees of freedom, a sum in theta = atan(t / sqrt(df)).

    df odd:  2/pi (theta + sin cos (1 + 2/3 cos^2 + 2·4/(3·5) cos^4 + …)), df even:  sin (1 + 1/2 cos^2 + 1·3/(2·4) cos^4 + …),
    up to cos^(df - 3) and cos^(df - 2).
    """
    theta = math.atan(t / math.sqrt(df))
    sine, cosine = math.sin(theta), math.cos(theta)
    term, total = 1.0, 0.0
    odd = df % 2
    for k in range((df - odd) // 2):
        total += term
        term *= (2 * k + 1 + odd) / (2 * k + 2 + odd) * cosine**2
    return 2 / math.pi * (theta + sine * cosine * total) if odd else sine * total


@functools.cache
def student_t(df: int, confidence: float = CONFIDENCE) -> float:
    """Find the t with P(|T| <= t) = confidence, by bisection over theta."""
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        if student_probability(math.sqrt(df) * math.tan(middle), df) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(df) * math.tan((low + high) / 2)


def half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the 95% interval of the mean; None for one value, which says nothing about chance."""
    if len(values) < 2:
        return None
    return student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
