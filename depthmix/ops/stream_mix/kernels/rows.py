"""The write to n streams, with the next read where its weights are known beforehand: one pass over memory.

    x'_o = Σ_i res[o, i] x_i + post[o] y, rounded;    Σ x'²  (and Σ x' of each stream);    u = Σ_i pre_i x'_i;    h = gain ⊙ u / RMS(u)

z = x' W is a matrix product of its own (products.py). Rows that are too long for a program are written in parts, each of which stores
a slice of the sums (split_product.py). Such a row is read by a kernel of its own, because its norm needs all of it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.launch import launch
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2
from depthmix.ops.stream_mix.kernels.tiles import load_streams, load_weights, written

# Channels of a row whose n streams a program holds, and of the parts of longer rows.
MAX_ROW, PART = 4096, 1024


@triton.jit(do_not_specialize=["N"])
def _write_rows_kernel(
    x, y, post, res, out, sums, pre, gain, h, rho, N: tl.int64, eps,
    D: tl.constexpr, BD: tl.constexpr, n: tl.constexpr, BT: tl.constexpr, COPIES: tl.constexpr, RES: tl.constexpr, STATIC: tl.constexpr,
    SCAN: tl.constexpr, READ: tl.constexpr, STATIC_PRE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    inside = t < N
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    # Of this part of a row.
    slot = tl.program_id(1).to(tl.int64) * N + t
    ok = inside[:, None] & (d < D)[None, :]
    xs = load_streams(x, t, d, ok, D, n, COPIES)
    b = tl.load(y + t[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
    a_post = load_weights(post, t, inside, n, STATIC)
    a_res = a_post
    if RES:
        a_res = load_weights(res, t, inside, n * n, STATIC)
    new = written(xs, b, a_res, a_post, out.dtype.element_ty, n, RES)
    u = tl.zeros([BT, BD], tl.float32)
    squares = tl.zeros([BT, BD], tl.float32)
    if READ:
        a_pre = load_weights(pre, t, inside, n, STATIC_PRE)
    for o in tl.static_range(n):
        tl.store(out + t[:, None] * (n * D) + o * D + d[None, :], new[o], mask=ok)
        v = new[o].to(tl.float32)
        if READ:
            u += a_pre[o] * v
        if SCAN == 1:
            squares += v * v
        if SCAN == 2:
            tl.store(sums + (slot * n + o) * 2, tl.sum(v, 1), mask=inside)
            tl.store(sums + (slot * n + o) * 2 + 1, tl.sum(v * v, 1), mask=inside)
    if SCAN == 1:
        tl.store(sums + slot, tl.sum(squares, 1), mask=inside)
    if READ:
        if NORM:
            r = tl.rsqrt(tl.sum(u * u, 1) / D + eps)
            tl.store(rho + t, r, mask=inside)
            u = u * r[:, None] * tl.load(gain + d, mask=d < D, other=0.0)[None, :]
        tl.store(h + t[:, None] * D + d[None, :], u.to(h.dtype.element_ty), mask=ok)


class Reading(NamedTuple):
    """A read whose weights are known before the write."""

    pre: Tensor  # [N, n] or [n]
    gain: Tensor | None  # [D], of the norm; None: no norm
    eps: float


class Rows(NamedTuple):
    """Results of a write and a read."""

    x: Tensor  # [N, n, D]
    sums: Tensor | None  # slices of Σ x'² [S, N] for all streams together, of Σ x' and Σ x'² [S, N, n, 2] for each
    h: Tensor | None  # [N, D]
    rho: Tensor | None  # [N]


def write_rows(
    x: Tensor, copies: bool, n: int, y: Tensor, post: Tensor, res: Tensor | None, scan: int,
    reading: Reading | None = None,
) -> Rows:  # fmt: skip
    """Write to the streams, and read from them if `reading` is given and a program holds a row.

    x: [N, n, D], or with copies [N, D]. scan: 1 for the sum of all streams, 2 for those of each.
    """
    tokens, dim = x.shape[0], x.shape[-1]
    whole = dim <= MAX_ROW
    block = next_power_of_2(dim) if whole else PART
    parts = cdiv(dim, block)
    out = torch.empty(tokens, n, dim, dtype=x.dtype, device=x.device)
    sums = h = rho = None
    if scan:
        shape = (parts, tokens) if scan == 1 else (parts, tokens, n, 2)
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    pre, gain, eps = reading if reading is not None and whole else (None, None, 0.0)
    if pre is not None:
        h = torch.empty(tokens, dim, dtype=x.dtype, device=x.device)
        rho = None if gain is None else torch.empty(tokens, dtype=torch.float32, device=x.device)
    if tokens:

        def or_x(tensor: Tensor | None) -> Tensor:
            return x if tensor is None else tensor

        launch(
            _write_rows_kernel, (tokens, parts), x,
            x, y, post, or_x(res), out, or_x(sums), or_x(pre), or_x(gain), or_x(h), or_x(rho), tokens, eps,
            D=dim, BD=block, n=n, BT=1, COPIES=copies, RES=res is not None, STATIC=post.ndim == 1, SCAN=scan,
            READ=pre is not None, STATIC_PRE=pre is not None and pre.ndim == 1, NORM=gain is not None, num_warps=max(1, block // 512),
        )  # fmt: skip
    return Rows(out, sums, h, rho)
