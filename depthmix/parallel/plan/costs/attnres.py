"""Costs of Attention Residuals, whose reads attend over depth.

Work for later reads counts where it happens: the mixtures of a group with its first site, the gradient of a source with the site
that was the first to see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from depthmix.ops.depth_attention.precomputed_logits import KNOWN_WAYS, MIN_SOURCES
from depthmix.ops.depth_attention.source_order import MAX_FUSED_WAYS, MIN_SHARED_READERS, is_pair
from depthmix.parallel.plan.costs.base import NORM, Costs, Published, StateSizes, Traffic, costs_for

# Blocks in which the paper's table schedules a Full stack.
PUBLISHED_BLOCKS = 8
# Copies of the values in kernels/tiling.py and kernels/source_backward.py, which import triton.
GROUP, PAIR = 4, 2
# Units of a tensor in fp32.
WIDE = 2


class ReadShape(NamedTuple):
    """Shape of one read of a stack, as far as its traffic depends on it. The last read is finish's."""

    n: int  # sources, the newest included
    ways: int
    adds: bool  # the newest source is added up here
    lasts: bool  # later reads see the newest source too
    norm: bool = True

    @property
    def pair(self) -> bool:
        """Return whether the read computes the gradients of both of its sources at once."""
        return is_pair(self.n, self.ways, self.lasts)


def forward_units(reads: Sequence[ReadShape], tiled: bool) -> list[int]:
    """Return the units of every read. tiled: read s has s older sources, which groups of sites read together."""
    # Logits of finished sources are computed once.
    precomputes_logits = max(r.ways for r in reads) >= KNOWN_WAYS
    units_by_read, scored, bank = [], 0, range(0)
    for s, r in enumerate(reads):
        n_older, units = r.n - 1, 0
        if precomputes_logits and not r.pair:
            units, scored = n_older - scored, n_older
        elif tiled and s % GROUP == 0 and MIN_SOURCES <= s <= len(reads) - 2:
            bank = range(s, min(s + GROUP, len(reads)))
            units, scored = (n_older - scored) + n_older + WIDE * len(bank), n_older
        units += r.n if s not in bank else r.n - bank[0] + WIDE
        units_by_read.append(units + 2 * r.adds + r.ways * (1 + (r.norm and not r.pair)))
    return units_by_read


def backward_units(reads: Sequence[ReadShape]) -> list[int]:
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
        # Each do.
        units += r.ways * (r.norm and (r.n > 1 or not fused))
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


@costs_for("attnres")
class AttnResCosts(Costs):
    def _sources(self, site: int) -> int:
        """Count the sources that a site (or finish) reads."""
        others = -(-site // self.mixer.block_size)
        return 1 + (others if self.mixer.window is None else min(others, self.mixer.window))

    def _reads(self, norm: bool) -> list[ReadShape]:
        """Describe the reads of all sites. With `norm`, their kernels also apply the norms that follow."""
        mixer, size = self.mixer, self.mixer.block_size
        return [
            ReadShape(self._sources(s), mixer.ways(s), s % size != 1 and size > 1 and s > 0, s % size == 0, norm=norm)
            for s in range(mixer.n_sites)
        ]

    def traffic(self) -> list[Traffic]:
        mixer = self.mixer
        size, end = mixer.block_size, mixer.n_sites
        tiled = size == 1 and mixer.n_ways == 1 and mixer.window is None
        if mixer.routing == "add":
            return self._traffic_beside_a_stream(tiled)
        reads = self._reads(norm=True)
        reads.append(ReadShape(self._sources(end), 1, end % size != 1 and size > 1, False, norm=False))
        units = zip(forward_units(reads, tiled), backward_units(reads), strict=True)
        by_site = [Traffic(f, b, 1 + r.ways * (not r.pair)) for r, (f, b) in zip(reads, units, strict=True)]
        last = by_site[-1]
        by_site[-1] = Traffic(last.forward + NORM[0], last.backward + NORM[1], 2)
        return by_site

    def _traffic_beside_a_stream(self, tiled: bool) -> list[Traffic]:
        """Count for routing="add": outputs and mixtures are added to a plain stream, and norms are separate kernels."""
        by_site, reads = [], self._reads(norm=False)
        for s, (r, f, b) in enumerate(zip(reads, forward_units(reads, tiled), backward_units(reads), strict=True)):
            sums = 3 * (1 + r.ways * (s > 0))
            by_site.append(Traffic(f + sums + NORM[0] * r.ways, b + sums + NORM[1] * r.ways, 2 + r.ways))
        return [*by_site, Traffic(*NORM, 1)]

    def state_tensors(self) -> list[StateSizes]:
        mixer = self.mixer
        # The embedding and the sums of finished blocks have the labels 0, 1, …
        size, states = mixer.block_size, [{0: 1.0}]
        for site in range(1, mixer.n_sites + 1):
            newest = -(-site // size)
            first = 1 if mixer.window is None else max(1, newest + 1 - mixer.window)
            # An unfinished sum has a label of its own at every site.
            changing = [newest if site % size == 0 else -2 * site]
            changing += [-2 * site - 1] * (mixer.routing == "add")
            states.append(dict.fromkeys((0, *range(first, newest), *changing), 1.0))
        return states

    def published(self) -> Published:
        """Count the two phases of the paper's inference, averaged over the sites."""
        sites, full = self.mixer.n_sites, self.mixer.block_size == 1
        blocks = min(sites, PUBLISHED_BLOCKS) if full else -(-sites // self.mixer.block_size)
        size, read = -(-sites // blocks), 0
        for begin in range(0, sites, size):
            n_block_sites = min(size, sites - begin)
            if full:
                # Keys and values of everything before the block, then of the block's own sources so far.
                read += 2 * begin + sum(2 * i for i in range(n_block_sites))
            else:
                # All block sums once for all sites of the block, then a mixture, the partial sum and an output for each site.
                read += blocks + 3 * n_block_sites
        # Each phase writes a mixture.
        return Published(read / sites, 2)
