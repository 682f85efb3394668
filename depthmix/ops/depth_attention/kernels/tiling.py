"""Depth tiling: the queries are known beforehand, so a source can be read once for many sites that will attend to it.

scores       the logits of a source for many queries: a thin matrix product
make_bank    the mixtures of the older sources for up to four consecutive queries; for the first also its site's whole read
read_known   a read whose older sources have known logits: plain weighted sums, without a dot product per source and way
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.depth_attention.kernels.read import Result, deliver, load_row
from depthmix.ops.gpu.addresses import address_table, aligned
from depthmix.ops.gpu.launch import launch, repeat_last
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2

# Sites that read older sources together.
GROUP = 4
# From this many rows of sources on, larger tiles keep all cores busy.
MANY_ROWS = 1 << 15


@triton.jit(do_not_specialize=["N", "n", "rows"])
def _scores_kernel(
    table, u_high, u_low, s, like, N: tl.int64, n: tl.int32, rows: tl.int32, eps,
    D: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(1)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    row, column = tl.arange(0, BR), tl.arange(0, BK)
    at = tl.load(table + i).to(tl.pointer_type(like.dtype.element_ty)) + t[:, None] * D + column[None, :]
    if ALIGNED:
        at = tl.multiple_of(at, (1, 16))
    dots, squares = tl.zeros([BT, BR], tl.float32), tl.zeros([BT, BK], tl.float32)
    v = tl.load(at, mask=(t < N)[:, None] & (column < D)[None, :], other=0.0)
    # The next part of a source is loaded into registers meanwhile, see `scores`.
    for k in range(0, D, BK):
        d = k + column
        of_u, inside = row[:, None] * D + d[None, :], (row < rows)[:, None] & (d < D)[None, :]
        high = tl.load(u_high + of_u, mask=inside, other=0.0)
        low = high
        if SPLIT:
            low = tl.load(u_low + of_u, mask=inside, other=0.0)
        at += BK
        later = tl.load(at, mask=(t < N)[:, None] & (d + BK < D)[None, :], other=0.0)
        dots = tl.dot(v, tl.trans(high), dots, input_precision="ieee")
        if SPLIT:
            dots = tl.dot(v, tl.trans(low), dots, input_precision="ieee")
        v = v.to(tl.float32)
        squares += v * v
        v = later
    dots = dots * tl.rsqrt(tl.sum(squares, 1) / D + eps)[:, None]
    at = s + (row.to(tl.int64)[None, :] * n + i) * N + t[:, None]
    tl.store(at, dots, mask=(t < N)[:, None] & (row < rows)[None, :])


@triton.jit
def _log_sum(table, n, at, BN: tl.constexpr):
    """Return the log-sum-exp over all sources of the logits at an offset from those in the table."""
    i = tl.arange(0, BN)
    at += tl.load(table + 2 * i + 1, mask=i < n, other=0).to(tl.pointer_type(tl.float32))
    s = tl.load(at, mask=i < n, other=float("-inf"))
    top = tl.max(s, 0)
    return top + tl.log(tl.sum(tl.exp(s - top), 0))


@triton.jit(do_not_specialize=["N", "n"])
def _bank_kernel(
    table, bank0, bank1, bank2, bank3, lse, like, newest, u, gain, y, N: tl.int64, n: tl.int32, eps, out_eps,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, ALIGNED: tl.constexpr,
    STAGES: tl.constexpr, NEWEST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    ok = d < D
    first = tl.program_id(1) == 0
    l0, l1 = _log_sum(table, n, t, BN), _log_sum(table, n, t + STEP * N, BN)
    tl.store(lse + N + t, l1, mask=first)
    acc0, acc1 = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if NEWEST:
        x = tl.load(newest + t * D + d, mask=ok, other=0.0)
    else:
        tl.store(lse + t, l0, mask=first)
    if ROWS > 2:
        l2, acc2 = _log_sum(table, n, t + 2 * STEP * N, BN), tl.zeros([BD], tl.float32)
        tl.store(lse + 2 * N + t, l2, mask=first)
    if ROWS > 3:
        l3, acc3 = _log_sum(table, n, t + 3 * STEP * N, BN), tl.zeros([BD], tl.float32)
        tl.store(lse + 3 * N + t, l3, mask=first)
    for i in tl.range(0, n, num_stages=STAGES):
        v = load_row(tl.load(table + 2 * i), t, d, D, like, ALIGNED, ok)
        s = tl.load(table + 2 * i + 1).to(tl.pointer_type(tl.float32)) + t
        acc0 += tl.exp(tl.load(s) - l0) * v
        acc1 += tl.exp(tl.load(s + STEP * N) - l1) * v
        if ROWS > 2:
            acc2 += tl.exp(tl.load(s + 2 * STEP * N) - l2) * v
        if ROWS > 3:
            acc3 += tl.exp(tl.load(s + 3 * STEP * N) - l3) * v
    at = t * D + d
    # The first query's site reads now. It has one more source.
    if NEWEST:
        x = x.to(tl.float32)
        square, s0 = tl.split(tl.sum(tl.join(x * x, x * tl.load(u + d, mask=ok, other=0.0)), 0))
        s0 *= tl.rsqrt(square / D + eps)
        both = _with(l0, s0)
        acc0 = tl.exp(l0 - both) * acc0 + tl.exp(s0 - both) * x
        deliver(1.0, (acc0,), both, y, y, gain, lse, t, N, out_eps, D, NORM, 0)
    else:
        tl.store(bank0 + at, acc0, mask=ok)
    tl.store(bank1 + at, acc1, mask=ok)
    if ROWS > 2:
        tl.store(bank2 + at, acc2, mask=ok)
    if ROWS > 3:
        tl.store(bank3 + at, acc3, mask=ok)


@triton.jit
def _with(lse, s):
    """Return the log-sum-exp with one more logit."""
    top = tl.maximum(lse, s)
    return top + tl.log(tl.exp(lse - top) + tl.exp(s - top))


@triton.jit(do_not_specialize=["N", "n"])
def _read_known_kernel(
    table, newest, add, fresh, u, g0, g1, g2, y0, y1, y2, o0, o1, o2, s, lse, N: tl.int64, n: tl.int32, eps, out_eps,
    D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, WAYS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
    KEEP: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    ok = d < D
    v = tl.load(newest + t * D + d, mask=ok, other=0.0)
    if ADD:
        v = v.to(tl.float32) + tl.load(add + t * D + d, mask=ok, other=0.0)
        v = v.to(fresh.dtype.element_ty)
        tl.store(fresh + t * D + d, v, mask=ok)
    v = v.to(tl.float32)
    u0 = tl.load(u + d, mask=ok, other=0.0)
    # One reduction for all.
    if WAYS >= 2:
        u1 = tl.load(u + D + d, mask=ok, other=0.0)
        u2 = u1
        if WAYS >= 3:
            u2 = tl.load(u + 2 * D + d, mask=ok, other=0.0)
        front, back = tl.split(tl.sum(tl.join(tl.join(v * v, v * u0), tl.join(v * u1, v * u2)), 0))
        square, s0 = tl.split(front)
        s1, s2 = tl.split(back)
    else:
        square, s0 = tl.split(tl.sum(tl.join(v * v, v * u0), 0))
    r = tl.rsqrt(square / D + eps)
    s0 *= r
    l0 = _with(_log_sum(table, n, t, BN), s0)
    acc0 = tl.exp(s0 - l0) * v
    if KEEP > 0:
        tl.store(s + t, s0)
    if WAYS >= 2:
        s1 *= r
        l1 = _with(_log_sum(table, n, t + N, BN), s1)
        acc1 = tl.exp(s1 - l1) * v
        if KEEP > 0:
            tl.store(s + N + t, s1)
    if WAYS >= 3:
        s2 *= r
        l2 = _with(_log_sum(table, n, t + 2 * N, BN), s2)
        acc2 = tl.exp(s2 - l2) * v
        if KEEP > 0:
            tl.store(s + 2 * N + t, s2)
    for i in tl.range(0, n, num_stages=STAGES):
        v = load_row(tl.load(table + 2 * i), t, d, D, y0, ALIGNED, ok)
        p = tl.load(table + 2 * i + 1).to(tl.pointer_type(tl.float32)) + t
        acc0 = tl.fma(tl.exp(tl.load(p) - l0), v, acc0)
        if WAYS >= 2:
            acc1 = tl.fma(tl.exp(tl.load(p + N) - l1), v, acc1)
        if WAYS >= 3:
            acc2 = tl.fma(tl.exp(tl.load(p + 2 * N) - l2), v, acc2)
    # Distance from one way's totals to the next.
    rows = N * (1 + (NORM and KEEP == 2))
    deliver(1.0, (acc0,), l0, y0, o0, g0, lse, t, N, out_eps, D, NORM, KEEP)
    if WAYS >= 2:
        deliver(1.0, (acc1,), l1, y1, o1, g1, lse + rows, t, N, out_eps, D, NORM, KEEP)
    if WAYS >= 3:
        deliver(1.0, (acc2,), l2, y2, o2, g2, lse + 2 * rows, t, N, out_eps, D, NORM, KEEP)


class SplitRows(NamedTuple):
    """Rows [R, D] as sums high + low of two tensors in the sources' dtype, so that matrix products lose nothing of fp32 rows."""

    high: Tensor
    low: Tensor

    @classmethod
    def of(cls, queries: Tensor, kind: torch.dtype) -> "SplitRows":
        high = queries.to(kind)
        if kind == torch.float32:
            return cls(high, high)
        if torch.is_grad_enabled():
            return cls(high, (queries - high.float()).to(kind))
        # The numbers of the line above, in one launch. `out=` has no autograd.
        return cls(high, torch.sub(queries, high, out=torch.empty_like(high)))

    def after(self, row: int) -> "SplitRows":
        """Return the rows from `row` on."""
        return SplitRows(self.high[row:], self.low[row:])


