"""Gradients of W weighted sums and of their weights: first through the norm, then one read of the sources.

    do = dy, or with a norm  r (gain ⊙ dy - x̂ mean(gain ⊙ dy ⊙ x̂));      dgain = Σ_tokens dy ⊙ x̂,  x̂ = r o
    ddynamic_wi = do_w · v_i;      dstatic_wi = Σ_tokens do_w ⊙ v_i;      both only where relu lets them through

dstatic needs one sum per channel, way and source. Together they exceed the registers of one program, and in memory they would
cause more traffic than the sources. So a program walks over tokens with one group of sources, whose sums it holds in registers.
Every group of the same tokens reads do, which all but the first find in the L2 cache.

No read saves x̂: it is the sum times r where the sum is in memory, and otherwise the result divided by its gain. Where a gain is
close to zero that division is inexact, and the sum is computed again.
"""

# ruff: noqa: RUF005 (Triton adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,var-annotated"

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.depth_sum.kernels.read import kind_of, source_table
from depthmix.ops.depth_sum.kernels.rows import sums, sums_side_by_side, weight
from depthmix.ops.gpu.addresses import aligned
from depthmix.ops.gpu.launch import count_cores, launch, repeat_last
from depthmix.ops.gpu.program_sums import sum_programs
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2


@triton.jit
def _mixture(
    table,
    w,
    n,
    t,
    static,
    like,
    d,
    ok,
    D: tl.constexpr,
    STATIC: tl.constexpr,
    DYNAMIC: tl.constexpr,
    RELU: tl.constexpr,
):
    """Compute the sum of way w for one token."""
    o = tl.zeros(d.shape, tl.float32)
    for i in range(n):
        v = tl.load(tl.load(table + 4 * i).to(tl.pointer_type(like.dtype.element_ty)) + (t * D + d), mask=ok, other=0.0)
        b, p = 0.0, 0.0
        if STATIC == 1:
            b = tl.load(static + (w * n + i).to(tl.int64) * D + d, mask=ok, other=0.0)
        if STATIC == 2:
            b = tl.load(static + w * n + i)
        if DYNAMIC:
            p = _dynamic(table, i, w, t)
        o += weight(b, p, STATIC, DYNAMIC, RELU) * v.to(tl.float32)
    return o


