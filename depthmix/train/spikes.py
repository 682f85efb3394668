"""Loss spikes: steps at which the training loss leaps far above what the steps before it had.

    loss_t > m + max(LEAST, HIGH · 1.4826 · MAD),   m and MAD: median, and median deviation from it, of the WINDOW steps before

Papers show spikes in figures and define none. This one does not see the trend, nor how noisy small batches are; steps in a row
are one spike.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

WINDOW = 50  # steps
HIGH = 6.0  # standard deviations, if losses were normal
LEAST = 0.1  # nats


def find_spikes(losses: Sequence[float]) -> list[tuple[int, float]]:
    """(step, nats above the median before it) of every spike, at its highest step."""
    found: list[tuple[int, float]] = []
    inside = False
    for step in range(WINDOW, len(losses)):
        before = losses[step - WINDOW : step]
        middle = statistics.median(before)
        deviation = statistics.median(abs(loss - middle) for loss in before)
        above = losses[step] - middle
        if not above <= max(LEAST, HIGH * 1.4826 * deviation):  # a loss that is no number is one, too
            if not inside:
                found.append((step, above))
            elif above > found[-1][1]:
                found[-1] = step, above
            inside = True
        else:
            inside = False
    return found
