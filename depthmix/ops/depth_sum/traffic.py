"""What a stack of weighted sums moves between memory and the kernels, in units: one activation tensor read or written once.

An entry's making and its gradient count with the reader that is the first to see it. `tests/mixers/test_traffic.py` counts what
the kernels touch.
"""

from collections.abc import Sequence
from typing import NamedTuple

from depthmix.ops.depth_sum.source_order import UNFINISHED

WIDE = 2  # units of a tensor in fp32
SIZE = 2  # bytes of a number
KNOWN = ("static", "vectors")
NETWORK = (1, 3)  # weights by a network: the entry read; read twice and its gradient written


class ReadShape(NamedTuple):
    """What a reader makes of the stack."""

    ways: int  # results
    weighs: int  # mixtures, of which one may go on without being a result
    norm: bool
    sums: bool  # or the newest entry as it is
    adds: bool  # the newest entry is added up for it
    full: bool  # and the window's oldest becomes part of a sum


class ReadOf(NamedTuple):
    """A reader of the stack; the last is finish."""

    n: int  # entries
    shape: ReadShape
    kind: str  # of its weights: static or vectors, which are known before, scores or network


def forward_units(reads: Sequence[ReadOf]) -> list[int]:
    """Units of every reader: the newest entry, then one pass over the stack."""
    found = []
    for i, (n, (ways, _, norm, sums, adds, full), kind) in enumerate(reads):
        made = 3 * full + (2 if kind in KNOWN else 3) * adds
        if kind == "scores" and not adds:
            made += 1
        elif kind == "network" and sums:
            made += NETWORK[0]
        goes_on = i > 0 and sums and norm  # as it is before its norm
        found.append(made + n + ways + goes_on)
    return found


def backward_units(reads: Sequence[ReadOf]) -> list[int]:
    """Units of every reader's backward, with the gradient of the entry that it was the first to see."""
    found: list[int] = []
    later: list[int] = []  # ways of the readers after this one
    paired = 0  # of them those that the next entry's gradient has been formed for, with its neighbour's
    for i in reversed(range(len(reads))):
        n, (ways, weighs, norm, sums, _, full), kind = reads[i]
        if i == 0 or not sums:  # a copy of the newest entry
            units, own = 2 * ways + 1, ways
        else:
            inside = norm and weighs == ways  # what goes on is one of the results
            units, own = 3 * ways * norm + inside + weighs + n, weighs
            units += NETWORK[1] if kind == "network" else 0
        readers = sum(later) + own - paired
        units += (
            readers + 1 + WIDE * (paired > 0) + (kind == "network" and i > 0) + (i == 0) + (kind == "scores") + 3 * full
        )
        if i == 0 and later and not paired and kind != "static":  # two kinds of readers, one after the other
            units += 2 * WIDE
        shared = sum(later) + own
        if i % 2 and paired == 0 and shared * SIZE >= UNFINISHED:
            units, paired = units + WIDE, shared
        else:
            paired = 0
        later.append(own)
        found.append(units)
    return found[::-1]
