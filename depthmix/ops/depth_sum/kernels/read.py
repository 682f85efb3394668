"""W weighted sums of the same n sources from one read of them, with the add before and the RMSNorm after.

    o_w = Σ_i weight_wi ⊙ v_i;      y_w = o_w, or RMSNorm(o_w) ⊙ gain_w

All weights are known beforehand, so the loop over sources has no reduction in it. One program holds a few tokens, so that the
fp32 rows of static weights, W for each source, are loaded once for all of them.
"""

# ruff: noqa: RUF005 (Triton adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,var-annotated"

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.depth_sum.kernels.rows import load_rows, load_scalars, sums, tokens_of, weight, widened
from depthmix.ops.gpu.addresses import address_table, aligned
from depthmix.ops.gpu.launch import launch, repeat_last
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2

# Entries of a source in the table: its address, that of its dynamic weights, and their strides for tokens and ways.
FIELDS = 4


@triton.jit
def _load_dynamic(table, i, t, ok, BT: tl.constexpr, WAYS: tl.constexpr, DYNAMIC: tl.constexpr):
    """Load the dynamic weights of source i: WAYS x BT numbers."""
    numbers = ()
    if DYNAMIC:
        address, token, way = tl.load(table + 4 * i + 1), tl.load(table + 4 * i + 2), tl.load(table + 4 * i + 3)
        for w in tl.static_range(WAYS):
            numbers = numbers + load_scalars(address + 4 * w * way, token, t, ok, BT)
    return numbers


@triton.jit
def _load_static(static, i, n, d, ok, D: tl.constexpr, WAYS: tl.constexpr, STATIC: tl.constexpr, BRANCH: tl.constexpr):
    """Load the static weights of source i: WAYS rows, or numbers. In a branch of its own a load does not go through shared memory."""
    rows = ()
    for w in tl.static_range(WAYS):
        if STATIC == 1:
            # n is a tensor, so the sum is one too.
            at = static + (w * n + i).to(tl.int64) * D + d
            if BRANCH:
                row = tl.zeros(d.shape, tl.float32)
                if n > 0:
                    row = tl.load(at, mask=ok, other=0.0, eviction_policy="evict_last")
            else:
                row = tl.load(at, mask=ok, other=0.0, eviction_policy="evict_last")
            rows = rows + (row,)
        elif STATIC == 2:
            rows = rows + (tl.load(static + w * n + i),)
    return rows


@triton.jit
def _accumulate(
    acc, rows, b, p, BT: tl.constexpr, WAYS: tl.constexpr, STATIC: tl.constexpr, DYNAMIC: tl.constexpr, RELU: tl.constexpr,
    PAIRS: tl.constexpr = False,
):  # fmt: skip
    """Add one source to all sums."""
    wide = ()
    for k in tl.static_range(BT):
        wide = wide + (widened(rows[k], acc[0].shape[0], PAIRS),)
    new = ()
    for w in tl.static_range(WAYS):
        for k in tl.static_range(BT):
            x = weight(b[w] if STATIC > 0 else 0.0, p[w * BT + k] if DYNAMIC else 0.0, STATIC, DYNAMIC, RELU)
            new = new + (tl.fma(x, wide[k], acc[w * BT + k]),)
    return new