def scores(queries: SplitRows, sources: Sequence[Tensor], eps: float) -> Tensor:
    """Compute the logits [R, n, N] of n sources for all queries, reading each source once.

    num_stages must be 1. The kernel squares what a Hopper matrix product reads. Triton 3.6 pipelines such a load and overwrites it
    while another warp group's product still reads it (lab/LOG.md).
    """
    v, (high, low) = sources[0], queries
    (rows, dim), kind = high.shape, v.dtype
    tokens = v.numel() // dim
    out = torch.empty(rows, len(sources), tokens, dtype=torch.float32, device=v.device)
    table = address_table(tuple(x.data_ptr() for x in sources), v.device)
    wide = max(16, next_power_of_2(dim))
    # Few tokens: larger tiles would leave cores idle. Long rows: more of them on their way at a time.
    tile, depth = (64, 128) if dim > 1024 or tokens * len(sources) < MANY_ROWS else (128, 64)
    depth = min(wide, depth if kind != torch.float32 else 32)
    # More rows would not fit in the shared memory of smaller GPUs.
    for at in range(0, rows, 64):
        n = min(64, rows - at)
        launch(
            _scores_kernel, (cdiv(tokens, tile), len(sources)), v,
            table, high[at:], low[at:], out[at:], v, tokens, len(sources), n, eps,
            D=dim, BT=tile, BR=max(16, next_power_of_2(n)), BK=depth, SPLIT=kind != torch.float32,
            ALIGNED=aligned(dim, sources), num_warps=tile // 16, num_stages=1,
        )  # fmt: skip
    return out


