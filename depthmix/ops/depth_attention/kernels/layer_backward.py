"""Depth attention's backward read by read: one kernel computes the gradients of all sources of a read.

A token's sources are read twice, the second time from the cache: o is mixed again, because a stored o would be rounded.
source_order.py has the faster order for stacks of reads; this kernel needs nothing but the read itself.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.depth_attention.kernels.read import programs_for, row_of
from depthmix.ops.gpu.addresses import address_table, aligned
from depthmix.ops.gpu.launch import launch, repeat_last
from depthmix.ops.gpu.rows import (
    add_rows,
    add_scaled,
    cut,
    dot,
    load_pieces,
    multiply_rows,
    scale_row,
    store_pieces,
    zero_row,
)
from depthmix.ops.gpu.sizes import next_power_of_2


@triton.jit
def _through_norm(y, o, k, dgain, out_eps, D: tl.constexpr, NORM: tl.constexpr):
    """Return the gradient of o, the gain's gradient with this token added, and δ = do · o."""
    if NORM:
        r = tl.rsqrt(dot(o, o) / D + out_eps)
        dgain = add_rows(dgain, scale_row(multiply_rows(y, o), r))
        y = multiply_rows(y, k)
        y = scale_row(add_scaled(y, -(dot(y, o) * r * r / D), o), r)
    return y, dgain, dot(y, o)


@triton.jit
def _pair(v, r, y, u, s, lse, delta, several, acc, c, du, VALUE_NORM: tl.constexpr):
    """Add one way's part to a source's gradient, to c = Σ ds s (and p dp with normed values) and to du."""
    p, dp = tl.exp(s - lse), dot(y, v)
    if VALUE_NORM:
        dp *= r
        c += p * dp
    ds = p * (dp - delta) * several
    w = ds * r
    weight = p * r if VALUE_NORM else p
    return add_scaled(add_scaled(acc, weight, y), w, u), c + ds * s, add_scaled(du, w, v)


@triton.jit
def _load_source(
    table, add, t, i, n, stacked, D: tl.constexpr, C: tl.constexpr, K: tl.constexpr, ADD: tl.constexpr,
    STACK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return source i of a token; with ADD the newest one is a sum."""
    source = tl.load(table + 3 * i).to(tl.pointer_type(add.dtype.element_ty))
    v = load_pieces(source + row_of(t, i, stacked, STACK) * D, D, C, K, ALIGNED)
    if ADD:
        v = add_rows(v, load_pieces(add + t * D, tl.where(i == n - 1, D, 0), C, K))
    return v


@triton.jit(do_not_specialize=["N", "n", "stacked"])
def _layer_backward_kernel(
    table, add, dy0, dy1, dy2, u, gain, s, lse, part, N: tl.int64, n: tl.int32, stacked: tl.int32, eps, out_eps,
    D: tl.constexpr, C: tl.constexpr, K: tl.constexpr, WAYS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
    VALUE_NORM: tl.constexpr, STACK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    # The weight of an only source is 1 whatever its logit.
    several = tl.where(n > 1, 1.0, 0.0)
    # Distance from one way's logits to the next.
    way = N * n
    u0, k0 = load_pieces(u, D, C, K), load_pieces(gain, D, C, K)
    du0, dg0 = zero_row(C, K), zero_row(C, K)
    if WAYS >= 2:
        u1, k1 = load_pieces(u + D, D, C, K), load_pieces(gain + D, D, C, K)
        du1, dg1 = zero_row(C, K), zero_row(C, K)
    if WAYS >= 3:
        u2, k2 = load_pieces(u + 2 * D, D, C, K), load_pieces(gain + 2 * D, D, C, K)
        du2, dg2 = zero_row(C, K), zero_row(C, K)
    for t in tl.range(tl.program_id(0).to(tl.int64), N, tl.num_programs(0), num_stages=1):
        l0, o0 = tl.load(lse + t), zero_row(C, K)
        if WAYS >= 2:
            l1, o1 = tl.load(lse + N + t), zero_row(C, K)
        if WAYS >= 3:
            l2, o2 = tl.load(lse + 2 * N + t), zero_row(C, K)
        for i in range(n):
            v = _load_source(table, add, t, i, n, stacked, D, C, K, ADD, STACK, ALIGNED)
            if VALUE_NORM:
                v = scale_row(v, tl.rsqrt(dot(v, v) / D + eps))
            at = s + i * N + t
            o0 = add_scaled(o0, tl.exp(tl.load(at) - l0), v)
            if WAYS >= 2:
                o1 = add_scaled(o1, tl.exp(tl.load(at + way) - l1), v)
            if WAYS >= 3:
                o2 = add_scaled(o2, tl.exp(tl.load(at + 2 * way) - l2), v)
        y0, dg0, delta0 = _through_norm(load_pieces(dy0 + t * D, D, C, K), o0, k0, dg0, out_eps, D, NORM)
        # This token's part of du. A long sum in one accumulator would be less exact.
        token_du0 = zero_row(C, K)
        if WAYS >= 2:
            y1, dg1, delta1 = _through_norm(load_pieces(dy1 + t * D, D, C, K), o1, k1, dg1, out_eps, D, NORM)
            token_du1 = zero_row(C, K)
        if WAYS >= 3:
            y2, dg2, delta2 = _through_norm(load_pieces(dy2 + t * D, D, C, K), o2, k2, dg2, out_eps, D, NORM)
            token_du2 = zero_row(C, K)
        for i in range(n):
            v = _load_source(table, add, t, i, n, stacked, D, C, K, ADD, STACK, ALIGNED)
            r = tl.rsqrt(dot(v, v) / D + eps)
            g = tl.load(table + 3 * i + 1)
            acc = load_pieces(
                g.to(tl.pointer_type(add.dtype.element_ty)) + t * D, tl.where(g != 0, D, 0), C, K, ALIGNED
            )
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
            out = tl.load(table + 3 * i + 2).to(tl.pointer_type(add.dtype.element_ty))
            store_pieces(out + row_of(t, i, stacked, STACK) * D, add_scaled(acc, -(c * r * r / D), v), D, ALIGNED)
        du0 = add_rows(du0, token_du0)
        if WAYS >= 2:
            du1 = add_rows(du1, token_du1)
        if WAYS >= 3:
            du2 = add_rows(du2, token_du2)
    part += tl.program_id(0).to(tl.int64) * (2 * WAYS * D)
    store_pieces(part, du0, D)
    store_pieces(part + WAYS * D, dg0, D)
    if WAYS >= 2:
        store_pieces(part + D, du1, D)
        store_pieces(part + (WAYS + 1) * D, dg1, D)
    if WAYS >= 3:
        store_pieces(part + 2 * D, du2, D)
        store_pieces(part + (WAYS + 2) * D, dg2, D)


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
    # Few enough rows that a lane may hold 32 numbers of each.
    small = ways == 1 and v.element_size() == 2
    warps = min(32, max(1, next_power_of_2(dim) // (1024 if small else 256)))
    pieces = cut(dim, min(16, warps))
    if pieces.number > 1:
        # Rows in pieces are shorter. 32 warps would have too few registers each.
        warps = min(16, warps)
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
        D=dim, C=pieces.number, K=pieces.width, WAYS=ways, ADD=add is not None, NORM=gain is not None, VALUE_NORM=value_norm, STACK=stacked > 0,
        ALIGNED=aligned(dim, sources, gs, dv), num_warps=warps,
    )  # fmt: skip
    return dv, part[:, 0].sum(0), torch.zeros_like(u) if gain is None else part[:, 1].sum(0)
