"""What pipeline stages send each other of the depth state, and what a prefill keeps of it.

Naive: every hop carries the whole state. Cached: a rank keeps what it received for an earlier stage of its own, and a hop
carries only what it lacks (arXiv 2603.15031, section 4.1). Gradients go the same way back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from depthmix.parallel.plan.costs.base import StateSizes

States = Sequence[StateSizes]


def cuts(n_blocks: int, chunks: int, sites_per_block: int = 2) -> list[int]:
    """The first site of every stage; blocks are shared out evenly, the longer stages first."""
    short, longer = divmod(n_blocks, chunks)
    return [sites_per_block * (short * i + min(i, longer)) for i in range(chunks)]


def lacking(states: States, site: int, has: Iterable[int] = ()) -> float:
    """Count the activations that a rank must receive before `site`, given the states before the sites in `has`."""
    known = {label for s in has for label in states[s]}
    return sum(size for label, size in states[site].items() if label not in known)


def hop_sizes(states: States, starts: Sequence[int], ranks: int, cached: bool) -> list[float]:
    """Activations that every hop carries, into stage 1, 2, …"""
    sizes = []
    for stage in range(1, len(starts)):
        earlier = range(stage % ranks, stage, ranks) if cached else ()
        sizes.append(lacking(states, starts[stage], [starts[i] for i in earlier]))
    return sizes


def lasting(states: States) -> float:
    """The most activations of a state that stay as they are until the end: what a prefill keeps for all of its tokens."""
    return max(sum(n for label, n in s.items() if label in states[-1]) for s in states[:-1])


def prefill_bytes(states: States, dim: int, tokens: int, shards: int = 1, chunk: int | None = None) -> float:
    """Bytes of depth state in bf16 per GPU, the sequence shared by `shards` of them and read `chunk` tokens at a time."""
    return 2.0 * lasting(states) * dim * min(tokens, chunk or tokens) / shards
