"""The read of n streams with the RMSNorm that follows, and its backward: whole rows, every stream read once.

    u = Σ_i pre_i x_i;    h = gain ⊙ u rho, rho = 1 / RMS(u);    without a norm h = u

The backward of the write needs du = rho (gain ⊙ dh - u rho c). With a_i = Σ_D gain ⊙ dh ⊙ x_i, c = rho Σ_i pre_i a_i / D:

    dpre_i = rho (a_i - c rho Σ_D u ⊙ x_i);    dgain = Σ_tokens dh ⊙ u rho

du itself is never stored: the backward of the write computes it again from u. Where the weights pre do not depend on the
streams, that backward forms dpre as well. What remains, c and dgain, then follows from h alone: u rho = h / gain.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.launch import launch
from depthmix.ops.gpu.program_sums import sum_programs
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2
from depthmix.ops.stream_mix.kernels.tiles import SMS, load_streams, load_weights, row_tile, weighted

# Warps of the backward on each multiprocessor. More warps would cost more in stored sums than they save.
WARPS = 8


@triton.jit(do_not_specialize=["N"])
def _read_kernel(
    x, pre, gain, h, rho, N: tl.int64, eps,
    D: tl.constexpr, BD: tl.constexpr, n: tl.constexpr, BT: tl.constexpr, COPIES: tl.constexpr, STATIC: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    inside = t < N
    d = tl.arange(0, BD)
    ok = inside[:, None] & (d < D)[None, :]
    a_pre = load_weights(pre, t, inside, n, STATIC)
    u = weighted(load_streams(x, t, d, ok, D, n, COPIES), a_pre, n, 0, 1)
    if NORM:
        r = tl.rsqrt(tl.sum(u * u, 1) / D + eps)
        tl.store(rho + t, r, mask=inside)
        u = u * r[:, None] * tl.load(gain + d, mask=d < D, other=0.0)[None, :]
    tl.store(h + t[:, None] * D + d[None, :], u.to(h.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["N"])
def _read_backward_kernel(
    dh, x, pre, gain, rho, dpre, c, dgain, N: tl.int64,
    D: tl.constexpr, BD: tl.constexpr, n: tl.constexpr, BT: tl.constexpr, COPIES: tl.constexpr, STATIC: tl.constexpr,
    NORM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    sums = tl.zeros([BT, BD], tl.float32)
    if NORM:
        k = tl.load(gain + d, mask=d < D, other=0.0)[None, :]
    for start in tl.range(tl.program_id(0).to(tl.int64) * BT, N, tl.num_programs(0) * BT, num_stages=STAGES):
        t = start + tl.arange(0, BT)
        inside = t < N
        ok = inside[:, None] & (d < D)[None, :]
        g = tl.load(dh + t[:, None] * D + d[None, :], mask=ok, other=0.0).to(tl.float32)
        xs = load_streams(x, t, d, ok, D, n, COPIES)
        if NORM:
            a_pre = load_weights(pre, t, inside, n, STATIC)
            r = tl.load(rho + t, mask=inside, other=0.0)
            u = weighted(xs, a_pre, n, 0, 1) * r[:, None]
            sums += g * u
            g = g * k
            along = tl.sum(g * u, 1) / D
            tl.store(c + t, along, mask=inside)
            g = r[:, None] * (g - u * along[:, None])
        for i in tl.static_range(n):
            tl.store(dpre + t * n + i, tl.sum(g * xs[i], 1), mask=inside)
    if NORM:
        tl.store(dgain + tl.program_id(0) * D + d, tl.sum(sums, 0), mask=d < D)


@triton.jit(do_not_specialize=["N"])
def _norm_backward_kernel(
    dh, h, x, pre, gain, rho, c, dgain, N: tl.int64,
    D: tl.constexpr, BD: tl.constexpr, n: tl.constexpr, BT: tl.constexpr, COPIES: tl.constexpr, STATIC: tl.constexpr,
    SMALL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    k = tl.load(gain + d, mask=d < D, other=1.0)[None, :]
    # u cannot be recovered from h where the gain is close to zero.
    inexact = tl.min(tl.min(tl.abs(k), 1), 0) < SMALL
    back = 1.0 / tl.where(tl.abs(k) < SMALL, 1.0, k)
    sums = tl.zeros([BT, BD], tl.float32)
    for start in tl.range(tl.program_id(0).to(tl.int64) * BT, N, tl.num_programs(0) * BT, num_stages=STAGES):
        t = start + tl.arange(0, BT)
        inside = t < N
        ok = inside[:, None] & (d < D)[None, :]
        at = t[:, None] * D + d[None, :]
        g = tl.load(dh + at, mask=ok, other=0.0).to(tl.float32)
        u = tl.load(h + at, mask=ok, other=0.0).to(tl.float32) * back
        if inexact:
            u = weighted(load_streams(x, t, d, ok, D, n, COPIES), load_weights(pre, t, inside, n, STATIC), n, 0, 1)
            u = u * tl.load(rho + t, mask=inside, other=0.0)[:, None]
        sums += g * u
        tl.store(c + t, tl.sum(g * k * u, 1) / D, mask=inside)
    tl.store(dgain + tl.program_id(0) * D + d, tl.sum(sums, 0), mask=d < D)


def _options(x: Tensor, copies: bool, n: int, pre: Tensor, gain: Tensor | None) -> dict[str, int | bool]:
    tile, block = row_tile(x.shape[-1], x.shape[0])
    shape: dict[str, int | bool] = {"D": x.shape[-1], "BD": block, "n": n, "BT": tile}
    return shape | {"COPIES": copies, "STATIC": pre.ndim == 1, "NORM": gain is not None}


def read(x: Tensor, copies: bool, n: int, pre: Tensor, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
    """Return h [N, D] in x's dtype, and with a norm rho [N]. pre: [N, n], or [n] for all tokens."""
    tokens, dim = x.shape[0], x.shape[-1]
    h = torch.empty(tokens, dim, dtype=x.dtype, device=x.device)
    rho = None if gain is None else torch.empty(tokens, dtype=torch.float32, device=x.device)
    if tokens:
        options = _options(x, copies, n, pre, gain)
        launch(
            _read_kernel, (cdiv(tokens, int(options["BT"])),), x,
            x, pre, x if gain is None else gain, h, x if rho is None else rho, tokens, eps,
            **options, num_warps=_warps(options),
        )  # fmt: skip
    return h, rho


