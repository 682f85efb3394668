"""Dot products of one source with the rows of many readers: a thin matrix product, because readers have few rows.

    s_r = ρ w_r · v,      ρ = 1/sqrt(mean(v²) + eps), or 1 without eps
    dw_r = Σ_tokens ds_r ρ v;      dv = ρ Σ_r ds_r w_r - v ρ²/D Σ_r ds_r s_r    (its second term with eps alone)

Products are fp32 and not rounded. A bf16 source is never widened: its fp32 factor (w or ds) is split into two bf16 numbers, high and
low, so that tensor cores lose nothing that counts. The source is read once forward (twice with eps), once for dw and once for
dv, whose sum is rounded once.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients, uses_custom_backward
from depthmix.ops.matmul import matmul, wide_product
from depthmix.ops.precision import compute_dtype, rms_normalize, widen, without_autocast


def source_products(v: Tensor, w: Tensor, eps: float | None = None) -> Tensor:
    """Compute the dot products of one source with several rows.

    Args:
        v: source [..., D].
        w: rows [R, D].
        eps: if given, v is RMS-normalised with it first.

    Returns:
        [R, ...] in fp32 (fp64 for fp64).
    """
    with without_autocast(v):
        if not uses_custom_backward():
            return source_products_reference(eps, v, w)
        products: Tensor = SourceProducts.apply(eps, v, w)
        return products


def source_products_reference(eps: float | None, v: Tensor, w: Tensor) -> Tensor:
    """Compute `source_products` in plain PyTorch."""
    wide = compute_dtype(v, w)
    x = widen(v, wide) if eps is None else widen(rms_normalize(v, eps), wide)
    return matmul(x, widen(w, wide).T).movedim(-1, 0)


class SourceProducts(torch.autograd.Function):
    """Compute `source_products` with a backward that saves no activation but v."""

    @staticmethod
    def forward(ctx: Any, eps: float | None, v: Tensor, w: Tensor) -> Tensor:
        x, rho = v.reshape(-1, v.shape[-1]), None
        wide = compute_dtype(v, w)
        s = _rows_by_tokens(widen(w, wide), x)
        if eps is not None:
            length = torch.linalg.vector_norm(x, dim=-1, dtype=wide)
            rho = torch.rsqrt(length.square() / x.shape[-1] + eps)  # [N]
            s = s.mul_(rho)
        ctx.eps = eps
        ctx.save_for_backward(v, w, rho, None if eps is None else s)
        return s.view(len(w), *v.shape[:-1])

    @staticmethod
    def backward(ctx: Any, ds: Tensor) -> tuple[Tensor | None, ...]:
        v, w, rho, s = ctx.saved_tensors
        _, need_v, need_w = ctx.needs_input_grad
        with without_autocast(v):
            if torch.is_grad_enabled():
                reference = partial(source_products_reference, ctx.eps)
                return None, *reference_gradients(reference, (v, w), (need_v, need_w), [ds])
            x, ds = v.reshape(-1, v.shape[-1]), ds.reshape(len(w), -1)
            d, along = ds, None
            if rho is not None:
                d, along = ds * rho, (ds * s).sum(0).mul_(rho.square()).div_(-x.shape[-1]).unsqueeze(-1)
            dw = widen(_over_tokens(d, x), w.dtype) if need_w else None
            return None, _tokens_by_rows(d, widen(w, d.dtype), x, along).view(v.shape) if need_v else None, dw


def _rows_by_tokens(w: Tensor, x: Tensor) -> Tensor:
    """Return w xᵀ [R, N]."""
    if not _in_halves(w, x):
        return matmul(w, widen(x, w.dtype).T)
    high, low = wide_product(torch.cat(_halves(w)), x.T).chunk(2)
    return high + low


def _over_tokens(d: Tensor, x: Tensor) -> Tensor:
    """Return d x [R, D]."""
    if not _in_halves(d, x):
        return matmul(d, widen(x, d.dtype))
    high, low = wide_product(torch.cat(_halves(d)), x).chunk(2)
    return high + low


def _tokens_by_rows(d: Tensor, w: Tensor, x: Tensor, along: Tensor | None) -> Tensor:
    """Return dᵀ w + along ⊙ x [N, D], rounded to x's dtype, for along [N, 1]."""
    if not _in_halves(d, x):
        dx = matmul(d.T, w)
        return widen(dx if along is None else dx.addcmul_(widen(x, d.dtype), along), x.dtype)
    (d_high, d_low), (w_high, w_low) = _halves(d), _halves(w)
    # low times low is below the precision of the result.
    d_parts, w_parts = torch.cat([d_high, d_high, d_low]).T, torch.cat([w_high, w_low, w_high])
    if along is None:
        return d_parts @ w_parts
    return torch.addmm(torch.mul(x, along, out=torch.empty_like(x)), d_parts, w_parts)


def _in_halves(wide: Tensor, x: Tensor) -> bool:
    """Return whether the fp32 factor of a bf16 source is split into two bf16 halves."""
    return x.dtype == torch.bfloat16 and wide.dtype == torch.float32


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 x into bf16 high and low with high + low ≈ x to 16 bits of mantissa."""
    high = x.to(torch.bfloat16)
    return high, (x - high).to(torch.bfloat16)
