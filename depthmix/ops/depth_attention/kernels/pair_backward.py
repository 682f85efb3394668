"""The backward of a read of two sources a and b, the newest, in one pass: nothing of a mixture is kept, since both are at hand.

For each way, with p_a + p_b = 1, logits s, x̂ = ρ (p_a a + p_b b) and the result c ⊙ x̂ (ρ = c = 1 without a norm, and then do = dy):

    k = c ⊙ dy        do = ρ (k - x̂ mean(k ⊙ x̂))        ds = p_a p_b do·(b - a)        dc = Σ_tokens dy ⊙ x̂
    db = p_b do + ds r_b (u - s_b r_b b / D)        da = p_a do - ds r_a (u - s_a r_a a / D)        du = Σ_tokens ds (r_b b - r_a a)

r is 1 / RMS of a source, u the query with its key gain. The gradients of two ways are added up here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.depth_attention.kernels.read import four_sums, load_row, programs_for, stages, warps_for
from depthmix.ops.gpu.addresses import address_table, aligned
from depthmix.ops.gpu.launch import launch
from depthmix.ops.gpu.totals import total


@triton.jit
def _mixed(a, b, s_a, s_b, lse, N, t, NORM: tl.constexpr):
    """Both weights, ρ and x̂."""
    total = tl.load(lse + t)
    p_a, p_b = tl.exp(tl.load(s_a + t) - total), tl.exp(tl.load(s_b + t) - total)
    rho = 1.0
    if NORM:
        rho = tl.load(lse + N + t)
    return p_a, p_b, rho, rho * (p_a * a + p_b * b)


@triton.jit
def _towards(q, v, r, s, D: tl.constexpr):
    """The gradient of a source's logit."""
    return r * (q - (s * r / D) * v)


