"""Depth attention in plain PyTorch: the specification.

For one token, sources v_0 … v_{n-1} in R^D and a query u = query ⊙ key_gain:

    r_i = (mean(v_i²) + eps)^(-1/2)          (1 without key_norm)
    s_i = r_i · (u · v_i)
    p   = softmax(s) over the sources        (or sigmoid(s), element by element)
    o   = Σ_i p_i v_i                        (with value_norm: Σ_i p_i r_i v_i)

With H heads, channel group c of D/H has its own p from its own part of the dot product; r is shared.
Several queries (W "ways") read the same sources. Everything is computed in the dtype given by `compute_dtype`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthmix.ops.precision import compute_dtype


def spread(p: Tensor, v: Tensor) -> Tensor:
    """Multiply each channel group of v [..., D] by its head's weight in p [..., H]."""
    if p.shape[-1] == 1:
        return p * v
    return (v.unflatten(-1, (p.shape[-1], -1)) * p.unsqueeze(-1)).flatten(-2)


def weighted_sum(p: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """Return Σ_i p_i v_i [..., D], not rounded, for p [..., n, H] and sources [..., D]."""
    o = spread(p[..., 0, :], sources[0])
    for i in range(1, len(sources)):
        o = o + spread(p[..., i, :], sources[i])
    return o


def depth_attention_reference(
    u: Tensor,
    sources: Sequence[Tensor],
    eps: float,
    key_norm: bool = True,
    heads: int = 1,
    activation: str = "softmax",
    value_norm: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Compute the mixture of every way, not rounded, and the weights. Differentiable to any order.

    Args:
        u: queries [W, D] or [W, ..., D], key gains included.
        sources: n tensors [..., D].
        eps: of the norm of keys and values.
        key_norm, heads, activation, value_norm: as for `depth_attention`.

    Returns:
        W mixtures [..., D], and weights p [W, ..., n, H].
    """
    wide, logits, scales = compute_dtype(u, *sources), [], []
    u = u.to(wide)
    u = u.reshape(u.shape[0], *(1,) * (sources[0].ndim - 1), u.shape[-1]) if u.ndim == 2 else u
    for v in sources:
        v = v.to(wide)
        s = (u * v).unflatten(-1, (heads, -1)).sum(-1)  # [W, ..., H]
        r = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
        logits.append(s * r if key_norm else s)
        scales.append(r)
    s = torch.stack(logits, dim=-2)
    p = torch.softmax(s, dim=-2) if activation == "softmax" else torch.sigmoid(s)
    weights = p * torch.stack(scales, dim=-2) if value_norm else p
    return tuple(weighted_sum(w, sources) for w in weights), p
