"""Gradients of one or two sources from all their readers. Weights are known, so nothing is reduced and D may be cut anywhere.

    dv_j = g_j + part_j + Σ_r (weight_rj ⊙ do_r + ds_rj w_rj)

Each do is read once for both sources. A program holds some channels of a few tokens, so that rows of parameters are loaded
once for all of them. Programs of the same channels follow each other, so that those rows stay in the L1 cache.
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
from depthmix.ops.gpu.addresses import address_tables, aligned
from depthmix.ops.gpu.launch import launch
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2

# Tokens for which rows of parameters are loaded once.
TILE = 4


@triton.jit
def _open(targets, j, t, d, like, D: tl.constexpr, BT: tl.constexpr, HAS_G: tl.constexpr, HAS_PART: tl.constexpr,
          ALIGNED: tl.constexpr):  # fmt: skip
    """Load the gradient that source j has so far: from elsewhere, and from earlier readers."""
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
    """Store the gradient of source j, finished or not."""
    whole, rest = tl.load(targets + 4 * j + 2), tl.load(targets + 4 * j + 3)
    for k in tl.static_range(BT):
        row = (t + k) * D + d
        out, part = whole.to(tl.pointer_type(like.dtype.element_ty)) + row, rest.to(tl.pointer_type(tl.float32)) + row
        if ALIGNED:
            out, part = tl.multiple_of(out, 16), tl.multiple_of(part, 16)
        # WHOLE: 0: no source is finished, 1: one of them is, 2: all are.
        if WHOLE != 0:
            tl.store(out, acc[j * BT + k].to(like.dtype.element_ty), mask=d < tl.where(whole != 0, D, 0))
        if WHOLE != 2:
            tl.store(part, acc[j * BT + k], mask=d < tl.where(rest != 0, D, 0))


@triton.jit
def _load_row(address, d, ok, D: tl.constexpr, ALIGNED: tl.constexpr, PARTIAL: tl.constexpr):
    """Load a row of parameters, or zeros if there is none."""
    if PARTIAL:
        ok = d < tl.where(address != 0, D, 0)
    at = address.to(tl.pointer_type(tl.float32)) + d
    if ALIGNED:
        at = tl.multiple_of(at, 16)
    return tl.load(at, mask=ok, other=0.0, eviction_policy="evict_last")


@triton.jit
def _load_numbers(reader, t, ok, BT: tl.constexpr, S: tl.constexpr, DYNAMIC: tl.constexpr, SCORED: tl.constexpr,
                  PARTIAL: tl.constexpr):  # fmt: skip
    """Load a reader's dynamic weights of the S sources and the gradients of their scores, for BT tokens each."""
    numbers = ()
    for j in tl.static_range(S):
        if DYNAMIC:
            at = tl.load(reader + 6 * j + 2)
            present = ok & (at != 0) if PARTIAL else ok
            numbers = numbers + load_scalars(at, tl.load(reader + 6 * j + 3), t, present, BT)
        if SCORED:
            at = tl.load(reader + 6 * j + 4)
            present = ok & (at != 0) if PARTIAL else ok
            numbers = numbers + load_scalars(at, tl.load(reader + 6 * j + 5), t, present, BT)
    return numbers


@triton.jit
def _load_parameters(reader, d, ok, D: tl.constexpr, S: tl.constexpr, STATIC: tl.constexpr, SCORED: tl.constexpr,
                     SHARED_W: tl.constexpr, ROWS_ALIGNED: tl.constexpr, PARTIAL: tl.constexpr):  # fmt: skip
    """Load a reader's static weights of the S sources, and the rows that scored them."""
    b, u = (), ()
    for j in tl.static_range(S):
        if STATIC == 1:
            b = b + (_load_row(tl.load(reader + 6 * j), d, ok, D, ROWS_ALIGNED, PARTIAL),)
        elif STATIC == 2:
            at = tl.load(reader + 6 * j)
            b = b + (tl.load(at.to(tl.pointer_type(tl.float32)), mask=at != 0, other=0.0),)
        if SCORED and (j == 0 or not SHARED_W):
            u = u + (_load_row(tl.load(reader + 6 * j + 1), d, ok, D, ROWS_ALIGNED, PARTIAL),)
    return b, u