@triton.jit
def _norm_backward(
    dys, kept, dos, draw, rms, gain, passed, through, dgain, table, static, N, n,
    D: tl.constexpr, BD: tl.constexpr, WAYS: tl.constexpr, UP: tl.constexpr, NORM: tl.constexpr, RAW: tl.constexpr,
    MIXTURES: tl.constexpr, PASSED: tl.constexpr, AGAIN: tl.constexpr, STATIC: tl.constexpr, DYNAMIC: tl.constexpr, RELU: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Walk over all tokens of a program. AGAIN: compute the sums of ways that saved their result again."""
    program = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    ok = d < D
    acc, gains, inverse = (), (), ()
    if NORM:
        for w in tl.static_range(WAYS):
            acc = acc + (tl.zeros([BD], tl.float32),)
            gains = gains + (tl.load(gain + w * D + d, mask=ok, other=1.0),)
            inverse = inverse + (gains[w] if AGAIN or (MIXTURES >> w) % 2 == 1 else 1.0 / gains[w],)
    for t in tl.range(program, N, tl.num_programs(0), num_stages=STAGES):
        at = t * D + d
        ys, xs, products, new, scales = (), (), (), (), ()
        for w in tl.static_range(WAYS):
            if NORM:
                scales = scales + (tl.load(rms + w * N + t),)
            if NORM or w == RAW or (PASSED and w == 0):
                y = tl.load(dys[w] + at, mask=ok, other=0.0).to(tl.float32)
                if NORM:
                    if (MIXTURES >> w) % 2 == 1:
                        x = tl.load(kept[w] + at, mask=ok, other=0.0).to(tl.float32) * scales[w]
                    elif AGAIN:
                        x = _mixture(table, w, n, t, static, dys[0], d, ok, D, STATIC, DYNAMIC, RELU) * scales[w]
                    else:
                        x = tl.load(kept[w] + at, mask=ok, other=0.0).to(tl.float32)
                    along = y * x
                    if AGAIN or (MIXTURES >> w) % 2 == 1:
                        products = products + (along * gains[w],)
                    else:
                        # x is gain ⊙ x̂, so the sum is too.
                        products = products + (along,)
                    new = new + (acc[w] + along,)
                    xs = xs + (x,)
                ys = ys + (y,)
            else:
                ys = ys + (0.0,)
        if NORM:
            along = sums(products, WAYS, UP, 0)
        for w in tl.static_range(WAYS):
            if NORM or w == RAW or (PASSED and w == 0):
                y = ys[w]
                if NORM:
                    x = xs[w] * (along[w] / D)
                    if not AGAIN and (MIXTURES >> w) % 2 == 0:
                        x *= inverse[w]
                    y = scales[w] * (y * gains[w] - x)
                if w == RAW:
                    y += tl.load(draw + at, mask=ok, other=0.0).to(tl.float32)
                if NORM or w == RAW:
                    tl.store(dos[w] + at, y.to(dys[0].dtype.element_ty), mask=ok)
                if PASSED and w == 0:
                    y += tl.load(passed + at, mask=ok, other=0.0).to(tl.float32)
                    tl.store(through + at, y.to(dys[0].dtype.element_ty), mask=ok)
        acc = new
    if NORM:
        for w in tl.static_range(WAYS):
            total = acc[w]
            if not AGAIN and (MIXTURES >> w) % 2 == 0:
                total *= inverse[w]
            tl.store(dgain + (program * WAYS + w) * D + d, total, mask=ok)


@triton.jit(do_not_specialize=["N", "n"])
def _norm_backward_kernel(
    g0, g1, g2, g3, draw, x0, x1, x2, x3, rms, gain, o0, o1, o2, o3, passed, through, dgain, table, static, N: tl.int64, n: tl.int32,
    D: tl.constexpr, BD: tl.constexpr, WAYS: tl.constexpr, UP: tl.constexpr, NORM: tl.constexpr, RAW: tl.constexpr,
    MIXTURES: tl.constexpr, PASSED: tl.constexpr, SMALL: tl.constexpr, STATIC: tl.constexpr, DYNAMIC: tl.constexpr, RELU: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    dys, kept, dos = (g0, g1, g2, g3), (x0, x1, x2, x3), (o0, o1, o2, o3)
    smallest = 1.0
    if NORM:
        d = tl.arange(0, BD)
        for w in tl.static_range(WAYS):
            if (MIXTURES >> w) % 2 == 0:
                smallest = tl.minimum(smallest, tl.min(tl.abs(tl.load(gain + w * D + d, mask=d < D, other=1.0)), 0))
    if smallest < SMALL:
        _norm_backward(dys, kept, dos, draw, rms, gain, passed, through, dgain, table, static, N, n, D, BD, WAYS, UP, NORM, RAW,
                       MIXTURES, PASSED, True, STATIC, DYNAMIC, RELU, 1)  # fmt: skip
    else:
        _norm_backward(dys, kept, dos, draw, rms, gain, passed, through, dgain, table, static, N, n, D, BD, WAYS, UP, NORM, RAW,
                       MIXTURES, PASSED, False, STATIC, DYNAMIC, RELU, STAGES)  # fmt: skip


@triton.jit
def _lets_through(table, i, w, n, t, static, d, ok, D: tl.constexpr, STATIC: tl.constexpr, DYNAMIC: tl.constexpr):
    """Return static + dynamic, whose sign decides what relu lets through."""
    s = tl.zeros(d.shape, tl.float32)
    if STATIC == 1:
        s += tl.load(static + (w * n + i).to(tl.int64) * D + d, mask=ok, other=0.0)
    if STATIC == 2:
        s += tl.load(static + w * n + i)
    if DYNAMIC:
        s += _dynamic(table, i, w, t)
    return s


@triton.jit
def _dynamic(table, i, w, t):
    at = tl.load(table + 4 * i + 1).to(tl.pointer_type(tl.float32))
    return tl.load(at + (t * tl.load(table + 4 * i + 2) + w * tl.load(table + 4 * i + 3)))


@triton.jit(do_not_specialize=["N", "n"])
def _weight_backward_kernel(
    table, o0, o1, o2, o3, static, dots, part, N: tl.int64, n: tl.int32,
    D: tl.constexpr, BD: tl.constexpr, WAYS: tl.constexpr, G: tl.constexpr, UP: tl.constexpr, STATIC: tl.constexpr,
    DYNAMIC: tl.constexpr, RELU: tl.constexpr, DOTS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr,
    BY_SOURCE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # dots: [N, WAYS, n], or BY_SOURCE [N, n, WAYS]; part: [programs, WAYS, n, D]. Programs of the same tokens follow each other: do is then in the second cache
    start, program = tl.program_id(0) * G, tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BD)
    ok = d < D
    dos = (o0, o1, o2, o3)
    acc, bases = (), ()
    for j in tl.static_range(G):
        bases = bases + (tl.load(table + 4 * tl.minimum(start + j, n - 1)).to(tl.pointer_type(o0.dtype.element_ty)),)
    # Dot products side by side, those of a source's ways together.
    k = tl.arange(0, UP)
    way, i = k % WAYS, start + k // WAYS
    ok_dot = (k < WAYS * G) & (i < n)
    if RELU == 1 and DYNAMIC:
        dynamic_at = tl.load(table + 4 * i + 1, mask=ok_dot, other=0).to(tl.pointer_type(tl.float32))
        dynamic_at += way * tl.load(table + 4 * i + 3, mask=ok_dot, other=0)
        stride = tl.load(table + 4 * i + 2, mask=ok_dot, other=0)
    if ROWS:
        for _ in tl.static_range(WAYS * G):
            acc = acc + (tl.zeros([BD], tl.float32),)
    for t in tl.range(program, N, tl.num_programs(1), num_stages=STAGES):
        ys = ()
        for w in tl.static_range(WAYS):
            ys = ys + (tl.load(dos[w] + (t * D + d), mask=ok, other=0.0).to(tl.float32),)
        products, new = (), ()
        for j in tl.static_range(G):
            at = bases[j] + (t * D + d)
            if ALIGNED:
                at = tl.multiple_of(at, 16)
            v = tl.load(at, mask=d < tl.where(start + j < n, D, 0), other=0.0).to(tl.float32)
            for w in tl.static_range(WAYS):
                y = ys[w]
                if RELU == 2:
                    s = _lets_through(table, tl.minimum(start + j, n - 1), w, n, t, static, d, ok, D, STATIC, DYNAMIC)
                    y = tl.where(s >= 0, y, 0.0)
                products = products + (y * v,)
                if ROWS:
                    new = new + (tl.fma(y, v, acc[j * WAYS + w]),)
        acc = new
        # One reduction for all.
        if DOTS:
            products_sum = sums_side_by_side(products, WAYS * G, UP)
            if RELU == 1 and DYNAMIC:
                p = tl.load(dynamic_at + t * stride, mask=ok_dot, other=0.0)
                products_sum = tl.where(p >= 0, products_sum, 0.0)
            if BY_SOURCE:
                tl.store(dots + ((t * n + start) * WAYS + k), products_sum, mask=ok_dot)
            else:
                tl.store(dots + ((t * WAYS + way) * n + i), products_sum, mask=ok_dot)
    if ROWS:
        for j in tl.static_range(G):
            for w in tl.static_range(WAYS):
                at = part + ((program * WAYS + w) * n + start + j) * D + d
                tl.store(at, acc[j * WAYS + w], mask=d < tl.where(start + j < n, D, 0))


class Need(NamedTuple):
    """Select the gradients to compute besides those of the sums and the gain."""

    static: bool
    dynamic: bool
    by_source: bool = False  # ddynamic with a source's ways side by side in memory, as its gradient reads them


class ReadGradients(NamedTuple):
    """Gradients of W weighted sums, except those of the sources."""

    do: list[Tensor]  # of the mixtures, like a source
    dgain: Tensor | None  # [G, D]
    dstatic: Tensor | None  # like static
    ddynamic: Tensor | None  # [N, W, n] fp32
    through: Tensor | None = None  # do of the first way + what was passed


def read_backward(
    dy: Sequence[Tensor],
    draw: Tensor | None,
    raw: int | None,
    kept: Sequence[Tensor],
    rms: Tensor,
    gain: Tensor | None,
    sources: Sequence[Tensor],
    static: Tensor | None,
    dynamic: Sequence[Tensor] | None,
    relu: int,
    need: Need,
    mixtures: int = 0,
    passed: Tensor | None = None,
    *,
    group: int | None = None,
    programs: int | None = None,
) -> ReadGradients:
    """Compute the gradients of a read, given those of its results and of the raw one.

    Args:
        dy: gradients of all ways; with a gain [G, D] of the first G. The other ways have no gradient but that of the raw one.
        draw: gradient of the raw result.
        raw, gain, sources, static, dynamic, relu: as for `read`.
        kept, mixtures, rms: what the read saved.
        need: which gradients to compute.
        passed: a second gradient of a source that the first way passes unchanged; added to a copy of that way's do.
        group, programs: launch parameters for tests.
    """
    v, n, normed = sources[0], len(sources), len(dy)
    ways = static.shape[0] if static is not None else dynamic[0].shape[1] if dynamic is not None else normed
    dim = v.shape[-1]
    tokens = v.numel() // dim
    norm, has_raw = gain is not None, draw is not None and raw is not None and raw < normed
    need_dots = need.dynamic or (need.static and kind_of(static, dim) == 2)
    need_rows = need.static and kind_of(static, dim) == 1
    if not (norm or has_raw or passed is not None or need_dots or need_rows):
        return ReadGradients(list(dy), None, None, None)
    do = [torch.empty_like(g) if norm or (has_raw and i == raw) else g for i, g in enumerate(dy)]
    do += [draw if draw is not None and i == raw else torch.zeros_like(v) for i in range(normed, ways)]
    # The dynamic part is clamped apart from the static one. If both gradients are dot products, the clamp follows below.
    clamp_later = relu == 1 and need.static and kind_of(static, dim) == 2
    fp32: Any = {"dtype": torch.float32, "device": v.device}
    block = next_power_of_2(dim)
    cores = count_cores(v, on_cpu=2)
    make: Any = torch.empty if tokens else torch.zeros
    dgain, through = None, None if passed is None else torch.empty_like(v)
    table = source_table(sources, dynamic)
    if norm or has_raw or through is not None:
        norm_warps = min(32, max(1, block // 256 if normed == 1 else max(min(8, block // 128), block // 256)))
        # Tokens whose rows fit in the shared memory of small GPUs.
        fitting_stages = 1 + 90_000 // ((2 * normed + 1) * block * v.element_size())
        # Programs that the cores hold at once.
        share = min(max(tokens, 1), cores * max(1, 16 // norm_warps))
        dgain = make(share, normed if norm else 0, dim, **fp32)
        if tokens:
            launch(
                _norm_backward_kernel, (share,), v,
                *repeat_last(dy, 4), dy[0] if draw is None else draw, *repeat_last(kept or dy, 4), rms, rms if gain is None else gain, *repeat_last(do, 4),
                dy[0] if passed is None else passed, do[0] if through is None else through, dgain,
                table, rms if static is None else static, tokens, n,
                D=dim, BD=block, WAYS=normed, UP=next_power_of_2(normed), NORM=norm, RAW=raw if has_raw else -1,
                MIXTURES=mixtures, PASSED=through is not None, SMALL=2**-7 if v.dtype == torch.float16 else 1e-30,
                STATIC=kind_of(static, dim), DYNAMIC=dynamic is not None, RELU=relu, STAGES=min(3, fitting_stages),
                num_warps=norm_warps, num_stages=1,
            )  # fmt: skip
    by_source = need.by_source and not clamp_later
    dots = torch.empty(tokens if need_dots else 0, *((n, ways) if by_source else (ways, n)), **fp32)
    part = torch.empty(0, **fp32)
    if need_dots or need_rows:
        # A larger group would need more registers than there are.
        group = group or (4 if ways == 1 and n > 2 and relu != 2 else 2)
        groups = cdiv(n, group)
        programs = min(max(tokens, 1), programs or max(1, 12 * cores // groups))
        part = make(programs, ways, n if need_rows else 0, dim, **fp32)
        if tokens:
            launch(
                _weight_backward_kernel, (groups, programs), v,
                table, *repeat_last(do, 4), rms if static is None else static, dots, part, tokens, n,
                D=dim, BD=block, WAYS=ways, G=group, UP=max(2, next_power_of_2(ways * group)), STATIC=kind_of(static, dim),
                DYNAMIC=dynamic is not None, RELU=0 if clamp_later else relu, DOTS=need_dots, ROWS=need_rows,
                ALIGNED=aligned(dim, sources), BY_SOURCE=by_source, STAGES=1 if relu == 2 else 4, num_warps=min(32, max(1, block // 512)), num_stages=1,
            )  # fmt: skip
    dots = dots.transpose(1, 2) if by_source else dots
    dstatic = None
    if need.static:
        dstatic = sum_programs(part) if need_rows else dots.sum(0).unsqueeze(-1)
    if clamp_later and dynamic is not None:
        dots = dots * (torch.stack(list(dynamic), -1) >= 0)
    return ReadGradients(
        do,
        sum_programs(dgain) if norm and dgain is not None else None,
        dstatic,
        dots if need.dynamic else None,
        through,
    )
