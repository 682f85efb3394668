"""Weights of a sum over depth that a small network computes from the sum's newest source.

    a = W_2 GELU(W_1 RMS(x)) + b,      RMS(x) = x / sqrt(mean(x²) + eps)

In fp32 (fp64 for fp64) and not rounded.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backward_mail import saved_once
from depthmix.ops.matmul import matmul
from depthmix.ops.precision import rms_normalize, without_autocast


def coefficients_reference(x: Tensor, w_1: Tensor, w_2: Tensor, b: Tensor, eps: float) -> Tensor:
    """Compute the coefficients [..., C, l] in plain PyTorch, for x [..., D], w_1 [K, D], w_2 [C l, K] and b [C, l]."""
    x = rms_normalize(x, eps)
    w_1, w_2, b = (p.to(x.dtype) for p in (w_1, w_2, b))
    return matmul(functional.gelu(matmul(x, w_1.T)), w_2.T).unflatten(-1, b.shape) + b


def coefficients(x: Tensor, w_1: Tensor, w_2: Tensor, b: Tensor, eps: float) -> Tensor:
    """Compute `coefficients_reference` with kernels. The caller has checked that they can do it."""
    a: Tensor = Coefficients.apply(eps, *(t.contiguous() for t in (x, w_1.float(), w_2.float(), b.float())))
    return a


class Coefficients(torch.autograd.Function):
    """Run the kernels; differentiate the reference instead under create_graph=True."""

    @staticmethod
    def forward(ctx: Any, eps: float, x: Tensor, w_1: Tensor, w_2: Tensor, b: Tensor) -> Tensor:
        from depthmix.ops.depth_sum.kernels.coefficients import coefficients

        a, kept = coefficients(x, w_1, w_2, b.flatten(), eps)
        ctx.save_for_backward(x, w_1, w_2, b, *kept)
        ctx.eps = eps
        return a.view(*x.shape[:-1], *b.shape)

    @staticmethod
    def backward(ctx: Any, da: Tensor) -> tuple[Tensor | None, ...]:
        from depthmix.ops.depth_sum.kernels.coefficients import Kept, coefficients_backward

        x, w_1, w_2, b, *kept = saved_once(ctx, "depth_sum")
        with without_autocast(x):
            if torch.is_grad_enabled():

                def reference(x: Tensor, w_1: Tensor, w_2: Tensor, b: Tensor) -> Tensor:
                    return coefficients_reference(x, w_1, w_2, b, ctx.eps)

                return None, *reference_gradients(reference, (x, w_1, w_2, b), ctx.needs_input_grad[1:], [da])
            da = da.contiguous().view(-1, b.numel())
            gradients = coefficients_backward(da, x, w_1, w_2, Kept(*kept), *ctx.needs_input_grad[1:3])
        return None, gradients.dx, gradients.dw_1, gradients.dw_2, gradients.db.view(b.shape)
