"""Residual streams of rules that keep several: their similarity, and the gains of their maps.

Gains as in arXiv 2512.24880: the largest absolute row sum of a map is what it can do to a signal, the largest absolute column sum
what it can do to a gradient. The composite map at a site is the product of all maps up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthmix.insight.sampling import some_tokens
from depthmix.mixers import Mixer
from depthmix.ops.precision import without_autocast

TOKENS = 1024


@dataclass
class Streams:
    """Means over tokens, except where the name says largest."""

    similarity: Tensor  # [S+1, n, n], cosines between streams before every site, and at the end
    rms: Tensor  # [S+1, n]
    row_error: Tensor  # [S], |row sum − 1| of a site's map; 0 keeps a signal's size
    column_error: Tensor  # [S]
    largest_row_error: Tensor  # [S], of all tokens
    largest_column_error: Tensor  # [S]
    gain: Tensor  # [S, 2], of signals and of gradients, of a site's map
    composite_gain: Tensor  # [S, 2], of the product of the maps up to it


@torch.no_grad()
def stream_report(mixer: Mixer, sources: Sequence[Tensor]) -> Streams | None:
    """Measure the streams on a few tokens; None for a rule without streams. `sources`: the embedding and every site's
    raw output.
    """
    with without_autocast(sources[0]):
        return _report(mixer, *some_tokens(sources, TOKENS))


def _report(mixer: Mixer, e: Tensor, *outputs: Tensor) -> Streams | None:
    state = mixer.start(e)
    product: Tensor | None = None
    alike, size, errors, gains = [], [], [], []
    for site in range(mixer.n_sites + 1):
        x = mixer.streams(state)  # [N, n, D]
        if x is None:
            return None
        unit = torch.nn.functional.normalize(x.float(), dim=-1)
        alike.append((unit @ unit.mT).mean(0))
        size.append(x.float().square().mean((0, 2)).sqrt())
        if site == mixer.n_sites:
            break
        by = mixer.stream_map(state)  # [N, n, n]
        assert by is not None
        product = by if product is None else by @ product
        off = [(by.sum(d) - 1).abs() for d in (-1, -2)]
        errors.append(torch.stack([*(o.mean() for o in off), *(o.max() for o in off)]))
        gains.append(torch.stack([_gains(by), _gains(product)]))
        state = mixer.write(state, site, outputs[site])
    error, gain = torch.stack(errors).cpu(), torch.stack(gains).cpu()
    return Streams(torch.stack(alike).cpu(), torch.stack(size).cpu(), *error.unbind(-1), *gain.unbind(1))


def _gains(m: Tensor) -> Tensor:
    return torch.stack([m.abs().sum(d).amax(-1).mean() for d in (-1, -2)])
