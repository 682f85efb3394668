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
from depthmix.ops.gpu.launch import launch, repeat_last
from depthmix.ops.gpu.sizes import next_power_of_2
from depthmix.ops.slots.kernels import _attend, _newest, _row_of_way, _rows, _warps, rows_at_once


@triton.jit
def _row(main, further, index, is_main, d, D: tl.constexpr, HAS_FURTHER: tl.constexpr):
    """Load a row of one of two tensors, in fp32."""
    at = index.to(tl.int64) * D + d
    row = tl.load(main + at, mask=d < tl.where(is_main, D, 0), other=0.0)
    if HAS_FURTHER:
        row += tl.load(further + at, mask=d < tl.where(is_main, 0, D), other=0.0)
    return row


@triton.jit(do_not_specialize=["N", "slot", "stride", "begin", "n_later", "further_at", "further_begin", "readers"])
def _pass_on_kernel(
    slots, acc, stats, y, scale, before, q, k, further_q, further_k, g0, g1, g2, out,
    N: tl.int64, slot: tl.int32, stride: tl.int32, begin: tl.int32, n_later: tl.int32, further_at: tl.int32, further_begin: tl.int32,
    readers: tl.int32, rows: tl.int64, eps, out_eps,
    D: tl.constexpr, BD: tl.constexpr, NS: tl.constexpr, WAYS: tl.constexpr, HAS_FURTHER: tl.constexpr, FIRST: tl.constexpr,
    ANEW: tl.constexpr, SCALE: tl.constexpr, BEFORE: tl.constexpr, NORM: tl.constexpr, ALIGNED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    # Ways of this reader, then later readers, then their further ways.
    j = tl.program_id(1)
    d = tl.arange(0, BD)
    inside = d < D
    i = j - WAYS
    is_this_reader = j < WAYS
    is_main = tl.where(is_this_reader, j == 0, i < n_later)
    main_index = tl.where(is_this_reader, slot, begin + i)
    further_index = tl.where(is_this_reader, further_at + j - 1, further_begin + i - n_later)
    index = tl.where(is_main, main_index, further_index)
    row = index + tl.where(is_main, 0, readers)
    u = _row(q, further_q, index, is_main, d, D, HAS_FURTHER) * _row(k, further_k, index, is_main, d, D, HAS_FURTHER)
    if NORM:
        gain = _row_of_way(g0, g1, g2, j, d, D, WAYS)
    if EARLY:
        wait_for_previous_kernel()
    at = row.to(tl.int64) * N + t
    has_running = (not FIRST) & (is_this_reader | (not ANEW))
    a = tl.load(acc + at * D + d, mask=d < tl.where(has_running, D, 0), other=0.0)
    m = tl.load(stats + at, mask=has_running, other=float("-inf"))
    z = tl.load(stats + rows * N + at, mask=has_running, other=0.0)
    if ANEW:
        # Sources finished before the newest.
        n = tl.where(is_this_reader, 0, slot // stride)
        b = tl.arange(0, NS)
        for start in range(0, n, NS):
            row_ok = start + b < n
            x = _rows(slots, (start + b) * stride, t, N, d, row_ok[:, None] & inside[None, :], D, ALIGNED)
            m, z, a = _attend(x.to(tl.float32), row_ok, u, m, z, a, eps, D)
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
    if is_this_reader:
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
    further_query: Tensor | None,
    further_key_gain: Tensor | None,
    further_at: int,
    further_begin: int,
    further_end: int,
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
        further_query, further_key_gain: [A, D], of further ways.
        further_at: this reader's first row of these.
        further_begin, further_end: further ways to update.
        gain: [D] for each way, any dtype, or empty.
        scale: [D] fp32, or None.
    """
    dim = y.shape[-1]
    tokens = y.numel() // dim
    out = torch.empty(ways, *y.shape, dtype=slots.dtype, device=y.device)
    if tokens:
        block = next_power_of_2(dim)
        n_later, n_further = end - begin, further_end - further_begin
        anew = stride > 0 and slot > 0 and n_later + n_further > 0
        further = (
            (query, key_gain)
            if further_query is None or further_key_gain is None
            else (further_query, further_key_gain)
        )
        launch(
            _pass_on_kernel, (tokens, ways + n_later + n_further), y,
            slots, acc, stats, y, query if scale is None else scale, y if before is None else before, query, key_gain, *further, *repeat_last(gain or [query], 3), out,
            tokens, slot, max(1, stride), begin, n_later, further_at, further_begin, len(query), len(acc), eps, out_eps,
            D=dim, BD=block, NS=min(next_power_of_2(slot // stride), rows_at_once(dim)) if anew else 1, WAYS=ways,
            HAS_FURTHER=further_query is not None, FIRST=slot == 0, ANEW=anew, SCALE=scale is not None, BEFORE=before is not None, NORM=len(gain) > 0,
            ALIGNED=aligned(dim, [slots]), num_warps=_warps(block) if anew else _warps_of(block, n_later + n_further), **dependent_launch(y),
        )  # fmt: skip
    return out
