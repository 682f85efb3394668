"""Weights of reads and writes from the streams' products, and their backward: a tile of tokens at a time, all in registers.

For mHC a lane holds one token and its numbers are registers (sinkhorn/lanes.py). dz is stored in fp32 and, for products in bf16,
in parts of LAST columns each (products.py).

z and the sums of the streams come in slices (split_product.py). The forward adds the slices of its tokens up, stores the totals, and
loads them again, one token per lane; so does the backward. With many slices a program has few tokens, and loads all slices at once.

The equations are in rules.py. The backward starts from the products again. With H' the gradient of what scale and base made,
r = 1 / RMS over C channels, and r' = Σ dz ⊙ z / r:

    dbase = Σ_tokens H';    dscale = Σ_tokens H' ⊙ r z;    dz = r scale ⊙ H';    slope = -r³ r' / C;    shift = -slope · mean

slope x + shift is the gradient of the streams through the norm's sums. Each program stores one row of its sums over tokens.
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
from depthmix.ops.sinkhorn.kernels import TILE, WARPS, side
from depthmix.ops.sinkhorn.lanes import LANES, lanes_scratch, load_lanes, sinkhorn_lanes, sinkhorn_lanes_backward
from depthmix.ops.stream_mix.kernels.birkhoff import birkhoff_lanes, birkhoff_lanes_backward, permutation_bits
from depthmix.ops.stream_mix.products import HALF, padded
from depthmix.ops.stream_mix.rules import Rule

# Parameter rows may be aligned at one site and not at another. Do not compile twice for that.
ROWS = ["base", "scale"]


@triton.jit
def _side_by_side(
    values, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr, LAST: tl.constexpr, BT: tl.constexpr
):
    """Join a tuple of [BT] into [BT, COUNT], for one store instead of COUNT; beyond LAST the last of them repeats."""
    if COUNT == 1:
        return tl.reshape(values[FIRST if FIRST < LAST else LAST], [BT, 1])
    else:
        half: tl.constexpr = COUNT // 2
        even = _side_by_side(values, FIRST, 2 * STEP, half, LAST, BT)
        odd = _side_by_side(values, FIRST + STEP, 2 * STEP, half, LAST, BT)
        return tl.reshape(tl.join(even, odd), [BT, COUNT])


@triton.jit
def _store_parts(at, v, mask, LAST: tl.constexpr, PARTS: tl.constexpr):
    """Store a number as high, high and low, or as high and low, LAST apart."""
    high = v.to(tl.bfloat16)
    for i in tl.static_range(PARTS - 1):
        tl.store(at + i * LAST, high, mask=mask)
    tl.store(at + (PARTS - 1) * LAST, (v - high.to(tl.float32)).to(tl.bfloat16), mask=mask)


@triton.jit
def _square_transposed(t, n: tl.constexpr, P: tl.constexpr):
    i, j = tl.arange(0, P)[None, :, None], tl.arange(0, P)[None, None, :]
    return t[:, None, None] * (n * n) + j * n + i


@triton.jit
def _numbers(N, WIDTH: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr):
    """Return where the numbers of the program's BT tokens are in [N, WIDTH], and their mask: [BT WIDE]."""
    j = tl.arange(0, BT * WIDE)
    at = tl.program_id(0).to(tl.int64) * (BT * WIDTH) + j
    return at, (j < BT * WIDTH) & (at < N * WIDTH)


@triton.jit
def _load_slices(x, count, N, WIDTH: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr, SLICES: tl.constexpr):
    """Load all slices of x [count, N, WIDTH] for the program's tokens."""
    s = tl.arange(0, SLICES)[:, None]
    at, ok = _numbers(N, WIDTH, WIDE, BT)
    return tl.load(x + s * (N * WIDTH) + at[None, :], mask=(s < count) & ok[None, :], other=0.0)


@triton.jit
def _store_total(out, slices, N, WIDTH: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr):
    at, ok = _numbers(N, WIDTH, WIDE, BT)
    tl.store(out + at, tl.sum(slices, 0), mask=ok)


