"""Kernels of gated residual streams. A program takes one token, whose n streams lie in registers as a tile [n, D]."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.depth_attention.kernels.read import programs_for
from depthmix.ops.gpu.launch import launch
from depthmix.ops.gpu.sizes import next_power_of_2


@triton.jit
def load(row, ok):
    """Load numbers in fp32, and zeros outside."""
    return tl.load(row, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def write_token(x, y, post, new, t, i, d, n: tl.constexpr, D: tl.constexpr, WRITE: tl.constexpr):
    """Write to the streams of a token, and return them rounded, in fp32. Without WRITE they are x."""
    ok = (i < n)[:, None] & (d < D)[None, :]
    at = t * n * D + i[:, None] * D + d[None, :]
    v = load(x + at, ok)
    if WRITE:
        weights = load(post + t * n + i, i < n)
        v += weights[:, None] * load(y + t * D + d, d < D)[None, :]
        v = v.to(new.dtype.element_ty)
        tl.store(new + at, v, mask=ok)
        v = v.to(tl.float32)
    return v


@triton.jit
def _write_norm_kernel(
    x, y, post, gain, new, normed, eps,
    n: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    i, d = tl.arange(0, BN), tl.arange(0, BD)
    place = i[:, None] * D + d[None, :]
    ok = (i < n)[:, None] & (d < D)[None, :]
    at = t * n * D + place
    v = write_token(x, y, post, new, t, i, d, n, D, WRITE)
    r = tl.rsqrt(tl.sum(v * v, 1) / D + eps)
    h = v * r[:, None] * load(gain + place, ok)
    tl.store(normed + at, h.to(normed.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["N"])
def _write_norm_backward_kernel(
    new, y, post, gain, dnew, dnormed, dx, dy, dpost, part, N: tl.int64, eps,
    n: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, WRITE: tl.constexpr, HAS_NEXT: tl.constexpr,
):  # fmt: skip
    i, d = tl.arange(0, BN), tl.arange(0, BD)
    place = i[:, None] * D + d[None, :]
    ok = (i < n)[:, None] & (d < D)[None, :]
    dgain = tl.zeros([BN, BD], tl.float32)
    for t in tl.range(tl.program_id(0).to(tl.int64), N, tl.num_programs(0), num_stages=1):
        at = t * n * D + place
        v, g = load(new + at, ok), load(dnormed + at, ok)
        r = tl.rsqrt(tl.sum(v * v, 1) / D + eps)[:, None]
        dgain += g * v * r
        g *= load(gain + place, ok)
        g = r * (g - v * (tl.sum(g * v, 1)[:, None] * r * r / D))
        if HAS_NEXT:
            g += load(dnew + at, ok)
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=ok)
        if WRITE:
            weights = load(post + t * n + i, i < n)
            out = tl.sum(g * weights[:, None], 0)
            tl.store(dy + t * D + d, out.to(dy.dtype.element_ty), mask=d < D)
            along = tl.sum(g * load(y + t * D + d, d < D)[None, :], 1)
            tl.store(dpost + t * n + i, along.to(dpost.dtype.element_ty), mask=i < n)
    tl.store(part + tl.program_id(0).to(tl.int64) * n * D + place, dgain, mask=ok)


@triton.jit
def _gated_mean_kernel(z, normed, h, n: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i, d = tl.arange(0, BN), tl.arange(0, BD)
    ok = (i < n)[:, None] & (d < D)[None, :]
    at = t * n * D + i[:, None] * D + d[None, :]
    out = tl.sum(tl.sigmoid(load(z + at, ok)) * load(normed + at, ok), 0) / n
    tl.store(h + t * D + d, out.to(h.dtype.element_ty), mask=d < D)


@triton.jit
def _gated_mean_backward_kernel(
    z, normed, dh, dz, dnormed, n: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, BD: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    i, d = tl.arange(0, BN), tl.arange(0, BD)
    ok = (i < n)[:, None] & (d < D)[None, :]
    at = t * n * D + i[:, None] * D + d[None, :]
    g = (load(dh + t * D + d, d < D) / n)[None, :]
    a = tl.sigmoid(load(z + at, ok))
    step = g * load(normed + at, ok) * a * (1.0 - a)
    tl.store(dz + at, step.to(dz.dtype.element_ty), mask=ok)
    tl.store(dnormed + at, (g * a).to(dnormed.dtype.element_ty), mask=ok)


def _tile(x: Tensor) -> dict[str, int]:
    n, dim = x.shape[-2:]
    rows, columns = next_power_of_2(n), next_power_of_2(dim)
    warps = min(32, max(1, rows * columns // 512))
    return {"n": n, "BN": rows, "D": dim, "BD": columns, "num_warps": warps}


def write_norm(x: Tensor, y: Tensor | None, post: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Write y to the streams x [N, n, D] and norm them. Without y the streams are x itself. All tensors are contiguous."""
    new, normed = x if y is None else torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        given = (x if y is None else y, x if post is None else post)
        launch(_write_norm_kernel, (len(x),), x, x, *given, gain, new, normed, eps, WRITE=y is not None, **_tile(x))
    return new, normed


def write_norm_backward(
    new: Tensor, y: Tensor | None, post: Tensor | None, gain: Tensor, dnew: Tensor | None, dnormed: Tensor, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Compute the gradients of x, y, post and the gain, given those of the new streams and of the normed ones."""
    dx = torch.empty_like(new)
    dy, dpost = (None if t is None else torch.empty_like(t) for t in (y, post))
    if not new.numel():
        return dx, dy, dpost, torch.zeros_like(gain)
    tile = _tile(new)
    # More programs than run at a time, so that each adds up few tokens: long sums are less exact.
    programs = min(len(new), 4 * programs_for(len(new), tile["num_warps"], new))
    part = torch.empty(programs, *gain.shape, dtype=torch.float32, device=new.device)
    given = tuple(new if t is None else t for t in (y, post))
    made = tuple(new if t is None else t for t in (dy, dpost))
    launch(
        _write_norm_backward_kernel, (programs,), new,
        new, *given, gain, new if dnew is None else dnew, dnormed, dx, *made, part, len(new), eps,
        WRITE=y is not None, HAS_NEXT=dnew is not None, **tile,
    )  # fmt: skip
    return dx, dy, dpost, part.sum(0)


def gated_mean(z: Tensor, normed: Tensor) -> Tensor:
    """Average the normed streams [N, n, D], each channel times its gate: [N, D]."""
    h = normed.new_empty(len(normed), normed.shape[-1])
    if normed.numel():
        launch(_gated_mean_kernel, (len(normed),), normed, z, normed, h, **_tile(normed))
    return h


def gated_mean_backward(z: Tensor, normed: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the gates' logits and of the normed streams."""
    dz, dnormed = torch.empty_like(z), torch.empty_like(normed)
    if normed.numel():
        launch(_gated_mean_backward_kernel, (len(normed),), normed, z, normed, dh, dz, dnormed, **_tile(normed))
    return dz, dnormed
