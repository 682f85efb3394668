"""A read of gated residual streams for few tokens, without gradients: three launches, whose time is that of reading the weights.

    1. write, Σ x'², and products of x' with W_down and W_inject, each program for some channels of one stream and some rows
    2. the sums of those, the network's hidden numbers u, and the weights of the next write
    3. product with W_up, gates and mean, each program for some channels of all streams

Sums between programs are stored and added up in a fixed order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gated_streams.reference import Inputs
from depthmix.ops.gpu.dependent_launch import dependent_launch, wait_for_previous_kernel
from depthmix.ops.gpu.launch import Compiled, compiled_kernel, is_watched, launch, on_device
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2
from depthmix.ops.torch_internals import current_stream_handle

# Rows of W_down that a program of the first launch takes, and numbers of u of the second.
ROWS = 64
# Tokens of a program that a matrix product takes at least.
TOKENS = 16


@triton.jit(do_not_specialize=["N"])
def _down_kernel(
    x, y, post, gain, down, inject, new, squares, sums, N: tl.int64, offset,
    n: tl.constexpr, D: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, R: tl.constexpr, M: tl.constexpr,
    CUTS: tl.constexpr, WRITE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # Before any load: the previous kernel may have written the weights, as FSDP2 does when it gathers them for a layer.
    if EARLY:
        wait_for_previous_kernel()
    part, t = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64) * BT + tl.arange(0, BT)
    i, d = part // CUTS, (part % CUTS) * BK + tl.arange(0, BK)
    j = tl.program_id(1) * BR + tl.arange(0, BR)
    k = i * D + d
    row = j.to(tl.int64)[:, None] * (n * D) + k[None, :]
    w = tl.load(down + row, mask=(j < R)[:, None] & (d < D)[None, :], other=0.0)
    if M > 0 and (tl.program_id(1) + 1) * BR > R:
        ok = ((j >= R) & (j < R + M))[:, None] & (d < D)[None, :]
        w += tl.load(inject + (row - R * n * D), mask=ok, other=0.0)
    scale = tl.load(gain + k, mask=d < D, other=0.0).to(tl.float32) + offset
    w = (w.to(tl.float32) * scale[None, :]).to(w.dtype)
    ok = (t < N)[:, None] & (d < D)[None, :]
    at = t[:, None] * (n * D) + k[None, :]
    v = tl.load(x + at, mask=ok, other=0.0)
    # One program of those with the same channels stores what all of them compute.
    last = tl.where(tl.program_id(1) == 0, N, 0)
    if WRITE:
        weights = tl.load(post + t * n + i, mask=t < N, other=0.0).to(tl.float32)
        output = tl.load(y + t[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
        v = (v.to(tl.float32) + weights[:, None] * output).to(v.dtype)
        tl.store(new + at, v, mask=(t < last)[:, None] & (d < D)[None, :])
    wide = v.to(tl.float32)
    tl.store(squares + part * N + t, tl.sum(wide * wide, 1), mask=t < last)
    acc = tl.dot(v, tl.trans(w), input_precision="ieee")
    tl.store(sums + (part * N + t[:, None]) * (R + M) + j[None, :], acc, mask=(t < N)[:, None] & (j < R + M)[None, :])


@triton.jit(do_not_specialize=["N"])
def _combine_kernel(
    squares, sums, r, u, post, N: tl.int64, eps,
    n: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, R: tl.constexpr, M: tl.constexpr,
    CUTS: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    t, j = tl.program_id(0).to(tl.int64), tl.program_id(1) * BR + tl.arange(0, BR)
    c = tl.arange(0, BC)
    if EARLY:
        wait_for_previous_kernel()
    acc = tl.zeros([BR], tl.float32)
    for i in tl.static_range(n):
        part = (i * CUTS + c).to(tl.int64)
        square = tl.sum(tl.load(squares + part * N + t, mask=c < CUTS, other=0.0), 0)
        ok = (c < CUTS)[:, None] & (j < R + M)[None, :]
        of_stream = tl.sum(tl.load(sums + (part[:, None] * N + t) * (R + M) + j[None, :], mask=ok, other=0.0), 0)
        scale = tl.rsqrt(square / D + eps)
        acc += scale * of_stream
        tl.store(r + t * n + i, scale, mask=tl.program_id(1) == 0)
    acc /= n
    tl.store(u + t * R + j, (acc * tl.sigmoid(acc)).to(u.dtype.element_ty), mask=j < R)
    if M > 0:
        tl.store(post + t * M + (j - R), 2.0 * tl.sigmoid(acc), mask=(j >= R) & (j < R + M))


@triton.jit(do_not_specialize=["N"])
def _up_kernel(
    u, up, x, r, gain, h, N: tl.int64, offset,
    n: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    d, q = tl.program_id(0) * BD + tl.arange(0, BD), tl.arange(0, BN * BD)
    # Rows of W_up for these channels of all streams, one stream after the other.
    i, channel = q // BD, tl.program_id(0) * BD + q % BD
    row = up + (i * D + channel).to(tl.int64)[:, None] * R
    inside = (i < n) & (channel < D)
    k = tl.arange(0, BK)
    w = tl.load(row + k[None, :], mask=inside[:, None] & (k < R)[None, :], other=0.0)
    if EARLY:
        wait_for_previous_kernel()
    left = tl.load(u + t[:, None] * R + k[None, :], mask=(t < N)[:, None] & (k < R)[None, :], other=0.0).to(w.dtype)
    z = tl.dot(left, tl.trans(w), input_precision="ieee")
    for start in range(BK, R, BK):
        k = start + tl.arange(0, BK)
        w = tl.load(row + k[None, :], mask=inside[:, None] & (k < R)[None, :], other=0.0)
        left = tl.load(u + t[:, None] * R + k[None, :], mask=(t < N)[:, None] & (k < R)[None, :], other=0.0).to(w.dtype)
        z = tl.dot(left, tl.trans(w), z, input_precision="ieee")
    ok = (t < N)[:, None] & inside[None, :]
    v = tl.load(x + t[:, None] * (n * D) + (i * D + channel)[None, :], mask=ok, other=0.0).to(tl.float32)
    v *= tl.load(r + t[:, None] * n + i[None, :], mask=ok, other=0.0)
    v *= (tl.load(gain + i * D + channel, mask=inside, other=0.0).to(tl.float32) + offset)[None, :]
    out = tl.sum(tl.reshape(tl.sigmoid(z) * v, [BT, BN, BD]), 1) / n
    tl.store(h + t[:, None] * D + d[None, :], out.to(h.dtype.element_ty), mask=(t < N)[:, None] & (d < D)[None, :])


@triton.jit
def _few_write_kernel(x, y, post, new, n: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    t, i, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BD + tl.arange(0, BD)
    at = (t * n + i) * D + d
    v = tl.load(x + at, mask=d < D, other=0.0).to(tl.float32)
    v += tl.load(post + t * n + i).to(tl.float32) * tl.load(y + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(new + at, v.to(new.dtype.element_ty), mask=d < D)


class Launch(NamedTuple):
    """A launch of a read: kernel, grid and options."""

    kernel: Any
    grid: tuple[int, int, int]
    options: dict[str, Any]


class Plan(NamedTuple):
    """Launches for tensors of certain shapes and dtypes."""

    launches: tuple[Launch, ...]
    sizes: tuple[int, ...]  # numbers of a read's scratch memory: u, sums of products, sums of squares, 1 / rms
    compiled: list[Compiled]  # of the launches, for aligned addresses; empty before the first call


_plans: dict[tuple[Any, ...], Plan] = {}


def read(inputs: Inputs, eps: float, offset: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute x', h and the weights of the next write. All tensors are contiguous, and there are tokens."""
    x, y, post, gain, down, up, inject = inputs
    shape, kind, device = x.shape, x.dtype, x.device
    key = (shape, len(down), y is None, inject is None, kind, gain.dtype, None if post is None else post.dtype, device)
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _plan(x, len(down), y is not None, inject is not None)
    tokens, n, dim = shape
    new = x if y is None else torch.empty_like(x)
    h = torch.empty((tokens, dim), dtype=kind, device=device)
    next_post = None if inject is None else torch.empty((tokens, n), dtype=torch.float32, device=device)
    scratch = torch.empty(sum(plan.sizes), dtype=torch.float32, device=device)
    # Arguments that a launch does not use are others of the same dtype.
    given = (
        x, x if y is None else y, scratch if post is None else post, gain, down, down if inject is None else inject,
        new, up, h, scratch if next_post is None else next_post, scratch,
    )  # fmt: skip
    with on_device(device):
        addresses = _addresses(plan, given)
        if addresses is None:
            scratch_parts = scratch.split(plan.sizes)
            _launch(plan, x, _arguments(given[:-1], scratch_parts, tokens, eps, offset))
        else:
            start = addresses[-1]
            starts = [start, *(start := start + 4 * size for size in plan.sizes[:-1])]
            _launch_again(plan, device, _arguments(addresses[:-1], starts, tokens, eps, offset))
    return new, h, next_post


