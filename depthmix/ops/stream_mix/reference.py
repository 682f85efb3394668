"""Reading from and writing to n residual streams in plain PyTorch: the specification.

    read:   u    = Σ_i pre[i] x_i
    write:  x'_o = Σ_i res[o, i] x_i + post[o] y          (res None: x'_o = x_o + post[o] y)

x [..., n, C]. pre and post are [..., n] and res [..., n, n] with weights per token, or [n] and [n, n] with one for all tokens.
"""

import torch
from torch import Tensor

from depthmix.ops.precision import compute_dtype


def stream_read_reference(x: Tensor, pre: Tensor) -> Tensor:
    """Compute u [..., C] in plain PyTorch, not rounded."""
    return (pre.to(compute_dtype(x, pre)).unsqueeze(-1) * x).sum(-2)


def stream_write_reference(x: Tensor, res: Tensor | None, post: Tensor, y: Tensor) -> Tensor:
    """Compute x' [..., n, C] in plain PyTorch, not rounded."""
    wide = compute_dtype(x, post, y) if res is None else compute_dtype(x, res, post, y)
    out = post.to(wide).unsqueeze(-1) * y.unsqueeze(-2)
    if res is None:
        return out + x
    # Products instead of a matmul, whose backward would run in bf16 under autocast.
    for i in range(x.shape[-2]):
        out = torch.addcmul(out, res[..., i].to(wide).unsqueeze(-1), x[..., i, :].unsqueeze(-2).to(wide))
    return out
