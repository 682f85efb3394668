"""Depth attention's backward read by read: one kernel computes the gradients of all sources of a read.

A token's sources are read twice, the second time from the cache: o is mixed again, because a stored o would be rounded.
source_order.py has the faster order for stacks of reads; this kernel needs nothing but the read itself.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.depth_attention.kernels.read import load_row, programs_for, row_of
from depthmix.ops.gpu.addresses import address_table, aligned
from depthmix.ops.gpu.launch import launch, repeat_last


@triton.jit
def _through_norm(y, o, k, dgain, out_eps, D: tl.constexpr, NORM: tl.constexpr):
    """Return the gradient of o, the gain's gradient with this token added, and δ = do · o."""
    if NORM:
        r = tl.rsqrt(tl.sum(o * o, 0) / D + out_eps)
        dgain += y * o * r
        y *= k
        y = r * (y - o * (tl.sum(y * o, 0) * r * r / D))
    return y, dgain, tl.sum(y * o, 0)


@triton.jit
def _pair(v, r, y, u, s, lse, delta, several, acc, c, du, VALUE_NORM: tl.constexpr):
    """Add one way's part to a source's gradient, to c = Σ ds s (and p dp with normed values) and to du."""
    p, dp = tl.exp(s - lse), tl.sum(y * v, 0)
    if VALUE_NORM:
        dp *= r
        c += p * dp
    ds = p * (dp - delta) * several
    w = ds * r
    weight = p * r if VALUE_NORM else p
    return tl.fma(w, u, tl.fma(weight, y, acc)), c + ds * s, tl.fma(w, v, du)