@triton.jit
def _add_slices(
    z_slices, sum_slices, z_count, sum_count, z, sums, N, Z: tl.constexpr, UP: tl.constexpr, SUMS: tl.constexpr, SUMS_UP: tl.constexpr,
    BT: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Add up the slices of z [N, Z] and of the sums [N, SUMS] for the program's tokens, which may then load them."""
    if SLICES > 1:
        more_z = _load_slices(z_slices, z_count, N, Z, UP, BT, SLICES)
        more_sums = _load_slices(sum_slices, sum_count, N, SUMS, SUMS_UP, BT, SLICES)
        _store_total(z, more_z, N, Z, UP, BT)
        _store_total(sums, more_sums, N, SUMS, SUMS_UP, BT)
        tl.debug_barrier()


@triton.jit
def _scaled(z, t, inside, r, FIRST: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr):
    """Return columns of r z, a tuple of [BT]."""
    out = ()
    for k in tl.static_range(COUNT):
        out = out + (tl.load(z + t * K + FIRST + k, mask=inside, other=0.0) * r,)
    return out


@triton.jit
def _logits(v, a, base, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Apply scale and base to v[FIRST:]."""
    out = ()
    for k in tl.static_range(COUNT):
        out = out + (a * v[FIRST + k] + tl.load(base + k),)
    return out


@triton.jit
def _transposed(m, n: tl.constexpr):
    out = ()
    for e in tl.static_range(n * n):
        out = out + (m[e % n * n + e // n],)
    return out


@triton.jit(do_not_specialize=["N", "z_count", "sum_count", "iterations"], do_not_specialize_on_alignment=ROWS)
def _joint_kernel(
    z_slices, z, sum_slices, sums, base, scale, pre, post, res, N: tl.int64, z_count: tl.int32, sum_count: tl.int32,
    iterations: tl.int32, eps, pre_eps,
    D: tl.constexpr, n: tl.constexpr, K: tl.constexpr, UP: tl.constexpr, BT: tl.constexpr, SLICES: tl.constexpr,
    PERMUTATIONS: tl.constexpr, DEEPSEEK: tl.constexpr, POST_SCALE: tl.constexpr, POST_EPS: tl.constexpr,
):  # fmt: skip
    # Number of logits of the residual map.
    COUNT: tl.constexpr = K - 2 * n
    _add_slices(z_slices, sum_slices, z_count, sum_count, z, sums, N, K, UP, 1, 1, BT, SLICES)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    inside = t < N
    r = tl.rsqrt(tl.load(sums + t, mask=inside, other=1.0) / (n * D) + eps)
    # All loads come before all stores: a load cannot move before a store, and would wait for memory once more.
    v = _scaled(z, t, inside, r, 0, K, K)
    logits_pre = _logits(v, tl.load(scale), base, 0, n)
    logits_post = _logits(v, tl.load(scale + 1), base + n, n, n)
    if COUNT > 0:
        m = _logits(v, tl.load(scale + 2), base + 2 * n, 2 * n, COUNT)
    for k in tl.static_range(n):
        tl.store(pre + t * n + k, tl.sigmoid(logits_pre[k]) + pre_eps, mask=inside)
    for k in tl.static_range(n):
        p = POST_SCALE * tl.sigmoid(logits_post[k])
        if POST_EPS != 0:
            p += POST_EPS
        tl.store(post + t * n + k, p, mask=inside)
    if COUNT > 0:
        if PERMUTATIONS != 0:
            m = birkhoff_lanes(m, n, COUNT, PERMUTATIONS)
        else:
            m = sinkhorn_lanes(m, iterations, n, DEEPSEEK)
            if DEEPSEEK:
                m = _transposed(m, n)
        for e in tl.static_range(n * n):
            tl.store(res + t * (n * n) + e, m[e], mask=inside)


@triton.jit
def _joint_part(g, v, a, r, part, row, FIRST: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr):
    """Return dz of some columns and their Σ H' ⊙ r z, from H' and r z, and store the sums over tokens."""
    total = g[0] * v[0]
    for k in tl.static_range(1, COUNT):
        total += g[k] * v[k]
    dz = ()
    for k in tl.static_range(COUNT):
        tl.store(row + FIRST + k, tl.sum(g[k], 0))
        dz = dz + (g[k] * a * r,)
    tl.store(row + K + part, tl.sum(total, 0))
    return dz, total * a


@triton.jit(do_not_specialize=["N", "iterations"], do_not_specialize_on_alignment=ROWS)
def _joint_backward_kernel(
    z, sums, base, scale, dpre, dpost, dres, dz, slopes, part, scratch, N: tl.int64, iterations: tl.int32, eps,
    D: tl.constexpr, n: tl.constexpr, K: tl.constexpr, UP: tl.constexpr, LAST: tl.constexpr, BT: tl.constexpr,
    PERMUTATIONS: tl.constexpr, DEEPSEEK: tl.constexpr, HAS_PRE: tl.constexpr, HAS_POST: tl.constexpr, HAS_RES: tl.constexpr,
    POST_SCALE: tl.constexpr,
):  # fmt: skip
    COUNT: tl.constexpr = K - 2 * n
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    inside = t < N
    r = tl.rsqrt(tl.load(sums + t, mask=inside, other=1.0) / (n * D) + eps)
    row = part + tl.program_id(0) * (K + 3)
    along = tl.zeros([BT], tl.float32)
    dz_columns = ()
    for which in tl.static_range(2):
        a = tl.load(scale + which)
        v = _scaled(z, t, inside, r, which * n, n, K)
        logits = _logits(v, a, base + which * n, 0, n)
        g = ()
        for k in tl.static_range(n):
            s = tl.sigmoid(logits[k])
            d = tl.zeros([BT], tl.float32)
            if which == 0 and HAS_PRE:
                d = tl.load(dpre + t * n + k, mask=inside, other=0.0)
            if which == 1 and HAS_POST:
                d = POST_SCALE * tl.load(dpost + t * n + k, mask=inside, other=0.0)
            g = g + (d * s * (1 - s),)
        more, total = _joint_part(g, v, a, r, which, row, which * n, n, K)
        dz_columns, along = dz_columns + more, along + total
    if COUNT > 0:
        a = tl.load(scale + 2)
        v = _scaled(z, t, inside, r, 2 * n, COUNT, K)
        g = ()
        if HAS_RES:
            g = load_lanes(dres + t * (n * n), inside, n * n)
            logits = _logits(v, a, base + 2 * n, 0, COUNT)
            if PERMUTATIONS != 0:
                g = birkhoff_lanes_backward(logits, g, n, COUNT, PERMUTATIONS)
            else:
                if DEEPSEEK:
                    g = _transposed(g, n)
                g = sinkhorn_lanes_backward(logits, g, scratch, t, N, inside, iterations, n, DEEPSEEK)
        else:
            for _ in tl.static_range(COUNT):
                g = g + (tl.zeros([BT], tl.float32),)
        more, total = _joint_part(g, v, a, r, 2, row, 2 * n, COUNT, K)
        dz_columns, along = dz_columns + more, along + total
    else:
        tl.store(row + K + 2, 0.0)
    k = tl.arange(0, UP)
    whole, column_ok = _side_by_side(dz_columns, 0, 1, UP, K - 1, BT), inside[:, None] & (k < K)[None, :]
    if LAST > 0:
        _store_parts(dz + t[:, None] * (3 * LAST) + k[None, :], whole, column_ok, LAST, 3)
    else:
        tl.store(dz + t[:, None] * K + k[None, :], whole, mask=column_ok)
    tl.store(slopes + 2 * t, -r * r * along / (n * D), mask=inside)
    tl.store(slopes + 2 * t + 1, tl.zeros([BT], tl.float32), mask=inside)


@triton.jit
def _tanh(x):
    """Return tanh(x), accurate near zero too, where (1 - e) / (1 + e) is not."""
    e = tl.exp(-2 * tl.abs(x))
    far = tl.where(x < 0, -1.0, 1.0) * (1 - e) / (1 + e)
    square = x * x
    return tl.where(tl.abs(x) < 0.05, x * (1 - square * (1.0 / 3 - square * (2.0 / 15))), far)


@triton.jit
def _of_streams(
    z, sums, t, inside, eps, D: tl.constexpr, n: tl.constexpr, P: tl.constexpr, CENTRED: tl.constexpr
):  # fmt: skip
    """Load for every stream 1 / RMS, mean, r z for pre, post and res, and the masks of valid entries."""
    i, j = tl.arange(0, P)[None, :], tl.arange(0, P)[None, None, :]
    stream_ok = inside[:, None] & (i < n)
    stream = t[:, None] * n + i
    mean = tl.load(sums + 2 * stream, mask=stream_ok, other=0.0) / D
    variance = tl.load(sums + 2 * stream + 1, mask=stream_ok, other=1.0) / D
    if CENTRED:
        variance = tl.maximum(variance - mean * mean, 0.0)
    else:
        mean = tl.zeros_like(mean)
    r = tl.rsqrt(variance + eps)
    entry_ok = stream_ok[:, :, None] & (j < n)
    at = z + stream * (n + 2)
    a = tl.load(at, mask=stream_ok, other=0.0) * r
    b = tl.load(at + 1, mask=stream_ok, other=0.0) * r
    c = tl.load(at[:, :, None] + 2 + j, mask=entry_ok, other=0.0) * r[:, :, None]
    return r, mean, a, b, c, stream_ok, entry_ok


@triton.jit(do_not_specialize=["N", "z_count", "sum_count"], do_not_specialize_on_alignment=ROWS)
def _each_kernel(
    z_slices, z, sum_slices, sums, base, scale, pre, post, res, N: tl.int64, z_count: tl.int32, sum_count: tl.int32, eps,
    D: tl.constexpr, n: tl.constexpr, UP: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, SLICES: tl.constexpr,
    CENTRED: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    _add_slices(z_slices, sum_slices, z_count, sum_count, z, sums, N, n * (n + 2), UP, 2 * n, 2 * P, BT, SLICES)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    inside = t < N
    _, _, a, b, c, stream_ok, entry_ok = _of_streams(z, sums, t, inside, eps, D, n, P, CENTRED)
    if TANH:
        a, b, c = _tanh(a), _tanh(b), _tanh(c)
    i, j = tl.arange(0, P)[None, :], tl.arange(0, P)[None, None, :]
    s_alpha, s_beta = tl.load(scale), tl.load(scale + 1)
    at = t[:, None] * n + i
    tl.store(pre + at, s_alpha * a + tl.load(base + i, mask=i < n, other=0.0), mask=stream_ok)
    tl.store(post + at, s_beta * b + tl.load(base + n + i, mask=i < n, other=0.0), mask=stream_ok)
    static = tl.load(base + 2 * n + i[:, :, None] * n + j, mask=(i < n)[:, :, None] & (j < n), other=0.0)
    tl.store(res + _square_transposed(t, n, P), s_alpha * c + static, mask=entry_ok)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=ROWS)
def _each_backward_kernel(
    z, sums, scale, dpre, dpost, dres, dz, parts, slopes, part, N: tl.int64, eps,
    D: tl.constexpr, n: tl.constexpr, LAST: tl.constexpr, P: tl.constexpr, BT: tl.constexpr,
    CENTRED: tl.constexpr, TANH: tl.constexpr, HAS_PRE: tl.constexpr, HAS_POST: tl.constexpr, HAS_RES: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = n + 2
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    inside = t < N
    r, mean, a, b, c, stream_ok, entry_ok = _of_streams(z, sums, t, inside, eps, D, n, P, CENTRED)
    i, j = tl.arange(0, P)[None, :], tl.arange(0, P)[None, None, :]
    at = t[:, None] * n + i
    da, db, dc = tl.zeros([BT, P], tl.float32), tl.zeros([BT, P], tl.float32), tl.zeros([BT, P, P], tl.float32)
    if HAS_PRE:
        da = tl.load(dpre + at, mask=stream_ok, other=0.0)
    if HAS_POST:
        db = tl.load(dpost + at, mask=stream_ok, other=0.0)
    if HAS_RES:
        dc = tl.load(dres + _square_transposed(t, n, P), mask=entry_ok, other=0.0)
    line = tl.arange(0, P)
    row = part + tl.program_id(0) * (2 * n + n * n + 2)
    tl.store(row + line, tl.sum(da, 0), mask=line < n)
    tl.store(row + n + line, tl.sum(db, 0), mask=line < n)
    entry = line[:, None] * n + line[None, :]
    tl.store(row + 2 * n + entry, tl.sum(dc, 0), mask=(line < n)[:, None] & (line < n)[None, :])
    fa, fb, fc = a, b, c
    if TANH:
        fa, fb, fc = _tanh(a), _tanh(b), _tanh(c)
    tl.store(row + 2 * n + n * n, tl.sum(tl.sum(da * fa, 1) + tl.sum(tl.sum(dc * fc, 2), 1), 0))
    tl.store(row + 2 * n + n * n + 1, tl.sum(tl.sum(db * fb, 1), 0))
    s_alpha, s_beta = tl.load(scale), tl.load(scale + 1)
    da, db, dc = da * s_alpha, db * s_beta, dc * s_alpha
    if TANH:
        da, db, dc = da * (1 - fa * fa), db * (1 - fb * fb), dc * (1 - fc * fc)
    along = da * a + db * b + tl.sum(dc * c, 2)
    da, db, dc = da * r, db * r, dc * r[:, :, None]
    to = dz + at * K
    tl.store(to, da, mask=stream_ok)
    tl.store(to + 1, db, mask=stream_ok)
    tl.store(to[:, :, None] + 2 + j, dc, mask=entry_ok)
    if LAST > 0:
        to = parts + at * (2 * LAST)
        _store_parts(to, da, stream_ok, LAST, 2)
        _store_parts(to + 1, db, stream_ok, LAST, 2)
        _store_parts(to[:, :, None] + 2 + j, dc, entry_ok, LAST, 2)
    slope = -r * r * along / D
    tl.store(slopes + 2 * at, slope, mask=stream_ok)
    tl.store(slopes + 2 * at + 1, -slope * mean, mask=stream_ok)


class Made(NamedTuple):
    """Results of the forward: the coefficients, and for a backward the totals of all slices."""

    pre: Tensor  # [N, n]
    post: Tensor  # [N, n]
    res: Tensor | None  # [N, n, n]; None: the identity
    z: Tensor | None  # [N, K] or [N, n, K]
    sums: Tensor | None  # [N] or [N, n, 2]


def forward(
    rule: Rule, dim: int, z_slices: Tensor, sum_slices: Tensor, base: Tensor, scale: Tensor, keep: bool
) -> Made:
    """Compute the coefficients.

    Args:
        rule: the rule that makes them.
        dim: channels of a stream.
        z_slices: [S, N, K] or [S, N, n, K]. Without `keep` they may be overwritten.
        sum_slices: [S', N] or [S', N, n, 2]. Without `keep` they may be overwritten.
        base, scale: of the rule.
        keep: return the totals of the slices.
    """
    n, tokens, like = rule.n, z_slices.shape[1], z_slices
    pre, post = (torch.empty(tokens, n, dtype=torch.float32, device=like.device) for _ in range(2))
    res = None
    if not rule.joint or rule.residual_logits:
        res = torch.empty(tokens, n, n, dtype=torch.float32, device=like.device)
    z_count, sum_count = len(z_slices), len(sum_slices)
    block, slices = _tile(max(z_count, sum_count), LANES if rule.joint else TILE)
    # Totals overwrite the first slice, unless a backward keeps them: in tensors of their own they do not keep all slices.
    z, sums = z_slices, sum_slices
    if keep:
        z, sums = (s[0] if slices == 1 else s.new_empty(s.shape[1:]) for s in (z, sums))
    made = Made(pre, post, res, z if keep else None, sums if keep else None)
    if not tokens:
        return made
    columns, grid = z_slices.shape[-1], (cdiv(tokens, block),)
    arguments = (
        z_slices, z, sum_slices, sums, base, scale, pre, post, z if res is None else res, tokens, z_count, sum_count,
    )  # fmt: skip
    wide = next_power_of_2(columns if rule.joint else columns * n)
    shape = {"D": dim, "n": n, "UP": wide, "BT": block, "SLICES": slices}
    if rule.joint:
        launch(
            _joint_kernel, grid, like, *arguments, rule.iterations, rule.eps, rule.pre_eps,
            K=columns, PERMUTATIONS=_permutations(rule), DEEPSEEK=rule.convention == "deepseek",
            POST_SCALE=rule.post_scale, POST_EPS=rule.post_eps, num_warps=1, **shape,
        )  # fmt: skip
    else:
        launch(
            _each_kernel, grid, like, *arguments, rule.eps,
            P=side(n), CENTRED=rule.centred, TANH=rule.tanh, num_warps=WARPS, **shape,
        )  # fmt: skip
    return made


def _tile(count: int, most: int) -> tuple[int, int]:
    """Return the tokens of a program and the slices it loads at once, for `count` slices and at most `most` tokens.

    With K = 24 they are 2048 numbers, 64 for each lane. Few choices are few variants to compile.
    """
    return (most, 1) if count == 1 else (8, 8) if count <= 8 else (1, next_power_of_2(max(64, count)))


def _permutations(rule: Rule) -> int:
    """Return PERMUTATIONS of a Birkhoff map, or 0 for another map."""
    return permutation_bits(rule.n) if rule.residual_map == "birkhoff" else 0


class Gradients(NamedTuple):
    """Gradients of the inputs of the coefficients."""

    dz: Tensor | None  # [N, K] or [N, n, K] in fp32; None for mHC's in parts
    parts: Tensor | None  # for bf16 streams, high, high and low [N, 3 K'] or high and low [N, n, 2 K'] (products.py)
    slopes: Tensor  # slope and shift: [N, 2] or [N, n, 2]
    dbase: Tensor
    dscale: Tensor


def backward(
    rule: Rule, dim: int, z: Tensor, sums: Tensor, base: Tensor, scale: Tensor,
    dpre: Tensor | None, dpost: Tensor | None, dres: Tensor | None, kind: torch.dtype,
) -> Gradients:  # fmt: skip
    """Compute the gradients of the inputs. kind: dtype of the streams."""
    n, tokens, columns = rule.n, *z.shape[:: z.ndim - 1]
    last = padded(columns) if kind == HALF else 0
    parts = dz = None
    if last:
        # No kernel writes to padding columns: they must start as zeros.
        empty = torch.empty if last == columns else torch.zeros
        parts = empty(*z.shape[:-1], (3 if rule.joint else 2) * last, dtype=HALF, device=z.device)
    if not last or not rule.joint:
        dz = torch.empty_like(z)
    slopes = torch.empty(*z.shape[:-1], 2, dtype=torch.float32, device=z.device)
    programs = cdiv(tokens, LANES if rule.joint else TILE)
    part = torch.empty(programs, len(base) + (3 if rule.joint else 2), dtype=torch.float32, device=z.device)
    grads = [z if g is None else g for g in (dpre, dpost, dres)]
    options: dict[str, int | bool] = {"D": dim, "n": n, "LAST": last}
    options |= {"HAS_PRE": dpre is not None, "HAS_POST": dpost is not None, "HAS_RES": dres is not None}
    if tokens and rule.joint:
        kept = dres is not None and rule.residual_map == "sinkhorn"
        scratch = lanes_scratch(z, tokens, n, rule.iterations) if kept else z
        launch(
            _joint_backward_kernel, (programs,), z, z, sums, base, scale, *grads, dz if parts is None else parts, slopes, part, scratch,
            tokens, rule.iterations, rule.eps, K=columns, UP=next_power_of_2(columns), BT=LANES,
            PERMUTATIONS=_permutations(rule), DEEPSEEK=rule.convention == "deepseek", POST_SCALE=rule.post_scale, num_warps=1, **options,
        )  # fmt: skip
    elif tokens:
        launch(
            _each_backward_kernel, (programs,), z, z, sums, scale, *grads, dz, dz if parts is None else parts, slopes, part, tokens, rule.eps,
            P=side(n), BT=TILE, CENTRED=rule.centred, TANH=rule.tanh, num_warps=WARPS, **options,
        )  # fmt: skip
    total = part.sum(0)
    return Gradients(dz, parts, slopes, total[: len(base)], total[len(base) : len(base) + len(scale)])
