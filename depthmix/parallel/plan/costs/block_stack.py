"""Costs of the rules that read weighted sums of a stack with one entry per block: DenseFormer, GRN, DCA, MUDD.

Making an entry and its gradient count with the reader that is the first to see it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from depthmix.ops.depth_sum.source_order import UNFINISHED_BYTES
from depthmix.parallel.plan.costs.base import NORM, Costs, StateSizes, Traffic, costs_for

# Units of a tensor in fp32.
WIDE = 2
# Bytes of a number in bf16.
SIZE = 2
# Weights that are known beforehand.
KNOWN = ("static", "vectors")
# Weights by a network: forward reads the entry; backward reads it twice and writes its gradient.
NETWORK = (1, 3)


class Reader(NamedTuple):
    """A reader of the stack, as far as its traffic depends on it. The last reader is finish."""

    entries: int
    ways: int  # results
    mixtures: int  # weighted sums, of which one may go on without being a result
    norm: bool
    sums: bool  # or the newest entry as it is
    adds: bool  # the newest entry is added up for it
    merges: bool  # and the window's oldest becomes part of a sum
    weights: str  # "static" or "vectors", which are known beforehand, "scores" or "network"


def forward_units(readers: Sequence[Reader]) -> list[int]:
    """Return the units of every reader: the newest entry, then one pass over the stack."""
    units_by_reader = []
    for i, r in enumerate(readers):
        newest = 3 * r.merges + (2 if r.weights in KNOWN else 3) * r.adds
        if r.weights == "scores" and not r.adds:
            newest += 1
        elif r.weights == "network" and r.sums:
            newest += NETWORK[0]
        # The sum is also written before its norm.
        goes_on = i > 0 and r.sums and r.norm
        units_by_reader.append(newest + r.entries + r.ways + goes_on)
    return units_by_reader


def backward_units(readers: Sequence[Reader]) -> list[int]:
    """Return the units of every reader's backward, with the gradient of the entry that it was the first to see."""
    units_by_reader: list[int] = []
    # Ways of the readers after this one.
    later: list[int] = []
    # Ways among these that the next entry has already processed for its older neighbour.
    paired = 0
    for i in reversed(range(len(readers))):
        r = readers[i]
        # The read is a copy of the newest entry.
        if i == 0 or not r.sums:
            units, mixtures = 2 * r.ways + 1, r.ways
        else:
            # The sum that is handed on is one of the results.
            inside = r.norm and r.mixtures == r.ways
            units, mixtures = 3 * r.ways * r.norm + inside + r.mixtures + r.entries, r.mixtures
            units += NETWORK[1] if r.weights == "network" else 0
        shared = sum(later) + mixtures
        units += shared - paired + 1 + WIDE * (paired > 0) + (r.weights == "network" and i > 0)
        units += (i == 0) + (r.weights == "scores") + 3 * r.merges
        # Two kinds of readers, one after the other.
        if i == 0 and later and not paired and r.weights != "static":
            units += 2 * WIDE
        if i % 2 and paired == 0 and shared * SIZE >= UNFINISHED_BYTES:
            units, paired = units + WIDE, shared
        else:
            paired = 0
        later.append(mixtures)
        units_by_reader.append(units)
    return units_by_reader[::-1]


@costs_for("BlockStack")
class BlockStackCosts(Costs):
    """Readers are the blocks, and finish as reader N."""

    def weights_from(self) -> str:
        """Say where weights come from: "static" numbers, "vectors", "scores" of the entries or a "network"."""
        readers = range(1, self.mixer.n_blocks + 1)
        weights = next((w for reader in readers if (w := self.mixer.reader_weights(reader)) is not None), None)
        if weights is None or weights.is_static:
            return "static"
        return "network" if weights.projection is None else "scores"

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
        readers = [self._reader(i, i > 0 and has_parts[i - 1]) for i in range(mixer.n_blocks + 1)]
        units = zip(readers, forward_units(readers), backward_units(readers), strict=True)
        by_site: list[Traffic] = []
        for i, (reader, forward, backward) in enumerate(units):
            if i == mixer.n_blocks:
                return [*by_site, Traffic(forward + NORM[0], backward + NORM[1], 2 + reader.merges)]
            # If g is not kept, its sum with the next output is.
            keeps_g = i > 0 and not (mixer.accumulates and reader.mixtures > reader.ways)
            by_site.append(Traffic(forward, backward, 1 + keeps_g + reader.merges))
            # g and the outputs so far, their sum and its norm
            inner_site = Traffic(4, 4, 1) if mixer.accumulates else Traffic(3, 5, 1)
            by_site += [inner_site] * (blocks[i] - 1)
        return by_site

    def _reader(self, i: int, adds: bool) -> Reader:
        mixer, sums = self.mixer, self.reads_sums(i)
        ways = mixer.reader_ways[i]
        mixtures = ways + (ways > 1 and mixer.residual_way >= ways) if sums else ways
        # Two entries become one.
        merges = mixer.window is not None and i > mixer.window + 1
        norm, entries = i < mixer.n_blocks, self.entries(i) if sums else 1
        return Reader(entries, ways, mixtures, norm, sums, adds, merges, self.weights_from())

    def state_tensors(self) -> list[StateSizes]:
        """Count the state's activations by following the writes of a pass, with labels for tensors."""
        mixer = self.mixer
        labels = itertools.count()
        stack: tuple[int, ...] = (next(labels),)
        g: list[int] = []
        # Sum of the block's outputs so far.
        outputs: list[int] = []
        states = [dict.fromkeys(stack, 1.0)]
        for site in range(mixer.n_sites):
            block, begins, ends = mixer.layout.block[site], mixer.layout.begins[site], mixer.layout.ends[site]
            y = next(labels)
            if begins:
                g = [next(labels) if self.reads_sums(block) else stack[-1]]
            if mixer.accumulates:
                g = [next(labels)]
            else:
                outputs = [next(labels)] if outputs else [y]
            if ends:
                entry = g if mixer.accumulates else outputs
                stack, g, outputs = (*self._merged(stack, next(labels)), *entry), [], []
            states.append(dict.fromkeys((*stack, *g, *outputs), 1.0))
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