@triton.jit
def _load_source(
    table, add, t, i, n, stacked, d, ok, D: tl.constexpr, ADD: tl.constexpr, STACK: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return source i of a token; with ADD the newest one is a sum."""
    v = load_row(tl.load(table + 3 * i), row_of(t, i, stacked, STACK), d, D, add, ALIGNED, ok)
    if ADD:
        v += tl.load(add + t * D + d, mask=d < tl.where(i == n - 1, D, 0), other=0.0).to(tl.float32)
    return v


@triton.jit(do_not_specialize=["N", "n", "stacked"])
def _layer_backward_kernel(
    table, add, dy0, dy1, dy2, u, gain, s, lse, part, N: tl.int64, n: tl.int32, stacked: tl.int32, eps, out_eps,
    D: tl.constexpr, BD: tl.constexpr, WAYS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, VALUE_NORM: tl.constexpr,
    STACK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    ok = d < D
    # The weight of an only source is 1 whatever its logit.
    several = tl.where(n > 1, 1.0, 0.0)
    # Distance from one way's logits to the next.
    way = N * n
    u0, k0 = tl.load(u + d, mask=ok, other=0.0), tl.load(gain + d, mask=ok, other=0.0)
    du0, dg0 = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if WAYS >= 2:
        u1, k1 = tl.load(u + D + d, mask=ok, other=0.0), tl.load(gain + D + d, mask=ok, other=0.0)
        du1, dg1 = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if WAYS >= 3:
        u2, k2 = tl.load(u + 2 * D + d, mask=ok, other=0.0), tl.load(gain + 2 * D + d, mask=ok, other=0.0)
        du2, dg2 = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    for t in tl.range(tl.program_id(0).to(tl.int64), N, tl.num_programs(0), num_stages=1):
        l0, o0 = tl.load(lse + t), tl.zeros([BD], tl.float32)
        if WAYS >= 2:
            l1, o1 = tl.load(lse + N + t), tl.zeros([BD], tl.float32)
        if WAYS >= 3:
            l2, o2 = tl.load(lse + 2 * N + t), tl.zeros([BD], tl.float32)
        for i in range(n):
            v = _load_source(table, add, t, i, n, stacked, d, ok, D, ADD, STACK, ALIGNED)
            if VALUE_NORM:
                v *= tl.rsqrt(tl.sum(v * v, 0) / D + eps)
            at = s + i * N + t
            o0 = tl.fma(tl.exp(tl.load(at) - l0), v, o0)
            if WAYS >= 2:
                o1 = tl.fma(tl.exp(tl.load(at + way) - l1), v, o1)
            if WAYS >= 3:
                o2 = tl.fma(tl.exp(tl.load(at + 2 * way) - l2), v, o2)
        y0 = tl.load(dy0 + t * D + d, mask=ok, other=0.0).to(tl.float32)
        y0, dg0, delta0 = _through_norm(y0, o0, k0, dg0, out_eps, D, NORM)
        # This token's part of du. A long sum in one accumulator would be less exact.
        token_du0 = tl.zeros([BD], tl.float32)
        if WAYS >= 2:
            y1 = tl.load(dy1 + t * D + d, mask=ok, other=0.0).to(tl.float32)
            y1, dg1, delta1 = _through_norm(y1, o1, k1, dg1, out_eps, D, NORM)
            token_du1 = tl.zeros([BD], tl.float32)
        if WAYS >= 3:
            y2 = tl.load(dy2 + t * D + d, mask=ok, other=0.0).to(tl.float32)
            y2, dg2, delta2 = _through_norm(y2, o2, k2, dg2, out_eps, D, NORM)
            token_du2 = tl.zeros([BD], tl.float32)
        for i in range(n):
            v = _load_source(table, add, t, i, n, stacked, d, ok, D, ADD, STACK, ALIGNED)
            r = tl.rsqrt(tl.sum(v * v, 0) / D + eps)
            g, out = tl.load(table + 3 * i + 1), tl.load(table + 3 * i + 2)
            acc = load_row(g, t, d, D, add, ALIGNED, d < tl.where(g != 0, D, 0))
            c = 0.0
            at = s + i * N + t
            acc, c, token_du0 = _pair(v, r, y0, u0, tl.load(at), l0, delta0, several, acc, c, token_du0, VALUE_NORM)
            if WAYS >= 2:
                acc, c, token_du1 = _pair(
                    v, r, y1, u1, tl.load(at + way), l1, delta1, several, acc, c, token_du1, VALUE_NORM
                )
            if WAYS >= 3:
                acc, c, token_du2 = _pair(
                    v, r, y2, u2, tl.load(at + 2 * way), l2, delta2, several, acc, c, token_du2, VALUE_NORM
                )
            acc -= (c * r * r / D) * v
            out = out.to(tl.pointer_type(add.dtype.element_ty)) + row_of(t, i, stacked, STACK) * D + d
            if ALIGNED:
                out = tl.multiple_of(out, 16)
            tl.store(out, acc.to(add.dtype.element_ty), mask=ok)
        du0 += token_du0
        if WAYS >= 2:
            du1 += token_du1
        if WAYS >= 3:
            du2 += token_du2
    part += tl.program_id(0).to(tl.int64) * (2 * WAYS * D) + d
    tl.store(part, du0, mask=ok)
    tl.store(part + WAYS * D, dg0, mask=ok)
    if WAYS >= 2:
        tl.store(part + D, du1, mask=ok)
        tl.store(part + (WAYS + 1) * D, dg1, mask=ok)
    if WAYS >= 3:
        tl.store(part + 2 * D, du2, mask=ok)
        tl.store(part + (WAYS + 2) * D, dg2, mask=ok)


def layer_backward(
    dy: Sequence[Tensor],
    u: Tensor,
    gain: Tensor | None,
    s: Tensor,
    lse: Tensor,
    sources: Sequence[Tensor],
    g: Tensor | None,
    eps: float,
    out_eps: float,
    *,
    add: Tensor | None = None,
    value_norm: bool = False,
    dstack: Tensor | None = None,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Compute the gradients of every source, of u [W, D] and of the gain [W, D] (zeros without one), given those of the results.

    Args:
        s, lse: logits [W, n, N] and their log-sum-exp [W, N].
        g: a gradient of the newest source from elsewhere, or None.
        add: a tensor that was added to the newest source and has the same gradient, or None.
        value_norm: as for `read`.
        dstack: if the first m sources are views of a tensor [..., m, D], memory for its gradient.
    """
    v, (ways, dim) = sources[-1], u.shape
    tokens = v.numel() // dim
    of_stack = [] if dstack is None else list(dstack.unbind(-2))
    stacked = len(of_stack)
    dv = of_stack + [torch.empty_like(x) for x in sources[stacked:]]
    if not tokens:
        return dv, torch.zeros_like(u), torch.zeros_like(u)
    block = triton.next_power_of_2(dim)
    # Few enough rows that a lane may hold 32 numbers of each.
    small = ways == 1 and v.element_size() == 2
    warps = min(32, max(1, block // (1024 if small else 256)))
    # More programs than run at a time, so that each adds up few tokens: long sums are less exact.
    programs = min(tokens, (4 if small else 8) * programs_for(tokens, warps, v))
    part = torch.empty(programs, 2, ways, dim, dtype=torch.float32, device=v.device)
    gs = [*[None] * (len(sources) - 1), g]
    rows = [
        (x.data_ptr(), 0 if h is None else h.data_ptr(), o.data_ptr()) for x, h, o in zip(sources, gs, dv, strict=True)
    ]
    launch(
        _layer_backward_kernel, (programs,), v,
        address_table(tuple(a for row in rows for a in row), v.device),
        v if add is None else add, *repeat_last(dy, 3), u, u if gain is None else gain, s, lse, part, tokens, len(sources),
        stacked, eps, out_eps,
        D=dim, BD=block, WAYS=ways, ADD=add is not None, NORM=gain is not None, VALUE_NORM=value_norm, STACK=stacked > 0,
        ALIGNED=aligned(dim, sources, gs, dv), num_warps=warps,
    )  # fmt: skip
    return dv, part[:, 0].sum(0), torch.zeros_like(u) if gain is None else part[:, 1].sum(0)
