"""Compute the depth-mixing matrix M of any mixer, by linearity.

With its coefficients held fixed, a read is linear in the embedding e and the sites' outputs y:

    h_s = M[s, 0] e + Σ_{i<s} M[s, i+1] y_i

So M is the derivative of h_s with the coefficients cut off from autograd (`State.observe`). An entry of M is one number per channel and
token or, for rules with `channel_mixing`, one matrix [D, D] for all tokens. Where a rule mixes fractions of the channels, an entry is a
matrix of its fractions for each token, of which M has the diagonal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from depthmix.mixers.checks import ContractError
from depthmix.ops.precision import compute_dtype

if TYPE_CHECKING:
    from depthmix.mixers.base import Mixer


def mixing_matrix(mixer: Mixer, sources: Sequence[Tensor], per_token: bool = False) -> Tensor:
    """Return M [W, S+1, S+1], averaged over channels and tokens; with per_token [..., W, S+1, S+1].

    Args:
        mixer: the rule.
        sources: the embedding and the raw output of every site, S + 1 tensors [..., D].
        per_token: average over channels only.

    Raises:
        ContractError: another number of sources.
    """
    if len(sources) != mixer.n_sites + 1:
        expected = f"{mixer.n_sites + 1} sources, the embedding and one per site"
        raise ContractError(f"mixing: expected {expected}, got {len(sources)}")
    # The mean over channels of the diagonal.
    m = _all_readers(mixer, sources, lambda g, probe: (g * probe).mean(-1))
    if mixer.channel_mixing:
        m = m.sum(0).expand(*sources[0].shape[:-1], *m.shape[1:])
    return m if per_token else m.reshape(-1, *m.shape[-3:]).mean(0)


def mixing_by_channel(mixer: Mixer, sources: Sequence[Tensor]) -> Tensor:
    """Return M without averaging: [..., D, W, S+1, S+1]; for rules with `channel_mixing` [D, D, W, S+1, S+1].

    The first D of the latter is the channel of the read, the second that of the source.
    """
    return _all_readers(mixer, sources, lambda g, probe: g)


def mixing_of_token(mixer: Mixer, sources: Sequence[Tensor]) -> Tensor:
    """Return M with its entries as matrices [D, D], for one token: [D, D, W, S+1, S+1], the channel of the read first.

    Args:
        mixer: the rule.
        sources: the embedding and the outputs of all sites, [D] each.
    """
    # Each of D copies of the token carries one unit probe.
    copies = [source.expand(mixer.dim, -1) for source in sources]
    return _all_readers(mixer, copies, lambda g, probe: g, torch.eye(mixer.dim).to(sources[0]))


def frozen_reads(mixer: Mixer, sources: Sequence[Tensor], first: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Yield what sites and finish read when the sublayers produce these outputs, with coefficients that carry no gradient.

    Args:
        mixer: the rule.
        sources: the embedding and the outputs of the first sites. The last read is that of the site after them.
        first: the first site whose read is yielded.
    """
    state = dataclasses.replace(mixer.start(sources[0]), frozen=True)
    for site, y in enumerate((*sources[1:], None)):
        if site >= first:
            h = mixer.read(state, site) if site < mixer.n_sites else mixer.finish(state)
            yield h if isinstance(h, tuple) else (h,)
        if y is not None:
            state = mixer.write(state, site, y)


def differentiable(mixer: Mixer, sources: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return (leaves, probe): copies of the sources to differentiate by, and the direction of a read to differentiate."""
    leaves = [s.detach().to(compute_dtype(s)) for s in sources]
    if mixer.channel_mixing:  # the weights are the same for every token, so D tokens can carry the D unit probes
        leaves = [s.new_zeros(mixer.dim, mixer.dim) for s in leaves]
    with torch.inference_mode(False):
        leaves = [s.clone().requires_grad_() for s in leaves]
        return leaves, torch.eye(mixer.dim).to(leaves[0]) if mixer.channel_mixing else torch.ones_like(leaves[0])


def entries_of_read(h: Tensor, leaves: list[Tensor], probe: Tensor, fractions: int | None = None) -> list[Tensor]:
    """Return the entry of M for each source of a read, shaped like the probe: by channel, or a matrix [D, D].

    fractions: of a rule that mixes them, so that only what a fraction takes from the same fraction counts.
    """
    if fractions is None:
        return _gradients(h, leaves, probe)
    parts = zip(*(p.split(p.shape[-1] // fractions, dim=-1) for p in (h, probe)), strict=True)
    of_parts = [_gradients(part, leaves, own) for part, own in parts]
    width = probe.shape[-1] // fractions
    by_source = zip(*of_parts, strict=True)
    return [torch.cat([g[..., k * width : (k + 1) * width] for k, g in enumerate(gs)], dim=-1) for gs in by_source]


def _gradients(h: Tensor, leaves: list[Tensor], probe: Tensor) -> list[Tensor]:
    grads = torch.autograd.grad(h, leaves, probe, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True)]


@contextmanager
def differentiating(mixer: Mixer) -> Iterator[None]:
    """Record gradients inside this context, and release the parameters that FSDP2 has gathered at its end.

    A model's backward, which would release them, does not follow.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        reshard = getattr(mixer, "reshard", None)
        if callable(reshard):
            reshard()


def _all_readers(
    mixer: Mixer, sources: Sequence[Tensor], entry: Callable[[Tensor, Tensor], Tensor], units: Tensor | None = None
) -> Tensor:
    """Stack entry(g, probe) of all readers, ways and sources. units: probes to use, with which entries mix channels freely."""
    leaves, probe = differentiable(mixer, sources)
    probe, fractions = (probe, mixer.fractions) if units is None else (units.to(leaves[0]), None)
    with differentiating(mixer):
        rows = [
            [
                torch.stack([entry(g, probe) for g in entries_of_read(h, leaves, probe, fractions)], dim=-1)
                for h in reads
            ]
            for reads in frozen_reads(mixer, leaves)
        ]
    n_ways = max(len(row) for row in rows)  # a reader with one mixture repeats it in every way
    return torch.stack([torch.stack(row * (n_ways // len(row)), dim=-2) for row in rows], dim=-2)
