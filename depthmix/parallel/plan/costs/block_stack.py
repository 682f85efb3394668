"""Costs of the rules that read weighted sums of a stack with one entry per block: DenseFormer, GRN, DCA, MUDD."""

from __future__ import annotations

import itertools
from typing import Any

from depthmix.ops.depth_sum.traffic import ReadOf, ReadShape, backward_units, forward_units
from depthmix.parallel.plan.costs.base import NORM, Costs, StateSizes, Traffic, costs_for


@costs_for("BlockStack")
class BlockStackCosts(Costs):
    """Readers are the blocks, and finish as reader N."""

    def weights_from(self) -> str:
        """Say where weights come from: "static" numbers, "vectors", "scores" of the entries or a "network"."""
        return "static" if self.mixer.static else "scores" if self.mixer.scores else "network"

    def entries(self, reader: int) -> int:
        """Count the entries that a reader weighs."""
        window = self.mixer.window
        return reader + 1 if window is None else min(reader + 1, window + 2)

    def reads_sums(self, reader: int) -> bool:
        """Tell whether a reader takes weighted sums. Otherwise it takes the newest entry as it is."""
        return reader > 0

    def traffic(self) -> list[Traffic]:
        mixer = self.mixer
        blocks = [len(names) for names in mixer.layout.blocks]
        # Blocks whose entry has two parts, which its first reader adds up.
        has_parts = [n > 1 or mixer.accumulates for n in blocks]
        reads = [self._read_of(i, i > 0 and has_parts[i - 1]) for i in range(mixer.n_blocks + 1)]
        units = zip(forward_units(reads), backward_units(reads), strict=True)
        by_site: list[Traffic] = []
        for i, (forward, backward) in enumerate(units):
            if i == mixer.n_blocks:
                return [*by_site, Traffic(forward + NORM[0], backward + NORM[1], 2 + reads[i].shape.full)]
            ways, weighs, *_, full = reads[i].shape
            # If g is not kept, its sum with the next output is.
            keeps_g = i > 0 and not (mixer.accumulates and weighs > ways)
            by_site.append(Traffic(forward, backward, 1 + keeps_g + full))
            # g and the outputs so far, their sum and its norm
            inner_site = Traffic(4, 4, 1) if mixer.accumulates else Traffic(3, 5, 1)
            by_site += [inner_site] * (blocks[i] - 1)
        return by_site

    def _read_of(self, reader: int, adds: bool) -> ReadOf:
        mixer, sums = self.mixer, self.reads_sums(reader)
        ways = mixer.reader_ways[reader]
        weighs = ways + (ways > 1 and mixer.goes_on >= ways)
        # Two entries become one.
        merges = mixer.window is not None and reader > mixer.window + 1
        last = reader == mixer.n_blocks
        shape = ReadShape(ways, weighs if sums else ways, norm=not last, sums=sums, adds=adds, full=merges)
        return ReadOf(self.entries(reader) if sums else 1, shape, self.weights_from())

    def state_tensors(self) -> list[StateSizes]:
        """Count the state's activations by following the writes of a pass, with labels for tensors."""
        mixer = self.mixer
        labels = itertools.count()
        stack: tuple[int, ...] = (next(labels),)
        pending: list[int] = []
        g: list[int] = []
        outputs: list[int] = []  # the sum of the block's outputs so far
        before: list[int]
        states = [dict.fromkeys(stack, 1.0)]
        for site in range(mixer.n_sites):
            block, begins, ends = mixer.layout.block[site], mixer.layout.begins[site], mixer.layout.ends[site]
            if begins:
                if pending:
                    stack = (*self._merged(stack, next(labels)), *pending)
                g, before = [next(labels) if self.reads_sums(block) else stack[-1]], []
            else:
                before = [next(labels)] if mixer.accumulates else outputs
            y = [next(labels)]
            # With sums completed, a block has one entry, which is a new tensor if it is a sum.
            if ends:
                g, outputs, pending = [], [], [next(labels)] if before or mixer.accumulates else y
            elif begins:
                outputs, pending = y, []
            else:
                g, outputs = (before, y) if mixer.accumulates else (g, [next(labels)])
            states.append(dict.fromkeys((*stack, *pending, *g, *outputs), 1.0))
        return states

    def _merged(self, stack: tuple[int, ...], label: int) -> tuple[int, ...]:
        """Return the stack with its two oldest deltas added up, where its window is full."""
        window: Any = self.mixer.window
        if window is None or len(stack) < window + 2:
            return stack
        return (stack[0], label, *stack[3:])


@costs_for("DeltaStack")
class DeltaStackCosts(BlockStackCosts):
    """GRN and DCA."""

    def weights_from(self) -> str:
        return "vectors" if self.mixer.version == 2 else super().weights_from()


@costs_for("denseformer")
class DenseFormerCosts(BlockStackCosts):
    def entries(self, reader: int) -> int:
        return reader // self.mixer.dilation + 1

    def reads_sums(self, reader: int) -> bool:
        return reader > 0 and reader % self.mixer.period == 0
