"""Gradients of up to four sources from all their readers: weights are known, so nothing is reduced and D is cut as one likes.

    dv_j = g_j + part_j + Σ_r (weight_rj ⊙ do_r + ds_rj w_rj)

Each do is read once for all the sources. A program holds some channels of a few tokens, so that rows of parameters are loaded
once for all of them, and programs of the same channels follow each other, so that those rows stay in the first cache.
"""

# ruff: noqa: RUF005 (Triton adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,var-annotated"

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.depth_sum.kernels.rows import load_rows, load_scalars, tokens_of, weight
from depthmix.ops.gpu.addresses import address_table, aligned
from depthmix.ops.gpu.launch import launch

LEAN = False  # whether neighbours have a kernel of their own


@triton.jit
def _open(targets, j, t, d, ok, like, D: tl.constexpr, BT: tl.constexpr, HAS_G: tl.constexpr, HAS_PART: tl.constexpr,
          ALIGNED: tl.constexpr):  # fmt: skip
    """The gradients that source j has so far: from elsewhere, and from readers seen before."""
    acc = ()
    if HAS_G:
        g = tl.load(targets + 4 * j)
        rows = load_rows(g, t, d, d < tl.where(g != 0, D, 0), like, D, BT, ALIGNED)
        for k in tl.static_range(BT):
            acc = acc + (rows[k].to(tl.float32),)
    else:
        for _ in tl.static_range(BT):
            acc = acc + (tl.zeros(d.shape, tl.float32),)
    if HAS_PART:
        before = tl.load(targets + 4 * j + 1)
        both = ()
        for k in tl.static_range(BT):
            at = before.to(tl.pointer_type(tl.float32)) + (t + k) * D + d
            if ALIGNED:
                at = tl.multiple_of(at, 16)
            both = both + (acc[k] + tl.load(at, mask=d < tl.where(before != 0, D, 0), other=0.0),)
        acc = both
    return acc


