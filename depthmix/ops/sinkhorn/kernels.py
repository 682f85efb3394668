"""Sinkhorn on a GPU for n > 4 (smaller matrices: lanes.py). The matrices of a tile of tokens are in registers, [BT, P, P], with P
the next power of two and zeros as padding.

The equations and the two conventions are in reference.py. Only the paper's first iteration needs logarithms: after it no
entry is above 1 and no row or column sum is below 1 / n², so plain divisions cannot overflow.

The backward runs the iterations again and saves the divisors alone, since a matrix before a division is the one after it times
its divisors. With y = x / sums and G = x ⊙ dx for a matrix x and its gradient:    G_x = G_y - y ΣG_y    along the sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.launch import launch
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2
from depthmix.ops.sinkhorn.lanes import LANES, MAX_LANES_N, lanes_backward_kernel, lanes_kernel, lanes_scratch
from depthmix.ops.sinkhorn.reference import DEEPSEEK_EPS

EPS: tl.constexpr = tl.constexpr(DEEPSEEK_EPS)
MAX_N = 8
# The axis that a row's sum runs over.
ROWS: tl.constexpr = tl.constexpr(2)
COLUMNS: tl.constexpr = tl.constexpr(1)


@triton.jit
def _divided(m, AXIS: tl.constexpr, DEEPSEEK: tl.constexpr):
    """Return m divided by its sums along an axis, and the sums."""
    s = tl.sum(m, AXIS)
    if DEEPSEEK:
        s += EPS
    # Padding rows and columns have the sum 0.
    s = tl.where(s > 0, s, 1.0)
    return m / tl.expand_dims(s, AXIS), s


@triton.jit
def _undivided(m, g, s, AXIS: tl.constexpr):
    """Return a matrix before the division by s, and its G."""
    return m * tl.expand_dims(s, AXIS), g - m * tl.expand_dims(tl.sum(g, AXIS), AXIS)


@triton.jit
def _log_divided(logits, entry_ok, AXIS: tl.constexpr):
    """Return logits minus the log-sum-exp along an axis; -inf at padding."""
    top = tl.max(tl.where(entry_ok, logits, float("-inf")), AXIS)
    top = tl.where(top > float("-inf"), top, 0.0)
    s = tl.sum(tl.where(entry_ok, tl.exp(logits - tl.expand_dims(top, AXIS)), 0.0), AXIS)
    return logits - tl.expand_dims(top + tl.log(tl.where(s > 0, s, 1.0)), AXIS)


@triton.jit
def _softmax(logits, entry_ok):
    e = tl.where(entry_ok, tl.exp(logits - tl.max(tl.where(entry_ok, logits, float("-inf")), ROWS)[:, :, None]), 0.0)
    s = tl.sum(e, ROWS)
    return e / tl.where(s > 0, s, 1.0)[:, :, None]


@triton.jit
def _begin(logits, entry_ok, DEEPSEEK: tl.constexpr):
    """Return the matrix at which plain divisions begin."""
    if DEEPSEEK:
        rows = tl.max(tl.where(entry_ok, 1.0, 0.0), ROWS)[:, :, None] > 0
        m = tl.where(entry_ok, _softmax(tl.where(rows, logits, 0.0), entry_ok | (rows == 0)) + EPS, 0.0)
    else:
        m = tl.where(entry_ok, tl.exp(_log_divided(_log_divided(logits, entry_ok, COLUMNS), entry_ok, ROWS)), 0.0)
    return m


@triton.jit
def _iterate(m, at, stride, keep, iterations, DEEPSEEK: tl.constexpr, KEEP: tl.constexpr):
    """Do all plain divisions. KEEP: store their divisors, two of [BT, P] per iteration."""
    if DEEPSEEK:
        m, s = _divided(m, COLUMNS, DEEPSEEK)
        if KEEP:
            tl.store(at, s, mask=keep)
    for i in range(1, iterations):
        m, s = _divided(m, ROWS if DEEPSEEK else COLUMNS, DEEPSEEK)
        if KEEP:
            tl.store(at + (2 * i) * stride, s, mask=keep)
        m, s = _divided(m, COLUMNS if DEEPSEEK else ROWS, DEEPSEEK)
        if KEEP:
            tl.store(at + (2 * i + 1) * stride, s, mask=keep)
    return m


@triton.jit
def sinkhorn_tile(logits, entry_ok, iterations, DEEPSEEK: tl.constexpr):
    """Normalise a tile [BT, P, P]. some: mask of entries."""
    return _iterate(_begin(logits, entry_ok, DEEPSEEK), logits, 0, entry_ok, iterations, DEEPSEEK, False)


@triton.jit
def sinkhorn_tile_backward(logits, dm, entry_ok, scratch, t, N, iterations, P: tl.constexpr, DEEPSEEK: tl.constexpr):
    """Return dlogits. scratch: memory [2 iterations, N, P]."""
    j = tl.arange(0, P)
    at, keep, stride = scratch + t[:, None] * P + j[None, :], (t < N)[:, None] & (j < P)[None, :], N * P
    m = _iterate(_begin(logits, entry_ok, DEEPSEEK), at, stride, keep, iterations, DEEPSEEK, True)
    tl.debug_barrier()
    g = m * dm
    for back in range(1, iterations):
        i = iterations - back
        s = tl.load(at + (2 * i + 1) * stride, mask=keep, other=1.0)
        m, g = _undivided(m, g, s, COLUMNS if DEEPSEEK else ROWS)
        s = tl.load(at + (2 * i) * stride, mask=keep, other=1.0)
        m, g = _undivided(m, g, s, ROWS if DEEPSEEK else COLUMNS)
    if DEEPSEEK:
        m, g = _undivided(m, g, tl.load(at, mask=keep, other=1.0), COLUMNS)
        g = g / tl.where(entry_ok, m, 1.0)
        p = tl.where(entry_ok, m - EPS, 0.0)
        g = p * (g - tl.sum(p * g, ROWS)[:, :, None])
    else:
        g = g - m * tl.sum(g, ROWS)[:, :, None]
        m = tl.where(entry_ok, tl.exp(_log_divided(logits, entry_ok, COLUMNS)), 0.0)
        g = g - m * tl.sum(g, COLUMNS)[:, None, :]
    return g


@triton.jit
def square(t, N, n: tl.constexpr, P: tl.constexpr):
    """Return the offsets of a tile of matrices [N, n, n], and the mask of entries."""
    i, j = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :]
    return t[:, None, None] * (n * n) + i * n + j, (t < N)[:, None, None] & (i < n) & (j < n)


@triton.jit(do_not_specialize=["N", "iterations"])
def _forward_kernel(
    logits, out, N: tl.int64, iterations: tl.int32, n: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, DEEPSEEK: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    at, entry_ok = square(t, N, n, P)
    v = tl.load(logits + at, mask=entry_ok, other=0.0).to(tl.float32)
    tl.store(out + at, sinkhorn_tile(v, entry_ok, iterations, DEEPSEEK), mask=entry_ok)


@triton.jit(do_not_specialize=["N", "iterations"])
def _backward_kernel(
    logits, dm, out, scratch, N: tl.int64, iterations: tl.int32,
    n: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, DEEPSEEK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    at, entry_ok = square(t, N, n, P)
    v = tl.load(logits + at, mask=entry_ok, other=0.0).to(tl.float32)
    g = tl.load(dm + at, mask=entry_ok, other=0.0)
    g = sinkhorn_tile_backward(v, g, entry_ok, scratch, t, N, iterations, P, DEEPSEEK)
    tl.store(out + at, g.to(out.dtype.element_ty), mask=entry_ok)


def side(n: int) -> int:
    """Return the rows and columns of a matrix's tile."""
    return max(2, next_power_of_2(n))