def write(x: Tensor, y: Tensor, post: Tensor) -> Tensor:
    """Compute x' [N, n, D] alone. All tensors are contiguous, and there are tokens."""
    shape, device, new = x.shape, x.device, torch.empty_like(x)
    key = (shape, x.dtype, y.dtype, post.dtype, device)
    plan = _plans.get(key)
    if plan is None:
        tokens, n, dim = shape
        block = min(1024, next_power_of_2(dim))
        options = {"n": n, "D": dim, "BD": block, "num_warps": max(1, block // 256)}
        plan = _plans[key] = Plan((Launch(_few_write_kernel, (tokens, n, cdiv(dim, block)), options),), (), [])
    given = (x, y, post, new)
    with on_device(device):
        addresses = _addresses(plan, given)
        if addresses is None:
            _launch(plan, x, (given,))
        else:
            _launch_again(plan, device, (addresses,))
    return new


def _arguments(
    given: Sequence[Any], scratch: Sequence[Any], tokens: int, eps: float, offset: float
) -> tuple[tuple[Any, ...], ...]:
    """Return the arguments of a read's launches: tensors, or their addresses."""
    x, y, post, gain, down, inject, new, up, h, next_post = given
    u, sums, squares, r = scratch
    return (
        (x, y, post, gain, down, inject, new, squares, sums, tokens, offset),
        (squares, sums, r, u, next_post, tokens, eps),
        (u, up, new, r, gain, h, tokens, offset),
    )


def _addresses(plan: Plan, tensors: tuple[Tensor, ...]) -> list[int] | None:
    """Return the addresses of tensors for `_launch_again`, or None if Triton has to launch the kernels."""
    if not plan.compiled:
        return None
    addresses, together = [t.data_ptr() for t in tensors], 0
    for address in addresses:
        together |= address
    settings = plan.compiled[0].settings
    for each in plan.launches:
        if is_watched(each.kernel, settings):
            return None
    return None if together % 16 else addresses


def _launch_again(plan: Plan, device: torch.device, arguments: tuple[Any, ...]) -> None:
    """Launch the kernels of an earlier call. All of it takes less time than the keys of one launch."""
    handle = current_stream_handle(device)
    for each, compiled, given in zip(plan.launches, plan.compiled, arguments, strict=True):
        run, function, metadata, constants, _ = compiled
        run(*each.grid, handle, function, metadata, None, None, None, *given, *constants)


def _launch(plan: Plan, like: Tensor, arguments: tuple[tuple[Any, ...], ...]) -> None:
    """Launch the kernels of a plan, and keep them for `_launch_again` if all addresses are aligned."""
    found = []
    for each, given in zip(plan.launches, arguments, strict=True):
        launch(each.kernel, each.grid, like, *given, **each.options)
        if like.is_cuda and all(t.data_ptr() % 16 == 0 for t in given if isinstance(t, Tensor)):
            found.append(compiled_kernel(each.kernel, like.device, given, each.options))
    if not plan.compiled and None not in found and len(found) == len(plan.launches):
        # In one piece: another thread may do the same.
        plan.compiled[:] = found  # type: ignore[assignment]


def _plan(x: Tensor, rank: int, writes: bool, writes_next: bool) -> Plan:
    """Choose how programs share a read."""
    tokens, n, dim = x.shape
    more, half, early = n if writes_next else 0, x.dtype != torch.float32, dependent_launch(x)
    # A product of fp32 numbers keeps its operands in registers.
    channels = min(128 if half else 32, max(TOKENS, next_power_of_2(dim)))
    cuts, block = cdiv(dim, channels), min(64, max(TOKENS, next_power_of_2(tokens)))
    parts, row_blocks, token_blocks = n * cuts, cdiv(rank + more, ROWS), cdiv(tokens, block)
    shape = {"n": n, "D": dim, "R": rank}
    down = Launch(
        _down_kernel,
        (parts, row_blocks, token_blocks),
        {
            **shape, "BK": channels, "BT": block, "BR": ROWS, "M": more, "CUTS": cuts, "WRITE": writes, **early,
            "num_warps": 4 if block == TOKENS else 8, "num_stages": 1,
        },
    )  # fmt: skip
    options = {**shape, "BR": ROWS, "M": more, "CUTS": cuts, "BC": next_power_of_2(cuts), **early, "num_warps": 4}
    combine = Launch(_combine_kernel, (tokens, row_blocks, 1), options)
    streams = next_power_of_2(n)
    width = max(1, 64 // streams)
    # Tiles of both operands fit in the shared memory of any GPU: 80 KiB at most.
    most = (512 if block == TOKENS else 256) if half else 32
    numbers = max(TOKENS, min(most, next_power_of_2(rank)))
    options = {**shape, "BN": streams, "BD": width, "BT": block, "BK": numbers, **early}
    up = Launch(_up_kernel, (cdiv(dim, width), token_blocks, 1), {**options, "num_warps": 8, "num_stages": 1})
    sizes = (tokens * rank, parts * tokens * (rank + more), parts * tokens, tokens * n)
    # Each begins at a multiple of 16 bytes.
    u, sums, squares, r = (4 * cdiv(size, 4) for size in sizes)
    return Plan((down, combine, up), (u, sums, squares, r), [])
