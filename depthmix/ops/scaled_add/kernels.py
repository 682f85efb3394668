"""Kernels for x + g ⊙ y in one pass, and for the gradients of y and g in another. The gradient of x is the incoming one.

out = x + g ⊙ y        dy = g ⊙ d        dg = Σ_tokens d ⊙ y
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.launch import count_cores, launch
from depthmix.ops.gpu.program_sums import sum_programs
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2

# Numbers of each tensor that a program holds.
TILE = 4096
# Programs of the backward per core; each processes many tokens.
WAVES = 4


@triton.jit(do_not_specialize=["N", "units"])
def _forward_kernel(
    x, y, g, out, N: tl.int64, units: tl.int32, UNIT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    # A multiple of 16 bytes where D allows it.
    D = units * UNIT
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    at, ok = t[:, None] * D + d[None, :], (t < N)[:, None] & (d < D)[None, :]
    a = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(y + at, mask=ok, other=0.0).to(tl.float32)
    scale = tl.load(g + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, (a + scale * b).to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["N", "units"])
def _backward_kernel(
    d_out, y, g, dy, part, N: tl.int64, units: tl.int32, UNIT: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    D = units * UNIT
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    scale = tl.load(g + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros([BT, BD], tl.float32)
    for first in range(tl.program_id(0).to(tl.int64) * BT, N, tl.num_programs(0).to(tl.int64) * BT):
        t = first + tl.arange(0, BT)
        at, ok = t[:, None] * D + d[None, :], (t < N)[:, None] & (d < D)[None, :]
        back = tl.load(d_out + at, mask=ok, other=0.0).to(tl.float32)
        sums += back * tl.load(y + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(dy + at, (scale * back).to(dy.dtype.element_ty), mask=ok)
    tl.store(part + tl.program_id(0).to(tl.int64) * D + d, tl.sum(sums, 0), mask=d < D)


def forward(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """Return x + g ⊙ y [..., D], rounded once to x's dtype, for g [D]."""
    out = torch.empty_like(x)
    if x.numel():
        sizes = _sizes(x)
        tokens = x.numel() // x.shape[-1]
        grid = cdiv(tokens, sizes["BT"]), cdiv(x.shape[-1], sizes["BD"])
        launch(_forward_kernel, grid, x, x, y, g, out, tokens, **sizes)
    return out


def backward(d_out: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of y, in its dtype, and of g, in fp32."""
    dim, dy = y.shape[-1], torch.empty_like(y)
    if not y.numel():
        return dy, y.new_zeros(dim, dtype=torch.float32)
    sizes, tokens = _sizes(y), y.numel() // dim
    parts = cdiv(dim, sizes["BD"])
    cores = count_cores(y, on_cpu=1)
    programs = min(cdiv(tokens, sizes["BT"]), max(1, WAVES * cores // parts))
    part = y.new_empty(programs, dim, dtype=torch.float32)
    launch(_backward_kernel, (programs, parts), y, d_out, y, g, dy, part, tokens, **sizes)
    return dy, sum_programs(part)


def _sizes(x: Tensor) -> dict[str, Any]:
    dim = x.shape[-1]
    unit, block = 8 if dim % 8 == 0 else 1, min(512, next_power_of_2(dim))
    return {"units": dim // unit, "UNIT": unit, "BT": max(1, TILE // block), "BD": block, "num_warps": 8}
