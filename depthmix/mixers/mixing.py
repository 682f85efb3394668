"""The depth-mixing matrix of any mixer, by linearity.

What a reader sees is linear in the embedding and the sites' outputs once the coefficients are held fixed:
h_s = M[s, 0] e + Σ_{i<s} M[s, i+1] y_i. So M is the derivative of h_s with the coefficients cut off from autograd (`State.observe`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from depthmix.ops.precision import compute_dtype

if TYPE_CHECKING:
    from depthmix.mixers.base import Mixer


def mixing_matrix(mixer: Mixer, sources: Sequence[Tensor], per_token: bool = False) -> Tensor:
    """M [W, S+1, S+1], or with per_token [..., W, S+1, S+1]; sources: the embedding and every site's raw output."""
    tokens = sources[0].shape[:-1]
    leaves = [s.detach().to(compute_dtype(s)) for s in sources]
    if mixer.channel_mixing:  # the weights are the same for every token, so D tokens can carry the D unit probes
        leaves = [s.new_zeros(mixer.dim, mixer.dim) for s in leaves]
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [s.clone().requires_grad_() for s in leaves]
        probe = torch.eye(mixer.dim).to(leaves[0]) if mixer.channel_mixing else torch.ones_like(leaves[0])
        rows = [[_weights(h, leaves, probe) for h in reads] for reads in frozen_reads(mixer, leaves)]
    n_ways = max(len(row) for row in rows)  # a reader with one mixture repeats it in every way
    m = torch.stack([torch.stack(row * (n_ways // len(row)), dim=-2) for row in rows], dim=-2)
    if mixer.channel_mixing:
        m = m.sum(0).expand(*tokens, *m.shape[1:])
    return m if per_token else m.reshape(-1, *m.shape[-3:]).mean(0)


def frozen_reads(mixer: Mixer, sources: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """What every site and finish read when the sublayers produce these outputs, with coefficients that carry no gradient."""
    state = dataclasses.replace(mixer.start(sources[0]), frozen=True)
    reads: list[tuple[Tensor, ...]] = []
    for site in range(mixer.n_sites):
        h = mixer.read(state, site)
        reads.append(h if isinstance(h, tuple) else (h,))
        state = mixer.write(state, site, sources[site + 1])
    return [*reads, (mixer.finish(state),)]


def _weights(h: Tensor, sources: list[Tensor], probe: Tensor) -> Tensor:
    """The mean over channels of the diagonal of dh / dsource: [..., S+1]."""
    grads = torch.autograd.grad(h, sources, probe, retain_graph=True, allow_unused=True)
    return torch.stack([(torch.zeros_like(probe) if g is None else g * probe).mean(-1) for g in grads], dim=-1)
