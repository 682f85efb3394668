"""Gated residual streams in plain PyTorch: the specification.

    write and norm:  x'_i = x_i + post_i y;    x̂_i = gain_i ⊙ x'_i / sqrt(mean(x'_i²) + eps)
    gated mean:      h = 1/n Σ_i sigmoid(z_i) ⊙ x̂_i

x, x̂, z [N, n, D]; y, h [N, D]; post [N, n]; gain [n, D]. Each result is rounded once, to the streams' dtype.
"""

import torch
from torch import Tensor

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
