"""Gated residual streams in plain PyTorch: the specification.

    write and norm:  x'_i = x_i + post_i y;    x̂_i = gain_i ⊙ x'_i / sqrt(mean(x'_i²) + eps)
    gated mean:      h = 1/n Σ_i sigmoid(z_i) ⊙ x̂_i

    read:            both, with z⃗ = silu(x̂⃗ W_downᵀ / n) W_upᵀ; and for the next write post' = 2 sigmoid(x̂⃗ W_injectᵀ / n)

x, x̂, z [N, n, D], of which x̂⃗, z⃗ [N, n D] are the n streams one after the other; y, h [N, D]; post [N, n]; gain [n, D];
W_down [R, n D], W_up [n D, R], W_inject [n, n D]. Each result is rounded once, to the streams' dtype, and post' not at all.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from depthmix.ops.precision import compute_dtype, rms_normalize
from depthmix.ops.stream_mix.reference import stream_write_reference


def write_norm_reference(
    eps: float, x: Tensor, y: Tensor | None, post: Tensor | None, gain: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute x' and x̂. Without y nothing is written and x' is x."""
    if y is not None:
        assert post is not None
        x = stream_write_reference(x, None, post, y).to(x.dtype)
    wide = compute_dtype(x, gain)
    return x, (rms_normalize(x.to(wide), eps) * gain.to(wide)).to(x.dtype)


def gated_mean_reference(z: Tensor, normed: Tensor) -> Tensor:
    """Compute h."""
    wide = compute_dtype(z, normed)
    return (torch.sigmoid(z.to(wide)) * normed.to(wide)).mean(-2).to(normed.dtype)


class Inputs(NamedTuple):
    """Inputs of a read."""

    x: Tensor
    y: Tensor | None  # None: nothing is written
    post: Tensor | None
    gain: Tensor  # [n D], to which a number is added
    down: Tensor
    up: Tensor
    inject: Tensor | None  # None: nothing is written afterwards


def gated_read_reference(eps: float, offset: float, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute x', h and post' of `Inputs`. Between the two roundings of x' and h everything is in fp32 or wider."""
    a = Inputs(*inputs)  # type: ignore[arg-type]
    kind, (n, dim) = a.x.dtype, a.x.shape[-2:]
    x = a.x
    if a.y is not None:
        assert a.post is not None
        x = stream_write_reference(x, None, a.post, a.y).to(kind)
    wide = compute_dtype(x, a.gain, a.down)
    normed = rms_normalize(x.to(wide), eps) * (a.gain.to(wide) + offset).view(n, dim)
    flat = normed.flatten(1)
    z = functional.silu(flat @ a.down.to(wide).t() / n) @ a.up.to(wide).t()
    h = (torch.sigmoid(z).view_as(normed) * normed).mean(-2).to(kind)
    post = None if a.inject is None else 2.0 * torch.sigmoid(flat @ a.inject.to(wide).t() / n)
    return x, h, post
