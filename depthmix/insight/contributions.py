"""Split reads into what every source adds to them.

A read h is a sum of contributions c_j, one of each source. Their sizes say more than weights do, because sources differ in size:

    contribution of j    ||c_j|| / Σ_k ||c_k||     shares that add up to 1
    projection of j      <c_j, h> / <h, h>         add up to 1, and may be negative
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from depthmix.mixers import ContractError, Mixer
from depthmix.mixers.mixing import differentiable, differentiating, entries_of_read, frozen_reads
from depthmix.ops.precision import without_autocast

T = TypeVar("T")


class Contributions(NamedTuple):
    """The contributions of k sources to one mixture."""

    parts: Tensor  # [k, ..., D], which add up to the mixture
    weights: Tensor  # [k, ...], their entries of M, averaged over channels


class Shares(NamedTuple):
    """Three numbers for every token, way, reader and source: [..., W, S+1, S+1] each."""

    weights: Tensor  # M, averaged over channels
    contribution: Tensor  # rows add up to 1, or are 0 where the reader reads nothing
    projection: Tensor  # rows add up to 1, or are 0 where the read is 0


def contributions(mixer: Mixer, sources: Sequence[Tensor]) -> tuple[Contributions, ...]:
    """Return what every source adds to the read that comes after these sources, before any norm.

    Args:
        mixer: The rule.
        sources: The embedding and the raw outputs [..., D] of the sites so far. After S + 1 sources comes finish.

    Returns:
        One entry per way.

    Raises:
        ContractError: There are no sources, or more than S + 1.

    Examples:
        >>> mixer = depthmix.create_mixer("denseformer", dim=8, n_blocks=2)
        >>> e, y = torch.randn(2, 3, 8)
        >>> ((parts, weights),) = contributions(mixer, [e, y])  # of the read at site 1
        >>> parts.shape, weights.shape
        (torch.Size([2, 3, 8]), torch.Size([2, 3]))
    """
    if not 1 <= len(sources) <= mixer.n_sites + 1:
        expected = f"1 to {mixer.n_sites + 1} sources, the embedding and one per site so far"
        raise ContractError(f"contributions: expected {expected}, got {len(sources)}")
    (read,) = _split_reads(mixer, sources, lambda whole: whole, first=len(sources) - 1)
    return read


def shares_by_token(mixer: Mixer, sources: Sequence[Tensor]) -> Shares:
    """Compute every source's weight, contribution and projection at every reader, for each token.

    Args:
        mixer: The rule.
        sources: The embedding and the raw output of every site, S + 1 tensors [..., D].

    Returns:
        The numbers. A reader with one way repeats it in every way, as `Mixer.mixing` does.

    Raises:
        ContractError: There is another number of sources.

    Examples:
        >>> mixer = depthmix.create_mixer("attnres", dim=8, n_blocks=1)
        >>> shares_by_token(mixer, torch.randn(3, 5, 8)).contribution.shape
        torch.Size([5, 1, 3, 3])
    """
    n = mixer.n_sites + 1
    if len(sources) != n:
        raise ContractError(
            f"shares_by_token: expected {n} sources, the embedding and one per site, got {len(sources)}"
        )
    rows = _split_reads(mixer, sources, _shares)
    n_ways = max(len(row) for row in rows)
    by_reader = []
    for row in rows:
        ways = torch.stack(row * (n_ways // len(row)), dim=-2)  # [3, ..., W, k]
        by_reader.append(torch.nn.functional.pad(ways, (0, n - ways.shape[-1])))
    return Shares(*torch.stack(by_reader, dim=-2).unbind(0))


def _shares(read: Contributions) -> Tensor:
    """Return weights, shares of contributions and projections of one mixture: [3, ..., k]."""
    parts, weights = read
    limits = torch.finfo(parts.dtype)
    sizes, whole = torch.linalg.vector_norm(parts, dim=-1), parts.sum(0)
    total, square = sizes.sum(0), whole.square().sum(-1)
    shares = sizes / total.clamp(min=limits.tiny)
    # Contributions that cancel up to rounding leave nothing to project on.
    projections = torch.where(square > (limits.eps * total).square(), torch.linalg.vecdot(parts, whole) / square, 0.0)
    return torch.stack([weights, shares, projections]).movedim(1, -1)


def _split_reads(
    mixer: Mixer, sources: Sequence[Tensor], reduce: Callable[[Contributions], T], first: int = 0
) -> list[tuple[T, ...]]:
    """Apply `reduce` to the contributions of every way of the readers from `first` to the one after these sources."""
    leaves, probe = differentiable(mixer, sources)
    wide = [s.detach().to(leaf.dtype) for s, leaf in zip(sources, leaves, strict=True)]
    with differentiating(mixer), without_autocast(sources[0]):
        return [
            tuple(reduce(_split(mixer, h, leaves[:k], probe, wide[:k])) for h in reads)
            for k, reads in enumerate(frozen_reads(mixer, leaves, first), first + 1)
        ]


def _split(mixer: Mixer, h: Tensor, leaves: list[Tensor], probe: Tensor, sources: list[Tensor]) -> Contributions:
    entries = entries_of_read(h, leaves, probe, mixer.fractions)
    if mixer.fractions is not None:
        parts = _products(h, leaves, sources)
    elif mixer.channel_mixing:
        parts = torch.stack([source @ g.T for source, g in zip(sources, entries, strict=True)])
    else:
        parts = torch.stack([source * g for source, g in zip(sources, entries, strict=True)])
    weights = [g.diagonal().mean() if mixer.channel_mixing else g.mean(-1) for g in entries]
    return Contributions(parts, torch.stack([w.expand(sources[0].shape[:-1]) for w in weights]))


def _products(h: Tensor, leaves: list[Tensor], sources: list[Tensor]) -> Tensor:
    """Return M's entries times sources where entries mix channels: the derivatives of h along each source.

    The gradients by the leaves are linear in the direction of h, and their derivatives by that direction are the products.
    """
    direction = torch.zeros_like(h, requires_grad=True)
    gradients = torch.autograd.grad(h, leaves, direction, retain_graph=True, create_graph=True, allow_unused=True)
    return torch.stack(
        [
            torch.zeros_like(source) if g is None else torch.autograd.grad(g, direction, source, retain_graph=True)[0]
            for g, source in zip(gradients, sources, strict=True)
        ]
    )
