"""The backward of a step's write, after those of its read and its coefficients: every tensor is read once and written once.

The gradient of x', the written streams, has four parts: from the next step, the read, the products, and the norm's sums:

    g_o = dx'_o + pre_o du + P_o + slope_o x'_o + shift_o,    P_o = W_o dz
    dx_i = Σ_o res[o, i] g_o;    dy = Σ_o post[o] g_o;    dpost[o] = g_o · y;    dres[o, i] = g_o · x_i;    dpre[o] = du · x'_o

x' is computed again from x and y, and du from dh and x' (read.py): neither is read from memory. For Hyper-Connections P is formed
here, from the few numbers dz of a stream and as many rows of W. For mHC P is a matrix product of its own (products.py). Inside this
kernel it would need a layout in which everything else is slow.
"""

# Triton knows no other way to add to a tuple:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.launch import launch
from depthmix.ops.stream_mix.kernels.tiles import (
    fold,
    load_streams,
    load_weights,
    vector,
    weighted,
    written,
    zeros,
)
from depthmix.ops.stream_mix.products import padded


@triton.jit
def _row_of(w, k, d, D: tl.constexpr, K: tl.constexpr, LOW: tl.constexpr):
    """Load column k of W [D, K], or the two parts of that row of its transpose (products.py): [1, BK]."""
    if LOW > 0:
        high = tl.load(w + k * D + d, mask=d < D, other=0.0, eviction_policy="evict_last").to(tl.float32)
        row = high + tl.load(w + (LOW + k * D) + d, mask=d < D, other=0.0, eviction_policy="evict_last").to(tl.float32)
    else:
        row = tl.load(w + d * K + k, mask=d < D, other=0.0, eviction_policy="evict_last")
    return row[None, :]


