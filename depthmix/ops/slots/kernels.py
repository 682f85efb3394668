"""Everything between two sublayers in one launch, for so few tokens that a launch takes longer than its work.

    attend      newest = (scale ⊙) y (+ before), stored in its slot; softmax over it and the finished sources; the norm that follows
    look_back   the same sources for several later sites at once: mixture and log-sum-exp, from which `attend` continues
    add_up      newest = y (+ before), stored; weighted sums of all entries, with their scores, the norm that follows
    add_norm    x + y and its RMSNorm

A program is one token and one way of a site, so a single token keeps as many cores busy as there are ways. Sources lie side by
side in slots [slot, N, D], so no address table is read before them, and all rows of a tile are loaded at once. The time is that
of one memory access and two reductions, for one source or sixteen.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.addresses import aligned
from depthmix.ops.gpu.dependent_launch import dependent_launch, wait_for_previous_kernel
from depthmix.ops.gpu.launch import launch, repeat_last
from depthmix.ops.gpu.sizes import next_power_of_2

# A lane holds at most this many numbers of sources.
LANE = 128
# A lane that also holds their fp32 weights holds at most this many.
SUM_LANE = 64


@triton.jit
def _row_of_way(a, b, c, way, d, D: tl.constexpr, WAYS: tl.constexpr):
    """Load the row of a way from one of three tensors, in fp32. No address depends on a branch, so the compiler knows the alignment."""
    row = tl.load(a + d, mask=d < tl.where(way == 0, D, 0), other=0.0).to(tl.float32)
    if WAYS >= 2:
        row += tl.load(b + d, mask=d < tl.where(way == 1, D, 0), other=0.0).to(tl.float32)
    if WAYS >= 3:
        row += tl.load(c + d, mask=d < tl.where(way == 2, D, 0), other=0.0).to(tl.float32)
    return row


@triton.jit
def _rows(slots, at, t, N, d, mask, D: tl.constexpr, ALIGNED: tl.constexpr):
    """Load row t of several slots: [NS, BD], without widening."""
    rows = slots + ((at.to(tl.int64) * N + t) * D)[:, None] + d[None, :]
    if ALIGNED:
        rows = tl.multiple_of(rows, (1, 16))
    return tl.load(rows, mask=mask, other=0.0)


@triton.jit
def _attend(x, ok, u, m, z, acc, eps, D: tl.constexpr):
    """Add sources to a running softmax: return the new maximum, sum and weighted sum."""
    square, dot = tl.split(tl.sum(tl.join(x * x, x * u[None, :]), 1))
    s = tl.where(ok, dot * tl.rsqrt(square / D + eps), float("-inf"))
    top = tl.maximum(m, tl.max(s, 0))
    old, p = tl.exp(m - top), tl.exp(s - top)
    return top, z * old + tl.sum(p, 0), acc * old + tl.sum(p[:, None] * x, 0)


@triton.jit
def _newest(
    slots, y, scale, before, slot, t, way, N, d, ok, D: tl.constexpr, SCALE: tl.constexpr, BEFORE: tl.constexpr
):  # fmt: skip
    """Return (scale ⊙) y (+ before), rounded, and store it in its slot."""
    v = tl.load(y + t * D + d, mask=ok, other=0.0)
    if SCALE:
        v = v.to(tl.float32) * tl.load(scale + d, mask=ok, other=0.0)
    if BEFORE:
        v = v.to(tl.float32) + tl.load(before + t * D + d, mask=ok, other=0.0).to(tl.float32)
    v = v.to(slots.dtype.element_ty)
    tl.store(slots + (slot.to(tl.int64) * N + t) * D + d, v, mask=d < tl.where(way == 0, D, 0))
    return v.to(tl.float32)


@triton.jit(do_not_specialize=["N", "slot", "stride", "head", "skip", "n"])
def _attend_kernel(
    slots, y, scale, before, q0, q1, q2, k0, k1, k2, g0, g1, g2, bank, bank_lse, out,
    N: tl.int64, slot: tl.int32, stride: tl.int32, head: tl.int32, skip: tl.int32, n: tl.int32, eps, out_eps,
    D: tl.constexpr, BD: tl.constexpr, NS: tl.constexpr, MANY: tl.constexpr, WAYS: tl.constexpr, SCALE: tl.constexpr, BEFORE: tl.constexpr,
    BANK: tl.constexpr, NORM: tl.constexpr, ALIGNED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    way = tl.program_id(1)
    d = tl.arange(0, BD)
    ok = d < D
    u = _row_of_way(q0, q1, q2, way, d, D, WAYS) * _row_of_way(k0, k1, k2, way, d, D, WAYS)
    if NORM:
        gain = _row_of_way(g0, g1, g2, way, d, D, WAYS)
    if EARLY:
        wait_for_previous_kernel()
    i = tl.arange(0, NS)
    # Request these loads first.
    if not MANY:
        at = (i + tl.where(i >= head, skip, 0)) * stride
        x = _rows(slots, at, t, N, d, (i < n)[:, None] & ok[None, :], D, ALIGNED)
    v = _newest(slots, y, scale, before, slot, t, way, N, d, ok, D, SCALE, BEFORE)
    m, z, acc = float("-inf"), 0.0, tl.zeros([BD], tl.float32)
    if MANY:
        square, dot = tl.split(tl.sum(tl.join(v * v, v * u), 0))
        m, z, acc = dot * tl.rsqrt(square / D + eps), 1.0, v
        for start in range(0, n, NS):
            j = start + i
            at = (j + tl.where(j >= head, skip, 0)) * stride
            x = _rows(slots, at, t, N, d, (j < n)[:, None] & ok[None, :], D, ALIGNED)
            m, z, acc = _attend(x.to(tl.float32), j < n, u, m, z, acc, eps, D)
    else:
        # The newest source is one more row of the tile, so that one reduction gives all logits.
        x = tl.where((i == n)[:, None], v.to(x.dtype)[None, :], x)
        m, z, acc = _attend(x.to(tl.float32), i <= n, u, m, z, acc, eps, D)
    # The mixture of older sources, with weights that sum to one.
    if BANK:
        lse = tl.load(bank_lse + t)
        top = tl.maximum(m, lse)
        new, old = tl.exp(m - top), tl.exp(lse - top)
        z, acc = new * z + old, new * acc + old * tl.load(bank + t * D + d, mask=ok, other=0.0)
    acc = acc / z
    if NORM:
        acc = acc * tl.rsqrt(tl.sum(acc * acc, 0) / D + out_eps) * gain
    tl.store(out + (way * N + t) * D + d, acc.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["N", "n"])
def _look_back_kernel(
    slots, query, key_gain, bank, lse, N: tl.int64, n: tl.int32, eps,
    D: tl.constexpr, BD: tl.constexpr, NS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BD)
    ok = d < D
    u = tl.load(query + row * D + d, mask=ok, other=0.0) * tl.load(key_gain + row * D + d, mask=ok, other=0.0)
    m, z, acc = float("-inf"), 0.0, tl.zeros([BD], tl.float32)
    i = tl.arange(0, NS)
    for start in range(0, n, NS):
        j = start + i
        x = _rows(slots, j, t, N, d, (j < n)[:, None] & ok[None, :], D, ALIGNED).to(tl.float32)
        m, z, acc = _attend(x, j < n, u, m, z, acc, eps, D)
    tl.store(bank + (row * N + t) * D + d, acc / z, mask=ok)
    tl.store(lse + row * N + t, m + tl.log(z))


@triton.jit
def _weight(b, s, SCORES: tl.constexpr, RELU: tl.constexpr):
    """Return static + score, clamped by relu. 1: the score, 2: the sum."""
    if SCORES:
        b = b + (tl.maximum(s, 0.0) if RELU == 1 else s)
    return tl.maximum(b, 0.0) if RELU == 2 else b


@triton.jit(do_not_specialize=["N", "slot"])
def _add_up_kernel(
    slots, y, before, static, w, g0, g1, g2, out, raw, N: tl.int64, slot: tl.int32, out_eps,
    D: tl.constexpr, BD: tl.constexpr, NS: tl.constexpr, WAYS: tl.constexpr, STATIC: tl.constexpr, SCORES: tl.constexpr,
    PER_ENTRY: tl.constexpr, RELU: tl.constexpr, BEFORE: tl.constexpr, NORM: tl.constexpr, RAW: tl.constexpr, ALIGNED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    way = tl.program_id(1)
    d = tl.arange(0, BD)
    ok = d < D
    # Everything that does not depend on a sum is asked for before the first one.
    # First row of a way, if it has one row per entry.
    first = (way * (slot + 1)).to(tl.int64)
    u, newest_weight = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if SCORES:
        u = tl.load(w + (first + slot if PER_ENTRY else way) * D + d, mask=ok, other=0.0)
    if STATIC == 1:
        newest_weight = tl.load(static + (first + slot) * D + d, mask=ok, other=0.0)
    elif STATIC == 2:
        newest_weight += tl.load(static + first + slot)
    elif not SCORES:
        newest_weight += 1.0
    if NORM:
        gain = _row_of_way(g0, g1, g2, way, d, D, WAYS)
    if EARLY:
        wait_for_previous_kernel()
    v = _newest(slots, y, y, before, slot, t, way, N, d, ok, D, False, BEFORE)
    acc = tl.zeros([BD], tl.float32)
    i = tl.arange(0, NS)
    for start in range(0, slot, NS):
        j = start + i
        row_ok = (j < slot)[:, None] & ok[None, :]
        rows = ((first + j) * D)[:, None] + d[None, :]
        x = _rows(slots, j, t, N, d, row_ok, D, ALIGNED).to(tl.float32)
        b = tl.zeros([NS, BD], tl.float32)
        if STATIC == 1:
            b = tl.load(static + rows, mask=row_ok, other=0.0)
        elif STATIC == 2:
            b += tl.load(static + first + j, mask=j < slot, other=0.0)[:, None]
        elif not SCORES:
            b += 1.0
        if PER_ENTRY:  # noqa: SIM108 (decided by the compiler)
            s = tl.sum(x * tl.load(w + rows, mask=row_ok, other=0.0), 1)
        else:
            s = tl.sum(x * u[None, :], 1)
        acc += tl.sum(_weight(b, s[:, None], SCORES, RELU) * x, 0)
    acc += _weight(newest_weight, tl.sum(v * u, 0), SCORES, RELU) * v
    if way == RAW:
        tl.store(raw + t * D + d, acc.to(raw.dtype.element_ty), mask=ok)
    if NORM:
        acc = acc * tl.rsqrt(tl.sum(acc * acc, 0) / D + out_eps) * gain
    tl.store(out + (way * N + t) * D + d, acc.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["N"])
def _add_norm_kernel(
    x, y, gain, total, out, N: tl.int64, eps,
    D: tl.constexpr, BD: tl.constexpr, ADD: tl.constexpr, KEEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    ok = d < D
    scale = tl.load(gain + d, mask=ok, other=0.0).to(tl.float32)
    if EARLY:
        wait_for_previous_kernel()
    v = tl.load(x + t * D + d, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        v += tl.load(y + t * D + d, mask=ok, other=0.0).to(tl.float32)
        # Norm the rounded sum, which later readers see.
        if KEEP:
            v = v.to(total.dtype.element_ty)
            tl.store(total + t * D + d, v, mask=ok)
            v = v.to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / D + eps) * scale
    tl.store(out + t * D + d, v.to(out.dtype.element_ty), mask=ok)


def _warps(block: int) -> int:
    """Return the warps of a program. They lie along a row, so mixing rows needs no exchange between lanes."""
    return max(min(4, max(1, block // 256)), block // 1024)


def _sum_warps(block: int) -> int:
    """Return `_warps` for programs that also hold as many weights, which would otherwise leave room for too few rows."""
    return min(16, max(1, block // 256))


def rows_at_once(dim: int) -> int:
    """Return how many sources of `dim` channels one tile holds."""
    block = next_power_of_2(dim)
    return max(1, LANE * 32 * _warps(block) // block)


def attend(
    slots: Tensor,
    y: Tensor,
    before: Tensor | None,
    slot: int,
    stride: int,
    head: int,
    skip: int,
    n: int,
    query: Sequence[Tensor],
    key_gain: Sequence[Tensor],
    gain: Sequence[Tensor],
    eps: float,
    out_eps: float,
    bank: Tensor | None,
    bank_lse: Tensor | None,
    scale: Tensor | None,
) -> Tensor:
    """Compute the mixtures [W, ..., D] of the newest source and n finished ones.

    Args:
        slots: sources by slot. The newest, (scale ⊙) y (+ before), is stored in `slot`.
        stride, head, skip: finished source i lies in slot i * stride, and from number `head` on in slot (i + skip) * stride.
        query, key_gain: [D] fp32 for each way.
        gain: [D] for each way, any dtype, or empty.
        bank, bank_lse: `look_back`'s results for this site, [N, D] and [N] fp32, or None.
        scale: [D] fp32, or None.
    """
    dim, ways = y.shape[-1], len(query)
    tokens = y.numel() // dim
    out = torch.empty(ways, *y.shape, dtype=slots.dtype, device=y.device)
    if tokens:
        block = next_power_of_2(dim)
        # If all sources fit in one tile, the newest is one of its rows.
        rows = rows_at_once(dim)
        many = n + 1 > rows
        launch(
            _attend_kernel, (tokens, ways), y,
            slots, y, query[0] if scale is None else scale, y if before is None else before, *repeat_last(query, 3), *repeat_last(key_gain, 3), *repeat_last(gain or query[:1], 3),
            query[0] if bank is None else bank, query[0] if bank_lse is None else bank_lse, out,
            tokens, slot, stride, head, skip, n, eps, out_eps,
            D=dim, BD=block, NS=rows if many else next_power_of_2(n + 1), MANY=many, WAYS=ways, SCALE=scale is not None, BEFORE=before is not None, BANK=bank is not None,
            NORM=len(gain) > 0, ALIGNED=aligned(dim, [slots]), num_warps=_warps(block), **dependent_launch(y),
        )  # fmt: skip
    return out


def look_back(slots: Tensor, n: int, query: Tensor, key_gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return for each of R queries [R, D] the mixture of sources 0 … n-1, [R, N, D] fp32, and their log-sum-exp, [R, N]."""
    dim = slots.shape[-1]
    tokens = slots[0].numel() // dim
    bank = torch.empty(len(query), tokens, dim, dtype=torch.float32, device=slots.device)
    lse = torch.empty(len(query), tokens, dtype=torch.float32, device=slots.device)
    if tokens:
        block = next_power_of_2(dim)
        rows = min(next_power_of_2(max(1, n)), rows_at_once(dim))
        launch(
            _look_back_kernel, (tokens, len(query)), slots,
            slots, query, key_gain, bank, lse, tokens, n, eps,
            D=dim, BD=block, NS=rows, ALIGNED=aligned(dim, [slots]), num_warps=_warps(block),
        )  # fmt: skip
    return bank, lse