def make_bank(
    logits: Sequence[Tensor],
    sources: Sequence[Tensor],
    rows: int,
    step: int = GROUP,
    newest: Tensor | None = None,
    u: Tensor | None = None,
    gain: Tensor | None = None,
    eps: float = 0.0,
    out_eps: float = 0.0,
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Compute the mixtures of the sources for `rows` (2 to GROUP) consecutive queries.

    Args:
        logits: for each source those of the first query, [N], a row of what `scores` returned for `step` sources.
        sources: n tensors [..., D].
        rows: number of queries.
        step: sources per call of `scores`.
        newest: the newest source of the first query's site. With it that site's read runs here too.
        u: the first query [D], with newest.
        gain: of the norm after the first site's read, [D].
        eps, out_eps: of the keys' norm and of that norm.

    Returns:
        The mixtures, each [N, D] fp32; their log-sum-exp [rows, N]; the first site's result or None. With a result, the first
        mixture is a placeholder.
    """
    v = sources[0]
    dim = v.shape[-1]
    tokens, block = v.numel() // dim, next_power_of_2(dim)
    # A norm needs the whole row.
    block = min(1024, block) if newest is None else block
    mixtures = [
        torch.empty(tokens, dim, dtype=torch.float32, device=v.device) for _ in range(rows - (newest is not None))
    ]
    bank = mixtures if newest is None else [mixtures[0], *mixtures]
    lse = torch.empty(rows, tokens, dtype=torch.float32, device=v.device)
    y = None if newest is None else torch.empty_like(newest)
    pairs = [(x.data_ptr(), s.data_ptr()) for x, s in zip(sources, logits, strict=True)]
    launch(
        _bank_kernel, (tokens, cdiv(dim, block)), v,
        address_table(tuple(a for pair in pairs for a in pair), v.device), *bank, *bank[: GROUP - rows], lse, v,
        v if newest is None else newest, lse if u is None else u, lse if gain is None else gain, v if y is None else y,
        tokens, len(sources), eps, out_eps,
        D=dim, BD=block, BN=max(32, next_power_of_2(len(sources))), ROWS=rows, STEP=step, ALIGNED=aligned(dim, sources),
        STAGES=4 if block > 512 else 3, NEWEST=y is not None, NORM=gain is not None, num_warps=max(1, block // 1024),
    )  # fmt: skip
    return bank, lse, y


def read_known(
    u: Tensor,
    sources: Sequence[Tensor],
    logits: Sequence[Tensor],
    add: Tensor | None,
    gain: Tensor | Sequence[Tensor] | None,
    eps: float,
    out_eps: float,
    keep: int,
) -> Result:
    """Read like `read`, given the logits [W, N] of every source but the newest; s holds the newest source's logits alone.

    gain: [W, D], or a sequence with one row per way.
    """
    newest, n, (ways, dim) = sources[-1], len(sources) - 1, u.shape
    tokens = newest.numel() // dim
    result = Result.empty(newest, ways, gain is not None, add is not None, keep, 1)
    block = next_power_of_2(dim)
    pairs = [(x.data_ptr(), s.data_ptr()) for x, s in zip(sources, logits, strict=False)]
    launch(
        _read_known_kernel, (tokens,), newest,
        address_table(tuple(a for pair in pairs for a in pair), newest.device), newest, newest if add is None else add,
        newest if result.fresh is None else result.fresh, u, *repeat_last([u] if gain is None else list(gain), 3),
        *repeat_last(result.y, 3), *repeat_last(result.o or result.y, 3), result.s, result.lse, tokens, n, eps, out_eps,
        D=dim, BD=block, BN=max(16, next_power_of_2(n)), WAYS=ways, ADD=int(add is not None), NORM=gain is not None,
        KEEP=keep, ALIGNED=aligned(dim, sources), STAGES=3, num_warps=max(1, block // 1024),
    )  # fmt: skip
    return result
