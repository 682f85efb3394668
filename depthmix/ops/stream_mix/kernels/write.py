"""The write to n streams, with the products and sums that the next coefficients need: every stream is read and written once.

    x'_o = Σ_i res[o, i] x_i + post[o] y, rounded;      z = x' W;      Σ x'²  (and Σ x' of each stream)

over all n D channels for mHC (z [N, K]), stream by stream for Hyper-Connections (z [N, n, K]). One kernel does all of it here.
Where rows are not too long, `write` prefers an elementwise kernel and a matrix product (rows.py, products.py): x' is read
again, but neither waits for the other's layout.
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
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2
from depthmix.ops.stream_mix.kernels.rows import MAX_ROW, Reading, write_rows
from depthmix.ops.stream_mix.kernels.tiles import (
    dot_right,
    fold,
    load_products,
    load_streams,
    load_weights,
    splits,
    vector,
    written,
    zeros,
)
from depthmix.ops.stream_mix.products import padded, product, split_by_kernels

# What z is computed from: nothing, all streams together, or each of them.
NO_SCAN, JOINT, EACH = 0, 1, 2
# Tokens of a program.
TOKENS = 64


@triton.jit(do_not_specialize=["N"])
def _write_kernel(
    x, y, post, res, out, w, z, sums, N: tl.int64,
    D: tl.constexpr, n: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, LOW: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, V: tl.constexpr,
    COPIES: tl.constexpr, WRITE: tl.constexpr, RES: tl.constexpr, STATIC: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    SPLIT: tl.constexpr = LOW != 0
    C: tl.constexpr = D * n if SCAN == 1 else D
    L: tl.constexpr = BK // V
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    inside = t < N
    k = tl.arange(0, KP)
    if WRITE:
        a_post = load_weights(post, t, inside, n, STATIC)
        a_res = a_post
        if RES:
            a_res = load_weights(res, t, inside, n * n, STATIC)
    dots = zeros(n if SCAN == 2 else 1, BT, KP)
    squares = zeros(n if SCAN == 2 else 1, BT, L)
    totals = zeros(n if SCAN == 2 else 1, BT, L)
    for start in range(0, D, BK):
        d = start + tl.arange(0, BK)
        ok = inside[:, None] & (d < D)[None, :]
        xs = load_streams(x, t, d, ok, D, n, COPIES)
        new = ()
        if WRITE:
            b = tl.load(y + t[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
            new = written(xs, b, a_res, a_post, out.dtype.element_ty, n, RES)
            for o in tl.static_range(n):
                tl.store(out + t[:, None] * (n * D) + o * D + d[None, :], new[o], mask=ok)
        else:
            for o in tl.static_range(n):
                new = new + (xs[o].to(out.dtype.element_ty),)
        if SCAN > 0:
            w_ok = (d < D)[:, None] & (k < K)[None, :]
            more, more_squares, more_totals = (), (), ()
            joint, joint_squares = dots[0], squares[0]
            for o in tl.static_range(n):
                row = d.to(tl.int64) + (o * D if SCAN == 1 else 0)
                high, low = load_products(w, row, w_ok, k, C, K, LOW)
                v = new[o].to(tl.float32)
                a = new[o] if SPLIT else v
                if SCAN == 1:
                    joint = dot_right(a, high, low, joint, SPLIT)
                    joint_squares += fold(v * v, BT, L, V)
                else:
                    more = more + (dot_right(a, high, low, dots[o], SPLIT),)
                    more_squares = more_squares + (squares[o] + fold(v * v, BT, L, V),)
                    more_totals = more_totals + (totals[o] + fold(v, BT, L, V),)
            if SCAN == 1:
                dots, squares = (joint,), (joint_squares,)
            else:
                dots, squares, totals = more, more_squares, more_totals
    if SCAN > 0:
        keep = inside[:, None] & (k < K)[None, :]
        if SCAN == 1:
            tl.store(z + t[:, None] * K + k[None, :], dots[0], mask=keep)
            tl.store(sums + t, tl.sum(squares[0], 1), mask=inside)
        else:
            for o in tl.static_range(n):
                tl.store(z + (t[:, None] * n + o) * K + k[None, :], dots[o], mask=keep)
                tl.store(sums + (t * n + o) * 2, tl.sum(totals[o], 1), mask=inside)
                tl.store(sums + (t * n + o) * 2 + 1, tl.sum(squares[o], 1), mask=inside)


class Written(NamedTuple):
    """Results of a write: x' [N, n, D] (x if nothing was written), z, its sums, and the read if it was done here."""

    x: Tensor
    z: Tensor | None
    sums: Tensor | None
    h: Tensor | None = None
    rho: Tensor | None = None


def write(
    x: Tensor, copies: bool, n: int, y: Tensor | None, post: Tensor | None, res: Tensor | None,
    w: Tensor | None, halves: Tensor | None, scan: int, reading: Reading | None = None, *,
    inside: bool = False,
) -> Written:  # fmt: skip
    """Write to the streams and compute what the next coefficients need.

    Args:
        x: [N, n, D], or with copies [N, D].
        y: [N, D], or None to write nothing.
        w: fp32; for bf16 streams `halves` holds its parts (`halves_of`), or kernels split it (`split_by_kernels`).
        scan: NO_SCAN; JOINT for sums Σ x'² [N]; EACH for sums Σ x' and Σ x'² [N, n, 2].
        reading: a read that may run in the same launch.
        inside: one kernel for everything.
    """
    if y is None or post is None or inside or x.shape[-1] > MAX_ROW:
        return Written(*_write_and_scan(x, copies, n, y, post, res, w, halves, scan))
    done = write_rows(x, copies, n, y, post, res, scan, reading)
    z = None if scan == NO_SCAN or w is None else product(done.x, w, halves, scan == JOINT)
    return Written(done.x, z, done.sums, done.h, done.rho)


def _write_and_scan(
    x: Tensor, copies: bool, n: int, y: Tensor | None, post: Tensor | None, res: Tensor | None,
    w: Tensor | None, halves: Tensor | None, scan: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    dim, tokens = x.shape[-1], x.shape[0]
    out = x if y is None else torch.empty(tokens, n, dim, dtype=x.dtype, device=x.device)
    z = sums = None
    columns = 0 if w is None else w.shape[-1]
    if scan != NO_SCAN:
        shape = (tokens,) if scan == JOINT else (tokens, n)
        z = torch.empty(*shape, columns, dtype=torch.float32, device=x.device)
        sums = torch.empty(*shape, *(() if scan == JOINT else (2,)), dtype=torch.float32, device=x.device)
    if tokens and (y is not None or scan != NO_SCAN):
        v = vector(x)
        low = 0
        if w is not None and splits(x):
            low = padded(columns) * len(w) if halves is not None else -1 if split_by_kernels(x, w) else 0
        launch(
            _write_kernel, (cdiv(tokens, TOKENS),), x,
            x, x if y is None else y, x if post is None else post, x if res is None else res, out,
            x if w is None else halves if low > 0 else w, x if z is None else z, x if sums is None else sums, tokens,
            D=dim, n=n, K=columns, KP=max(16, next_power_of_2(columns)), LOW=low, BT=TOKENS, BK=4 * v, V=v, COPIES=copies,
            WRITE=y is not None, RES=res is not None, STATIC=post is not None and post.ndim == 1, SCAN=scan,
            # One stage, for the reason given in depth attention's `scores`.
            num_warps=4, num_stages=1,
        )  # fmt: skip
    return out, z, sums
