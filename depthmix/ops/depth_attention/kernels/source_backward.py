"""Gradients of one or two sources from all their readers: each source and each reader's gradient is read once.

One program per token. With p = exp(s - lse) of a reader and r = 1 / RMS of the source v,

    ds = p (do · v - δ)        dv = Σ (p do + r ds u) - v r² / D Σ ds s        du = Σ_tokens r ds v

The weights of a group of readers are computed side by side and stored in memory. The loop over the rows of do loads them one by
one. r ds also goes to memory, for du, which is a matrix product.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.depth_attention.kernels.read import load_row
from depthmix.ops.gpu.addresses import address_tables, aligned
from depthmix.ops.gpu.launch import launch
from depthmix.ops.gpu.sizes import next_power_of_2
from depthmix.ops.matmul import matmul, wide_product

# Sources whose gradients are computed together.
PAIR = 2


@triton.jit
def _open_source(table, t, d, ok, eps, D: tl.constexpr, like, ALIGNED: tl.constexpr):
    """Load a source's row, its 1 / RMS, and its gradient so far: from elsewhere, and from earlier readers."""
    x = load_row(tl.load(table), t, d, D, like, ALIGNED, ok)
    elsewhere, before = tl.load(table + 1), tl.load(table + 2)
    acc = load_row(elsewhere, t, d, D, like, ALIGNED, d < tl.where(elsewhere != 0, D, 0))
    row = before.to(tl.pointer_type(tl.float32)) + t * D + d
    if ALIGNED:
        row = tl.multiple_of(row, 16)
    acc += tl.load(row, mask=d < tl.where(before != 0, D, 0), other=0.0)
    return x, tl.rsqrt(tl.sum(x * x, 0) / D + eps), acc