@triton.jit(do_not_specialize=["N"])
def _write_backward_kernel(
    g, x, y, post, res, dh, gain, pre, rho, c, products, w, slopes, dx, dy, dpost, dres, dpre, N: tl.int64,
    D: tl.constexpr, n: tl.constexpr, K: tl.constexpr, LOW: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, V: tl.constexpr,
    COPIES: tl.constexpr, WRITE: tl.constexpr, RES: tl.constexpr, STATIC: tl.constexpr, NEXT: tl.constexpr,
    READ: tl.constexpr, NORM: tl.constexpr, STATIC_PRE: tl.constexpr, DPRE: tl.constexpr, SCAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    L: tl.constexpr = BK // V
    kind = x.dtype.element_ty
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    inside = t < N
    if WRITE:
        a_post = load_weights(post, t, inside, n, STATIC)
        a_res = a_post
        if RES:
            a_res = load_weights(res, t, inside, n * n, STATIC)
    if READ:
        a_pre = load_weights(pre, t, inside, n, STATIC_PRE)
        if NORM:
            r = tl.load(rho + t, mask=inside, other=0.0)[:, None]
            along = tl.load(c + t, mask=inside, other=0.0)[:, None]
    if SCAN > 0:
        # Slope and shift of each stream.
        a_norm = load_weights(slopes, t, inside, 2 * n if SCAN == 2 else 2, False)
    if SCAN == 2:
        dz = load_weights(products, t, inside, n * K, False)
    d_post = zeros(n if WRITE else 1, BT, L)
    d_res = zeros(n * n if WRITE and RES else 1, BT, L)
    d_pre = zeros(n if DPRE else 1, BT, L)
    for start in tl.range(0, D, BK, num_stages=STAGES):
        d = start + tl.arange(0, BK)
        ok = inside[:, None] & (d < D)[None, :]
        at = t[:, None] * D + d[None, :]
        xs = load_streams(x, t, d, ok, D, n, COPIES)
        new = xs
        if WRITE:
            b = tl.load(y + at, mask=ok, other=0.0).to(tl.float32)
            rounded = written(xs, b, a_res, a_post, kind, n, RES)
            new = ()
            for o in tl.static_range(n):
                new = new + (rounded[o].to(tl.float32),)
        if READ:
            du = tl.load(dh + at, mask=ok, other=0.0).to(tl.float32)
            if NORM:
                du = du * tl.load(gain + d, mask=d < D, other=0.0)[None, :]
                du = r * (du - weighted(new, a_pre, n, 0, 1) * (r * along))
            if DPRE:
                more = ()
                for o in tl.static_range(n):
                    more = more + (d_pre[o] + fold(du * new[o], BT, L, V),)
                d_pre = more
        ps = zeros(n, BT, BK)
        if SCAN == 2:
            for k in tl.static_range(K):
                row, more = tl.zeros([1, BK], tl.float32), ()
                # In a branch of its own the load does not go through shared memory.
                if N > 0:
                    row = _row_of(w, k, d, D, K, LOW)
                for o in tl.static_range(n):
                    more = more + (ps[o] + dz[o * K + k] * row,)
                ps = more
        gs = ()
        for o in tl.static_range(n):
            acc = ps[o]
            at_stream = t[:, None] * (n * D) + o * D + d[None, :]
            if SCAN == 1:
                acc += tl.load(products + at_stream, mask=ok, other=0.0).to(tl.float32) + a_norm[0] * new[o]
            if SCAN == 2:
                acc += a_norm[2 * o] * new[o] + a_norm[2 * o + 1]
            if NEXT:
                acc += tl.load(g + at_stream, mask=ok, other=0.0).to(tl.float32)
            if READ:
                acc += a_pre[o] * du
            # At padding channels this may be the shift. It is multiplied with zeros there.
            gs = gs + (acc,)
        if WRITE:
            tl.store(dy + at, weighted(gs, a_post, n, 0, 1).to(dy.dtype.element_ty), mask=ok)
            more = ()
            for o in tl.static_range(n):
                more = more + (d_post[o] + fold(gs[o] * b, BT, L, V),)
            d_post = more
            if RES:
                more = ()
                for oi in tl.static_range(n * n):
                    more = more + (d_res[oi] + fold(gs[oi // n] * xs[oi % n], BT, L, V),)
                d_res = more
        total = tl.zeros([BT, BK], tl.float32)
        for i in tl.static_range(n):
            back = gs[i]
            if WRITE and RES:
                back = weighted(gs, a_res, n, i, n)
            if COPIES:
                total += back
            else:
                tl.store(dx + t[:, None] * (n * D) + i * D + d[None, :], back.to(kind), mask=ok)
        if COPIES:
            tl.store(dx + at, total.to(kind), mask=ok)
    if WRITE:
        for o in tl.static_range(n):
            tl.store(dpost + t * n + o, tl.sum(d_post[o], 1), mask=inside)
        if RES:
            for oi in tl.static_range(n * n):
                tl.store(dres + t * (n * n) + oi, tl.sum(d_res[oi], 1), mask=inside)
    if DPRE:
        for o in tl.static_range(n):
            tl.store(dpre + t * n + o, tl.sum(d_pre[o], 1), mask=inside)


class ReadGradient(NamedTuple):
    """Results of the read's backward (read.py)."""

    dh: Tensor  # [N, D]
    pre: Tensor  # [N, n] or [n]
    gain: Tensor | None
    rho: Tensor | None  # [N]
    c: Tensor | None  # [N]
    need_dpre: bool = False


class ScanGradient(NamedTuple):
    """Results of the coefficients' backward."""

    products: Tensor  # mHC: P [N, n, D]; Hyper-Connections: dz [N, n, K]
    slopes: Tensor  # slope and shift: [N, 2] or [N, n, 2]
    w: Tensor | None = None  # Hyper-Connections: W [D, K], or its parts (products.py) for bf16 streams


class WriteGradients(NamedTuple):
    """Gradients of a step's inputs. Those of weights that all tokens share are still per token."""

    dx: Tensor
    dy: Tensor | None
    dpost: Tensor | None  # [N, n]
    dres: Tensor | None  # [N, n, n]
    dpre: Tensor | None  # [N, n], with need_dpre


def write_backward(
    g: Tensor | None, x: Tensor, copies: bool, n: int, y: Tensor | None, post: Tensor | None, res: Tensor | None,
    read: ReadGradient | None, scan: ScanGradient | None,
) -> WriteGradients:  # fmt: skip
    """Compute the gradients of a write.

    g: the gradient of x' from the next step, [N, n, D].
    """
    tokens, dim = x.shape[0], x.shape[-1]
    dx, dy, dpost, dres, dpre = out = _gradients_like(x, n, y, res, read is not None and read.need_dpre)
    if tokens:

        def or_x(tensor: Tensor | None) -> Tensor:
            return x if tensor is None else tensor

        dh, pre, gain, rho, c = (None,) * 5 if read is None else read[:5]
        products, slopes, w = (None,) * 3 if scan is None else scan
        columns = 0 if w is None or products is None else products.shape[-1]
        low = padded(columns) * dim if w is not None and w.dtype != torch.float32 else 0
        launch(
            _write_backward_kernel, (tokens,), x,
            or_x(g), x, or_x(y), or_x(post), or_x(res), or_x(dh), or_x(gain), or_x(pre), or_x(rho), or_x(c),
            or_x(products), or_x(w), or_x(slopes), dx, or_x(dy), or_x(dpost), or_x(dres), or_x(dpre), tokens,
            D=dim, n=n, K=columns, LOW=low, BT=1, BK=32 * vector(x), V=vector(x), COPIES=copies,
            WRITE=y is not None, RES=res is not None, STATIC=post is not None and post.ndim == 1, NEXT=g is not None,
            READ=dh is not None, NORM=gain is not None, STATIC_PRE=pre is not None and pre.ndim == 1, DPRE=dpre is not None,
            SCAN=0 if slopes is None else slopes.ndim - 1, STAGES=2, num_warps=1,
        )  # fmt: skip
    return out


def _gradients_like(x: Tensor, n: int, y: Tensor | None, res: Tensor | None, pre: bool) -> WriteGradients:
    def numbers(*shape: int) -> Tensor:
        return torch.empty(len(x), *shape, dtype=torch.float32, device=x.device)

    dpre = numbers(n) if pre else None
    if y is None:
        return WriteGradients(torch.empty_like(x), None, None, None, dpre)
    dres = None if res is None else numbers(n, n)
    return WriteGradients(torch.empty_like(x), torch.empty_like(y), numbers(n), dres, dpre)
