"""Depth attention on a GPU: one program per token, its row of D channels in registers, every source read once.

The equations are in reference.py. Sources are never stacked: kernels reach them through tables of addresses.

    read             o_w = Σ_i p_wi v_i for W ways from one read of the sources, the add that makes the newest source
                     and the RMSNorm that follows. Wide rows are cut into pieces (depthmix/ops/gpu/rows.py)
    read_backward    for one or two ways: the norm, and the newest source while it is in registers
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.addresses import table_of
from depthmix.ops.gpu.launch import count_cores, launch, repeat_last
from depthmix.ops.gpu.program_sums import sum_programs
from depthmix.ops.gpu.rows import (
    Pieces,
    add_rows,
    blend_rows,
    cut,
    divide_row,
    dot,
    load_pieces,
    multiply_rows,
    round_row,
    scale_row,
    store_pieces,
    zero_row,
)
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2


@triton.jit
def load_row(address, t, d, D: tl.constexpr, like, ALIGNED: tl.constexpr, mask):
    """Load row t of the tensor at an address, in fp32; zeros where the mask is false."""
    row = address.to(tl.pointer_type(like.dtype.element_ty)) + t * D + d
    if ALIGNED:
        # The compiler knows no alignment of an address that comes from a table.
        row = tl.multiple_of(row, 16)
    return tl.load(row, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _attend(v, r, u, m, z, acc, at, KEEP: tl.constexpr, VALUE_NORM: tl.constexpr):
    """Add one source to a running softmax: return the new maximum, sum and weighted sum. Its logit is stored."""
    s = dot(v, u) * r
    if KEEP > 0:
        tl.store(at, s)
    top = tl.maximum(m, s)
    old, new = tl.exp(m - top), tl.exp(s - top)
    weight = new * r if VALUE_NORM else new
    return top, z * old + new, blend_rows(acc, old, v, weight)


@triton.jit
def deliver(z, acc, lse, y, xhat, gain, total, t, N, out_eps, D: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr):
    """Store a way's result acc / z: the sum, or with NORM its RMSNorm; and what a backward needs (Result). acc is in pieces."""
    acc = divide_row(acc, z)
    if KEEP > 0:
        tl.store(total + t, lse)
    if NORM:
        r = tl.rsqrt(dot(acc, acc) / D + out_eps)
        acc = scale_row(acc, r)
        if KEEP == 2:
            store_pieces(xhat + t * D, acc, D)
            tl.store(total + N + t, r)
        acc = multiply_rows(acc, load_pieces(gain, D, len(acc), acc[0].shape[0]))
    store_pieces(y + t * D, acc, D)


@triton.jit
def row_of(t, i, stacked, STACK: tl.constexpr):
    """Return the row of token t in source i. The first `stacked` sources lie in one tensor [N, stacked, D]."""
    return t * tl.where(i < stacked, stacked, 1) if STACK else t


