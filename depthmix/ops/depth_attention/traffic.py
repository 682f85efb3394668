"""Memory traffic of a stack of attention reads, in units: one activation tensor read or written once.

Work for later reads counts where it happens: the mixtures of a group with its first site, the gradient of a source with the site
that was the first to see it. `tests/mixers/test_traffic.py` counts what the kernels touch.
"""

from collections.abc import Sequence
from typing import NamedTuple

from depthmix.ops.depth_attention.precomputed_logits import KNOWN_WAYS, MIN_SOURCES
from depthmix.ops.depth_attention.source_major import MAX_FUSED_WAYS, MIN_SHARED_READERS, is_pair

# Copies of the values in kernels/tiling.py and kernels/source_backward.py, which import triton.
GROUP, PAIR = 4, 2
# Units of a tensor in fp32.
WIDE = 2


class ReadOf(NamedTuple):
    """Shape of one read of a stack, as far as its traffic depends on it; the last is finish's."""

    n: int  # sources, the newest included
    ways: int
    adds: bool  # the newest source is added up here
    lasts: bool  # later reads see the newest source too
    norm: bool = True

    @property
    def pair(self) -> bool:
        """Return whether the read computes the gradients of both of its sources at once."""
        return is_pair(self.n, self.ways, self.lasts)


def forward_units(reads: Sequence[ReadOf], tiled: bool) -> list[int]:
    """Return the units of every read. tiled: read s has s older sources, which groups of sites read together."""
    # Logits of finished sources are computed once.
    known = max(r.ways for r in reads) >= KNOWN_WAYS
    units_by_read, scored, bank = [], 0, range(0)
    for s, r in enumerate(reads):
        olds, units = r.n - 1, 0
        if known and not r.pair:
            units, scored = olds - scored, olds
        elif tiled and s % GROUP == 0 and MIN_SOURCES <= s <= len(reads) - 2:
            bank = range(s, min(s + GROUP, len(reads)))
            units, scored = (olds - scored) + olds + WIDE * len(bank), olds
        units += r.n if s not in bank else r.n - bank[0] + WIDE
        units_by_read.append(units + 2 * r.adds + r.ways * (1 + (r.norm and not r.pair)))
    return units_by_read


def backward_units(reads: Sequence[ReadOf]) -> list[int]:
    """Return the units of every read's backward."""
    units_by_read: list[int] = []
    # Ways of later reads, each of which has posted its gradient to every lasting source.
    before = 0
    # Ways among these that the next lasting source has already processed for this one, which then has a partial gradient.
    done, part = 0, False
    # Gradients of the embedding that reads of two sources have posted.
    summands = 0
    for s in reversed(range(len(reads))):
        r = reads[s]
        # The next read's running sum hands down a gradient.
        of_next = s + 1 < len(reads) and reads[s + 1].adds
        if r.pair:
            summands += 1
            # dy; both sources and their gradients.
            units_by_read.append(r.ways + of_next + 4)
            continue
        unprocessed = before - done if r.lasts else 0
        fused = r.ways <= MAX_FUSED_WAYS and not unprocessed
        # dy and o, the source and its gradient.
        units = 2 * r.ways + 2 + of_next + WIDE * (part and r.lasts)
        units += r.ways * (r.norm and (r.n > 1 or not fused))  # do
        paired = False
        if not fused:
            readers = unprocessed + r.ways
            paired = r.lasts and not part and r.n % PAIR == 0 and readers >= MIN_SHARED_READERS
            # Every do, and the source again for du. If paired, the older source twice and its partial gradient.
            units += readers + 1 + paired * (2 + WIDE)
        # Several summands are added up in fp32; a single one needs no addition.
        if s == 0:
            units += summands + 2 * WIDE * (summands > 1)
        before += r.ways
        if r.lasts:
            done, part = (before, True) if paired else (0, False)
        units_by_read.append(units)
    return units_by_read[::-1]
