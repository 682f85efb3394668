"""Split a read into what every source adds to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from depthmix.mixers import ContractError, Mixer
from depthmix.mixers.mixing import differentiable, differentiating, entries_of_read, frozen_reads
from depthmix.ops.precision import without_autocast


class Contributions(NamedTuple):
    """The contributions of k sources to one mixture."""

    parts: Tensor  # [k, ..., D], which add up to the mixture
    weights: Tensor  # [k, ...], their entries of M, averaged over channels


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
    leaves, probe = differentiable(mixer, sources)
    by_way = []
    with differentiating(mixer), without_autocast(sources[0]):
        *_, reads = frozen_reads(mixer, leaves, len(leaves) - 1)
        for h in reads:
            parts: list[Tensor] = []
            weights: list[Tensor] = []
            for source, g in zip(sources, entries_of_read(h, leaves, probe, mixer.fractions), strict=True):
                wide = source.detach().to(g.dtype)
                if mixer.fractions is not None:
                    parts.append(_products(h, leaves[len(parts)], wide))
                else:
                    parts.append(wide @ g.T if mixer.channel_mixing else wide * g)
                w = g.diagonal().mean() if mixer.channel_mixing else g.mean(-1)
                weights.append(w.expand(source.shape[:-1]))
            by_way.append(Contributions(torch.stack(parts), torch.stack(weights)))
    return tuple(by_way)


def _products(h: Tensor, leaf: Tensor, source: Tensor) -> Tensor:
    """Return M's entry times a source where the entry mixes channels: the derivative of h along the source.

    The gradient by the leaf is linear in the direction of h, and its derivative by that direction is the product.
    """
    direction = torch.zeros_like(h, requires_grad=True)
    (g,) = torch.autograd.grad(h, leaf, direction, retain_graph=True, create_graph=True, allow_unused=True)
    return torch.zeros_like(source) if g is None else torch.autograd.grad(g, direction, source)[0]
