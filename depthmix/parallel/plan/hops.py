"""Count the depth state that pipeline stages send each other, and the part of it that a prefill keeps.

Naive: every hop carries the whole state. Cached: a rank keeps what it received for an earlier stage of its own, and a hop
carries only what the rank lacks (arXiv 2603.15031, section 4.1). Gradients go the same way back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from depthmix.parallel.plan.costs.base import StateSizes

States = Sequence[StateSizes]


def cuts(n_blocks: int, chunks: int, sites_per_block: int = 2) -> list[int]:
    """Return the first site of every stage. Blocks are shared out evenly; the first stages get those that are left over."""
    short, longer = divmod(n_blocks, chunks)
    return [sites_per_block * (short * i + min(i, longer)) for i in range(chunks)]


def lacking(states: States, site: int, has: Iterable[int] = ()) -> float:
    """Count the activations that a rank must receive before `site`, given the states before the sites in `has`."""
    known = {label for s in has for label in states[s]}
    return sum(size for label, size in states[site].items() if label not in known)


def hop_sizes(states: States, starts: Sequence[int], ranks: int, cached: bool) -> list[float]:
    """Count the activations that every hop carries, into stage 1, 2, …

    Args:
        states: of the rule, before every site.
        starts: first site of every stage.
        ranks: of the pipeline; stage i runs on rank i % ranks.
        cached: ranks keep what they received for their earlier stages.
    """
    sizes = []
    for stage in range(1, len(starts)):
        earlier = range(stage % ranks, stage, ranks) if cached else ()
        sizes.append(lacking(states, starts[stage], [starts[i] for i in earlier]))
    return sizes


def lasting(states: States) -> float:
    """Count the most activations of a state that stay unchanged until the end. A prefill keeps these for all of its tokens."""
    return max(sum(n for label, n in s.items() if label in states[-1]) for s in states[:-1])


def prefill_bytes(states: States, dim: int, tokens: int, shards: int = 1, chunk: int | None = None) -> float:
    """Count the bytes of depth state in bf16 per GPU.

    Args:
        states: of the rule, before every site.
        dim: channels.
        tokens: length of the sequence.
        shards: GPUs that share the sequence.
        chunk: tokens read at a time, or None for all.
    """
    return 2.0 * lasting(states) * dim * min(tokens, chunk or tokens) / shards