@triton.jit
def _close(targets, acc, j: tl.constexpr, t, d, like, D: tl.constexpr, BT: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Write the gradients of source j, or what is known of them."""
    whole, rest = tl.load(targets + 4 * j + 2), tl.load(targets + 4 * j + 3)
    for k in tl.static_range(BT):
        row = (t + k) * D + d
        out, part = whole.to(tl.pointer_type(like.dtype.element_ty)) + row, rest.to(tl.pointer_type(tl.float32)) + row
        if ALIGNED:
            out, part = tl.multiple_of(out, 16), tl.multiple_of(part, 16)
        if WHOLE != 0:  # 0: no source is, 1: some are, 2: all are
            tl.store(out, acc[j * BT + k].to(like.dtype.element_ty), mask=d < tl.where(whole != 0, D, 0))
        if WHOLE != 2:
            tl.store(part, acc[j * BT + k], mask=d < tl.where(rest != 0, D, 0))


@triton.jit
def _load_row(address, d, ok, D: tl.constexpr, ALIGNED: tl.constexpr, SOME: tl.constexpr):
    """A row of parameters, zeros if there is none."""
    if SOME:
        ok = d < tl.where(address != 0, D, 0)
    at = address.to(tl.pointer_type(tl.float32)) + d
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return tl.load(at, mask=ok, other=0.0, eviction_policy="evict_last")


@triton.jit
def _load_numbers(reader, t, some, BT: tl.constexpr, S: tl.constexpr, DYNAMIC: tl.constexpr, SCORED: tl.constexpr,
                  SOME: tl.constexpr):  # fmt: skip
    """A reader's dynamic weights of the S sources and the gradients of their scores, for BT tokens each."""
    numbers = ()
    for j in tl.static_range(S):
        if DYNAMIC:
            at = tl.load(reader + 6 * j + 2)
            seen = some & (at != 0) if SOME else some
            numbers = numbers + load_scalars(at, tl.load(reader + 6 * j + 3), t, seen, BT)
        if SCORED:
            at = tl.load(reader + 6 * j + 4)
            seen = some & (at != 0) if SOME else some
            numbers = numbers + load_scalars(at, tl.load(reader + 6 * j + 5), t, seen, BT)
    return numbers


@triton.jit
def _load_parameters(reader, d, ok, D: tl.constexpr, S: tl.constexpr, STATIC: tl.constexpr, SCORED: tl.constexpr,
                     SAME_W: tl.constexpr, ROWS_ALIGNED: tl.constexpr, SOME: tl.constexpr):  # fmt: skip
    """A reader's static weights of the S sources, and what scored them."""
    b, u = (), ()
    for j in tl.static_range(S):
        if STATIC == 1:
            b = b + (_load_row(tl.load(reader + 6 * j), d, ok, D, ROWS_ALIGNED, SOME),)
        elif STATIC == 2:
            at = tl.load(reader + 6 * j)
            b = b + (tl.load(at.to(tl.pointer_type(tl.float32)), mask=at != 0, other=0.0),)
        if SCORED and (j == 0 or not SAME_W):
            u = u + (_load_row(tl.load(reader + 6 * j + 1), d, ok, D, ROWS_ALIGNED, SOME),)
    return b, u


@triton.jit(do_not_specialize=["N", "n"])
def _source_backward_kernel(
    targets, readers, like, N: tl.int64, n: tl.int32,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, S: tl.constexpr, STATIC: tl.constexpr, DYNAMIC: tl.constexpr,
    SCORED: tl.constexpr, SAME_W: tl.constexpr, RELU: tl.constexpr, HAS_G: tl.constexpr, HAS_PART: tl.constexpr,
    WHOLE: tl.constexpr, ALIGNED: tl.constexpr, ROWS_ALIGNED: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    # targets: [g, part, whole, rest]; readers: [do], then for each target [static, w, dynamic, stride, ds, stride]
    size: tl.constexpr = 1 + 6 * S
    t = tl.minimum(tl.program_id(0).to(tl.int64) * BT, N - BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    ok = d < D
    rows = load_rows(tl.load(readers), t, d, ok, like, D, BT, ALIGNED)
    numbers = _load_numbers(readers + 1, t, n > 0, BT, S, DYNAMIC, SCORED, SOME)
    later = tl.load(readers + size * tl.minimum(1, n - 1))
    acc = ()
    for j in tl.static_range(S):
        acc = acc + _open(targets, j, t, d, ok, like, D, BT, HAS_G, HAS_PART, ALIGNED)
    for r in tl.range(0, n):
        b, u = _load_parameters(readers + size * r + 1, d, ok, D, S, STATIC, SCORED, SAME_W, ROWS_ALIGNED, SOME)
        next_rows = load_rows(later, t, d, d < tl.where(r + 1 < n, D, 0), like, D, BT, ALIGNED)
        follower = readers + size * tl.minimum(r + 1, n - 1) + 1
        next_numbers = _load_numbers(follower, t, r + 1 < n, BT, S, DYNAMIC, SCORED, SOME)
        later = tl.load(readers + size * tl.minimum(r + 2, n - 1))
        wide = ()
        for k in tl.static_range(BT):
            wide = wide + (rows[k].to(tl.float32),)
        new = ()
        for j in tl.static_range(S):
            for k in tl.static_range(BT):
                p = numbers[j * BT * (1 + SCORED) + k] if DYNAMIC else 0.0
                x = weight(b[j] if STATIC > 0 else 0.0, p, STATIC, DYNAMIC, RELU)
                total = tl.fma(x, wide[k], acc[j * BT + k])
                if SCORED:
                    total = tl.fma(numbers[j * BT * (1 + DYNAMIC) + DYNAMIC * BT + k], u[0 if SAME_W else j], total)
                new = new + (total,)
        acc = new
        rows, numbers = next_rows, next_numbers
    for j in tl.static_range(S):
        _close(targets, acc, j, t, d, like, D, BT, WHOLE, ALIGNED)


@triton.jit
def _load_side_by_side(
    places, strides, ds, packed, some, t, BT: tl.constexpr, S: tl.constexpr, SCORED: tl.constexpr, SOME: tl.constexpr
):  # fmt: skip
    """What `_load_numbers` loads, of a reader whose numbers for the S sources have one address."""
    column, stride, step = packed >> 40, (packed >> 20) & 0xFFFFF, (packed >> 4) & 0xFFFF
    numbers = ()
    for j in tl.static_range(S):
        there = some & (((packed >> j) & 1) == 1) if SOME else some
        at = places[j].to(tl.pointer_type(tl.float32)) + (t * strides[j] + column)
        for _ in tl.static_range(BT):
            numbers = numbers + (tl.load(at, mask=there, other=0.0),)
            at += strides[j]
        if SCORED:
            at = ds.to(tl.pointer_type(tl.float32)) + (t * stride + j * step)
            for _ in tl.static_range(BT):
                numbers = numbers + (tl.load(at, mask=there, other=0.0),)
                at += stride
    return numbers


@triton.jit(do_not_specialize=["N", "n"])
def _neighbours_backward_kernel(
    targets, readers, scores, like, N: tl.int64, n: tl.int32,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, S: tl.constexpr, SCORED: tl.constexpr, RELU: tl.constexpr,
    HAS_G: tl.constexpr, HAS_PART: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, ROWS_ALIGNED: tl.constexpr,
    SOME: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    # As the kernel above, for neighbours: what a reader has for them lies side by side, so that one address is enough.
    # readers: [do, static, w, ds, packed], packed as `_pack` says; scores: [address, stride] for each source.
    # Addresses are loaded one reader before they are used.
    if TOGETHER:  # the channels of a token follow each other
        t, c = tl.program_id(1).to(tl.int64) * BT, tl.program_id(0)
    else:
        t, c = tl.program_id(0).to(tl.int64) * BT, tl.program_id(1)
    t = tl.minimum(t, N - BT)
    d = c * BD + tl.arange(0, BD)
    ok = d < D
    rows = load_rows(tl.load(readers), t, d, ok, like, D, BT, ALIGNED)
    places, strides = (), ()
    for j in tl.static_range(S):
        places, strides = places + (tl.load(scores + 2 * j),), strides + (tl.load(scores + 2 * j + 1),)
    static, u_at, packed = tl.load(readers + 1), tl.load(readers + 2), tl.load(readers + 4)
    numbers = _load_side_by_side(places, strides, tl.load(readers + 3), packed, n > 0, t, BT, S, SCORED, SOME)
    at = readers + 5 * tl.minimum(1, n - 1)
    do_1, static_1, u_1, ds_1, packed_1 = (
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
    )
    acc = ()
    for j in tl.static_range(S):
        acc = acc + _open(targets, j, t, d, ok, like, D, BT, HAS_G, HAS_PART, ALIGNED)
    for r in tl.range(0, n):
        b = ()
        for j in tl.static_range(S):
            there = d < tl.where(((packed >> j) & 1) == 1, D, 0) if SOME else ok
            b = b + (_load_row(static + 4 * j * D, d, there, D, ROWS_ALIGNED, False),)
        if SCORED:
            u = _load_row(u_at, d, ok, D, ROWS_ALIGNED, False)
        more = r + 1 < n
        next_rows = load_rows(do_1, t, d, d < tl.where(more, D, 0), like, D, BT, ALIGNED)
        next_numbers = _load_side_by_side(places, strides, ds_1, packed_1, more, t, BT, S, SCORED, SOME)
        static, u_at, packed = static_1, u_1, packed_1
        at = readers + 5 * tl.minimum(r + 2, n - 1)
        do_1, static_1, u_1, ds_1, packed_1 = (
            tl.load(at),
            tl.load(at + 1),
            tl.load(at + 2),
            tl.load(at + 3),
            tl.load(at + 4),
        )
        new = ()
        for j in tl.static_range(S):
            for k in tl.static_range(BT):
                x = weight(b[j], numbers[j * BT * (1 + SCORED) + k], 1, True, RELU)
                total = tl.fma(x, rows[k].to(tl.float32), acc[j * BT + k])
                if SCORED:
                    total = tl.fma(numbers[(2 * j + 1) * BT + k], u, total)
                new = new + (total,)
        acc = new
        rows, numbers = next_rows, next_numbers
    for j in tl.static_range(S):
        _close(targets, acc, j, t, d, like, D, BT, WHOLE, ALIGNED)


class Target(NamedTuple):
    """A source whose gradient is wanted, and what is known of it."""

    like: Tensor  # the source, or a tensor like it
    g: Tensor | None = None  # from elsewhere, like the source
    part: Tensor | None = None  # from readers seen before, fp32
    whole: bool = True  # whether these are the last readers


class Reader(NamedTuple):
    """One way of a read, as the gradients of some sources see it; None in place of all that it has for a target it does not read."""

    do: Tensor  # like a source
    static: Sequence[Tensor | None] | None  # for each target [D] or [1]
    dynamic: Sequence[Tensor | None] | None  # for each target [N], any stride
    relu: int = 0
    ds: Sequence[Tensor | None] | None = None  # gradients of the scores: for each target [N], any stride
    w: Sequence[Tensor | None] | None = None  # what made the scores: for each target [D]


def source_backward(
    targets: Sequence[Target],
    readers: Sequence[Reader],
    *,
    tile: int | None = None,
    block: int | None = None,
    warps: int | None = None,
    lean: bool | None = None,
    together: bool = False,
) -> list[Tensor]:
    """Gradients of one, two or four sources: rounded to their dtype if these are the last readers, fp32 otherwise."""
    options: Any = {"tile": tile, "block": block, "warps": warps, "lean": lean, "together": together}
    if len(targets) not in (1, 2, 4):
        halves = targets[:2], targets[2:]
        cut = [[_of(r, slice(0, 2)) for r in readers], [_of(r, slice(2, None)) for r in readers]]
        return [g for some, own in zip(halves, cut, strict=True) for g in source_backward(some, own, **options)]
    kinds = [list(same) for _, same in groupby(readers, _kind)]
    for same in kinds[:-1]:  # readers that differ in kind, one kind after the other
        parts = source_backward([x._replace(whole=False) for x in targets], same, **options)
        targets = [x._replace(g=None, part=part) for x, part in zip(targets, parts, strict=True)]
    out = [torch.empty_like(x.like, dtype=x.like.dtype if x.whole else torch.float32) for x in targets]
    if not kinds:
        return [o.copy_(_known(x)) for o, x in zip(out, targets, strict=True)]
    if out[0].numel():
        _launch(targets, kinds[-1], out, **options)
    return out


def _of(reader: Reader, some: slice) -> Reader:
    """A reader as some of the targets see it."""
    lists: Any = [None if x is None else x[some] for x in (reader.static, reader.dynamic, reader.ds, reader.w)]
    return Reader(reader.do, lists[0], lists[1], reader.relu, lists[2], lists[3])


def _kind(reader: Reader) -> tuple[int, bool, bool, int]:
    static = next((1 if b.shape[0] == reader.do.shape[-1] else 2 for b in reader.static or () if b is not None), 0)
    return static, reader.dynamic is not None, reader.ds is not None, reader.relu


def _at(given: Sequence[Tensor | None] | None, j: int) -> tuple[int, int]:
    """Where what a reader has for target j begins, and how far apart its numbers are."""
    x = None if given is None else given[j]
    return (0, 0) if x is None else (x.data_ptr(), x.stride(0))


def _known(target: Target) -> Tensor:
    """A gradient that no reader adds to."""
    given = [x.float() for x in (target.g, target.part) if x is not None]
    return sum(x.view(target.like.shape) for x in given) if given else torch.zeros_like(target.like)  # type: ignore[return-value]


def _launch(
    targets: Sequence[Target],
    readers: Sequence[Reader],
    out: Sequence[Tensor],
    tile: int | None,
    block: int | None,
    warps: int | None,
    lean: bool | None,
    together: bool,
) -> None:
    v, s = targets[0].like, len(targets)
    dim = v.shape[-1]
    tokens = v.numel() // dim
    static, dynamic, scored, relu = _kind(readers[0])
    block = min(block or 256, triton.next_power_of_2(dim))
    tile = tokens_of(tile or {1: 4, 2: 2, 4: 2}[s], tokens)
    entries: list[int] = []
    same_w = scored
    for r in readers:
        w = [] if r.w is None else [next(u for u in (*r.w[j:], *r.w) if u is not None) for j in range(s)]
        same_w = same_w and len({u.data_ptr() for u in w}) == 1
        entries.append(r.do.data_ptr())
        for j in range(s):
            entries += _at(r.static, j)[:1] + _at(w or None, j)[:1] + _at(r.dynamic, j) + _at(r.ds, j)
    rows = [(x.g, x.part, o if x.whole else None, None if x.whole else o) for x, o in zip(targets, out, strict=True)]
    parameters = [p for r in readers for given in (r.static if static == 1 else None, r.w) for p in given or ()]
    some = any(x is None for r in readers for given in (r.static, r.dynamic) for x in given or ())
    wholes = sum(x.whole for x in targets)
    known: Any = {
        "D": dim, "BD": block, "BT": tile, "S": s, "SCORED": scored, "RELU": relu, "HAS_G": any(x.g is not None for x in targets),
        "HAS_PART": any(x.part is not None for x in targets), "WHOLE": 2 if wholes == s else int(wholes > 0),
        "ALIGNED": aligned(dim, *rows, [r.do for r in readers]), "ROWS_ALIGNED": aligned(dim, parameters), "SOME": some,
        "num_warps": warps or max(1, block // 256), "num_stages": 1,
    }  # fmt: skip
    where = address_table(tuple(0 if a is None else a.data_ptr() for row in rows for a in row), v.device)
    grid = triton.cdiv(tokens, tile), triton.cdiv(dim, block)
    near = (
        _side_by_side(readers, dim, s)
        if (LEAN if lean is None else lean) and static == 1 and dynamic and s < 4
        else None
    )
    if near is not None:
        table, scores = (address_table(tuple(x), v.device) for x in near)
        launch(
            _neighbours_backward_kernel, grid[::-1] if together else grid, v, where, table, scores, v, tokens, len(readers),
            **known, TOGETHER=together,
        )  # fmt: skip
        return
    launch(
        _source_backward_kernel, grid, v, where, address_table(tuple(entries), v.device), v, tokens, len(readers),
        STATIC=static, DYNAMIC=dynamic, SAME_W=same_w, **known,
    )  # fmt: skip


def _side_by_side(readers: Sequence[Reader], dim: int, s: int) -> tuple[list[int], list[int]] | None:
    """The tables of `_neighbours_backward_kernel`, if what each reader has for the targets lies as it expects."""
    both = next(
        (r for r in readers if r.dynamic is not None and None not in [_at(r.dynamic, j)[0] or None for j in range(s)]),
        None,
    )
    if both is None:
        return None
    base = [_at(both.dynamic, j) for j in range(s)]  # of each target's scores
    found: list[tuple[int, ...]] = []
    for r in readers:
        seen = [j for j, b in enumerate(r.static or ()) if b is not None]
        j = seen[0]
        static, (ds, stride), w, p = (
            _at(r.static, j)[0],
            _at(r.ds, j),
            _at(r.w, j)[0],
            _at(r.dynamic, j)[0] - base[j][0],
        )
        step = _at(r.ds, seen[-1])[0] - ds if len(seen) > 1 else 0
        for k in seen:
            lies = _at(r.dynamic, k), _at(r.static, k)[0], _at(r.ds, k), _at(r.w, k)[0]
            if lies != ((base[k][0] + p, base[k][1]), static + 4 * dim * (k - j), (ds + step * (k - j), stride), w):
                return None
        found.append(
            (
                r.do.data_ptr(),
                static - 4 * dim * j,
                w,
                ds - step * j,
                p // 4,
                stride,
                step // 4,
                sum(1 << k for k in seen),
            )
        )
    first = min(x[4] for x in found)
    packed = [_pack(x[4] - first, *x[5:]) for x in found]
    if None in packed:
        return None
    table = [a for x, p in zip(found, packed, strict=True) for a in (*x[:4], p or 0)]
    return table, [a for address, stride in base for a in (address + 4 * first, stride)]


def _pack(column: int, stride: int, step: int, seen: int) -> int | None:
    """In one number: the column of a reader's scores, the strides of ds from token to token and from source to source, a bit a source."""
    fits = column < 1 << 23 and 0 <= stride < 1 << 20 and 0 <= step < 1 << 16
    return column << 40 | stride << 20 | step << 4 | seen if fits else None