@triton.jit
def _row(do, t, d, mask, D: tl.constexpr, like, ALIGNED: tl.constexpr):
    """Load a reader's row of do without widening it. It is read once, so caches are reserved for the queries."""
    row = do.to(tl.pointer_type(like.dtype.element_ty)) + t * D + d
    if ALIGNED:
        row = tl.multiple_of(row, 16)
    return tl.load(row, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _prefetch(do, t, lane, D: tl.constexpr, LANES: tl.constexpr, like):
    """Prefetch a row into the L2 cache: a hint, for which no register waits."""
    size: tl.constexpr = like.dtype.element_ty.primitive_bitwidth // 8
    at = do + t * (D * size) + lane * (D * size // LANES)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _chain(z, acc, LEVELS: tl.constexpr, NEAR: tl.constexpr):
    """Add 2^LEVELS parts of z to acc one after the other, which compiles to one instruction each if z is a product."""
    half: tl.constexpr = z.shape[0] // 2
    if LEVELS == 0:
        acc += z
    elif NEAR > 0:
        a, b = tl.split(tl.reshape(z, [half, 2]))
        acc = _chain(b, _chain(a, acc, LEVELS - 1, NEAR - 1), LEVELS - 1, NEAR - 1)
    else:
        a, b = tl.split(tl.permute(tl.reshape(z, [2, half]), (1, 0)))
        acc = _chain(b, _chain(a, acc, LEVELS - 1, 0), LEVELS - 1, 0)
    return acc


@triton.jit
def _fold(z, LEVELS: tl.constexpr, NEAR: tl.constexpr):
    """Return the sum of the 2^LEVELS numbers that a lane holds, of which 2^NEAR are neighbours."""
    return _chain(z, tl.zeros([z.shape[0] >> LEVELS], tl.float32), LEVELS, NEAR)


@triton.jit
def _load_readers(readers, e, n, t, N, S: tl.constexpr):
    """Load log-sum-exp, δ, whether several sources were read, and the logits of the sources, for a group of readers."""
    at, ok = readers + 5 * e, e < n
    ld = tl.load(at + 1, mask=ok, other=0).to(tl.pointer_type(tl.float32)) + t
    a = tl.load(tl.load(at + 3, mask=ok, other=0).to(tl.pointer_type(tl.float32)) + t, mask=ok, other=0.0)
    b = a
    if S == 2:
        b = tl.load(tl.load(at + 4, mask=ok, other=0).to(tl.pointer_type(tl.float32)) + t, mask=ok, other=0.0)
    # No reader, no weight.
    lse = tl.load(ld, mask=ok, other=float("inf"))
    return lse, tl.load(ld + N, mask=ok, other=0.0), tl.load(at + 2, mask=ok, other=0), a, b


@triton.jit
def _weights(s, r, lse, delta, several):
    """Return p, p r and -δ p r of a group of readers for one source."""
    p = tl.exp(s - lse)
    # The weight of an only source is 1 whatever its logit.
    w = tl.where(several != 0, p * r, 0.0)
    return tl.join(tl.join(p, w), tl.join(-delta * w, p))


@triton.jit
def _four(x):
    """Return p, -δ p r and p r of one reader and source, as _weights joined them."""
    a, b = tl.split(tl.reshape(x, [2, 2]))
    p, w = tl.split(a)
    minus_delta, _ = tl.split(b)
    return p, minus_delta, w


@triton.jit
def _store_ds(w, s, r, ok, at, C, SPLIT: tl.constexpr):
    """Store r ds of a group of readers and return Σ ds s."""
    head = w.to(at.dtype.element_ty)
    tl.store(at, head, mask=ok)
    if SPLIT:
        tl.store(at + C, (w - head.to(tl.float32)).to(at.dtype.element_ty), mask=ok)
    return tl.sum(w * s, 0) / r


@triton.jit
def _close_source(table, t, d, x, r, acc, c, D: tl.constexpr, like, ALIGNED: tl.constexpr):
    """Store a source's gradient, rounded if it is whole, in fp32 if more readers will come."""
    acc -= (c * r * r / D) * x
    whole, part = tl.load(table + 3), tl.load(table + 4)
    out = whole.to(tl.pointer_type(like.dtype.element_ty)) + t * D + d
    rest = part.to(tl.pointer_type(tl.float32)) + t * D + d
    if ALIGNED:
        out, rest = tl.multiple_of(out, 16), tl.multiple_of(rest, 16)
    tl.store(out, acc.to(like.dtype.element_ty), mask=d < tl.where(whole != 0, D, 0))
    tl.store(rest, acc, mask=d < tl.where(part != 0, D, 0))


@triton.jit(do_not_specialize=["N", "n", "C"])
def _source_backward_kernel(
    sources, readers, u, like, ds, weights, N: tl.int64, n: tl.int32, C: tl.int32, eps,
    D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, G: tl.constexpr, SPLIT: tl.constexpr, ALIGNED: tl.constexpr,
    LEVELS: tl.constexpr, NEAR: tl.constexpr, PREFETCH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    # sources: rows [v, g, part, whole, rest]; readers: [do, log-sum-exp and δ, whether it read several, logits, logits]
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    ok = d < D
    j = tl.arange(0, G)
    lane = tl.arange(0, LANES)
    for i in tl.static_range(1, PREFETCH):
        _prefetch(tl.load(readers + 5 * tl.minimum(i, n - 1)), t, lane, D, LANES, like)
    lse, delta, several, s0, s1 = _load_readers(readers, j, n, t, N, S)
    x0, r0, acc0 = _open_source(sources, t, d, ok, eps, D, like, ALIGNED)
    c0 = 0.0
    if S == 2:
        x1, r1, acc1 = _open_source(sources + 5, t, d, ok, eps, D, like, ALIGNED)
        c1 = 0.0
    four = tl.arange(0, 4 * S)
    group_weights = weights + t * (4 * S * G)
    ds += t * (1 + SPLIT) * C
    # The loop waits for memory, so each row of do is fetched while the one before it is at work, its address while the one
    # before that is. Registers allow no more, so what is further ahead is prefetched.
    y = _row(tl.load(readers), t, d, ok, D, like, ALIGNED)
    do = tl.load(readers + 5 * tl.minimum(1, n - 1))
    later = tl.load(readers + 5 * tl.minimum(PREFETCH, n - 1))
    for start in range(0, n, G):
        group = _weights(s0, r0, lse, delta, several)
        scaled_ds0 = tl.zeros([G], tl.float32)
        if S == 2:
            group = tl.join(group, _weights(s1, r1, lse, delta, several))
            scaled_ds1 = tl.zeros([G], tl.float32)
        tl.store(group_weights + j[:, None] * (4 * S) + four[None, :], tl.reshape(group, [G, 4 * S]))
        tl.debug_barrier()
        logits0, logits1 = s0, s1
        lse, delta, several, s0, s1 = _load_readers(readers, start + G + j, n, t, N, S)
        for k in tl.range(0, tl.minimum(n - start, G)):
            z = y.to(tl.float32)
            packed = tl.load(group_weights + k * (4 * S) + four)
            if PREFETCH > 0:
                _prefetch(later, t, lane, D, LANES, like)
                later = tl.load(readers + 5 * tl.minimum(start + k + PREFETCH + 1, n - 1))
            y = _row(do, t, d, d < tl.where(start + k + 1 < n, D, 0), D, like, ALIGNED)
            do = tl.load(readers + 5 * tl.minimum(start + k + 2, n - 1))
            q = tl.load(u + (start + k) * D + d, mask=ok, other=0.0, eviction_policy="evict_last")
            if S == 1:
                p, minus_delta, w = _four(packed)
                w = tl.fma(tl.sum(_fold(x0 * z, LEVELS, NEAR), 0), w, minus_delta)
                acc0 = tl.fma(w, q, tl.fma(p, z, acc0))
                scaled_ds0 = tl.where(j == k, w, scaled_ds0)
            else:
                packed, packed1 = tl.split(tl.reshape(packed, [4, 2]))
                dots = tl.join(_fold(x0 * z, LEVELS, NEAR), _fold(x1 * z, LEVELS, NEAR))
                # One reduction for both.
                dot, other = tl.split(tl.sum(dots, 0))
                p, minus_delta, w = _four(packed)
                w = tl.fma(dot, w, minus_delta)
                acc0 = tl.fma(w, q, tl.fma(p, z, acc0))
                scaled_ds0 = tl.where(j == k, w, scaled_ds0)
                p, minus_delta, w = _four(packed1)
                w = tl.fma(other, w, minus_delta)
                acc1 = tl.fma(w, q, tl.fma(p, z, acc1))
                scaled_ds1 = tl.where(j == k, w, scaled_ds1)
        e = start + j
        c0 += _store_ds(scaled_ds0, logits0, r0, e < n, ds + e, C, SPLIT)
        if S == 2:
            c1 += _store_ds(scaled_ds1, logits1, r1, e < n, ds + N * (1 + SPLIT) * C + e, C, SPLIT)
        tl.debug_barrier()
    _close_source(sources, t, d, x0, r0, acc0, c0, D, like, ALIGNED)
    if S == 2:
        _close_source(sources + 5, t, d, x1, r1, acc1, c1, D, like, ALIGNED)


class Reader(NamedTuple):
    """A way of a read, as kernel arguments for the gradients of its sources."""

    do: Tensor  # like a source
    s: Sequence[Tensor]  # logits of each of the sources in question, [N]
    ld: Tensor  # log-sum-exp and δ: [2, N]
    u: Tensor  # [D]
    several: bool = True  # sources were read


class Source(NamedTuple):
    """A source and its gradient so far."""

    v: Tensor
    g: Tensor | None = None  # from elsewhere
    part: Tensor | None = None  # fp32, from readers that an earlier launch processed
    whole: bool = True  # whether these are the last readers
    need_dv: bool = True


def source_backward(
    sources: Sequence[Source], readers: Sequence[Reader], eps: float, need_du: bool
) -> tuple[list[Tensor | None], Tensor | None]:
    """Compute the gradients of one or two sources from all their readers, and these sources' part of du.

    Returns:
        A gradient for each source: rounded to the source's dtype after its last readers, fp32 otherwise. And du [1 or 2, readers, D],
        whose first dimension is to be summed.
    """
    v = sources[0].v
    dim, n = v.shape[-1], len(readers)
    tokens = v.numel() // dim
    # r ds goes to memory as two bf16 halves, so that a bf16 matrix product loses nothing.
    split = v.dtype == torch.bfloat16
    # Whole rows of 16 bytes. Columns without a reader are neither written nor read.
    columns = -(-n // 4) * 4
    kind = v.dtype if split else torch.float32
    ds = torch.empty(len(sources), tokens, (1 + split) * columns, dtype=kind, device=v.device)
    out = [torch.empty_like(x.v, dtype=x.v.dtype if x.whole else torch.float32) if x.need_dv else None for x in sources]
    if tokens:
        _launch(sources, readers, out, ds, columns, eps)
    if not need_du:
        return out, None
    rows = [x.v.reshape(tokens, dim) for x in sources]
    product = wide_product if split else lambda d, x: matmul(d, x.float())
    parts = [product(d.t(), x) for d, x in zip(ds, rows, strict=True)]
    du = parts[0] if len(parts) == 1 else parts[0].add_(parts[1])
    return out, du.view(1 + split, columns, dim)[:, :n]


def _launch(
    sources: Sequence[Source],
    readers: Sequence[Reader],
    out: Sequence[Tensor | None],
    ds: Tensor,
    columns: int,
    eps: float,
) -> None:
    v = sources[0].v
    dim, tokens = v.shape[-1], ds.shape[1]
    block = next_power_of_2(dim)
    # A lane holds 16 numbers of each row, or more where that saves a reduction between warps and registers allow it.
    widest = 2048 if len(sources) == 1 else 1024
    warps = 1 if v.element_size() == 2 and block <= widest else min(32, max(1, block // 512))
    prefetch = _rows_to_prefetch(v)
    rows = [
        (x.v, x.g, x.part, o if x.whole else None, None if x.whole else o) for x, o in zip(sources, out, strict=True)
    ]
    addresses = (
        (x.do.data_ptr(), x.ld.data_ptr(), int(x.several), x.s[0].data_ptr(), x.s[-1].data_ptr()) for x in readers
    )
    wide = aligned(dim, *rows, [x.do for x in readers])
    # Numbers of a row that a lane holds, as a power of two.
    levels = max(1, block // (32 * warps)).bit_length() - 1
    # And the numbers of these that it loads at once.
    near = (16 // v.element_size()).bit_length() - 1 if wide else 0
    # More readers side by side cost registers, which smaller programs lack.
    group = 16 if levels <= 4 else 32
    launch(
        _source_backward_kernel, (tokens,), v,
        *address_tables(
            v.device,
            tuple(0 if a is None else a.data_ptr() for row in rows for a in row),
            tuple(a for reader in addresses for a in reader),
        ),
        _side_by_side([x.u for x in readers]), v, ds,
        torch.empty(tokens, group, 4 * len(sources), dtype=torch.float32, device=v.device), tokens, len(readers), columns, eps,
        D=dim, BD=block, S=len(sources), G=group, SPLIT=ds.dtype == torch.bfloat16, ALIGNED=wide,
        LEVELS=levels, NEAR=min(levels, near), PREFETCH=prefetch, LANES=32 * warps, num_warps=warps, num_stages=1,
        # Many warps per core are worth more than a few registers.
        maxnreg=(96 if len(sources) == 1 else 128) if prefetch and levels == 4 and ds.dtype == torch.bfloat16 else None,
    )  # fmt: skip


def _rows_to_prefetch(like: Tensor) -> int:
    """Return how many readers ahead a row is prefetched: the fastest on an H200. The instruction exists on NVIDIA GPUs only."""
    return 2 if like.is_cuda and torch.version.hip is None else 0


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """Return rows [D] as consecutive memory: in place if they already are, as the queries of a stack mostly are, otherwise a copy."""
    start = rows[0].data_ptr()
    if all(row.data_ptr() == start + k * row.nbytes for k, row in enumerate(rows)):
        return rows[0]
    return torch.stack(list(rows))
