"""Weighted sums over depth in plain PyTorch: the specification.

    out_w = Σ_i (static[w, i] + dynamic[w, i]) ⊙ v_i        static [W, n, D] or [W, n, 1]: parameters;  dynamic [..., W, n]: one number per token
    relu:  Σ_i max(static[w, i] + dynamic[w, i], 0) ⊙ v_i
    scores[w, i] = w[w, i] · v_i                            w [W, n, D] or [W, 1, D]

A product of a bf16 source with an fp32 weight is fp32 and keeps a reference to the source, not a copy, for the backward.
max(·, 0) has derivative 1 at 0.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.precision import compute_dtype


def depth_sum_reference(
    sources: Sequence[Tensor], static: Tensor | None, dynamic: Tensor | None, relu: bool
) -> tuple[Tensor, ...]:
    """Compute the W sums [..., D] in plain PyTorch, not rounded."""
    wide = compute_dtype(*sources, *(t for t in (static, dynamic) if t is not None))
    static = None if static is None else static.to(wide)
    dynamic = None if dynamic is None else dynamic.to(wide)
    n_ways = static.shape[0] if static is not None else dynamic.shape[-2]  # type: ignore[union-attr]
    return tuple(_one_way(sources, static, dynamic, relu, w) for w in range(n_ways))


def _one_way(sources: Sequence[Tensor], static: Tensor | None, dynamic: Tensor | None, relu: bool, w: int) -> Tensor:
    out: Any = 0
    for i, v in enumerate(sources):
        parts = [] if static is None else [static[w, i]]
        parts += [] if dynamic is None else [dynamic[..., w, i].unsqueeze(-1)]
        if relu:
            parts = [sum(parts).clamp(min=0)]  # type: ignore[union-attr]
        # One product per part, so that no weight for every token and channel is formed.
        for part in parts:
            out = out + part * v
    return out


def depth_scores_reference(sources: Sequence[Tensor], w: Tensor) -> Tensor:
    """Compute the scores w[way, i] · v_i [..., W, n] in plain PyTorch."""
    w = w.to(compute_dtype(w, *sources)).expand(-1, len(sources), -1)
    return torch.stack([(w[:, i] * v.unsqueeze(-2)).sum(-1) for i, v in enumerate(sources)], dim=-1)
