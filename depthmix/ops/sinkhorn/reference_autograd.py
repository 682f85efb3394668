"""Sinkhorn in plain PyTorch with a hand-written backward, stored entry by entry: [n, n, N]. A sum of n numbers is then n additions
of long rows.

The equations are in reference.py; those of the backward, which needs the divisors alone, are in kernels.py.
"""

from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.precision import compute_dtype
from depthmix.ops.sinkhorn.reference import DEEPSEEK_EPS, sinkhorn_reference

# The axis that a sum runs over.
ROWS, COLUMNS = 1, 0


class SinkhornByEntry(torch.autograd.Function):
    """Compute [..., n, n] -> [..., n, n] in fp32 or fp64. Saves n numbers per token for each division."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, convention: str) -> Tensor:
        m, divisors = _iterate(_by_entry(logits), iterations, convention)
        ctx.options = iterations, convention
        ctx.save_for_backward(logits, m, *divisors)
        return _by_token(m, logits)

    @staticmethod
    def backward(ctx: Any, dm: Tensor) -> tuple[Tensor | None, ...]:
        logits, m, *divisors = ctx.saved_tensors
        # create_graph=True.
        if torch.is_grad_enabled():
            gradients = reference_gradients(lambda v: sinkhorn_reference(v, *ctx.options), [logits], [True], [dm])
            return *gradients, None, None
        # g = m ⊙ dm of the matrix before each division, from the last to the first.
        g = m * _by_entry(dm)
        for axis, s in zip(reversed(_order(*ctx.options)), reversed(divisors), strict=True):
            g = _before(g, m, axis)
            m = m * s
        if ctx.options[1] == "deepseek":
            p = m - DEEPSEEK_EPS
            g = _before(g / m * p, p, ROWS)
        else:
            v = _by_entry(logits)
            g = _before(_before(g, m, ROWS), (v - torch.logsumexp(v, COLUMNS)).exp(), COLUMNS)
        return _by_token(g, logits).to(logits.dtype), None, None


def _order(iterations: int, convention: str) -> tuple[int, ...]:
    """Return the axes of all plain divisions."""
    if convention == "deepseek":
        return COLUMNS, *(ROWS, COLUMNS) * (iterations - 1)
    return (COLUMNS, ROWS) * (iterations - 1)


def _iterate(v: Tensor, iterations: int, convention: str) -> tuple[Tensor, list[Tensor]]:
    """Return the matrix and the divisors of all plain divisions."""
    if convention == "deepseek":
        m, eps = torch.softmax(v, ROWS) + DEEPSEEK_EPS, DEEPSEEK_EPS
    else:
        # Only the first iteration needs logarithms: after it every sum is between 1 / n² and n.
        m, eps = torch.softmax(v - torch.logsumexp(v, COLUMNS), ROWS), 0.0
    divisors = []
    for axis in _order(iterations, convention):
        s = m.sum(axis, keepdim=True)
        divisors.append(s.add_(eps) if eps else s)
        m = m / s
    return m, divisors


def _before(g: Tensor, m: Tensor, axis: int) -> Tensor:
    """Return g = m ⊙ dm before the division whose result is m."""
    return torch.addcmul(g, m, g.sum(axis, keepdim=True), value=-1)


def _by_entry(t: Tensor) -> Tensor:
    return t.to(compute_dtype(t)).reshape(-1, *t.shape[-2:]).permute(1, 2, 0).contiguous()


def _by_token(t: Tensor, like: Tensor) -> Tensor:
    return t.permute(2, 0, 1).reshape(like.shape)