def scratch_for(like: Tensor, tokens: int, n: int, iterations: int) -> Tensor:
    """Allocate memory for the divisors of a backward."""
    return torch.empty(2 * iterations, tokens, side(n), dtype=torch.float32, device=like.device)


TILE, WARPS = 32, 4


def forward(logits: Tensor, iterations: int, convention: str) -> Tensor:
    """Return matrices [..., n, n] in fp32 for contiguous logits."""
    n = logits.shape[-1]
    out = torch.empty_like(logits, dtype=torch.float32)
    tokens = logits.numel() // (n * n)
    if tokens and n <= MAX_LANES_N:
        launch(
            lanes_kernel, (cdiv(tokens, LANES),), logits, logits, out, tokens, iterations,
            n=n, BT=LANES, DEEPSEEK=convention == "deepseek", num_warps=1,
        )  # fmt: skip
    elif tokens:
        launch(
            _forward_kernel, (cdiv(tokens, TILE),), logits, logits, out, tokens, iterations,
            n=n, P=side(n), BT=TILE, DEEPSEEK=convention == "deepseek", num_warps=WARPS,
        )  # fmt: skip
    return out


def backward(logits: Tensor, dm: Tensor, iterations: int, convention: str) -> Tensor:
    """Return dlogits in the logits' dtype."""
    n = logits.shape[-1]
    out = torch.empty_like(logits)
    tokens = logits.numel() // (n * n)
    if tokens and n <= MAX_LANES_N:
        launch(
            lanes_backward_kernel, (cdiv(tokens, LANES),), logits,
            logits, dm, out, lanes_scratch(logits, tokens, n, iterations), tokens, iterations,
            n=n, BT=LANES, DEEPSEEK=convention == "deepseek", num_warps=1,
        )  # fmt: skip
    elif tokens:
        launch(
            _backward_kernel, (cdiv(tokens, TILE),), logits,
            logits, dm, out, scratch_for(logits, tokens, n, iterations), tokens, iterations,
            n=n, P=side(n), BT=TILE, DEEPSEEK=convention == "deepseek", num_warps=WARPS,
        )  # fmt: skip
    return out
