"""Depth attention on a GPU: one program a token, its row of D channels in registers, every source read once.

The equations are in reference.py. Sources are never stacked: kernels find them through tables of addresses.

    read             o_w = Σ_i p_wi v_i for W ways from one read of the sources, the add that makes the newest source
                     and the RMSNorm that follows
    read_backward    of one way: of the norm, and of the newest source while it is at hand
    source_backward  of one or two sources from all their readers: each source and each reader's gradient read once
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.addresses import address_table, aligned


@triton.jit
def load_row(address, t, d, D: tl.constexpr, like, ALIGNED: tl.constexpr, mask):
    """Row t of the tensor at an address, in fp32; zeros where the mask says so."""
    row = address.to(tl.pointer_type(like.dtype.element_ty)) + t * D + d
    if ALIGNED:
        row = tl.multiple_of(row, 16)  # what comes from a table has no known alignment
    return tl.load(row, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _attend(v, r, u, m, z, acc, at, KEEP: tl.constexpr):
    """One more source in a running softmax: the new maximum, sum and weighted sum; its logit is stored."""
    s = tl.sum(v * u, 0) * r
    if KEEP > 0:
        tl.store(at, s)
    top = tl.maximum(m, s)
    old, new = tl.exp(m - top), tl.exp(s - top)
    return top, z * old + new, acc * old + new * v


@triton.jit
def deliver(
    z, acc, lse, y, xhat, gain, total, t, N, d, ok, out_eps, D: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr
):
    """Store a way's result acc / z: the sum, or with NORM its RMSNorm; and what a backward needs (Result)."""
    acc = acc / z
    if KEEP > 0:
        tl.store(total + t, lse)
    if NORM:
        r = tl.rsqrt(tl.sum(acc * acc, 0) / D + out_eps)
        acc = acc * r
        if KEEP == 2:
            tl.store(xhat + t * D + d, acc.to(xhat.dtype.element_ty), mask=ok)
            tl.store(total + N + t, r)
        acc = acc * tl.load(gain + d, mask=ok, other=0.0)
    tl.store(y + t * D + d, acc.to(y.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["N", "n"])
def _read_kernel(
    table, add, fresh, bank, bank_lse, u, gain, y0, y1, y2, o0, o1, o2, s, lse, N: tl.int64, n: tl.int32, eps, out_eps,
    D: tl.constexpr, BD: tl.constexpr, WAYS: tl.constexpr, ADD: tl.constexpr, BANK: tl.constexpr, NORM: tl.constexpr,
    KEEP: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    ok = d < D
    way = N * n  # from one way's logits to the next
    u0 = tl.load(u + d, mask=ok, other=0.0)
    m0, z0, acc0 = float("-inf"), 0.0, tl.zeros([BD], tl.float32)
    if BANK:  # the mixture of older sources, with weights that sum to one
        m0, z0, acc0 = tl.load(bank_lse + t), 1.0, tl.load(bank + t * D + d, mask=ok, other=0.0)
    if WAYS == 3:
        u1 = tl.load(u + D + d, mask=ok, other=0.0)
        u2 = tl.load(u + 2 * D + d, mask=ok, other=0.0)
        m1, z1, acc1 = float("-inf"), 0.0, tl.zeros([BD], tl.float32)
        m2, z2, acc2 = float("-inf"), 0.0, tl.zeros([BD], tl.float32)
    for i in tl.range(0, n - ADD, num_stages=STAGES):
        v = load_row(tl.load(table + i), t, d, D, y0, ALIGNED, ok)
        r = tl.rsqrt(tl.sum(v * v, 0) / D + eps)
        at = s + i * N + t
        m0, z0, acc0 = _attend(v, r, u0, m0, z0, acc0, at, KEEP)
        if WAYS == 3:
            m1, z1, acc1 = _attend(v, r, u1, m1, z1, acc1, at + way, KEEP)
            m2, z2, acc2 = _attend(v, r, u2, m2, z2, acc2, at + 2 * way, KEEP)
    if ADD:
        v = load_row(tl.load(table + n - 1), t, d, D, y0, ALIGNED, ok) + tl.load(add + t * D + d, mask=ok, other=0.0)
        v = v.to(fresh.dtype.element_ty)
        tl.store(fresh + t * D + d, v, mask=ok)
        v = v.to(tl.float32)
        r = tl.rsqrt(tl.sum(v * v, 0) / D + eps)
        at = s + (n - 1) * N + t
        m0, z0, acc0 = _attend(v, r, u0, m0, z0, acc0, at, KEEP)
        if WAYS == 3:
            m1, z1, acc1 = _attend(v, r, u1, m1, z1, acc1, at + way, KEEP)
            m2, z2, acc2 = _attend(v, r, u2, m2, z2, acc2, at + 2 * way, KEEP)
    rows = N * (1 + (NORM and KEEP == 2))  # from one way's totals to the next
    deliver(z0, acc0, m0 + tl.log(z0), y0, o0, gain, lse, t, N, d, ok, out_eps, D, NORM, KEEP)
    if WAYS == 3:
        deliver(z1, acc1, m1 + tl.log(z1), y1, o1, gain + D, lse + rows, t, N, d, ok, out_eps, D, NORM, KEEP)
        deliver(z2, acc2, m2 + tl.log(z2), y2, o2, gain + 2 * D, lse + 2 * rows, t, N, d, ok, out_eps, D, NORM, KEEP)


@triton.jit(do_not_specialize=["N", "several"])
def _read_backward_kernel(
    dy, o, do, u, gain, s, lse, ld, v, g, before, dv, part, N: tl.int64, several: tl.int32, eps,
    D: tl.constexpr, BD: tl.constexpr, NORM: tl.constexpr, STORE: tl.constexpr, LOCAL: tl.constexpr,
    HAS_G: tl.constexpr, HAS_BEFORE: tl.constexpr, NEED_DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    ok = d < D
    du, dgain = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if LOCAL:
        q = tl.load(u + d, mask=ok, other=0.0)
    if NORM:
        k = tl.load(gain + d, mask=ok, other=0.0)
    for t in tl.range(tl.program_id(0).to(tl.int64), N, tl.num_programs(0), num_stages=STAGES):
        y = tl.load(dy + t * D + d, mask=ok, other=0.0).to(tl.float32)
        x = tl.load(o + t * D + d, mask=ok, other=0.0).to(tl.float32)
        w, square, rho = x, 0.0, 1.0
        if LOCAL:
            w = tl.load(v + t * D + d, mask=ok, other=0.0).to(tl.float32)
        if NORM:  # x is the normed result
            rho = tl.load(lse + N + t)
            dgain += y * x
            y = y * k
            if LOCAL:
                along, square = tl.split(tl.sum(tl.join(y * x, w * w), 0))  # one reduction for both
            else:
                along = tl.sum(y * x, 0)
            y = (rho * (y - x * (along / D))).to(dy.dtype.element_ty)  # as the other sources will read it
            if STORE:
                tl.store(do + t * D + d, y, mask=ok)
            y = y.to(tl.float32)
        elif LOCAL:
            square = tl.sum(w * w, 0)
        if LOCAL:
            delta, dot = tl.split(tl.sum(tl.join(y * x, y * w), 0))
        else:
            delta, dot = tl.sum(y * x, 0), 0.0
        delta = delta / rho
        total = tl.load(lse + t)
        if STORE:
            tl.store(ld + t, total)
            tl.store(ld + N + t, delta)
        if LOCAL:
            r = tl.rsqrt(square / D + eps)
            logit = tl.load(s + t)
            p = tl.exp(logit - total)
            ds = p * (dot - delta) * several
            du += (ds * r) * w
            if NEED_DV:
                y = p * y + (ds * r) * q - (ds * logit * r * r / D) * w
                if HAS_G:
                    y += tl.load(g + t * D + d, mask=ok, other=0.0).to(tl.float32)
                if HAS_BEFORE:
                    y += tl.load(before + t * D + d, mask=ok, other=0.0)
                tl.store(dv + t * D + d, y.to(dv.dtype.element_ty), mask=ok)
    at = part + tl.program_id(0).to(tl.int64) * 2 * D + d
    tl.store(at, du, mask=ok)
    tl.store(at + D, dgain, mask=ok)


@triton.jit
def _open_source(table, t, d, ok, eps, D: tl.constexpr, like, ALIGNED: tl.constexpr):
    """A source's row, its 1 / RMS, and the gradients it has so far: from elsewhere, and from readers seen before."""
    x = load_row(tl.load(table), t, d, D, like, ALIGNED, ok)
    elsewhere, before = tl.load(table + 1), tl.load(table + 2)
    acc = load_row(elsewhere, t, d, D, like, ALIGNED, d < tl.where(elsewhere != 0, D, 0))
    row = before.to(tl.pointer_type(tl.float32)) + t * D + d
    if ALIGNED:
        row = tl.multiple_of(row, 16)
    acc += tl.load(row, mask=d < tl.where(before != 0, D, 0), other=0.0)
    return x, tl.rsqrt(tl.sum(x * x, 0) / D + eps), acc


@triton.jit
def _fetch(do, s0, s1, ld, t, d, ok, N, D: tl.constexpr, like, S: tl.constexpr, ALIGNED: tl.constexpr):
    """A reader's row of do, as it lies in memory, log-sum-exp and δ, and the logits of the sources."""
    row = do.to(tl.pointer_type(like.dtype.element_ty)) + t * D + d
    if ALIGNED:
        row = tl.multiple_of(row, 16)
    y = tl.load(row, mask=ok, other=0.0, cache_modifier=".cg")  # read once: the first cache is left to the queries
    ld = ld.to(tl.pointer_type(tl.float32)) + t
    a = tl.load(s0.to(tl.pointer_type(tl.float32)) + t)
    b = a
    if S == 2:
        b = tl.load(s1.to(tl.pointer_type(tl.float32)) + t)
    return y, tl.load(ld), tl.load(ld + N), a, b


@triton.jit
def _prefetch(do, t, lane, D: tl.constexpr, LANES: tl.constexpr, like):
    """Ask for a row to be brought to the second cache: a hint, for which no register waits."""
    size: tl.constexpr = like.dtype.element_ty.primitive_bitwidth // 8
    at = do + t * (D * size) + lane * (D * size // LANES)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _pair(dot, r, acc, c, y, u, s, lse, delta, high, low, SPLIT: tl.constexpr):
    """One reader's part of a source's gradient and of c = Σ ds s; ds r goes to memory, for du."""
    p = tl.exp(s - lse)
    ds = p * (dot - delta)
    w = ds * r
    head = w.to(high.dtype.element_ty)
    tl.store(high, head)
    if SPLIT:
        tl.store(low, (w - head.to(tl.float32)).to(high.dtype.element_ty))
    return tl.fma(w, u, tl.fma(p, y, acc)), c + ds * s


@triton.jit
def _close_source(table, t, d, ok, x, r, acc, c, D: tl.constexpr, like, ALIGNED: tl.constexpr):
    """Store a source's gradient, rounded if it is whole, in fp32 if more readers will come."""
    acc -= (c * r * r / D) * x
    whole, part = tl.load(table + 3), tl.load(table + 4)
    out = whole.to(tl.pointer_type(like.dtype.element_ty)) + t * D + d
    rest = part.to(tl.pointer_type(tl.float32)) + t * D + d
    if ALIGNED:
        out, rest = tl.multiple_of(out, 16), tl.multiple_of(rest, 16)
    tl.store(out, acc.to(like.dtype.element_ty), mask=d < tl.where(whole != 0, D, 0))
    tl.store(rest, acc, mask=d < tl.where(part != 0, D, 0))


@triton.jit(do_not_specialize=["N", "n"])
def _source_backward_kernel(
    sources, readers, u, like, ds_high, ds_low, N: tl.int64, n: tl.int32, eps,
    D: tl.constexpr, BD: tl.constexpr, S: tl.constexpr, SPLIT: tl.constexpr, ALIGNED: tl.constexpr,
    AHEAD: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    ok = d < D
    lane = tl.arange(0, LANES)
    for k in tl.static_range(1, AHEAD):
        _prefetch(tl.load(readers + 5 * tl.minimum(k, n - 1)), t, lane, D, LANES, like)
    later = tl.load(readers + 5 * tl.minimum(AHEAD, n - 1))
    # The loop waits for memory, so each reader is fetched while the one before it is at work, and its addresses,
    # [do, log-sum-exp and δ, whether it read several sources, logits, logits], while the one before that is.
    # Registers allow no more, so what is further ahead is prefetched.
    s0, s1 = tl.load(readers + 3), tl.load(readers + 4)
    y, lse, delta, a, b = _fetch(tl.load(readers), s0, s1, tl.load(readers + 1), t, d, ok, N, D, like, S, ALIGNED)
    at = readers + 5 * tl.minimum(1, n - 1)
    do, ld, s0, s1 = tl.load(at), tl.load(at + 1), tl.load(at + 3), tl.load(at + 4)
    x0, r0, acc0 = _open_source(sources, t, d, ok, eps, D, like, ALIGNED)
    c0 = 0.0
    if S == 2:
        x1, r1, acc1 = _open_source(sources + 5, t, d, ok, eps, D, like, ALIGNED)
        c1 = 0.0
    for e in range(n):
        if AHEAD > 0:
            _prefetch(later, t, lane, D, LANES, like)
            later = tl.load(readers + 5 * tl.minimum(e + AHEAD + 1, n - 1))
        q = tl.load(u + e * D + d, mask=ok, other=0.0)
        z, m, minus, s, s_next = y.to(tl.float32), lse, delta, a, b
        y, lse, delta, a, b = _fetch(do, s0, s1, ld, t, d, d < tl.where(e + 1 < n, D, 0), N, D, like, S, ALIGNED)
        at = readers + 5 * tl.minimum(e + 2, n - 1)
        do, ld, s0, s1 = tl.load(at), tl.load(at + 1), tl.load(at + 3), tl.load(at + 4)
        high, low = ds_high + e * N + t, ds_low + e * N + t
        if S == 1:
            dot = tl.sum(x0 * z, 0)
            # The weight of an only source is 1 whatever its logit: its δ is what its dot product is.
            minus = tl.where(tl.load(readers + 5 * e + 2) != 0, minus, dot)
            acc0, c0 = _pair(dot, r0, acc0, c0, z, q, s, m, minus, high, low, SPLIT)
        else:
            dot, other = tl.split(tl.sum(tl.join(x0 * z, x1 * z), 0))  # one reduction for both
            step = (1 + SPLIT) * n * N
            acc0, c0 = _pair(dot, r0, acc0, c0, z, q, s, m, minus, high, low, SPLIT)
            acc1, c1 = _pair(other, r1, acc1, c1, z, q, s_next, m, minus, high + step, low + step, SPLIT)
    _close_source(sources, t, d, ok, x0, r0, acc0, c0, D, like, ALIGNED)
    if S == 2:
        _close_source(sources + 5, t, d, ok, x1, r1, acc1, c1, D, like, ALIGNED)


def _warps(block: int, registers: int) -> int:
    """As few warps as hold `registers` fp32 rows of a block: one, without a reduction between warps, if it can be."""
    return min(32, max(1, triton.next_power_of_2(block * registers) // (32 * 128)))


def _stages(most: int, like: Tensor, rows: int) -> int:
    """How many steps of a loop are loaded ahead, each of them rows like one of a tensor: as small GPUs' shared memory allows."""
    return max(1, min(most, 1 + 90_000 // (rows * triton.next_power_of_2(like.shape[-1]) * like.element_size())))


class Result(NamedTuple):
    """What a read returns and what its backward needs."""

    y: list[Tensor]  # W results like a source
    o: list[Tensor]  # with keep=2 and a norm: the same before the gain, like a source but never bf16
    s: Tensor  # logits [W, n, N]
    lse: Tensor  # their log-sum-exp [W, 1, N]; with keep=2 and a norm also 1 / RMS of the mixture, [W, 2, N]
    fresh: Tensor | None  # the newest source, if it was added up here

    @classmethod
    def empty(cls, like: Tensor, ways: int, norm: bool, add: bool, keep: int, n: int) -> "Result":
        """Memory for a read like a source, of n sources whose logits are stored.

        A normed result is of the order of one: fp16 holds it in as many bytes as bf16 and eight times as exactly, and the
        backward takes differences of what it computes from it.
        """
        tokens = like.numel() // like.shape[-1]
        kind = torch.float16 if like.dtype == torch.bfloat16 else like.dtype
        rows = min(1, keep) + (norm and keep == 2)
        return cls(
            [torch.empty_like(like) for _ in range(ways)],
            [torch.empty_like(like, dtype=kind) for _ in range(ways if norm and keep == 2 else 0)],
            torch.empty(ways, n if keep else 0, tokens, dtype=torch.float32, device=like.device),
            torch.empty(ways, rows, tokens, dtype=torch.float32, device=like.device),
            torch.empty_like(like) if add else None,
        )


def read(
    u: Tensor,
    sources: Sequence[Tensor],
    add: Tensor | None,
    gain: Tensor | None,
    eps: float,
    out_eps: float,
    keep: int,
    bank: Tensor | None = None,
    bank_lse: Tensor | None = None,
) -> Result:
    """W mixtures of the sources [..., D], the last of which is sources[-1] + add if that is given.

    u, gain: [W, D] fp32. keep: also what a backward needs, 1: layer by layer, 2: in the order of the sources. bank, bank_lse:
    the mixture of further sources that one way has read, [N, D] fp32, and its log-sum-exp [N]; s is then that of the others.
    """
    first, n, (ways, dim) = sources[-1], len(sources), u.shape
    tokens = first.numel() // dim
    result = Result.empty(first, ways, gain is not None, add is not None, keep, n)
    y, o, s, lse, fresh = result
    if tokens:
        block = triton.next_power_of_2(dim)
        table = address_table(tuple(v.data_ptr() for v in sources), first.device)
        _read_kernel[(tokens,)](
            table, first if add is None else add, first if fresh is None else fresh, u if bank is None else bank,
            u if bank_lse is None else bank_lse, u, u if gain is None else gain,
            *three(y), *three(o or y), s, lse, tokens, n, eps, out_eps,
            D=dim, BD=block, WAYS=ways, ADD=int(add is not None), BANK=bank is not None, NORM=gain is not None, KEEP=keep,
            ALIGNED=aligned(dim, sources), STAGES=_stages(4, first, 1), num_warps=_warps(block, 1 + ways),
        )  # fmt: skip
    return result


def three(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return (tensors[0], tensors[-1], tensors[-1]) if len(tensors) < 3 else (tensors[0], tensors[1], tensors[2])


PAIR = 2  # sources whose gradients are computed together


class Newest(NamedTuple):
    """The newest source of a read, if its gradient is to be computed there and then."""

    v: Tensor
    g: Tensor | None  # a gradient it has from elsewhere
    need_dv: bool
    part: Tensor | None = None  # one that it has from other readers, fp32


class ReadGradients(NamedTuple):
    """Gradients of one way of a read."""

    do: Tensor  # of o
    ld: Tensor  # log-sum-exp and δ = do · o: [2, N]
    dv: Tensor | None  # of the newest source
    du: Tensor  # [D], the newest source's part; zero without one
    dgain: Tensor  # [D]; zero without a norm


def read_backward(
    dy: Tensor,
    o: Tensor,
    u: Tensor,
    gain: Tensor | None,
    s: Tensor,
    lse: Tensor,
    newest: Newest | None,
    eps: float,
    store: bool,
    several: bool = True,
) -> ReadGradients:
    """Gradients of one way, given that of its output; o: its result, with a norm before the gain (Result).

    u, gain: [D]; s: logits [n, N], the newest source's last; lse: [1 or 2, N]. store: also do and δ, for the other sources.
    several: sources were read, those in a bank included: the weight of an only one is 1 whatever its logit.
    """
    dim, tokens = u.shape[0], s.shape[1]
    do = torch.empty_like(dy) if store and gain is not None else dy
    ld = torch.empty(2, tokens if store else 0, dtype=torch.float32, device=dy.device)
    dv = torch.empty_like(dy) if newest is not None and newest.need_dv else None
    if not tokens:
        return ReadGradients(do, ld, dv, torch.zeros_like(u), torch.zeros_like(u))
    block = triton.next_power_of_2(dim)
    warps = _warps(block, 8)
    programs = programs_for(tokens, warps, dy)
    part = torch.empty(programs, 2, dim, dtype=torch.float32, device=dy.device)
    g, before = (None, None) if newest is None else (newest.g, newest.part)
    _read_backward_kernel[(programs,)](
        dy, o, do, u, u if gain is None else gain, s[-1], lse, ld, dy if newest is None else newest.v,
        dy if g is None else g, u if before is None else before, dy if dv is None else dv, part,
        tokens, int(several), eps,
        D=dim, BD=block, NORM=gain is not None, STORE=store, LOCAL=newest is not None, HAS_G=g is not None,
        HAS_BEFORE=before is not None, NEED_DV=dv is not None, STAGES=_stages(4 if newest is None else 3, dy, 5), num_warps=warps,
    )  # fmt: skip
    du, dgain = part[0] if newest is None and gain is None else part.sum(0)  # all zeros, or to be added up
    return ReadGradients(do, ld, dv, du, dgain)


def programs_for(tokens: int, warps: int, like: Tensor) -> int:
    """How many programs share the tokens, where each adds up a gradient of its own: few, and enough to fill a GPU."""
    cores = torch.cuda.get_device_properties(like.device).multi_processor_count if like.is_cuda else 3
    return min(tokens, max(1, 8 // warps) * cores)


class Reader(NamedTuple):
    """One way of a read, as the gradient of its sources sees it."""

    do: Tensor  # like a source
    s: Sequence[Tensor]  # logits of each of the sources in question, [N]
    ld: Tensor  # log-sum-exp and δ: [2, N]
    u: Tensor  # [D]
    several: bool = True  # sources were read


class Source(NamedTuple):
    """A source and what is known of its gradient."""

    v: Tensor
    g: Tensor | None = None  # from elsewhere
    part: Tensor | None = None  # from readers seen before, fp32
    whole: bool = True  # whether these are the last readers
    need_dv: bool = True


def source_backward(
    sources: Sequence[Source], readers: Sequence[Reader], eps: float, need_du: bool
) -> tuple[list[Tensor | None], Tensor | None]:
    """Gradients of one or two sources from all their readers, and these sources' part of du [readers, D].

    A gradient is rounded to the source's dtype if these are its last readers, and stays in fp32 otherwise.
    """
    v = sources[0].v
    dim, n = v.shape[-1], len(readers)
    tokens = v.numel() // dim
    split = v.dtype == torch.bfloat16  # ds in two bf16 halves, so that a bf16 matrix product loses nothing
    kind = v.dtype if split else torch.float32
    ds = torch.empty(len(sources), 1 + split, n, tokens, dtype=kind, device=v.device)
    out = [torch.empty_like(x.v, dtype=x.v.dtype if x.whole else torch.float32) if x.need_dv else None for x in sources]
    if tokens:
        block = triton.next_power_of_2(dim)
        warps, ahead = min(32, max(1, block // 512)), _ahead(v, len(sources), n)
        rows = [
            (x.v, x.g, x.part, o if x.whole else None, None if x.whole else o)
            for x, o in zip(sources, out, strict=True)
        ]
        columns = (
            (x.do.data_ptr(), x.ld.data_ptr(), int(x.several), x.s[0].data_ptr(), x.s[-1].data_ptr()) for x in readers
        )
        u = _side_by_side([x.u for x in readers])
        _source_backward_kernel[(tokens,)](
            address_table(tuple(0 if a is None else a.data_ptr() for row in rows for a in row), v.device),
            address_table(tuple(a for column in columns for a in column), v.device),
            u, v, ds[0, 0], ds[0, -1], tokens, n, eps,
            D=dim, BD=block, S=len(sources), SPLIT=split, ALIGNED=aligned(dim, *rows, [x.do for x in readers]),
            AHEAD=ahead, LANES=32 * warps, num_warps=warps, num_stages=1,
            maxnreg=128 if ahead and split else None,  # sixteen warps a core are worth more than a few registers
        )  # fmt: skip
    if not need_du:
        return out, None
    if split and v.is_cuda:
        parts = [
            torch.mm(d.view(2 * n, tokens), x.v.reshape(tokens, dim), out_dtype=torch.float32)
            for d, x in zip(ds, sources, strict=True)
        ]
        return out, (parts[0] if len(parts) == 1 else parts[0] + parts[1]).view(2, n, dim).sum(0)
    whole = [d.float().sum(0) @ x.v.reshape(tokens, dim).float() for d, x in zip(ds, sources, strict=True)]
    return out, whole[0] if len(whole) == 1 else whole[0] + whole[1]


def _ahead(like: Tensor, sources: int, readers: int) -> int:
    """How many readers ahead a row is prefetched: what was fastest on an H200. The instruction is NVIDIA's."""
    if not like.is_cuda or torch.version.hip is not None or sources == 1:
        return 0
    block = triton.next_power_of_2(like.shape[-1])
    return 3 if block == 1024 else 2 if block > 512 or readers > 8 else 0


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """Rows [D] one after the other in memory: where they are, as the queries of a stack mostly do, or as a copy."""
    start = rows[0].data_ptr()
    if all(row.data_ptr() == start + k * row.nbytes for k, row in enumerate(rows)):
        return rows[0]
    return torch.stack(list(rows))
