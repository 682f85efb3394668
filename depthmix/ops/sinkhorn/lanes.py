"""Sinkhorn of small matrices, n ≤ 4. A lane holds one token, its matrix is a tuple of n² registers, and sums add registers.

The equations, and what the backward saves, are in kernels.py. Here a matrix m is (m[0, 0], m[0, 1], …), each of them [BT].
"""

# Triton knows no other way to add to a tuple:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.sinkhorn.reference import DEEPSEEK_EPS

EPS: tl.constexpr = tl.constexpr(DEEPSEEK_EPS)
MAX_LANES_N = 4
# Tokens of a program, which is one warp: all SMs have work, and no sum over tokens needs a barrier.
LANES = 32


@triton.jit
def _sums(m, n: tl.constexpr, ROWS: tl.constexpr):
    """Return n sums, of the rows or of the columns."""
    out = ()
    for a in tl.static_range(n):
        s = m[a * n if ROWS else a]
        for b in tl.static_range(1, n):
            s = s + m[a * n + b if ROWS else b * n + a]
        out = out + (s,)
    return out


@triton.jit
def _tops(m, n: tl.constexpr, ROWS: tl.constexpr):
    """Return n maxima, of the rows or of the columns."""
    out = ()
    for a in tl.static_range(n):
        s = m[a * n if ROWS else a]
        for b in tl.static_range(1, n):
            s = tl.maximum(s, m[a * n + b if ROWS else b * n + a])
        out = out + (s,)
    return out


@triton.jit
def _divisors(m, n: tl.constexpr, ROWS: tl.constexpr, DEEPSEEK: tl.constexpr):
    s = _sums(m, n, ROWS)
    if DEEPSEEK:
        more = ()
        for a in tl.static_range(n):
            more = more + (s[a] + EPS,)
        s = more
    return s


@triton.jit
def _inverses(s, n: tl.constexpr):
    out = ()
    for a in tl.static_range(n):
        out = out + (1.0 / s[a],)
    return out