@triton.jit(do_not_specialize=["N", "n"])
def _source_backward_kernel(
    targets, readers, like, N: tl.int64, n: tl.int32,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, S: tl.constexpr, STATIC: tl.constexpr, DYNAMIC: tl.constexpr,
    SCORED: tl.constexpr, SHARED_W: tl.constexpr, RELU: tl.constexpr, HAS_G: tl.constexpr, HAS_PART: tl.constexpr,
    WHOLE: tl.constexpr, ALIGNED: tl.constexpr, ROWS_ALIGNED: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    # targets: [g, part, whole, rest]; readers: [do], then for each target [static, w, dynamic, stride, ds, stride]
    size: tl.constexpr = 1 + 6 * S
    t = tl.minimum(tl.program_id(0).to(tl.int64) * BT, N - BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    ok = d < D
    rows = load_rows(tl.load(readers), t, d, ok, like, D, BT, ALIGNED)
    numbers = _load_numbers(readers + 1, t, n > 0, BT, S, DYNAMIC, SCORED, PARTIAL)
    later = tl.load(readers + size * tl.minimum(1, n - 1))
    acc = ()
    for j in tl.static_range(S):
        acc = acc + _open(targets, j, t, d, like, D, BT, HAS_G, HAS_PART, ALIGNED)
    for r in tl.range(0, n):
        b, u = _load_parameters(readers + size * r + 1, d, ok, D, S, STATIC, SCORED, SHARED_W, ROWS_ALIGNED, PARTIAL)
        next_rows = load_rows(later, t, d, d < tl.where(r + 1 < n, D, 0), like, D, BT, ALIGNED)
        follower = readers + size * tl.minimum(r + 1, n - 1) + 1
        next_numbers = _load_numbers(follower, t, r + 1 < n, BT, S, DYNAMIC, SCORED, PARTIAL)
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
                    total = tl.fma(numbers[j * BT * (1 + DYNAMIC) + DYNAMIC * BT + k], u[0 if SHARED_W else j], total)
                new = new + (total,)
        acc = new
        rows, numbers = next_rows, next_numbers
    for j in tl.static_range(S):
        _close(targets, acc, j, t, d, like, D, BT, WHOLE, ALIGNED)


class Target(NamedTuple):
    """A source whose gradient is computed, and its gradient so far."""

    like: Tensor  # the source, or a tensor like it
    g: Tensor | None = None  # from elsewhere, like the source
    part: Tensor | None = None  # fp32, from readers that an earlier launch processed
    whole: bool = True  # whether these are the last readers


class Reader(NamedTuple):
    """A way of a read, as kernel arguments for the gradients of some sources. None marks a source it does not use."""

    do: Tensor  # like a source
    static: Sequence[Tensor | None] | None  # for each target [D] or [1]
    dynamic: Sequence[Tensor | None] | None  # for each target [N], any stride
    relu: int = 0
    ds: Sequence[Tensor | None] | None = None  # gradients of the scores: for each target [N], any stride
    w: Sequence[Tensor | None] | None = None  # what made the scores: for each target [D]


def source_backward(targets: Sequence[Target], readers: Sequence[Reader]) -> list[Tensor]:
    """Compute the gradients of one or two sources: rounded to their dtype after their last readers, fp32 otherwise."""
    kinds = [list(alike) for _, alike in groupby(readers, _kind)]
    # Readers of different kinds need different kernels, one after the other.
    for alike in kinds[:-1]:
        parts = source_backward([x._replace(whole=False) for x in targets], alike)
        targets = [x._replace(g=None, part=part) for x, part in zip(targets, parts, strict=True)]
    out = [torch.empty_like(x.like, dtype=x.like.dtype if x.whole else torch.float32) for x in targets]
    if not kinds:
        return [o.copy_(_without_readers(x)) for o, x in zip(out, targets, strict=True)]
    if out[0].numel():
        _launch(targets, kinds[-1], out)
    return out


def _kind(reader: Reader) -> tuple[int, bool, bool, int]:
    static = next((1 if b.shape[0] == reader.do.shape[-1] else 2 for b in reader.static or () if b is not None), 0)
    return static, reader.dynamic is not None, reader.ds is not None, reader.relu


def _at(by_target: Sequence[Tensor | None] | None, j: int) -> tuple[int, int]:
    """Return the address of a reader's numbers for target j, and their stride."""
    x = None if by_target is None else by_target[j]
    return (0, 0) if x is None else (x.data_ptr(), x.stride(0))


def _without_readers(target: Target) -> Tensor:
    """Return a gradient to which no reader adds."""
    parts = [x.float() for x in (target.g, target.part) if x is not None]
    return sum(x.view(target.like.shape) for x in parts) if parts else torch.zeros_like(target.like)  # type: ignore[return-value]


def _launch(targets: Sequence[Target], readers: Sequence[Reader], out: Sequence[Tensor]) -> None:
    v, s = targets[0].like, len(targets)
    dim = v.shape[-1]
    tokens = v.numel() // dim
    static, dynamic, scored, relu = _kind(readers[0])
    block = min(256, next_power_of_2(dim))
    tile = tokens_of(TILE, tokens)
    entries: list[int] = []
    shared_w = scored
    for r in readers:
        w = [] if r.w is None else [next(u for u in (*r.w[j:], *r.w) if u is not None) for j in range(s)]
        shared_w = shared_w and len({u.data_ptr() for u in w}) == 1
        entries.append(r.do.data_ptr())
        for j in range(s):
            entries += _at(r.static, j)[:1] + _at(w or None, j)[:1] + _at(r.dynamic, j) + _at(r.ds, j)
    rows = [(x.g, x.part, o if x.whole else None, None if x.whole else o) for x, o in zip(targets, out, strict=True)]
    parameters = [p for r in readers for by_target in (r.static if static == 1 else None, r.w) for p in by_target or ()]
    partial = any(x is None for r in readers for by_target in (r.static, r.dynamic) for x in by_target or ())
    wholes = sum(x.whole for x in targets)
    constants: Any = {
        "D": dim, "BD": block, "BT": tile, "S": s, "SCORED": scored, "RELU": relu, "HAS_G": any(x.g is not None for x in targets),
        "HAS_PART": any(x.part is not None for x in targets), "WHOLE": 2 if wholes == s else int(wholes > 0),
        "ALIGNED": aligned(dim, *rows, [r.do for r in readers]), "ROWS_ALIGNED": aligned(dim, parameters), "PARTIAL": partial,
        "num_warps": 1, "num_stages": 1,
    }  # fmt: skip
    target_addresses = tuple(0 if a is None else a.data_ptr() for row in rows for a in row)
    grid = cdiv(tokens, tile), cdiv(dim, block)
    launch(
        _source_backward_kernel, grid, v, *address_tables(v.device, target_addresses, tuple(entries)), v, tokens, len(readers),
        STATIC=static, DYNAMIC=dynamic, SHARED_W=shared_w, **constants,
    )  # fmt: skip
