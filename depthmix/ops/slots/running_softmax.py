"""Decoding reads that continue a running softmax over the finished sources, and update those of later readers.

    v = (scale ⊙) y (+ before), rounded, stored in its slot
    this reader       s = logit of v;  t = max(m, s);  o, p = exp(m - t), exp(s - t);  h = (o a + p v) / (o z + p), and its norm
    later readers     m, z, a = t, o z + p, o a + p v,  if v is finished: either from their running values, or, for those of a
                      block, anew from all finished sources and v

So a site waits for one memory access and one reduction, like a plain add and norm. Its norm needs the mixture's square,
o² a·a + 2 o p a·v + p² v·v, and those three products come from the same reduction as the logit's two sums. The later readers are
other programs of the launch. For few tokens all of them add the source to their running values, and no source is read twice. For
more tokens only the readers of the next block begin anew: reading a few sources moves less than updating all readers.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.addresses import aligned
from depthmix.ops.gpu.dependent_launch import dependent_launch, wait_for_previous_kernel
from depthmix.ops.gpu.launch import launch
from depthmix.ops.slots.kernels import _attend, _newest, _row_of_way, _rows, _three, _warps, rows_at_once


@triton.jit
def _row(main, own, index, is_main, d, D: tl.constexpr, OWN: tl.constexpr):
    """Load a row of one of two tensors, in fp32."""
    at = index.to(tl.int64) * D + d
    row = tl.load(main + at, mask=d < tl.where(is_main, D, 0), other=0.0)
    if OWN:
        row += tl.load(own + at, mask=d < tl.where(is_main, 0, D), other=0.0)
    return row


@triton.jit(do_not_specialize=["N", "slot", "stride", "begin", "ahead", "own_at", "own_begin", "readers"])
def _pass_on_kernel(
    slots, acc, stats, y, scale, before, q, k, oq, ok, g0, g1, g2, out,
    N: tl.int64, slot: tl.int32, stride: tl.int32, begin: tl.int32, ahead: tl.int32, own_at: tl.int32, own_begin: tl.int32,
    readers: tl.int32, rows: tl.int64, eps, out_eps,
    D: tl.constexpr, BD: tl.constexpr, NS: tl.constexpr, WAYS: tl.constexpr, OWN: tl.constexpr, FIRST: tl.constexpr,
    ANEW: tl.constexpr, SCALE: tl.constexpr, BEFORE: tl.constexpr, NORM: tl.constexpr, ALIGNED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)  # ways of this reader, readers to come, and their own ways
    d = tl.arange(0, BD)
    inside = d < D
    i = j - WAYS
    mine = j < WAYS
    is_main = tl.where(mine, j == 0, i < ahead)
    index = tl.where(is_main, tl.where(mine, slot, begin + i), tl.where(mine, own_at + j - 1, own_begin + i - ahead))
    row = index + tl.where(is_main, 0, readers)
    u = _row(q, oq, index, is_main, d, D, OWN) * _row(k, ok, index, is_main, d, D, OWN)
    if NORM:
        gain = _row_of_way(g0, g1, g2, j, d, D, WAYS)
    if EARLY:
        wait_for_previous_kernel()
    at = row.to(tl.int64) * N + t
    known = (not FIRST) & (mine | (not ANEW))
    a = tl.load(acc + at * D + d, mask=d < tl.where(known, D, 0), other=0.0)
    m = tl.load(stats + at, mask=known, other=float("-inf"))
    z = tl.load(stats + rows * N + at, mask=known, other=0.0)
    if ANEW:
        n = tl.where(mine, 0, slot // stride)  # finished before the newest
        b = tl.arange(0, NS)
        for start in range(0, n, NS):
            there = start + b < n
            x = _rows(slots, (start + b) * stride, t, N, d, there[:, None] & inside[None, :], D, ALIGNED)
            m, z, a = _attend(x.to(tl.float32), there, u, m, z, a, eps, D)
    v = _newest(slots, y, scale, before, slot, t, j, N, d, inside, D, SCALE, BEFORE)
    sums = tl.sum(tl.join(tl.join(v * v, v * u), tl.join(a * v, a * a)), 0)  # [2, 2]
    of_new, of_old = tl.split(sums)
    square, dot = tl.split(of_new)
    across, old_square = tl.split(of_old)
    s = dot * tl.rsqrt(square / D + eps)
    top = tl.maximum(m, s)
    o, p = tl.exp(m - top), tl.exp(s - top)
    z = o * z + p
    h = o * a + p * v
    if mine:
        h = h / z
        if NORM:
            total = tl.maximum(o * o * old_square + 2 * o * p * across + p * p * square, 0.0)
            h = h * tl.rsqrt(total / (z * z) / D + out_eps) * gain
        tl.store(out + (j * N + t) * D + d, h.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(acc + at * D + d, h, mask=inside)
        tl.store(stats + at, top)
        tl.store(stats + rows * N + at, z)


def _warps_of(block: int, others: int) -> int:
    """Return the warps of a program: many for a read alone, which everything waits for; few where later readers keep the GPU busy."""
    return min(16, max(1, block // 512)) if others else min(8, max(1, block // 128))


def pass_on(
    slots: Tensor,
    acc: Tensor,
    stats: Tensor,
    y: Tensor,
    before: Tensor | None,
    slot: int,
    stride: int,
    begin: int,
    end: int,
    query: Tensor,
    key_gain: Tensor,
    own_query: Tensor | None,
    own_key_gain: Tensor | None,
    own_at: int,
    own_begin: int,
    own_end: int,
    ways: int,
    gain: Sequence[Tensor],
    eps: float,
    out_eps: float,
    scale: Tensor | None,
) -> Tensor:
    """Compute the mixtures [W, ..., D] of reader `slot`, over all finished sources and the newest, and update later readers.

    Args:
        slots: sources by slot. The newest, (scale ⊙) y (+ before), is stored in `slot`.
        acc, stats: running mixtures [R + A, N, D] and [2, R + A, N], fp32. Uninitialised before slot 0 is read.
        stride: 0, or the distance between finished sources: update later readers from slots 0, stride, …, slot instead of the newest.
        begin, end: later readers to update.
        query, key_gain: [R, D] fp32, of every reader.
        own_query, own_key_gain: [A, D], of further ways.
        own_at: this reader's first row of these.
        own_begin, own_end: further ways to update.
        gain: [D] for each way, any dtype, or empty.
        scale: [D] fp32, or None.
    """
    dim = y.shape[-1]
    tokens = y.numel() // dim
    out = torch.empty(ways, *y.shape, dtype=slots.dtype, device=y.device)
    if tokens:
        block = triton.next_power_of_2(dim)
        ahead, others = end - begin, own_end - own_begin
        anew = stride > 0 and slot > 0 and ahead + others > 0
        own = (query, key_gain) if own_query is None or own_key_gain is None else (own_query, own_key_gain)
        launch(
            _pass_on_kernel, (tokens, ways + ahead + others), y,
            slots, acc, stats, y, query if scale is None else scale, y if before is None else before, query, key_gain, *own, *_three(gain, query), out,
            tokens, slot, max(1, stride), begin, ahead, own_at, own_begin, len(query), len(acc), eps, out_eps,
            D=dim, BD=block, NS=min(triton.next_power_of_2(slot // stride), rows_at_once(dim)) if anew else 1, WAYS=ways,
            OWN=own_query is not None, FIRST=slot == 0, ANEW=anew, SCALE=scale is not None, BEFORE=before is not None, NORM=len(gain) > 0,
            ALIGNED=aligned(dim, [slots]), num_warps=_warps(block) if anew else _warps_of(block, ahead + others), **dependent_launch(y),
        )  # fmt: skip
    return out