@triton.jit
def _times(m, s, n: tl.constexpr, ROWS: tl.constexpr):
    """Multiply every row or column by its number."""
    out = ()
    for e in tl.static_range(n * n):
        out = out + (m[e] * s[e // n if ROWS else e % n],)
    return out


@triton.jit
def _minus(m, s, n: tl.constexpr, ROWS: tl.constexpr):
    out = ()
    for e in tl.static_range(n * n):
        out = out + (m[e] - s[e // n if ROWS else e % n],)
    return out


@triton.jit
def _exp(m, n: tl.constexpr):
    out = ()
    for e in tl.static_range(n * n):
        out = out + (tl.exp(m[e]),)
    return out


@triton.jit
def _log_divided(logits, n: tl.constexpr, ROWS: tl.constexpr):
    """Return logits minus the log-sum-exp of their row or column."""
    logits = _minus(logits, _tops(logits, n, ROWS), n, ROWS)
    s = _sums(_exp(logits, n), n, ROWS)
    logs = ()
    for a in tl.static_range(n):
        logs = logs + (tl.log(s[a]),)
    return _minus(logits, logs, n, ROWS)


@triton.jit
def _begin(logits, n: tl.constexpr, DEEPSEEK: tl.constexpr):
    """Return the matrix at which plain divisions begin."""
    if DEEPSEEK:
        e = _exp(_minus(logits, _tops(logits, n, True), n, True), n)
        e = _times(e, _inverses(_sums(e, n, True), n), n, True)
        m = ()
        for i in tl.static_range(n * n):
            m = m + (e[i] + EPS,)
    else:
        m = _exp(_log_divided(_log_divided(logits, n, False), n, True), n)
    return m


@triton.jit
def _keep(at, s, N, inside, n: tl.constexpr, KEEP: tl.constexpr):
    if KEEP:
        for a in tl.static_range(n):
            tl.store(at + a * N, s[a], mask=inside)


@triton.jit
def _kept(at, N, inside, n: tl.constexpr):
    out = ()
    for a in tl.static_range(n):
        out = out + (tl.load(at + a * N, mask=inside, other=1.0),)
    return out


@triton.jit
def _iterate(m, at, N, inside, iterations, n: tl.constexpr, DEEPSEEK: tl.constexpr, KEEP: tl.constexpr):
    """Do all plain divisions. KEEP: store their divisors, 2 n per iteration, those of all tokens contiguous."""
    if DEEPSEEK:
        s = _divisors(m, n, False, DEEPSEEK)
        _keep(at, s, N, inside, n, KEEP)
        m = _times(m, _inverses(s, n), n, False)
    for i in range(1, iterations):
        s = _divisors(m, n, DEEPSEEK, DEEPSEEK)
        _keep(at + (2 * i) * n * N, s, N, inside, n, KEEP)
        m = _times(m, _inverses(s, n), n, DEEPSEEK)
        s = _divisors(m, n, not DEEPSEEK, DEEPSEEK)
        _keep(at + (2 * i + 1) * n * N, s, N, inside, n, KEEP)
        m = _times(m, _inverses(s, n), n, not DEEPSEEK)
    return m


@triton.jit
def sinkhorn_lanes(logits, iterations, n: tl.constexpr, DEEPSEEK: tl.constexpr):
    """Normalise a tuple of n² entries [BT]."""
    return _iterate(_begin(logits, n, DEEPSEEK), 0, 0, 0, iterations, n, DEEPSEEK, False)


@triton.jit
def _less_sums(g, m, n: tl.constexpr, ROWS: tl.constexpr):
    """Return G before a division whose result is m."""
    s = _sums(g, n, ROWS)
    out = ()
    for e in tl.static_range(n * n):
        out = out + (g[e] - m[e] * s[e // n if ROWS else e % n],)
    return out


@triton.jit
def sinkhorn_lanes_backward(logits, dm, scratch, t, N, inside, iterations, n: tl.constexpr, DEEPSEEK: tl.constexpr):
    """Return dlogits. scratch: memory [2 iterations, n, N]."""
    at = scratch + t
    m = _iterate(_begin(logits, n, DEEPSEEK), at, N, inside, iterations, n, DEEPSEEK, True)
    tl.debug_barrier()
    g = ()
    for e in tl.static_range(n * n):
        g = g + (m[e] * dm[e],)
    for back in range(1, iterations):
        i = iterations - back
        second, first = _kept(at + (2 * i + 1) * n * N, N, inside, n), _kept(at + (2 * i) * n * N, N, inside, n)
        g = _less_sums(g, m, n, not DEEPSEEK)
        m = _times(m, second, n, not DEEPSEEK)
        g = _less_sums(g, m, n, DEEPSEEK)
        m = _times(m, first, n, DEEPSEEK)
    if DEEPSEEK:
        g = _less_sums(g, m, n, False)
        m = _times(m, _kept(at, N, inside, n), n, False)
        p, weighed = (), ()
        for e in tl.static_range(n * n):
            p = p + (m[e] - EPS,)
            weighed = weighed + (g[e] / m[e] * (m[e] - EPS),)
        g = _less_sums(weighed, p, n, True)
    else:
        g = _less_sums(g, m, n, True)
        g = _less_sums(g, _exp(_log_divided(logits, n, False), n), n, False)
    return g


@triton.jit
def load_lanes(at, inside, count: tl.constexpr):
    """Load consecutive numbers as a tuple of [BT]."""
    out = ()
    for e in tl.static_range(count):
        out = out + (tl.load(at + e, mask=inside, other=0.0).to(tl.float32),)
    return out


@triton.jit(do_not_specialize=["N", "iterations"])
def lanes_kernel(logits, out, N: tl.int64, iterations: tl.int32, n: tl.constexpr, BT: tl.constexpr, DEEPSEEK: tl.constexpr):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    inside = t < N
    m = sinkhorn_lanes(load_lanes(logits + t * (n * n), inside, n * n), iterations, n, DEEPSEEK)
    for e in tl.static_range(n * n):
        tl.store(out + t * (n * n) + e, m[e], mask=inside)


@triton.jit(do_not_specialize=["N", "iterations"])
def lanes_backward_kernel(
    logits, dm, out, scratch, N: tl.int64, iterations: tl.int32, n: tl.constexpr, BT: tl.constexpr, DEEPSEEK: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    inside = t < N
    v, g = load_lanes(logits + t * (n * n), inside, n * n), load_lanes(dm + t * (n * n), inside, n * n)
    g = sinkhorn_lanes_backward(v, g, scratch, t, N, inside, iterations, n, DEEPSEEK)
    for e in tl.static_range(n * n):
        tl.store(out + t * (n * n) + e, g[e].to(out.dtype.element_ty), mask=inside)


def lanes_scratch(like: Tensor, tokens: int, n: int, iterations: int) -> Tensor:
    """Allocate memory for the divisors of a backward."""
    return torch.empty(2 * iterations, n, tokens, dtype=torch.float32, device=like.device)
