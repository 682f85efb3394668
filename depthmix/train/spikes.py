"""Find loss spikes: steps at which the training loss leaps far above the steps before.

    loss_t > m + max(LEAST, HIGH · 1.4826 · MAD),   m and MAD: median and median absolute deviation of the WINDOW steps before

Papers show spikes in figures without defining them. This definition ignores the trend and the noise of small batches.
Consecutive steps count as one spike.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

# Preceding steps that a step is compared with.
WINDOW = 50
# Minimum height in standard deviations, estimated from the MAD for normally distributed losses.
HIGH = 6.0
# Minimum height in nats.
LEAST = 0.1


def find_spikes(losses: Sequence[float]) -> list[tuple[int, float]]:
    """Return (step, nats above the preceding median) of every spike, at its highest step."""
    spikes: list[tuple[int, float]] = []
    inside = False
    for step in range(WINDOW, len(losses)):
        before = losses[step - WINDOW : step]
        middle = statistics.median(before)
        deviation = statistics.median(abs(loss - middle) for loss in before)
        above = losses[step] - middle
        if not above <= max(LEAST, HIGH * 1.4826 * deviation):  # NaN counts as a spike
            if not inside:
                spikes.append((step, above))
            elif above > spikes[-1][1]:
                spikes[-1] = step, above
            inside = True
        else:
            inside = False
    return spikes
