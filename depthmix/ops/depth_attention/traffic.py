"""What a stack of reads moves between memory and the kernels, in units: one activation tensor read or written once.

What later reads pay for is counted where it happens: the bank of a group with its first site, the gradient of a source with the
site that was the first to see it. `tests/mixers/test_traffic.py` counts what the kernels touch.
"""

from collections.abc import Sequence
from typing import NamedTuple

from depthmix.ops.depth_attention.ahead import FAR_SOURCES, KNOWN_WAYS
from depthmix.ops.depth_attention.source_major import AT_ONCE, FEWEST_READERS, is_pair

GROUP, PAIR = 4, 2  # as kernels/tiling.py and kernels/source_backward.py have them, which import triton
WIDE = 2  # units of a tensor in fp32


class ReadOf(NamedTuple):
    """One read of a stack, as far as its traffic goes; the last is finish's."""

    n: int  # sources, the newest included
    ways: int
    adds: bool  # the newest source is added up here
    lasts: bool  # later reads see the newest source too
    norm: bool = True

    @property
    def pair(self) -> bool:
        """Whether both of its sources have their gradients at once."""
        return is_pair(self.n, self.ways, self.lasts)


def forward_units(reads: Sequence[ReadOf], tiled: bool) -> list[int]:
    """Units of every read; tiled: read s has s older sources, which groups of sites look at together."""
    known = max(r.ways for r in reads) >= KNOWN_WAYS  # logits of finished sources, worked out once
    found, scored, bank = [], 0, range(0)
    for s, r in enumerate(reads):
        olds, units = r.n - 1, 0
        if known and not r.pair:
            units, scored = olds - scored, olds
        elif tiled and s % GROUP == 0 and FAR_SOURCES <= s <= len(reads) - 2:
            bank = range(s, min(s + GROUP, len(reads)))
            units, scored = (olds - scored) + olds + WIDE * len(bank), olds
        units += r.n if s not in bank else r.n - bank[0] + WIDE
        found.append(units + 2 * r.adds + r.ways * (1 + (r.norm and not r.pair)))
    return found


def backward_units(reads: Sequence[ReadOf]) -> list[int]:
    """Units of every read's backward."""
    found: list[int] = []
    before = 0  # ways of later reads, each of which left its gradient with every lasting source
    done, part = (
        0,
        False,
    )  # of them those that the next lasting source was paired for, and that it has a part of its gradient
    summands = 0  # gradients of e that reads of two sources left
    for s in reversed(range(len(reads))):
        r = reads[s]
        of_next = s + 1 < len(reads) and reads[s + 1].adds  # the gradient that the sum to come hands down
        if r.pair:
            summands += 1
            found.append(r.ways + of_next + 4)  # dy; both sources and their gradients
            continue
        left = before - done if r.lasts else 0
        at_once = r.ways <= AT_ONCE and not left
        units = 2 * r.ways + 2 + of_next + WIDE * (part and r.lasts)  # dy and o, the source and its gradient
        units += r.ways * (r.norm and (r.n > 1 or not at_once))  # do
        paired = False
        if not at_once:
            readers = left + r.ways
            paired = r.lasts and not part and r.n % PAIR == 0 and readers >= FEWEST_READERS
            units += (
                readers + 1 + paired * (2 + WIDE)
            )  # every do, the source again for du; the older one twice, its part
        if s == 0:  # added up in fp32, but one by itself
            units += summands + 2 * WIDE * (summands > 1)
        before += r.ways
        if r.lasts:
            done, part = (before, True) if paired else (0, False)
        found.append(units)
    return found[::-1]
