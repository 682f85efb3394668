"""The depth-mixing matrix of any mixer, and what every source adds to a read, by linearity.

What a reader sees is linear in the embedding and the sites' outputs once the coefficients are held fixed:
h_s = M[s, 0] e + Σ_{i<s} M[s, i+1] y_i. So M is the derivative of h_s with the coefficients cut off from autograd (`State.observe`).
An entry of M is a number for every channel of every token or, with `channel_mixing`, one matrix [D, D] for all tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from depthmix.ops.precision import compute_dtype, without_autocast

if TYPE_CHECKING:
    from depthmix.mixers.base import Mixer


class Contributions(NamedTuple):
    """What each of k sources adds to one mixture."""

    parts: Tensor  # [k, ..., D], which add up to it
    weights: Tensor  # [k, ...], their entries of M, averaged over channels


def mixing_matrix(mixer: Mixer, sources: Sequence[Tensor], per_token: bool = False) -> Tensor:
    """M [W, S+1, S+1], or with per_token [..., W, S+1, S+1]; sources: the embedding and every site's raw output."""
    m = _all_readers(mixer, sources, lambda g, probe: (g * probe).mean(-1))  # the mean over channels of the diagonal
    if mixer.channel_mixing:
        m = m.sum(0).expand(*sources[0].shape[:-1], *m.shape[1:])
    return m if per_token else m.reshape(-1, *m.shape[-3:]).mean(0)


def mixing_by_channel(mixer: Mixer, sources: Sequence[Tensor]) -> Tensor:
    """M with nothing averaged: [..., D, W, S+1, S+1]; with `channel_mixing` [D, D, W, S+1, S+1], the channel that reads first."""
    return _all_readers(mixer, sources, lambda g, probe: g)


def contributions(mixer: Mixer, sources: Sequence[Tensor]) -> tuple[Contributions, ...]:
    """Of the reader that comes after these sources, one per way."""
    leaves, probe = _leaves(mixer, sources)
    found = []
    with torch.inference_mode(False), torch.enable_grad(), without_autocast(sources[0]):
        *_, reads = _frozen(mixer, leaves, len(leaves) - 1)
        for h in reads:
            parts, weights = [], []
            for source, g in zip(sources, _gradients(h, leaves, probe), strict=True):
                wide = source.detach().to(g.dtype)
                parts.append(wide @ g.T if mixer.channel_mixing else wide * g)
                w = g.diagonal().mean() if mixer.channel_mixing else g.mean(-1)
                weights.append(w.expand(source.shape[:-1]))
            found.append(Contributions(torch.stack(parts), torch.stack(weights)))
    return tuple(found)


def frozen_reads(mixer: Mixer, sources: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """What every site and finish read when the sublayers produce these outputs, with coefficients that carry no gradient."""
    return list(_frozen(mixer, sources, 0))


def _frozen(mixer: Mixer, sources: Sequence[Tensor], first: int) -> Iterator[tuple[Tensor, ...]]:
    """The reads from the first one on up to the one that comes after these sources."""
    state = dataclasses.replace(mixer.start(sources[0]), frozen=True)
    for site, y in enumerate((*sources[1:], None)):
        if site >= first:
            h = mixer.read(state, site) if site < mixer.n_sites else mixer.finish(state)
            yield h if isinstance(h, tuple) else (h,)
        if y is not None:
            state = mixer.write(state, site, y)


def _leaves(mixer: Mixer, sources: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """What to differentiate by, and the direction of a read to differentiate."""
    leaves = [s.detach().to(compute_dtype(s)) for s in sources]
    if mixer.channel_mixing:  # the weights are the same for every token, so D tokens can carry the D unit probes
        leaves = [s.new_zeros(mixer.dim, mixer.dim) for s in leaves]
    with torch.inference_mode(False):
        leaves = [s.clone().requires_grad_() for s in leaves]
        return leaves, torch.eye(mixer.dim).to(leaves[0]) if mixer.channel_mixing else torch.ones_like(leaves[0])


def _gradients(h: Tensor, leaves: list[Tensor], probe: Tensor) -> list[Tensor]:
    """An entry of M for each source, as large as the probe: by channel, or a matrix [D, D]."""
    grads = torch.autograd.grad(h, leaves, probe, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(probe) if g is None else g for g in grads]


def _all_readers(mixer: Mixer, sources: Sequence[Tensor], entry: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    leaves, probe = _leaves(mixer, sources)
    with torch.inference_mode(False), torch.enable_grad():
        rows = [
            [torch.stack([entry(g, probe) for g in _gradients(h, leaves, probe)], dim=-1) for h in reads]
            for reads in frozen_reads(mixer, leaves)
        ]
    n_ways = max(len(row) for row in rows)  # a reader with one mixture repeats it in every way
    return torch.stack([torch.stack(row * (n_ways // len(row)), dim=-2) for row in rows], dim=-2)
