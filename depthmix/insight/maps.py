"""Depth-mixing matrices over many tokens: mean, spread over tokens, and the number of sources that readers use.

With p_j = |M_j| / Σ|M| over the sources of a reader, for every token (absolute values, because weights may be negative):

    entropy = −Σ p_j log p_j;    effective sources = exp(entropy);    newest = p of the last output;    embedding = p_0

Sources are the embedding and raw outputs: a sum of four outputs, read with one weight, counts as four sources. Beside the weights stand
contributions and projections (contributions.py), which also know how large sources are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.insight.contributions import Shares, shares_by_token
from depthmix.insight.mixing import choose_mixer, sources_of
from depthmix.insight.statistics import EvenSample, Moments
from depthmix.mixers import Mixer
from depthmix.models.with_mixer import with_mixer

AT_ONCE = 1024  # tokens whose matrices are computed together
MEASURES = ("entropy", "effective", "newest", "embedding")


@dataclass
class DepthMap:
    """Mean and spread of M over the tokens of a text. A reader is a site or, last, finish."""

    tokens: int
    signed: bool  # whether any token has a negative weight
    mean: Tensor  # [W, S+1, S+1]
    std: Tensor  # [W, S+1, S+1], over tokens
    quantiles: Tensor  # [Q, W, S+1, S+1]
    measures: dict[str, Tensor]  # mean over tokens of each of MEASURES: [W, S+1]
    measures_std: dict[str, Tensor]
    contribution: Tensor  # [W, S+1, S+1], mean over tokens of each source's share of the sizes of contributions
    projection: Tensor  # [W, S+1, S+1], mean over tokens of each source's projection on the read


def reading(m: Tensor) -> dict[str, Tensor]:
    """Compute MEASURES [..., S+1] of matrices [..., S+1, S+1]."""
    size = m.abs()
    p = size / size.sum(-1, keepdim=True).clamp(min=torch.finfo(m.dtype).tiny)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    return {
        "entropy": entropy,
        "effective": entropy.exp(),
        "newest": p.diagonal(dim1=-2, dim2=-1),
        "embedding": p[..., 0],
    }


def depth_map(model: nn.Module, batches: Iterable[Any], mixer: Mixer | str | None = None) -> DepthMap:
    """Measure the depth-mixing matrices of a model over batches.

    Args:
        model: A model with a mixer, called as model(batch).
        batches: Inputs of the model.
        mixer: The mixer, or its name, of a model with several.

    Returns:
        Mean and spread over the tokens of all batches.

    Raises:
        ValueError: There are no tokens, or the mixer is not found.

    Examples:
        >>> model = depthmix.Decoder(depthmix.DecoderConfig(11, dim=8, n_blocks=2, n_heads=2))
        >>> depth_map(model, [torch.zeros(2, 3, dtype=torch.int64)]).mean.shape
        torch.Size([1, 5, 5])
    """
    model = with_mixer(model)
    chosen = choose_mixer(model, mixer)
    whole, sample, signed = Moments(), EvenSample(), False
    contribution, projection = Moments(), Moments()
    measures = {name: Moments() for name in MEASURES}
    for batch in batches:
        for shares in _by_token(chosen, sources_of(model, chosen, batch)):
            m = shares.weights
            whole.add(m)
            contribution.add(shares.contribution)
            projection.add(shares.projection)
            sample.add(m)
            signed = signed or bool((m < 0).any())
            for name, value in reading(m).items():
                measures[name].add(value)
    if not whole.count:
        raise ValueError("depth_map: there are no tokens")
    return DepthMap(
        whole.count,
        signed,
        whole.mean,
        whole.std(),
        sample.quantiles(),
        {name: moments.mean for name, moments in measures.items()},
        {name: moments.std() for name, moments in measures.items()},
        contribution.mean,
        projection.mean,
    )


def _by_token(mixer: Mixer, sources: list[Tensor]) -> Iterator[Shares]:
    """Yield the numbers of some tokens at a time: [N, W, S+1, S+1]. Autograd keeps many times the size of a read, so memory
    limits the number.
    """
    flat = [s.reshape(-1, s.shape[-1]).split(AT_ONCE) for s in sources]
    for some in zip(*flat, strict=True):
        yield shares_by_token(mixer, some)


def by_kind(mixer: Mixer, measures: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Average MEASURES over the sites of each name and over their ways. Site 0 is left out: it has only one source."""
    names = mixer.layout.names
    averages: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(names):
        sites = [s for s in range(1, len(names)) if names[s] == kind]
        if not sites:
            continue
        averages[kind] = {name: float(value[:, sites].mean()) for name, value in measures.items()}
        share = measures["effective"][:, sites] / (torch.tensor(sites) + 1)
        averages[kind]["effective_share"] = float(share.mean())
    return averages
