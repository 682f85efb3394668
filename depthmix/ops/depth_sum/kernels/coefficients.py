"""Kernels for the coefficients that a small network computes from a source, and their gradients: products with few rows.

    z = r W_1 x,  r = 1 / RMS(x);      a = W_2 h + b,  h = GELU(z)
    dz = GELU'(z) ⊙ W_2ᵀ da;      dW_2 = Σ_tokens da hᵀ;      db = Σ_tokens da
    dx = W_1ᵀ e - x r² (dz · z) / D,  e = r dz;      dW_1 = Σ_tokens e xᵀ

The norm's gradient needs no product of its own: W_1ᵀ dz · r x is dz · z. The source is read once forward. The backward reads it
once, besides the product for dW_1. fp32 factors of bf16 sources are split into two bf16 halves, as in scores.py.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.depth_attention.kernels.tiling import SplitRows
from depthmix.ops.depth_sum.kernels.scores import rows_from_halves
from depthmix.ops.gpu.launch import count_cores, launch
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2

# Rows of W_1, or of W_2, that a program processes together.
BLOCK = 64


@triton.jit
def _normal(z):
    """Return the standard normal distribution function of z: GELU(z) = z times this."""
    return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))


@triton.jit(do_not_specialize=["N"])
def _hidden_kernel(
    x, high, low, z, r, N: tl.int64, eps,
    D: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    d = tl.arange(0, BD)
    dots, squares = tl.zeros([BT, BK], tl.float32), tl.zeros([BT, BD], tl.float32)
    v = tl.load(x + (t[:, None] * D + d[None, :]), mask=(t < N)[:, None] & (d < D)[None, :], other=0.0)
    # The next part is loaded into registers and there is one stage, as in depth attention's `scores`.
    for _ in range(0, D, BD):
        at, w_ok = k[:, None] * D + d[None, :], (k < K)[:, None] & (d < D)[None, :]
        of_high = tl.load(high + at, mask=w_ok, other=0.0)
        of_low = of_high
        if SPLIT:
            of_low = tl.load(low + at, mask=w_ok, other=0.0)
        d += BD
        later = tl.load(x + (t[:, None] * D + d[None, :]), mask=(t < N)[:, None] & (d < D)[None, :], other=0.0)
        dots = tl.dot(v, tl.trans(of_high), dots, input_precision="ieee")
        if SPLIT:
            dots = tl.dot(v, tl.trans(of_low), dots, input_precision="ieee")
        v = v.to(tl.float32)
        squares += v * v
        v = later
    scale = tl.rsqrt(tl.sum(squares, 1) / D + eps)
    tl.store(z + t[:, None] * K + k[None, :], dots * scale[:, None], mask=(t < N)[:, None] & (k < K)[None, :])
    tl.store(r + t, scale, mask=t < tl.where(tl.program_id(1) == 0, N, 0))


@triton.jit(do_not_specialize=["N", "groups"])
def _out_kernel(
    z, w_2, b, a, N: tl.int64, groups: tl.int32,
    K: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    C = groups * UNIT
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    acc = tl.zeros([BT, BC], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        h = tl.load(z + t[:, None] * K + k[None, :], mask=(t < N)[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(w_2 + c[:, None] * K + k[None, :], mask=(c < C)[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(h * _normal(h), tl.trans(w), acc, input_precision=PRECISION)
    acc += tl.load(b + c, mask=c < C, other=0.0)[None, :]
    tl.store(a + t[:, None] * C + c[None, :], acc, mask=(t < N)[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=["N", "groups"])
def _hidden_backward_kernel(
    da, w_2, z, r, e, along, N: tl.int64, groups: tl.int32,
    K: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    C = groups * UNIT
    # e: [N, K], or with SPLIT [N, 2, K]; along: dz · z, from each program of a token
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    inside = (t < N)[:, None] & (k < K)[None, :]
    dh = tl.zeros([BT, BK], tl.float32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        g = tl.load(da + t[:, None] * C + c[None, :], mask=(t < N)[:, None] & (c < C)[None, :], other=0.0)
        w = tl.load(w_2 + c[:, None] * K + k[None, :], mask=(c < C)[:, None] & (k < K)[None, :], other=0.0)
        dh = tl.dot(g, w, dh, input_precision=PRECISION)
    x = tl.load(z + t[:, None] * K + k[None, :], mask=inside, other=0.0)
    dz = dh * (_normal(x) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x))
    tl.store(along + t * tl.num_programs(1) + tl.program_id(1), tl.sum(dz * x, 1), mask=t < N)
    dz *= tl.load(r + t, mask=t < N, other=0.0)[:, None]
    head = dz.to(e.dtype.element_ty)
    at = e + t[:, None] * ((1 + SPLIT) * K) + k[None, :]
    tl.store(at, head, mask=inside)
    if SPLIT:
        tl.store(at + K, (dz - head.to(tl.float32)).to(e.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "groups"])
def _outer_kernel(
    da, z, part, N: tl.int64, groups: tl.int32,
    K: tl.constexpr, UNIT: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    C = groups * UNIT
    # part: dW_2 and after it db, of each program's tokens
    program = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    acc, bias = tl.zeros([BC, BK], tl.float32), tl.zeros([BC], tl.float32)
    for tile in range(program, tl.cdiv(N, BT), tl.num_programs(0)):
        t = tile * BT + tl.arange(0, BT)
        g = tl.load(da + t[:, None] * C + c[None, :], mask=(t < N)[:, None] & (c < C)[None, :], other=0.0)
        h = tl.load(z + t[:, None] * K + k[None, :], mask=(t < N)[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(tl.trans(g), h * _normal(h), acc, input_precision=PRECISION)
        bias += tl.sum(g, 0)
    part += program * (K + 1) * C
    tl.store(part + c[:, None] * K + k[None, :], acc, mask=(c < C)[:, None] & (k < K)[None, :])
    tl.store(part + C * K + c, bias, mask=c < tl.where(tl.program_id(1) == 0, C, 0))


@triton.jit(do_not_specialize=["N"])
def _source_kernel(
    e, high, low, x, r, along, dx, N: tl.int64,
    D: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = (t < N)[:, None] & (d < D)[None, :]
    acc = tl.zeros([BT, BD], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        at, e_ok = e + t[:, None] * ((1 + SPLIT) * K) + k[None, :], (t < N)[:, None] & (k < K)[None, :]
        of_w, w_ok = k[:, None] * D + d[None, :], (k < K)[:, None] & (d < D)[None, :]
        head, w = tl.load(at, mask=e_ok, other=0.0), tl.load(high + of_w, mask=w_ok, other=0.0)
        acc = tl.dot(head, w, acc, input_precision="ieee")
        if SPLIT:
            acc = tl.dot(tl.load(at + K, mask=e_ok, other=0.0), w, acc, input_precision="ieee")
            acc = tl.dot(head, tl.load(low + of_w, mask=w_ok, other=0.0), acc, input_precision="ieee")
    c = tl.zeros([BT], tl.float32)
    parts: tl.constexpr = (K + BK - 1) // BK
    for i in tl.static_range(parts):
        c += tl.load(along + t * parts + i, mask=t < N, other=0.0)
    scale = tl.load(r + t, mask=t < N, other=0.0)
    at = t[:, None] * D + d[None, :]
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    acc -= v * (c * scale * scale / D)[:, None]
    tl.store(dx + at, acc.to(dx.dtype.element_ty), mask=inside)


class Kept(NamedTuple):
    """Intermediates that the backward needs."""

    z: Tensor  # [N, K] fp32
    r: Tensor  # [N] fp32
    high: Tensor  # W_1 in two halves
    low: Tensor


class CoefficientGradients(NamedTuple):
    dx: Tensor | None
    dw_1: Tensor | None
    dw_2: Tensor
    db: Tensor


def coefficients(x: Tensor, w_1: Tensor, w_2: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Kept]:
    """Compute the coefficients [N, C] fp32 of a source x [..., D], for w_1 [K, D], w_2 [C, K] and b [C] in fp32."""
    dim, (rows, hidden) = x.shape[-1], w_2.shape
    tokens, small = x.numel() // dim, x.element_size() == 2
    fp32: Any = {"dtype": torch.float32, "device": x.device}
    kept = Kept(torch.empty(tokens, hidden, **fp32), torch.empty(tokens, **fp32), *SplitRows.of(w_1, x.dtype))
    a = torch.empty(tokens, rows, **fp32)
    if tokens:
        tile = 128 if small else 32
        launch(
            _hidden_kernel, (cdiv(tokens, tile), cdiv(hidden, BLOCK)), x,
            x, kept.high, kept.low, kept.z, kept.r, tokens, eps,
            D=dim, K=hidden, BT=tile, BK=BLOCK, BD=min(64 if small else 32, max(16, next_power_of_2(dim))), SPLIT=small,
            num_warps=8, num_stages=1,
        )  # fmt: skip
        launch(
            _out_kernel, (cdiv(tokens, tile), cdiv(rows, BLOCK)), x,
            kept.z, w_2, b, a, tokens, rows // _unit(rows),
            K=hidden, UNIT=_unit(rows), BT=tile, BK=BLOCK, BC=BLOCK, PRECISION=_precision(x), num_warps=8, num_stages=1,
        )  # fmt: skip
    return a, kept


def coefficients_backward(
    da: Tensor, x: Tensor, w_1: Tensor, w_2: Tensor, kept: Kept, need_x: bool, need_w_1: bool
) -> CoefficientGradients:
    """Compute the gradients, given da [N, C] and the forward's arguments."""
    dim, (rows, hidden) = x.shape[-1], w_2.shape
    # fp16 is not split: its range is too small for gradients.
    tokens, split = x.numel() // dim, x.dtype == torch.bfloat16
    fp32: Any = {"dtype": torch.float32, "device": x.device}
    if not tokens:
        return CoefficientGradients(
            torch.zeros_like(x), torch.zeros_like(w_1), torch.zeros_like(w_2), torch.zeros(rows, **fp32)
        )
    parts = cdiv(hidden, BLOCK)
    cores = count_cores(x, on_cpu=2)
    tile = 128 if x.element_size() == 2 else 32
    # More tokens at a time would not fit in the registers.
    short = min(tile, 64)
    programs = min(cdiv(tokens, short), 2 * cores)
    sums = torch.empty(programs, rows * (hidden + 1), **fp32)
    launch(
        _outer_kernel, (programs, parts, cdiv(rows, BLOCK)), x,
        da, kept.z, sums, tokens, rows // _unit(rows),
        K=hidden, UNIT=_unit(rows), BT=short, BK=BLOCK, BC=BLOCK, PRECISION=_precision(x), num_warps=4 if short == 64 else 8, num_stages=1,
    )  # fmt: skip
    total = sums.sum(0)
    dx = dw_1 = None
    if need_x or need_w_1:
        e = torch.empty(tokens, (1 + split) * hidden, dtype=x.dtype if split else torch.float32, device=x.device)
        along = torch.empty(tokens, parts, **fp32)
        launch(
            _hidden_backward_kernel, (cdiv(tokens, tile), parts), x,
            da, w_2, kept.z, kept.r, e, along, tokens, rows // _unit(rows),
            K=hidden, UNIT=_unit(rows), BT=tile, BK=BLOCK, BC=BLOCK, SPLIT=split, PRECISION=_precision(x), num_warps=8, num_stages=1,
        )  # fmt: skip
        dw_1 = rows_from_halves(e, x, hidden) if need_w_1 else None
    if need_x:
        dx = torch.empty_like(x)
        tile = 128 if split else 32
        block = min(tile, max(16, next_power_of_2(dim)))
        launch(
            _source_kernel, (cdiv(tokens, tile), cdiv(dim, block)), x,
            e, kept.high if split else w_1, kept.low if split else w_1, x, kept.r, along, dx, tokens,
            D=dim, K=hidden, BT=tile, BK=BLOCK, BD=block, SPLIT=split, num_warps=8 if split else 4, num_stages=1,
        )  # fmt: skip
    at = rows * hidden
    return CoefficientGradients(dx, dw_1, total[:at].view(rows, hidden), total[at:])


def _unit(rows: int) -> int:
    """Return how many of a token's coefficients are aligned together: kernels are compiled for this, not for the count itself."""
    return 4 if rows % 4 == 0 else 1


def _precision(x: Tensor) -> str:
    """Return the precision of fp32 products: exact for fp32 sources, otherwise three tensor-core passes, which lose one or two bits."""
    return "ieee" if x.dtype == torch.float32 else "tf32x3"