@triton.jit
def _load_lean(
    address, t, like, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, ALIGNED: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Load rows like load_rows, or with PAIRS as integers that hold two bf16 numbers each."""
    if PAIRS:
        d = tl.arange(0, BD // 2)
        return load_rows(address, t, d, d < D // 2, address.to(tl.pointer_type(tl.int32)), D // 2, BT, ALIGNED)
    else:
        d = tl.arange(0, BD)
        return load_rows(address, t, d, d < D, like, D, BT, ALIGNED)


@triton.jit
def _load_side(address, t, N, BT: tl.constexpr, WAYS: tl.constexpr):
    """Load the dynamic weights of a source stored side by side, tokens first: WAYS x BT numbers."""
    at = address.to(tl.pointer_type(tl.float32)) + t
    numbers = ()
    for _ in tl.static_range(WAYS):
        for k in tl.static_range(BT):
            numbers = numbers + (tl.load(at + k),)
        at += N
    return numbers


@triton.jit
def _load_next(at, way, d, ok, WAYS: tl.constexpr, STATIC: tl.constexpr):
    """Load the static rows of a source for all ways, which lie `way` numbers apart."""
    rows = ()
    for _ in tl.static_range(WAYS):
        if STATIC == 1:
            rows = rows + (tl.load(at + d, mask=ok, other=0.0),)
        elif STATIC == 2:
            rows = rows + (tl.load(at),)
        at += way
    return rows


@triton.jit(do_not_specialize=["N", "n"])
def _read_kernel(
    table, add, fresh, static, g0, g1, g2, g3, y0, y1, y2, y3, raw, rms, N: tl.int64, n: tl.int32, out_eps,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, WAYS: tl.constexpr, STATIC: tl.constexpr, DYNAMIC: tl.constexpr,
    RELU: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, RAW: tl.constexpr, KEEP: tl.constexpr, UP: tl.constexpr,
    ALIGNED: tl.constexpr, STAGES: tl.constexpr, LEAN: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    t = tl.minimum(tl.program_id(0).to(tl.int64) * BT, N - BT)
    d = tl.arange(0, BD)
    ok = d < D
    acc = ()
    for _ in tl.static_range(WAYS * BT):
        acc = acc + (tl.zeros([BD], tl.float32),)
    # The loop below with the fewest instructions. In this case instructions take longer than memory.
    if LEAN:
        step: tl.constexpr = D if STATIC == 1 else 1
        # Address of the static weights, and distance from one way's to the next.
        at, way = static, n.to(tl.int64) * step
        rows = _load_lean(tl.load(table), t, y0, D, BD, BT, ALIGNED, PAIRS)
        p = _load_side(tl.load(table + 1), t, N, BT, WAYS)
        later = table + 4 * tl.minimum(1, n - 1)
        row, numbers = tl.load(later), tl.load(later + 1)
        for i in tl.range(1, n):
            b = _load_next(at, way, d, ok, WAYS, STATIC)
            next_rows = _load_lean(row, t, y0, D, BD, BT, ALIGNED, PAIRS)
            next_p = _load_side(numbers, t, N, BT, WAYS)
            later = table + 4 * tl.minimum(i + 1, n - 1)
            row, numbers = tl.load(later), tl.load(later + 1)
            acc = _accumulate(acc, rows, b, p, BT, WAYS, STATIC, DYNAMIC, RELU, PAIRS)
            rows, p = next_rows, next_p
            at += step
        b = _load_next(at, way, d, ok, WAYS, STATIC)
        acc = _accumulate(acc, rows, b, p, BT, WAYS, STATIC, DYNAMIC, RELU, PAIRS)
    elif STAGES > 1:
        # Rows of sources go through shared memory. Rows of weights do not: hence the branches.
        p = _load_dynamic(table, 0, t, True, BT, WAYS, DYNAMIC)
        for i in tl.range(0, n - ADD, num_stages=STAGES):
            rows = load_rows(tl.load(table + 4 * i), t, d, ok, y0, D, BT, ALIGNED)
            next_p = p
            if DYNAMIC:  # noqa: SIM102 (decided by the compiler)
                if n > 0:
                    next_p = _load_dynamic(table, tl.minimum(i + 1, n - 1), t, True, BT, WAYS, DYNAMIC)
            b = _load_static(static, i, n, d, ok, D, WAYS, STATIC, True)
            acc = _accumulate(acc, rows, b, p, BT, WAYS, STATIC, DYNAMIC, RELU)
            p = next_p
    else:
        # Load the next source's rows and numbers while this one's are in use, and the address of the one after it.
        rows = load_rows(tl.load(table), t, d, d < tl.where(n > ADD, D, 0), y0, D, BT, ALIGNED)
        p = _load_dynamic(table, 0, t, True, BT, WAYS, DYNAMIC)
        later = tl.load(table + 4 * tl.minimum(1, n - 1))
        for i in tl.range(0, n - ADD):
            b = _load_static(static, i, n, d, ok, D, WAYS, STATIC, False)
            has_next = i + 1 < n - ADD
            next_rows = load_rows(later, t, d, d < tl.where(has_next, D, 0), y0, D, BT, ALIGNED)
            next_p = _load_dynamic(table, tl.minimum(i + 1, n - 1), t, has_next, BT, WAYS, DYNAMIC)
            later = tl.load(table + 4 * tl.minimum(i + 2, n - 1))
            acc = _accumulate(acc, rows, b, p, BT, WAYS, STATIC, DYNAMIC, RELU)
            rows, p = next_rows, next_p
    if ADD:
        rows = load_rows(tl.load(table + 4 * (n - 1)), t, d, ok, y0, D, BT, ALIGNED)
        other = load_rows(add.to(tl.int64), t, d, ok, y0, D, BT, ALIGNED)
        newest = ()
        for k in tl.static_range(BT):
            v = (rows[k].to(tl.float32) + other[k].to(tl.float32)).to(y0.dtype.element_ty)
            tl.store(fresh + (t + k) * D + d, v, mask=ok)
            newest = newest + (v,)
        p = _load_dynamic(table, n - 1, t, True, BT, WAYS, DYNAMIC)
        b = _load_static(static, n - 1, n, d, ok, D, WAYS, STATIC, False)
        acc = _accumulate(acc, newest, b, p, BT, WAYS, STATIC, DYNAMIC, RELU)
    if NORM > 0:
        squares = ()
        for k in tl.static_range(NORM * BT):
            squares = squares + (acc[k] * acc[k],)
        squares = sums(squares, NORM * BT, UP, 0)
    ys, gains = (y0, y1, y2, y3), (g0, g1, g2, g3)
    for w in tl.static_range(WAYS):
        if w < NORM:
            g = tl.load(gains[w] + d, mask=ok, other=0.0)
        for k in tl.static_range(BT):
            o = acc[w * BT + k]
            row = t + k
            if w == RAW:
                tl.store(raw + row * D + d, o.to(raw.dtype.element_ty), mask=ok)
            if w < NORM:
                r = tl.rsqrt(squares[w * BT + k] / D + out_eps)
                if KEEP:
                    tl.store(rms + w * N + row, r)
                o = o * r * g
            if NORM == 0 or w < NORM:
                tl.store(ys[w] + row * D + d, o.to(ys[w].dtype.element_ty), mask=ok)


class Sums(NamedTuple):
    """Results of a read, and what its backward needs."""

    y: list[Tensor]  # W results like a source, or those of the ways with a norm
    raw: Tensor | None  # one way's mixture before its norm, like a source
    kept: list[Tensor]  # with keep and a norm, one tensor per way: its result, from which its sum can be computed,
    mixtures: int  # or the sum itself, for ways whose bit is set here
    rms: Tensor  # with keep and a norm: 1 / RMS of the mixtures, [G, N]
    fresh: Tensor | None  # the newest source, if it was added up here


def read(
    sources: Sequence[Tensor],
    add: Tensor | None,
    static: Tensor | None,
    dynamic: Sequence[Tensor] | None,
    relu: int,
    gain: Tensor | Sequence[Tensor] | None,
    out_eps: float,
    raw: int | None,
    keep: bool,
    plain: bool = False,
    *,
    tile: int | None = None,
    stages: int | None = None,
    pairs: bool = True,
) -> Sums:
    """Compute W sums of the sources [..., D], the last of which is sources[-1] + add if `add` is given.

    Args:
        static: [W, n, D] or [W, n, 1] fp32, or None.
        dynamic: for each source [N, W] fp32, any strides; or None.
        relu: see source_order.py.
        gain: [G, D] or a sequence of rows, any precision: of the norms of the first G ways.
        out_eps: of these norms.
        raw: the way whose sum is also returned before its norm. Ways without a norm, beside others with one, have no other result.
        keep: also return what a backward of the norm needs.
        plain: all weights are one.
        tile, stages, pairs: launch parameters for tests.
    """
    v, n, dim = sources[-1], len(sources), sources[-1].shape[-1]
    tokens, ways = v.numel() // dim, static.shape[0] if static is not None else dynamic[0].shape[1]  # type: ignore[index]
    norm = 0 if gain is None else len(gain)
    kept = norm if keep else 0
    fresh = None if add is None else torch.empty_like(v)
    rough = None if raw is None else torch.empty_like(v)
    only = (v if fresh is None else fresh) if plain and n == 1 else None
    mixtures = [only if only is not None else rough if w == raw else None for w in range(kept)]
    y = [torch.empty_like(v) for _ in range(norm or ways)]
    result = Sums(
        y,
        rough,
        [out if t is None else t for out, t in zip(y, mixtures, strict=False)],
        sum(1 << w for w, t in enumerate(mixtures) if t is not None),
        torch.empty(kept, tokens, dtype=torch.float32, device=v.device),
        fresh,
    )
    if not tokens:
        return result
    block = next_power_of_2(dim)
    rows = kind_of(static, dim) == 1
    lean = not keep and add is None and _side_by_side(dynamic, tokens)
    best_tile, warps, best_stages = _shape(block, ways, rows, v.element_size())
    limit = {}
    if lean and rows and ways == 3 and v.element_size() == 2 and block <= 4096:
        # As many tokens as the registers hold.
        best_tile, warps, best_stages, limit = 3, max(1, block // 256), 1, {"maxnreg": 128}
    elif rows and ways > 1 and block <= 512:
        # A quarter more warps fit on a core, at the price of four spilled numbers.
        limit = {"maxnreg": 96}
    tile, stages = tokens_of(tile or best_tile, tokens), stages or best_stages
    fp32 = result.rms if static is None else static
    launch(
        _read_kernel, (cdiv(tokens, tile),), v,
        source_table(sources, dynamic), v if add is None else add, v if result.fresh is None else result.fresh,
        fp32, *repeat_last([fp32] if gain is None else list(gain), 4), *repeat_last(result.y, 4),
        v if result.raw is None else result.raw, result.rms, tokens, n, out_eps,
        D=dim, BD=block, BT=tile, WAYS=ways, STATIC=kind_of(static, dim), DYNAMIC=dynamic is not None, RELU=relu,
        ADD=int(add is not None), NORM=norm, RAW=-1 if raw is None else raw, KEEP=kept > 0,
        UP=next_power_of_2((norm or ways) * tile), ALIGNED=aligned(dim, sources, [add]), STAGES=stages,
        LEAN=lean and stages == 1, PAIRS=pairs and v.dtype == torch.bfloat16 and dim % 2 == 0, num_warps=warps, num_stages=1, **limit,
    )  # fmt: skip
    return result


def _shape(block: int, ways: int, rows: bool, size: int) -> tuple[int, int, int]:
    """Return tokens of a tile, warps, and sources loaded ahead: the fastest on an H200, by the kind of static weights.

    Rows of parameters are worth a tile of tokens, for which they are loaded once. Without them few tokens, loaded further ahead.
    """
    narrow = block <= 1024
    if rows:
        tile, lane, stages = (2, 512, 1) if ways == 1 else (4, 128, 1) if block == 1024 else (2, 256, 1)
    else:
        tile, lane, stages = (1, 512, 4) if ways == 1 else (4, 256, 3) if narrow else (1, 512, 1)
    # Stages that fit in the shared memory of small GPUs.
    fit = 1 + 90_000 // (tile * block * size)
    return tile, min(32, max(1, block // lane)), min(stages, fit)


def _side_by_side(dynamic: Sequence[Tensor] | None, tokens: int) -> bool:
    """Return whether the dynamic weights of each way are contiguous over tokens, and the ways follow each other."""
    return dynamic is not None and all(p.stride() == (1, tokens) for p in dynamic)


def source_table(sources: Sequence[Tensor], dynamic: Sequence[Tensor] | None) -> Tensor:
    """Return a table with the address of each source and of its dynamic weights."""
    fields: list[int] = []
    if dynamic is None:
        for v in sources:
            fields += v.data_ptr(), 0, 0, 0
    else:
        for v, p in zip(sources, dynamic, strict=True):
            fields += v.data_ptr(), p.data_ptr(), *p.stride()
    return address_table(tuple(fields), sources[0].device)


def kind_of(static: Tensor | None, dim: int) -> int:
    """Return the kind of static weights. 0: none, 1: rows of channels, 2: numbers."""
    return 0 if static is None else 1 if static.shape[-1] == dim else 2