@triton.jit(do_not_specialize=["N", "n", "stacked"])
def _read_kernel(
    table, add, fresh, bank, bank_lse, u, gain, y0, y1, y2, o0, o1, o2, s, lse, N: tl.int64, n: tl.int32, stacked: tl.int32,
    eps, out_eps,
    D: tl.constexpr, C: tl.constexpr, K: tl.constexpr, WAYS: tl.constexpr, ADD: tl.constexpr, STORE_SUM: tl.constexpr, BANK: tl.constexpr,
    NORM: tl.constexpr, VALUE_NORM: tl.constexpr, KEEP: tl.constexpr, STACK: tl.constexpr, ALIGNED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    # Distance from one way's logits to the next.
    way = N * n
    u0 = load_pieces(u, D, C, K)
    m0, z0, acc0 = float("-inf"), 0.0, zero_row(C, K)
    # The mixture of older sources, with weights that sum to one.
    if BANK:
        m0, z0, acc0 = tl.load(bank_lse + t), 1.0, load_pieces(bank + t * D, D, C, K)
    if WAYS >= 2:
        u1 = load_pieces(u + D, D, C, K)
        m1, z1, acc1 = float("-inf"), 0.0, zero_row(C, K)
    if WAYS >= 3:
        u2 = load_pieces(u + 2 * D, D, C, K)
        m2, z2, acc2 = float("-inf"), 0.0, zero_row(C, K)
    for i in tl.range(0, n - ADD, num_stages=STAGES):
        source = tl.load(table + i).to(tl.pointer_type(add.dtype.element_ty))
        v = load_pieces(source + row_of(t, i, stacked, STACK) * D, D, C, K, ALIGNED)
        r = tl.rsqrt(dot(v, v) / D + eps)
        at = s + i * N + t
        m0, z0, acc0 = _attend(v, r, u0, m0, z0, acc0, at, KEEP, VALUE_NORM)
        if WAYS >= 2:
            m1, z1, acc1 = _attend(v, r, u1, m1, z1, acc1, at + way, KEEP, VALUE_NORM)
        if WAYS >= 3:
            m2, z2, acc2 = _attend(v, r, u2, m2, z2, acc2, at + 2 * way, KEEP, VALUE_NORM)
    if ADD:
        source = tl.load(table + n - 1).to(tl.pointer_type(add.dtype.element_ty))
        v = load_pieces(source + t * D, D, C, K, ALIGNED)
        v = add_rows(v, load_pieces(add + t * D, D, C, K))
        if STORE_SUM:
            v = round_row(v, fresh)
            store_pieces(fresh + t * D, v, D)
        r = tl.rsqrt(dot(v, v) / D + eps)
        at = s + (n - 1) * N + t
        m0, z0, acc0 = _attend(v, r, u0, m0, z0, acc0, at, KEEP, VALUE_NORM)
        if WAYS >= 2:
            m1, z1, acc1 = _attend(v, r, u1, m1, z1, acc1, at + way, KEEP, VALUE_NORM)
        if WAYS >= 3:
            m2, z2, acc2 = _attend(v, r, u2, m2, z2, acc2, at + 2 * way, KEEP, VALUE_NORM)
    # Distance from one way's totals to the next.
    rows = N * (1 + (NORM and KEEP == 2))
    deliver(z0, acc0, m0 + tl.log(z0), y0, o0, gain, lse, t, N, out_eps, D, NORM, KEEP)
    if WAYS >= 2:
        deliver(z1, acc1, m1 + tl.log(z1), y1, o1, gain + D, lse + rows, t, N, out_eps, D, NORM, KEEP)
    if WAYS >= 3:
        deliver(z2, acc2, m2 + tl.log(z2), y2, o2, gain + 2 * D, lse + 2 * rows, t, N, out_eps, D, NORM, KEEP)


@triton.jit
def four_sums(a, b, c, e):
    """Return four sums over a row, from one reduction."""
    front, back = tl.split(tl.sum(tl.join(tl.join(a, b), tl.join(c, e)), 0))
    first, second = tl.split(front)
    third, fourth = tl.split(back)
    return first, second, third, fourth


@triton.jit
def store_sums(part, way, du, dgain, d, ok, D: tl.constexpr, WAYS: tl.constexpr):
    """Store what a program has added up for a way's query and gain: [programs, 2, W, D]."""
    part += tl.program_id(0).to(tl.int64) * (2 * WAYS * D) + way * D + d
    tl.store(part, du, mask=ok)
    tl.store(part + WAYS * D, dgain, mask=ok)


@triton.jit
def _through_norm(y, x, along, rho, do, at, ok, D: tl.constexpr, like, STORE: tl.constexpr):
    """Return the gradient of a mixture from that of its normed value x, rounded as the other sources will read it."""
    y = (rho * (y - x * (along / D))).to(like.dtype.element_ty)
    if STORE:
        tl.store(do + at, y, mask=ok)
    return y.to(tl.float32)


@triton.jit
def _to_newest(y, w, q, r, logit, total, delta, dot, several, D: tl.constexpr):
    """Return a way's part of the newest source's gradient, and of its query's."""
    p = tl.exp(logit - total)
    ds = p * (dot - delta) * several
    return p * y + (ds * r) * q - (ds * logit * r * r / D) * w, (ds * r) * w


@triton.jit(do_not_specialize=["N", "several", "way"])
def _read_backward_kernel(
    dy0, dy1, o0, o1, do0, do1, u, gain, s, lse, ld, v, g, before, dv, part, N: tl.int64, several: tl.int32, way: tl.int64, eps,
    D: tl.constexpr, BD: tl.constexpr, WAYS: tl.constexpr, NORM: tl.constexpr, STORE: tl.constexpr, LOCAL: tl.constexpr,
    HAS_G: tl.constexpr, HAS_BEFORE: tl.constexpr, NEED_DV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    ok = d < D
    # Distance from one way's totals to the next.
    rows = N * (1 + NORM)
    du0, dgain0 = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if WAYS == 2:
        du1, dgain1 = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if LOCAL:
        q0 = tl.load(u + d, mask=ok, other=0.0)
        if WAYS == 2:
            q1 = tl.load(u + D + d, mask=ok, other=0.0)
    if NORM:
        k0 = tl.load(gain + d, mask=ok, other=0.0)
        if WAYS == 2:
            k1 = tl.load(gain + D + d, mask=ok, other=0.0)
    for t in tl.range(tl.program_id(0).to(tl.int64), N, tl.num_programs(0), num_stages=STAGES):
        at = t * D + d
        y0 = tl.load(dy0 + at, mask=ok, other=0.0).to(tl.float32)
        x0 = tl.load(o0 + at, mask=ok, other=0.0).to(tl.float32)
        rho0 = 1.0
        if WAYS == 2:
            rho1 = 1.0
            y1 = tl.load(dy1 + at, mask=ok, other=0.0).to(tl.float32)
            x1 = tl.load(o1 + at, mask=ok, other=0.0).to(tl.float32)
        if LOCAL:
            w = tl.load(v + at, mask=ok, other=0.0).to(tl.float32)
        # x is the normed result.
        if NORM:
            rho0 = tl.load(lse + N + t)
            dgain0 += y0 * x0
            y0 = y0 * k0
            if WAYS == 2:
                rho1 = tl.load(lse + rows + N + t)
                dgain1 += y1 * x1
                y1 = y1 * k1
            # One reduction for all.
            if WAYS == 2 and LOCAL:
                along0, square, along1, _ = four_sums(y0 * x0, w * w, y1 * x1, w * w)
            elif WAYS == 2:
                along0, along1 = tl.split(tl.sum(tl.join(y0 * x0, y1 * x1), 0))
            elif LOCAL:
                along0, square = tl.split(tl.sum(tl.join(y0 * x0, w * w), 0))
            else:
                along0 = tl.sum(y0 * x0, 0)
            y0 = _through_norm(y0, x0, along0, rho0, do0, at, ok, D, dy0, STORE)
            if WAYS == 2:
                y1 = _through_norm(y1, x1, along1, rho1, do1, at, ok, D, dy0, STORE)
        elif LOCAL:
            square = tl.sum(w * w, 0)
        if WAYS == 2 and LOCAL:
            delta0, dot0, delta1, dot1 = four_sums(y0 * x0, y0 * w, y1 * x1, y1 * w)
        elif WAYS == 2:
            delta0, delta1 = tl.split(tl.sum(tl.join(y0 * x0, y1 * x1), 0))
        elif LOCAL:
            delta0, dot0 = tl.split(tl.sum(tl.join(y0 * x0, y0 * w), 0))
        else:
            delta0 = tl.sum(y0 * x0, 0)
        delta0 = delta0 / rho0
        total0 = tl.load(lse + t)
        if STORE:
            tl.store(ld + t, total0)
            tl.store(ld + N + t, delta0)
        if WAYS == 2:
            delta1 = delta1 / rho1
            total1 = tl.load(lse + rows + t)
            if STORE:
                tl.store(ld + 2 * N + t, total1)
                tl.store(ld + 3 * N + t, delta1)
        if LOCAL:
            r = tl.rsqrt(square / D + eps)
            y, more = _to_newest(y0, w, q0, r, tl.load(s + t), total0, delta0, dot0, several, D)
            du0 += more
            if WAYS == 2:
                other, more = _to_newest(y1, w, q1, r, tl.load(s + way + t), total1, delta1, dot1, several, D)
                y += other
                du1 += more
            if NEED_DV:
                if HAS_G:
                    y += tl.load(g + at, mask=ok, other=0.0).to(tl.float32)
                if HAS_BEFORE:
                    y += tl.load(before + at, mask=ok, other=0.0)
                tl.store(dv + at, y.to(dv.dtype.element_ty), mask=ok)
    store_sums(part, 0, du0, dgain0, d, ok, D, WAYS)
    if WAYS == 2:
        store_sums(part, 1, du1, dgain1, d, ok, D, WAYS)


@functools.cache
def warps_for(block: int, registers: int) -> int:
    """Return the fewest warps that hold `registers` fp32 rows of a block. One warp needs no reduction across warps."""
    return min(32, max(1, next_power_of_2(block * registers) // (32 * 128)))


@functools.cache
def warps_and_pieces(dim: int, ways: int) -> tuple[int, Pieces]:
    """Return how many warps hold a row, and a query and a sum for each way, and how they cut a row."""
    # Pieces have no empty lanes. A lane has registers for 200 numbers of these rows.
    warps = max(4, next_power_of_2(cdiv(dim * (1 + 2 * ways), 25600)) * 4)
    pieces = cut(dim, warps)
    return (warps_for(pieces.width, 1 + ways) if pieces.number == 1 else warps), pieces


def stages(most: int, like: Tensor, rows: int) -> int:
    """Return how many loop steps are loaded ahead, each of `rows` rows like `like`, within a small GPU's shared memory."""
    return _stages(most, like.shape[-1], like.element_size(), rows)


@functools.cache
def _stages(most: int, dim: int, size: int, rows: int) -> int:
    return max(1, min(most, 1 + 90_000 // (rows * next_power_of_2(dim) * size)))


class Result(NamedTuple):
    """Results of a read, and what its backward needs."""

    y: list[Tensor]  # W results like a source
    o: list[Tensor]  # with keep=2 and a norm: the same before the gain, like a source but never bf16
    s: Tensor  # logits [W, n, N]
    lse: Tensor  # their log-sum-exp [W, 1, N]; with keep=2 and a norm also 1 / RMS of the mixture, [W, 2, N]
    fresh: Tensor | None  # the newest source, if it was added up here

    @classmethod
    def empty(
        cls, like: Tensor, ways: int, norm: bool, add: bool, keep: int, n: int, dtype: torch.dtype | None = None
    ) -> "Result":
        """Allocate a read of n sources like `like`, whose results have another dtype if one is given.

        A normed result is of order one: fp16 holds it in as many bytes as bf16 and eight times as exactly. That matters because the
        backward takes differences of what it computes from it.
        """
        tokens = like.numel() // like.shape[-1]
        kind = torch.float16 if like.dtype == torch.bfloat16 else like.dtype
        rows = min(1, keep) + (norm and keep == 2)
        return cls(
            [torch.empty_like(like, dtype=dtype) for _ in range(ways)],
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
    *,
    value_norm: bool = False,
    store_sum: bool = True,
    stack: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Result:
    """Compute W mixtures of the sources [..., D], the last of which is sources[-1] + add if `add` is given.

    Args:
        u, gain: [W, D] fp32.
        keep: what to save for a backward. 0: nothing; 1: layer by layer; 2: in source order.
        bank, bank_lse: the mixture of further sources for one way, [N, D] fp32, and its log-sum-exp [N]. s then covers the others.
        value_norm: mix normalised sources.
        store_sum: round the sum with `add` and return it; otherwise it is neither rounded nor stored.
        stack: older sources as one contiguous tensor [..., m, D], or None.
        dtype: of the results, by default that of the sources.
    """
    first, n = sources[-1], len(sources) + (0 if stack is None else stack.shape[-2])
    result = Result.empty(first, u.shape[0], gain is not None, add is not None and store_sum, keep, n, dtype)
    y, o, s, lse, fresh = result
    _launch_read(y, o or y, s, lse, fresh, u, sources, add, gain, eps, out_eps, keep, bank, bank_lse, value_norm, stack)
    return result


def mixtures(
    u: Tensor,
    sources: Sequence[Tensor],
    add: Tensor | None,
    gain: Tensor | None,
    eps: float,
    out_eps: float,
    value_norm: bool = False,
    stack: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Return the mixtures of `read` alone, for calls without gradients. A sum with `add` is neither rounded nor stored.

    u, gain: [W, D] fp32, or [D] for one way.
    """
    first, ways = sources[-1], 1 if u.ndim == 1 else u.shape[0]
    y = [torch.empty_like(first, dtype=dtype) for _ in range(ways)]
    # The kernel stores neither logits nor their log-sum-exp: u takes their places.
    _launch_read(y, y, u, u, None, u, sources, add, gain, eps, out_eps, 0, None, None, value_norm, stack)
    return y


def _launch_read(
    y: list[Tensor], o: list[Tensor], s: Tensor, lse: Tensor, fresh: Tensor | None,
    u: Tensor, sources: Sequence[Tensor], add: Tensor | None, gain: Tensor | None, eps: float, out_eps: float,
    keep: int, bank: Tensor | None, bank_lse: Tensor | None, value_norm: bool, stack: Tensor | None,
) -> None:  # fmt: skip
    """Launch the kernel with the results of `Result`, and otherwise the arguments of `read`."""
    first, dim = sources[-1], u.shape[-1]
    tokens = first.numel() // dim
    if not tokens:
        return
    stacked = 0 if stack is None else stack.shape[-2]
    table, is_aligned = table_of(sources, stack)
    settings = _read_settings(
        dim, first.element_size(), len(y), add is not None, fresh is not None, bank is not None, gain is not None, value_norm, keep,
        stacked > 0, is_aligned,
    )  # fmt: skip
    launch(
        _read_kernel, (tokens,), first,
        table, first if add is None else add, first if fresh is None else fresh, u if bank is None else bank,
        u if bank_lse is None else bank_lse, u, u if gain is None else gain,
        *repeat_last(y, 3), *repeat_last(o, 3), s, lse, tokens, stacked + len(sources), stacked, eps, out_eps, **settings,
    )  # fmt: skip


@functools.cache
def _read_settings(
    dim: int, size: int, ways: int, add: bool, store_sum: bool, bank: bool, norm: bool, value_norm: bool, keep: int, stack: bool,
    is_aligned: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the constants and launch options of `_read_kernel`. size: bytes of an element of the sources."""
    warps, pieces = warps_and_pieces(dim, ways)
    return {
        "D": dim, "C": pieces.number, "K": pieces.width, "WAYS": ways, "ADD": int(add), "STORE_SUM": store_sum, "BANK": bank, "NORM": norm,
        "VALUE_NORM": value_norm, "KEEP": keep, "STACK": stack, "ALIGNED": is_aligned, "STAGES": _stages(4, dim, size, 1), "num_warps": warps,
    }  # fmt: skip


class Newest(NamedTuple):
    """The newest source of a read, when its gradient is computed in the same launch."""

    v: Tensor
    g: Tensor | None  # a gradient it has from elsewhere
    need_dv: bool
    part: Tensor | None = None  # one that it has from other readers, fp32


class ReadGradients(NamedTuple):
    """Gradients of one or two ways of a read."""

    do: list[Tensor]  # of each o
    ld: Tensor  # log-sum-exp and δ = do · o: [W, 2, N]
    dv: Tensor | None  # of the newest source
    du: Tensor  # [W, D], the newest source's part; zero without one
    dgain: Tensor  # [W, D]; zero without a norm


def read_backward(
    dy: Sequence[Tensor],
    o: Sequence[Tensor],
    u: Tensor,
    gain: Tensor | None,
    s: Tensor,
    lse: Tensor,
    newest: Newest | None,
    eps: float,
    store: bool,
    several: bool = True,
) -> ReadGradients:
    """Compute the gradients of one or two ways, given those of their outputs.

    Args:
        o: results; with a norm, before the gain (Result).
        u, gain: [W, D].
        s: logits [W, n, N], the newest source's last.
        lse: [W, 1 or 2, N].
        newest: compute the newest source's gradient here too, or None.
        store: also return do and δ, for the other sources.
        several: more than one source was read, those in a bank included. The weight of an only source is 1 whatever its logit.
    """
    first, (ways, dim), tokens = dy[0], u.shape, s.shape[-1]
    do = [torch.empty_like(d) if store and gain is not None else d for d in dy]
    ld = torch.empty(ways, 2, tokens if store else 0, dtype=torch.float32, device=first.device)
    dv = torch.empty_like(first) if newest is not None and newest.need_dv else None
    if not tokens:
        return ReadGradients(do, ld, dv, torch.zeros_like(u), torch.zeros_like(u))
    block = next_power_of_2(dim)
    # Twice as many warps for two ways are slower, at every width.
    warps = warps_for(block, 8)
    programs = programs_for(tokens, warps, first)
    part = torch.empty(programs, 2, ways, dim, dtype=torch.float32, device=first.device)
    g, before = (None, None) if newest is None else (newest.g, newest.part)
    launch(
        _read_backward_kernel, (programs,), first,
        dy[0], dy[-1], o[0], o[-1], do[0], do[-1], u, u if gain is None else gain, s[0, -1], lse, ld,
        first if newest is None else newest.v, first if g is None else g, u if before is None else before,
        first if dv is None else dv, part, tokens, int(several), s.stride(0), eps,
        D=dim, BD=block, WAYS=ways, NORM=gain is not None, STORE=store, LOCAL=newest is not None, HAS_G=g is not None,
        HAS_BEFORE=before is not None, NEED_DV=dv is not None, STAGES=stages(4 if newest is None else 3, first, 3 + 2 * ways),
        num_warps=warps,
    )  # fmt: skip
    # Without newest source and gain no program has anything to add up: every part is zero.
    du, dgain = part[0] if newest is None and gain is None else sum_programs(part)
    return ReadGradients(do, ld, dv, du, dgain)


def programs_for(tokens: int, warps: int, like: Tensor) -> int:
    """Return how many programs share the tokens when each adds up its own partial gradient: few, but enough to fill a GPU."""
    cores = count_cores(like, on_cpu=3)
    return min(tokens, max(1, 8 // warps) * cores)
