"""Memory traffic of a stack of weighted sums, in units: one activation tensor read or written once.

Making an entry and its gradient count with the reader that is the first to see it. `tests/mixers/test_traffic.py` counts what
the kernels touch.
"""

from collections.abc import Sequence
from typing import NamedTuple

from depthmix.ops.depth_sum.source_order import UNFINISHED_BYTES

# Units of a tensor in fp32.
WIDE = 2
# Bytes of a number.
SIZE = 2
KNOWN = ("static", "vectors")
# Weights by a network: forward reads the entry; backward reads it twice and writes its gradient.
NETWORK = (1, 3)


class ReadShape(NamedTuple):
    """Shape of a read, as far as its traffic depends on it."""

    ways: int  # results
    weighs: int  # mixtures, of which one may go on without being a result
    norm: bool
    sums: bool  # or the newest entry as it is
    adds: bool  # the newest entry is added up for it
    full: bool  # and the window's oldest becomes part of a sum


class ReadOf(NamedTuple):
    """Reader of the stack; the last is finish."""

    n: int  # entries
    shape: ReadShape
    kind: str  # of its weights: static or vectors, which are known before, scores or network


def forward_units(reads: Sequence[ReadOf]) -> list[int]:
    """Return the units of every reader: the newest entry, then one pass over the stack."""
    units_by_read = []
    for i, (n, (ways, _, norm, sums, adds, full), kind) in enumerate(reads):
        made = 3 * full + (2 if kind in KNOWN else 3) * adds
        if kind == "scores" and not adds:
            made += 1
        elif kind == "network" and sums:
            made += NETWORK[0]
        # The sum is also written before its norm.
        goes_on = i > 0 and sums and norm
        units_by_read.append(made + n + ways + goes_on)
    return units_by_read


def backward_units(reads: Sequence[ReadOf]) -> list[int]:
    """Return the units of every reader's backward, with the gradient of the entry that it was the first to see."""
    units_by_read: list[int] = []
    # Ways of the readers after this one.
    later: list[int] = []
    # Ways among these that the next entry has already processed for its older neighbour.
    paired = 0
    for i in reversed(range(len(reads))):
        n, (ways, weighs, norm, sums, _, full), kind = reads[i]
        # The read is a copy of the newest entry.
        if i == 0 or not sums:
            units, own = 2 * ways + 1, ways
        else:
            # The sum that is handed on is one of the results.
            inside = norm and weighs == ways
            units, own = 3 * ways * norm + inside + weighs + n, weighs
            units += NETWORK[1] if kind == "network" else 0
        readers = sum(later) + own - paired
        units += (
            readers + 1 + WIDE * (paired > 0) + (kind == "network" and i > 0) + (i == 0) + (kind == "scores") + 3 * full
        )
        # Two kinds of readers, one after the other.
        if i == 0 and later and not paired and kind != "static":
            units += 2 * WIDE
        shared = sum(later) + own
        if i % 2 and paired == 0 and shared * SIZE >= UNFINISHED_BYTES:
            units, paired = units + WIDE, shared
        else:
            paired = 0
        later.append(own)
        units_by_read.append(units)
    return units_by_read[::-1]
