"""Costs of Attention Residuals."""

from __future__ import annotations

from depthmix.ops.depth_attention.traffic import ReadOf, backward_units, forward_units
from depthmix.parallel.plan.costs.base import NORM, Costs, Published, StateSizes, Traffic, costs_for

# Blocks in which the paper's table schedules a Full stack.
PUBLISHED_BLOCKS = 8


@costs_for("attnres")
class AttnResCosts(Costs):
    def _sources(self, site: int) -> int:
        """Count the sources that a site (or finish) reads."""
        others = -(-site // self.mixer.block_size)
        return 1 + (others if self.mixer.window is None else min(others, self.mixer.window))

    def _reads(self, norm: bool) -> list[ReadOf]:
        """Describe the reads of all sites. With `norm`, their kernels also apply the norms that follow."""
        mixer, size = self.mixer, self.mixer.block_size
        return [
            ReadOf(self._sources(s), mixer.ways(s), s % size != 1 and size > 1 and s > 0, s % size == 0, norm=norm)
            for s in range(mixer.n_sites)
        ]

    def traffic(self) -> list[Traffic]:
        mixer = self.mixer
        size, end = mixer.block_size, mixer.n_sites
        tiled = size == 1 and mixer.n_ways == 1 and mixer.window is None
        if mixer.routing == "add":
            return self._traffic_beside_a_stream(tiled)
        reads = self._reads(norm=True)
        reads.append(ReadOf(self._sources(end), 1, end % size != 1 and size > 1, False, norm=False))
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