@triton.jit(do_not_specialize=["N", "way_a", "way_b"])
def _pair_backward_kernel(
    dy0, dy1, old, new, u, gain, s_a, s_b, lse, g, before, da, db, part, N: tl.int64, way_a: tl.int64, way_b: tl.int64, eps,
    D: tl.constexpr, BD: tl.constexpr, WAYS: tl.constexpr, NORM: tl.constexpr, HAS_G: tl.constexpr, HAS_BEFORE: tl.constexpr,
    NEED_A: tl.constexpr, NEED_B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    ok = d < D
    rows = N * (1 + NORM)  # from one way's totals to the next
    q0 = tl.load(u + d, mask=ok, other=0.0)
    du0, dgain0 = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if NORM:
        k0 = tl.load(gain + d, mask=ok, other=0.0)
    if WAYS == 2:
        q1 = tl.load(u + D + d, mask=ok, other=0.0)
        du1, dgain1 = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
        if NORM:
            k1 = tl.load(gain + D + d, mask=ok, other=0.0)
    for t in tl.range(tl.program_id(0).to(tl.int64), N, tl.num_programs(0), num_stages=STAGES):
        at = t * D + d
        a = tl.load(old + at, mask=ok, other=0.0).to(tl.float32)
        b = tl.load(new + at, mask=ok, other=0.0).to(tl.float32)
        y0 = tl.load(dy0 + at, mask=ok, other=0.0).to(tl.float32)
        p_a0, p_b0, rho0, x0 = _mixed(a, b, s_a, s_b, lse, N, t, NORM)
        if WAYS == 2:
            y1 = tl.load(dy1 + at, mask=ok, other=0.0).to(tl.float32)
            p_a1, p_b1, rho1, x1 = _mixed(a, b, s_a + way_a, s_b + way_b, lse + rows, N, t, NORM)
        if NORM:
            dgain0 += y0 * x0
            y0 = y0 * k0
            if WAYS == 2:
                dgain1 += y1 * x1
                y1 = y1 * k1
                along0, square_a, along1, square_b = four_sums(y0 * x0, a * a, y1 * x1, b * b)
                y1 = rho1 * (y1 - x1 * (along1 / D))
            else:
                along0, square_a, square_b, _ = four_sums(y0 * x0, a * a, b * b, b * b)
            y0 = rho0 * (y0 - x0 * (along0 / D))
        else:
            square_a, square_b = tl.split(tl.sum(tl.join(a * a, b * b), 0))
        r_a, r_b = tl.rsqrt(square_a / D + eps), tl.rsqrt(square_b / D + eps)
        if WAYS == 2:
            dot0, dot1 = tl.split(tl.sum(tl.join(y0 * (b - a), y1 * (b - a)), 0))
            ds1 = p_a1 * p_b1 * dot1
        else:
            dot0 = tl.sum(y0 * (b - a), 0)
        ds0 = p_a0 * p_b0 * dot0
        apart = r_b * b - r_a * a
        du0 += ds0 * apart
        if WAYS == 2:
            du1 += ds1 * apart
        if NEED_A:
            to_a = p_a0 * y0 - ds0 * _towards(q0, a, r_a, tl.load(s_a + t), D)
            if WAYS == 2:
                to_a += p_a1 * y1 - ds1 * _towards(q1, a, r_a, tl.load(s_a + way_a + t), D)
            tl.store(da + at, to_a.to(da.dtype.element_ty), mask=ok)
        if NEED_B:
            to_b = p_b0 * y0 + ds0 * _towards(q0, b, r_b, tl.load(s_b + t), D)
            if WAYS == 2:
                to_b += p_b1 * y1 + ds1 * _towards(q1, b, r_b, tl.load(s_b + way_b + t), D)
            if HAS_G:
                to_b += tl.load(g + at, mask=ok, other=0.0).to(tl.float32)
            if HAS_BEFORE:
                to_b += tl.load(before + at, mask=ok, other=0.0)
            tl.store(db + at, to_b.to(db.dtype.element_ty), mask=ok)
    part += tl.program_id(0).to(tl.int64) * (2 * WAYS * D) + d
    tl.store(part, du0, mask=ok)
    tl.store(part + WAYS * D, dgain0, mask=ok)
    if WAYS == 2:
        tl.store(part + D, du1, mask=ok)
        tl.store(part + 3 * D, dgain1, mask=ok)


@triton.jit(do_not_specialize=["n"])
def _add_up_kernel(
    table, before, out, like, n: tl.int32, D: tl.constexpr, BD: tl.constexpr, HAS_BEFORE: tl.constexpr, ALIGNED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    ok = d < D
    acc = tl.zeros([BD], tl.float32)
    if HAS_BEFORE:
        acc += tl.load(before + t * D + d, mask=ok, other=0.0)
    for i in tl.range(0, n, num_stages=STAGES):
        acc += load_row(tl.load(table + i), t, d, D, like, ALIGNED, ok)
    tl.store(out + t * D + d, acc, mask=ok)


class PairGradients(NamedTuple):
    """Gradients of both sources, where they are needed, and of the rows of a read of one way or two."""

    da: Tensor | None
    db: Tensor | None
    du: Tensor  # [W, D]
    dgain: Tensor  # [W, D]; zero without a norm


def pair_backward(
    dy: Sequence[Tensor],
    old: Tensor,
    new: Tensor,
    u: Tensor,
    gain: Tensor | None,
    s_old: Tensor,
    s_new: Tensor,
    lse: Tensor,
    g: Tensor | None,
    part: Tensor | None,
    eps: float,
    need: tuple[bool, bool],
    whole: bool = True,
) -> PairGradients:
    """Gradients of a read of `old` and `new`, given those of its results.

    u, gain: [W, D] fp32; s_old, s_new: logits [W, N]; lse: [W, 1, N], with a norm [W, 2, N], as `read` keeps them. g, part (fp32): what
    new's gradient has from elsewhere. need: of the old and of the new one. whole: new's is finished here, and not fp32.
    """
    first, (ways, dim), tokens = dy[0], u.shape, s_new.shape[-1]
    da = torch.empty_like(first) if need[0] else None
    db = torch.empty_like(first, dtype=first.dtype if whole else torch.float32) if need[1] else None
    if not tokens:
        return PairGradients(da, db, torch.zeros_like(u), torch.zeros_like(u))
    block = triton.next_power_of_2(dim)
    warps = warps_for(block, 8)
    programs = programs_for(tokens, warps, first)
    parts = torch.empty(programs, 2, ways, dim, dtype=torch.float32, device=first.device)
    launch(
        _pair_backward_kernel, (programs,), first,
        dy[0], dy[-1], old, new, u, u if gain is None else gain, s_old, s_new, lse, first if g is None else g,
        u if part is None else part, first if da is None else da, first if db is None else db, parts,
        tokens, s_old.stride(0), s_new.stride(0), eps,
        D=dim, BD=block, WAYS=ways, NORM=gain is not None, HAS_G=g is not None, HAS_BEFORE=part is not None,
        NEED_A=da is not None, NEED_B=db is not None, STAGES=stages(3, first, 3 + ways), num_warps=warps,
    )  # fmt: skip
    return PairGradients(da, db, *total(parts))


def add_up_rows(summands: Sequence[Tensor], before: Tensor | None) -> Tensor:
    """The sum of tensors like a source, in their order, and of an fp32 one: fp32."""
    first = summands[0]
    out = torch.empty_like(first, dtype=torch.float32)
    dim = first.shape[-1]
    block = triton.next_power_of_2(dim)
    if out.numel():
        launch(
            _add_up_kernel, (out.numel() // dim,), first,
            address_table(tuple(v.data_ptr() for v in summands), first.device), out if before is None else before, out, first,
            len(summands), D=dim, BD=block, HAS_BEFORE=before is not None, ALIGNED=aligned(dim, summands), STAGES=4,
            num_warps=max(1, block // 1024),
        )  # fmt: skip
    return out
