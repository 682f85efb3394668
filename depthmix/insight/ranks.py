"""Structure of M: its numerical rank and its semiseparable rank.

The block M[s:, :s+1] holds the weights with which the readers from s on read the sources before s. The largest rank of these blocks
is M's semiseparable rank, the number of streams that could carry out the rule: 1 for one stream that is scaled and added to, n for n
streams, and at most (S+2)//2, if every reader weighs every source anew (arXiv 2603.15031, section 6.2).

Ranks are those of single tokens and channels, since averages over tokens have higher ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthmix.insight.sampling import some_tokens
from depthmix.mixers import Mixer
from depthmix.mixers.mixing import mixing_by_channel, mixing_of_token

TOKENS, CHANNELS = 32, 4
FEW = 2  # tokens of which matrices of matrices are taken
LARGEST = 2048  # maximum rows of a matrix of matrices whose rank is computed
# Factor on the usual bound of rounding errors in singular values, since M itself is the result of many operations.
ROUNDING = 30.0


@dataclass
class Structure:
    """Ranks of one way: medians over tokens and channels."""

    rank: int
    semiseparable: int
    most: int  # largest possible semiseparable rank of a matrix of this size


def structure(mixer: Mixer, sources: Sequence[Tensor]) -> list[Structure] | None:
    """Compute the ranks of each way from a few tokens.

    Args:
        mixer: The mixer.
        sources: The embedding and the raw output of every site.

    Returns:
        One entry per way; None where entries of M are matrices too large to analyse. Where entries are matrices
            [D, D], ranks are in units of D.
    """
    n, dim = mixer.n_sites + 1, mixer.dim
    if (mixer.channel_mixing or mixer.fractions is not None) and n * dim > LARGEST:
        return None
    if mixer.fractions is not None:
        few = some_tokens(sources, FEW)  # [N, D] each
        by_token = [mixing_of_token(mixer, token).permute(2, 3, 0, 4, 1) for token in zip(*few, strict=True)]
        m = torch.stack(by_token).reshape(len(by_token), -1, n * dim, n * dim)
        unit = dim
    elif mixer.channel_mixing:
        m = mixing_by_channel(mixer, sources).permute(2, 3, 0, 4, 1)  # [W, reader, out, source, in]
        m = m.reshape(1, m.shape[0], n * dim, n * dim)
        unit = dim
    else:
        m = mixing_by_channel(mixer, some_tokens(sources, TOKENS))  # [N, D, W, S+1, S+1]
        m = m[:, torch.linspace(0, dim - 1, min(dim, CHANNELS)).long()].flatten(0, 1)
        unit = 1
    m = m.cpu().double()
    eps = torch.finfo(torch.float64 if sources[0].dtype == torch.float64 else torch.float32).eps
    whole = ranks(m, eps)  # [N, W]
    blocks = [ranks(m[..., s * unit :, : (s + 1) * unit], eps) for s in range(n)]
    widest = torch.stack(blocks).amax(0)
    by_way = []
    for way in range(m.shape[1]):
        rank, semiseparable = (
            -(-int(r[:, way].median()) // unit) for r in (whole, widest)
        )  # a stream of D channels counts as one
        by_way.append(Structure(rank, semiseparable, (n + 1) // 2))
    return by_way


def ranks(m: Tensor, eps: float) -> Tensor:
    """Compute the numerical ranks of matrices [..., a, b] whose entries are exact to about eps."""
    values = torch.linalg.svdvals(m)
    bound = ROUNDING * eps * max(m.shape[-2:])
    return (values > bound * values[..., :1]).sum(-1)
