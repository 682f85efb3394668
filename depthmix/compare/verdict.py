"""What a table says, in sentences that claim no more than its seeds allow."""

from __future__ import annotations

import math
from collections.abc import Sequence

from depthmix.compare.interval import CONFIDENCE, student_t
from depthmix.compare.rows import Row

FINEST = 4  # decimals of a loss; what is smaller nobody should care about
SURE = f"{CONFIDENCE:.0%} interval"


def verdict(rows: Sequence[Row], pooled: bool = False) -> list[str]:
    """A sentence for every arm but the first: a difference is one if the paired interval leaves zero out.

    pooled: intervals of few seeds have the spread of all arms, not of their own.
    """
    return [_sentence(row, row.difference, pooled) for row in rows if row.difference is not None]


def _sentence(row: Row, difference: float, pooled: bool) -> str:
    if max(abs(difference), row.difference_spread or 0) < 10**-FINEST / 2:
        seeds = "one seed" if row.paired == 1 else f"each of {row.paired} seeds"
        return f"{row.arm}: the same loss as {row.baseline} to {FINEST} decimals with {seeds}."
    half = row.difference_interval
    if half is None:
        size = f"{_rounded(0.01, difference)[0]} nats {_side(difference)} {row.baseline}"
        return f"{row.arm}: {size} with one seed, which says nothing of chance; run three or more."
    near, far = sorted((difference - half, difference + half), key=abs)
    size, from_, to = _rounded(half, difference, near, far)
    begin = f"{row.arm}: {size} nats {_side(difference)} {row.baseline}"
    over = f"over {row.paired} seeds" if row.paired > 1 else "with one seed, by the spread of the others"
    wide = f", wide since t = {student_t(1):.1f} for two" if row.paired == 2 and not pooled else ""
    if abs(difference) > half:
        return f"{begin} ({SURE} {from_} to {to} {over}{wide})."
    reach = f"reaches from {to} {_side(far)} to {from_} {_side(near)}"
    return f"{begin}, but the {SURE} {over}{wide}{',' * bool(wide or row.paired == 1)} {reach}: no difference shown."


def _side(difference: float) -> str:
    return "below" if difference < 0 else "above"


def _rounded(uncertainty: float, *values: float) -> list[str]:
    """The values to two digits of what is uncertain, finer where one of them would read as nothing."""
    decimals = 2 if uncertainty <= 0 else min(max(1 - math.floor(math.log10(uncertainty)), 2), FINEST)
    while decimals < FINEST and any(round(abs(value), decimals) == 0 for value in values):
        decimals += 1
    return [f"{abs(value):.{decimals}f}" for value in values]


def footnotes(rows: Sequence[Row]) -> list[str]:
    """What the columns mean."""
    first = rows[0].baseline if rows else "the first arm"
    notes = [
        f"“to reach”: what an arm needs to come down to {first}'s final validation loss, as a fraction of what {first} needs; below 1 is better.",
        "“ratio”: step time against the first arm's; “time”: steps at the median step time, without compilation, evaluation and pauses.",
    ]
    if any(row.val_loss_spread is not None for row in rows):
        notes.insert(
            0,
            f"“±”: half the range over seeds; differences are taken seed by seed. The {SURE} is Student's, of the mean difference, for one arm at a time.",
        )
    return notes