def add_up(
    slots: Tensor,
    y: Tensor,
    before: Tensor | None,
    slot: int,
    ways: int,
    static: Tensor | None,
    w: Tensor | None,
    relu: int,
    gain: Sequence[Tensor],
    out_eps: float,
    raw: int,
) -> tuple[Tensor, Tensor]:
    """Compute weighted sums [W, ..., D] of the newest entry and all before it, and the sum of way `raw` also without its norm.

    Args:
        slots: entries by slot. The newest, y (+ before), is stored in `slot`.
        static: [W, slot + 1, D] or [W, slot + 1, 1] fp32, or None.
        w: [W, slot + 1 or 1, D] fp32, whose products with the entries are added to the weights; or None.
        relu: 1 clamps these products, 2 the whole weights. Without static and w, weights are one.
        gain: as in attend.
    """
    dim = y.shape[-1]
    tokens = y.numel() // dim
    out = torch.empty(ways, *y.shape, dtype=slots.dtype, device=y.device)
    rough = torch.empty(y.shape, dtype=slots.dtype, device=y.device)
    if tokens:
        block = next_power_of_2(dim)
        warps = _sum_warps(block)
        rows = min(next_power_of_2(max(1, slot)), max(1, SUM_LANE * 32 * warps // block))
        kind = 0 if static is None else 1 if static.shape[-1] == dim and dim > 1 else 2
        fp32 = next((t for t in (static, w) if t is not None), slots)
        launch(
            _add_up_kernel, (tokens, ways), y,
            slots, y, y if before is None else before, fp32 if static is None else static, fp32 if w is None else w,
            *repeat_last(gain or [fp32], 3), out, rough, tokens, slot, out_eps,
            D=dim, BD=block, NS=rows, WAYS=ways, STATIC=kind, SCORES=w is not None,
            PER_ENTRY=w is not None and w.shape[1] > 1, RELU=relu, BEFORE=before is not None, NORM=len(gain) > 0, RAW=raw, ALIGNED=aligned(dim, [slots]), num_warps=warps, **dependent_launch(y),
        )  # fmt: skip
    return out, rough


def add_norm(x: Tensor, y: Tensor | None, gain: Tensor, eps: float, keep: bool = True) -> tuple[Tensor | None, Tensor]:
    """Return x + y, rounded (None without y, or if it is not kept), and its RMSNorm."""
    dim = x.shape[-1]
    tokens = x.numel() // dim
    total, out = torch.empty_like(x) if keep and y is not None else None, torch.empty_like(x)
    if tokens:
        block = next_power_of_2(dim)
        launch(
            _add_norm_kernel, (tokens,), x,
            x, x if y is None else y, gain, x if total is None else total, out, tokens, eps,
            D=dim, BD=block, ADD=y is not None, KEEP=keep, num_warps=min(16, max(1, block // 512)), **dependent_launch(x),
        )  # fmt: skip
    return total, out
