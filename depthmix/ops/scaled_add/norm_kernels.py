"""Kernels for x + g ⊙ y with the RMSNorm after it, one pass each way. The sum is handed on, and the backward needs no other stream.

o = x + g ⊙ y        h = c ⊙ x̂,  x̂ = r o,  r = (mean(o²) + eps)^(-1/2)
do = d + r (c ⊙ dh - x̂ mean(c ⊙ dh ⊙ x̂)) = dx        dy = g ⊙ do        dg = Σ_tokens do ⊙ y        dc = Σ_tokens dh ⊙ x̂
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.launch import count_cores, launch
from depthmix.ops.gpu.program_sums import sum_programs
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2

# Numbers of each tensor that a program holds, unless a row has more.
TILE = 2048
# Numbers of each tensor that a thread holds.
LANE = 16
# Programs of the backward per core; each processes many tokens.
WAVES = 4


@triton.jit(do_not_specialize=["N", "units"])
def _forward_kernel(
    x, y, g, gain, out, h, rms, N: tl.int64, units: tl.int32, eps, UNIT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    # A multiple of 16 bytes where D allows it.
    D = units * UNIT
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.arange(0, BD)
    at, ok = t[:, None] * D + d[None, :], (t < N)[:, None] & (d < D)[None, :]
    a = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(y + at, mask=ok, other=0.0).to(tl.float32)
    scale = tl.load(g + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    o = a + scale * b
    tl.store(out + at, o.to(out.dtype.element_ty), mask=ok)
    r = tl.rsqrt(tl.sum(o * o, 1) / D + eps)
    tl.store(rms + t, r, mask=t < N)
    c = tl.load(gain + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    tl.store(h + at, (o * r[:, None] * c).to(h.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["N", "units"])
def _backward_kernel(
    d_out, dh, out, y, g, gain, rms, dx, dy, part, N: tl.int64, units: tl.int32,
    UNIT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, GOES_ON: tl.constexpr,
):  # fmt: skip
    D = units * UNIT
    d = tl.arange(0, BD)
    scale = tl.load(g + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    c = tl.load(gain + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    dg, dc = tl.zeros([BT, BD], tl.float32), tl.zeros([BT, BD], tl.float32)
    for first in range(tl.program_id(0).to(tl.int64) * BT, N, tl.num_programs(0).to(tl.int64) * BT):
        t = first + tl.arange(0, BT)
        at, ok = t[:, None] * D + d[None, :], (t < N)[:, None] & (d < D)[None, :]
        r = tl.load(rms + t, mask=t < N, other=0.0)[:, None]
        n = tl.load(out + at, mask=ok, other=0.0).to(tl.float32) * r
        back = tl.load(dh + at, mask=ok, other=0.0).to(tl.float32)
        dc += back * n
        back *= c
        do = r * (back - n * (tl.sum(back * n, 1) / D)[:, None])
        if GOES_ON:
            do += tl.load(d_out + at, mask=ok, other=0.0).to(tl.float32)
        dg += do * tl.load(y + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(dx + at, do.to(dx.dtype.element_ty), mask=ok)
        tl.store(dy + at, (scale * do).to(dy.dtype.element_ty), mask=ok)
    at = part + tl.program_id(0).to(tl.int64) * (2 * D) + d
    tl.store(at, tl.sum(dg, 0), mask=d < D)
    tl.store(at + D, tl.sum(dc, 0), mask=d < D)


def forward(x: Tensor, y: Tensor, g: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum and its norm [..., D], each rounded once to x's dtype, and r [N] fp32, for g and gain [D]."""
    out, h, tokens = torch.empty_like(x), torch.empty_like(x), x.numel() // max(1, x.shape[-1])
    rms = x.new_empty(tokens, dtype=torch.float32)
    if x.numel():
        sizes = _sizes(x)
        launch(
            _forward_kernel, (cdiv(tokens, sizes["BT"]),), x,
            x, y, g, gain, out, h, rms, tokens, sizes.pop("units"), eps, **sizes,
        )  # fmt: skip
    return out, h, rms


def backward(
    d_out: Tensor | None, dh: Tensor, out: Tensor, y: Tensor, g: Tensor, gain: Tensor, rms: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x and y, in their dtypes, and of g and the gain, in fp32. d_out: gradient of the sum, or None."""
    dim, dx, dy = y.shape[-1], torch.empty_like(out), torch.empty_like(y)
    if not y.numel():
        return dx, dy, *y.new_zeros(2, dim, dtype=torch.float32)
    sizes, tokens = _sizes(y), y.numel() // dim
    cores = count_cores(y, on_cpu=1)
    programs = min(cdiv(tokens, sizes["BT"]), WAVES * cores)
    part = y.new_empty(programs, 2, dim, dtype=torch.float32)
    launch(
        _backward_kernel, (programs,), y,
        dh if d_out is None else d_out, dh, out, y, g, gain, rms, dx, dy, part, tokens, sizes.pop("units"),
        GOES_ON=d_out is not None, **sizes,
    )  # fmt: skip
    return dx, dy, *sum_programs(part)


def _sizes(x: Tensor) -> dict[str, Any]:
    dim = x.shape[-1]
    unit, block = 8 if dim % 8 == 0 else 1, next_power_of_2(dim)
    tile = max(1, TILE // block)
    warps = min(32, max(1, tile * block // (32 * LANE)))
    return {"units": dim // unit, "UNIT": unit, "BT": tile, "BD": block, "num_warps": warps}