def read_backward(
    dh: Tensor, x: Tensor, copies: bool, n: int, pre: Tensor, gain: Tensor | None, rho: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return dpre [N, n], c [N] and dgain [D]."""
    tokens, dim = x.shape[0], x.shape[-1]
    dpre = torch.empty(tokens, n, dtype=torch.float32, device=x.device)
    c = part = None
    options = _options(x, copies, n, pre, gain) | {"BT": 1}
    warps = _warps(options)
    # Each program stores a row of sums for dgain.
    programs = min(SMS * max(1, WARPS // warps), tokens)
    if gain is not None:
        c = torch.empty(tokens, dtype=torch.float32, device=x.device)
        part = torch.empty(programs, dim, dtype=torch.float32, device=x.device)
    if tokens:
        launch(
            _read_backward_kernel, (programs,), x,
            dh, x, pre, x if gain is None else gain, x if rho is None else rho, dpre, x if c is None else c,
            x if part is None else part, tokens, **options, STAGES=_stages(x, n + 1, 3), num_warps=warps,
        )  # fmt: skip
    return dpre, c, None if part is None else sum_programs(part) if tokens else part.new_zeros(dim)


def norm_backward(
    dh: Tensor, h: Tensor, x: Tensor, copies: bool, n: int, pre: Tensor, gain: Tensor, rho: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return c [N] and dgain [D] from the result h of the read. The kernel reads the streams only if a gain is close to zero."""
    tokens = len(x)
    options = _options(x, copies, n, pre, None) | {"BT": 1}
    del options["NORM"]
    warps = _warps(options)
    programs = min(SMS * max(1, WARPS // warps), tokens)
    c = torch.empty(tokens, dtype=torch.float32, device=x.device)
    part = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    if tokens:
        launch(
            _norm_backward_kernel, (programs,), x, dh, h, x, pre, gain, rho, c, part, tokens,
            **options, SMALL=2**-7 if h.dtype == torch.float16 else 1e-30, STAGES=_stages(x, 2, 4), num_warps=warps,
        )  # fmt: skip
    return c, sum_programs(part) if tokens else gain.new_zeros(gain.shape)


def _stages(x: Tensor, rows: int, wanted: int) -> int:
    """Return how many tokens' rows may be loaded ahead within a small GPU's shared memory."""
    return max(1, min(wanted, 90_000 // (rows * next_power_of_2(x.shape[-1]) * x.element_size())))


def _warps(options: dict[str, int | bool]) -> int:
    return max(1, min(32, options["BT"] * options["BD"] // 512))
