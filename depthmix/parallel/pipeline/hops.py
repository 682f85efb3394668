"""Tensors that each hop of a pipeline carries, by their labels (parallel/packing.py).

Rank r of P holds the stages r, r + P, r + 2P, …. The hop into stage j carries the state before it, less what its rank has:

    cache="none"       nothing: every hop carries the whole state
    cache="received"   what came with the hops into earlier stages of the rank (arXiv 2603.15031, section 4.1)
    cache="all"        and what these stages made

With a state of j units before stage j and C = P V stages, as the paper counts:

    none: C (C - 1) / 2;    received: P (P - 1) / 2 + (V - 1) P²;    all: P (P - 1) / 2 + (V - 1) P (P - 1)

so that P = 4, V = 2 sends 28, 22 or 18 units. Gradients go back along the hops that brought their tensors, as many bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from depthmix.parallel.packing import Form

Cache = Literal["none", "received", "all"]
CACHES = ("none", "received", "all")


class Hop(NamedTuple):
    """Transfer into a stage."""

    form: Form  # of the state that the stage begins with
    carries: tuple[int, ...]  # labels of what travels; the rest of the state is there

    def bytes(self, tokens: int) -> int:
        """Count the bytes of the forward hop for `tokens` tokens. The backward hop has as many."""
        sizes = (self.form.numbers(label) for label in self.carries)
        return sum((each * tokens + once) * width for each, once, width in sizes)

    def activations(self, dim: int) -> float:
        """Return the size of the state before the stage, sent or not, in units of dim numbers per token."""
        return sum(self.form.numbers(label)[0] for label in set(self.form.labels)) / dim


def plan_hops(forms: Sequence[Form], ranks: int, cache: Cache) -> list[Hop]:
    """Plan the hops into the stages 0, 1, …, given the states before them. The first carries nothing."""
    hops = []
    for stage, form in enumerate(forms):
        present: set[int] = set(form.labels) if stage == 0 else set()
        if cache != "none":
            for earlier in range(stage % ranks, stage, ranks):
                present.update(forms[earlier].labels)
                if cache == "all":
                    present.update(forms[earlier + 1].labels)
        hops.append(Hop(form, tuple(label for label in dict.fromkeys(form.labels) if label not in present)))
    return hops
