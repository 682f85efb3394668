"""A read of two sources a and b, the newest, in one launch each for forward and backward. Nothing of a mixture is saved.

For each way, with logits s, weights p = softmax(s), x̂ = ρ (p_a a + p_b b) and the result c ⊙ x̂ (ρ = c = 1 without a norm, and then
do = dy):

    k = c ⊙ dy        do = ρ (k - x̂ mean(k ⊙ x̂))        ds = p_a p_b do·(b - a)        dc = Σ_tokens dy ⊙ x̂
    db = p_b do + ds r_b (u - s_b r_b b / D)        da = p_a do - ds r_a (u - s_a r_a a / D)        du = Σ_tokens ds (r_b b - r_a a)

r is 1 / RMS of a source, u the query with its key gain, s = r u·source. The gradients of two ways are added up here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.depth_attention.kernels.read import four_sums, load_row, programs_for, stages, store_sums, warps_for
from depthmix.ops.gpu.addresses import address_table, aligned
from depthmix.ops.gpu.launch import launch
from depthmix.ops.gpu.program_sums import sum_programs
from depthmix.ops.gpu.sizes import next_power_of_2


@triton.jit
def _weights(s_a, s_b):
    """Return the softmax of two logits, and their log-sum-exp."""
    top = tl.maximum(s_a, s_b)
    e_a, e_b = tl.exp(s_a - top), tl.exp(s_b - top)
    z = e_a + e_b
    return e_a / z, e_b / z, top + tl.log(z)


@triton.jit
def _store_way(x, rho, s_a, s_b, total, y, gain, s, lse, t, N, d, ok, D: tl.constexpr, NORM: tl.constexpr):
    """Store a way's result, and what its backward needs."""
    tl.store(s + t, s_a)
    tl.store(s + N + t, s_b)
    tl.store(lse + t, total)
    if NORM:
        tl.store(lse + N + t, rho)
        x = x * rho * tl.load(gain + d, mask=ok, other=0.0)
    tl.store(y + t * D + d, x.to(y.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["N"])
def _pair_read_kernel(
    old, new, add, fresh, u, gain, y0, y1, s, lse, N: tl.int64, eps, out_eps,
    D: tl.constexpr, BD: tl.constexpr, WAYS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    ok = d < D
    at = t * D + d
    a = tl.load(old + at, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(new + at, mask=ok, other=0.0)
    if ADD:
        b = (b.to(tl.float32) + tl.load(add + at, mask=ok, other=0.0)).to(fresh.dtype.element_ty)
        tl.store(fresh + at, b, mask=ok)
    b = b.to(tl.float32)
    u0 = tl.load(u + d, mask=ok, other=0.0)
    square_a, square_b, s_a0, s_b0 = four_sums(a * a, b * b, a * u0, b * u0)
    r_a, r_b = tl.rsqrt(square_a / D + eps), tl.rsqrt(square_b / D + eps)
    s_a0, s_b0 = s_a0 * r_a, s_b0 * r_b
    p_a0, p_b0, total0 = _weights(s_a0, s_b0)
    x0 = p_a0 * a + p_b0 * b
    rho0, rho1 = 1.0, 1.0
    if WAYS == 2:
        u1 = tl.load(u + D + d, mask=ok, other=0.0)
        s_a1, s_b1 = tl.split(tl.sum(tl.join(a * u1, b * u1), 0))
        s_a1, s_b1 = s_a1 * r_a, s_b1 * r_b
        p_a1, p_b1, total1 = _weights(s_a1, s_b1)
        x1 = p_a1 * a + p_b1 * b
        if NORM:
            square0, square1 = tl.split(tl.sum(tl.join(x0 * x0, x1 * x1), 0))
            rho0, rho1 = tl.rsqrt(square0 / D + out_eps), tl.rsqrt(square1 / D + out_eps)
        # Distance from one way's logits to the next.
        way = 2 * N
        totals = N * (1 + NORM)
        _store_way(x1, rho1, s_a1, s_b1, total1, y1, gain + D, s + way, lse + totals, t, N, d, ok, D, NORM)
    elif NORM:
        rho0 = tl.rsqrt(tl.sum(x0 * x0, 0) / D + out_eps)
    _store_way(x0, rho0, s_a0, s_b0, total0, y0, gain, s, lse, t, N, d, ok, D, NORM)


@triton.jit
def _mixed(a, b, s, lse, N, t, NORM: tl.constexpr):
    """Return both weights, ρ and x̂."""
    total = tl.load(lse + t)
    p_a, p_b = tl.exp(tl.load(s + t) - total), tl.exp(tl.load(s + N + t) - total)
    rho = 1.0
    if NORM:
        rho = tl.load(lse + N + t)
    return p_a, p_b, rho, rho * (p_a * a + p_b * b)


@triton.jit
def _towards(q, v, r, s, D: tl.constexpr):
    """Return the gradient of a source's logit with respect to the source."""
    return r * (q - (s * r / D) * v)


@triton.jit(do_not_specialize=["N"])
def _pair_backward_kernel(
    dy0, dy1, old, new, u, gain, s, lse, g, before, da, db, part, N: tl.int64, eps,
    D: tl.constexpr, BD: tl.constexpr, WAYS: tl.constexpr, NORM: tl.constexpr, HAS_G: tl.constexpr, HAS_BEFORE: tl.constexpr,
    NEED_A: tl.constexpr, NEED_B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    ok = d < D
    # Distance from one way's logits to the next.
    way, totals = 2 * N, N * (1 + NORM)
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
        p_a0, p_b0, rho0, x0 = _mixed(a, b, s, lse, N, t, NORM)
        if WAYS == 2:
            y1 = tl.load(dy1 + at, mask=ok, other=0.0).to(tl.float32)
            p_a1, p_b1, rho1, x1 = _mixed(a, b, s + way, lse + totals, N, t, NORM)
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
            to_a = p_a0 * y0 - ds0 * _towards(q0, a, r_a, tl.load(s + t), D)
            if WAYS == 2:
                to_a += p_a1 * y1 - ds1 * _towards(q1, a, r_a, tl.load(s + way + t), D)
            tl.store(da + at, to_a.to(da.dtype.element_ty), mask=ok)
        if NEED_B:
            to_b = p_b0 * y0 + ds0 * _towards(q0, b, r_b, tl.load(s + N + t), D)
            if WAYS == 2:
                to_b += p_b1 * y1 + ds1 * _towards(q1, b, r_b, tl.load(s + way + N + t), D)
            if HAS_G:
                to_b += tl.load(g + at, mask=ok, other=0.0).to(tl.float32)
            if HAS_BEFORE:
                to_b += tl.load(before + at, mask=ok, other=0.0)
            tl.store(db + at, to_b.to(db.dtype.element_ty), mask=ok)
    store_sums(part, 0, du0, dgain0, d, ok, D, WAYS)
    if WAYS == 2:
        store_sums(part, 1, du1, dgain1, d, ok, D, WAYS)


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


class PairRead(NamedTuple):
    """Results of a read of two sources, and what its backward needs besides them."""

    y: list[Tensor]  # W results like a source
    s: Tensor  # logits [W, 2, N], the older source's first
    lse: Tensor  # their log-sum-exp [W, 1, N]; with a norm also 1 / RMS of the mixture, [W, 2, N]
    fresh: Tensor | None  # the newest source, if it was added up here

    @classmethod
    def empty(cls, like: Tensor, ways: int, norm: bool, add: bool) -> "PairRead":
        """Allocate a read of sources like `like`."""
        tokens = like.numel() // like.shape[-1]
        return cls(
            [torch.empty_like(like) for _ in range(ways)],
            torch.empty(ways, 2, tokens, dtype=torch.float32, device=like.device),
            torch.empty(ways, 1 + norm, tokens, dtype=torch.float32, device=like.device),
            torch.empty_like(like) if add else None,
        )


def pair_read(
    u: Tensor, old: Tensor, new: Tensor, add: Tensor | None, gain: Tensor | None, eps: float, out_eps: float
) -> PairRead:
    """Compute one or two mixtures of `old` and `new` (+ add), [..., D].

    u, gain: [W, D] fp32; gain belongs to the norm that follows.
    """
    ways, dim = u.shape
    y, s, lse, fresh = result = PairRead.empty(new, ways, gain is not None, add is not None)
    if new.numel():
        block = next_power_of_2(dim)
        launch(
            _pair_read_kernel, (new.numel() // dim,), new,
            old, new, new if add is None else add, new if fresh is None else fresh, u, u if gain is None else gain,
            y[0], y[-1], s, lse, new.numel() // dim, eps, out_eps,
            D=dim, BD=block, WAYS=ways, ADD=add is not None, NORM=gain is not None, num_warps=warps_for(block, 2 + ways),
        )  # fmt: skip
    return result


class PairGradients(NamedTuple):
    """Gradients of both sources, where they are needed, and of the query and gain rows."""

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
    s: Tensor,
    lse: Tensor,
    g: Tensor | None,
    part: Tensor | None,
    eps: float,
    need: tuple[bool, bool],
    whole: bool = True,
) -> PairGradients:
    """Compute the gradients of a read of `old` and `new`, given those of its results.

    Args:
        dy: gradients of the W results.
        old, new: the sources.
        u, gain: [W, D] fp32.
        s, lse: as in PairRead.
        g: gradient of the newest source from elsewhere, or None.
        part: the same in fp32.
        eps: of the keys' norm.
        need: whether `old` and `new` need gradients.
        whole: the gradient of `new` is finished here and rounded; otherwise it is fp32.
    """
    first, (ways, dim), tokens = dy[0], u.shape, s.shape[-1]
    da = torch.empty_like(first) if need[0] else None
    db = torch.empty_like(first, dtype=first.dtype if whole else torch.float32) if need[1] else None
    if not tokens:
        return PairGradients(da, db, torch.zeros_like(u), torch.zeros_like(u))
    block = next_power_of_2(dim)
    warps = warps_for(block, 8)
    programs = programs_for(tokens, warps, first)
    parts = torch.empty(programs, 2, ways, dim, dtype=torch.float32, device=first.device)
    launch(
        _pair_backward_kernel, (programs,), first,
        dy[0], dy[-1], old, new, u, u if gain is None else gain, s, lse, first if g is None else g,
        u if part is None else part, first if da is None else da, first if db is None else db, parts,
        tokens, eps,
        D=dim, BD=block, WAYS=ways, NORM=gain is not None, HAS_G=g is not None, HAS_BEFORE=part is not None,
        NEED_A=da is not None, NEED_B=db is not None, STAGES=stages(3, first, 3 + ways), num_warps=warps,
    )  # fmt: skip
    return PairGradients(da, db, *sum_programs(parts))


def add_up_rows(summands: Sequence[Tensor], before: Tensor | None) -> Tensor:
    """Return the fp32 sum of tensors like a source, in their order, and of the fp32 tensor `before`."""
    first = summands[0]
    out = torch.empty_like(first, dtype=torch.float32)
    dim = first.shape[-1]
    block = next_power_of_2(dim)
    if out.numel():
        launch(
            _add_up_kernel, (out.numel() // dim,), first,
            address_table(tuple(v.data_ptr() for v in summands), first.device), out if before is None else before, out, first,
            len(summands), D=dim, BD=block, HAS_BEFORE=before is not None, ALIGNED=aligned(dim, summands), STAGES=4,
            num_warps=max(1, block // 1024),
        )  # fmt: skip
    return out
