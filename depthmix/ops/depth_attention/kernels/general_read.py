"""Kernels for depth attention with the paper's ablations, read by read: heads, sigmoid, keys without a norm,
normed values, per-token queries.

A program takes one token, whose channels lie as [heads, channels of a head]; heads beyond H and channels beyond D/H are zeros.
The equations are those of reference.py, and of reference_autograd.py for the backward. The backward mixes o again from the logits,
as layer_backward.py does. With several ways, each launch adds to the source gradients of the launch before it.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.depth_attention.kernels.read import programs_for, stages
from depthmix.ops.gpu.addresses import address_table, aligned
from depthmix.ops.gpu.launch import launch
from depthmix.ops.gpu.program_sums import sum_programs
from depthmix.ops.gpu.sizes import next_power_of_2


@triton.jit
def _row(address, at, like, ALIGNED: tl.constexpr):
    """Return pointers into the tensor at an address, of the same type as `like`."""
    row = address.to(tl.pointer_type(like.dtype.element_ty)) + at
    if ALIGNED:
        # The compiler knows no alignment of an address that comes from a table.
        row = tl.multiple_of(row, [1, 16])
    return row


@triton.jit
def _load(row, ok):
    return tl.load(row, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _total(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _weight(s, lse, SOFTMAX: tl.constexpr):
    return tl.exp(s - lse) if SOFTMAX else tl.sigmoid(s)


@triton.jit(do_not_specialize=["N", "n"])
def _read_kernel(
    table, u, gain, y, s, lse, N: tl.int64, n: tl.int32, eps, out_eps,
    D: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, BY_TOKEN: tl.constexpr, KEY_NORM: tl.constexpr,
    VALUE_NORM: tl.constexpr, SOFTMAX: tl.constexpr, NORM: tl.constexpr, KEEP: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    head, c = tl.arange(0, BH), tl.arange(0, BC)
    d = head[:, None] * (D // H) + c[None, :]
    head_ok = head < H
    ok = head_ok[:, None] & (c < D // H)[None, :]
    q = tl.load(u + (t * D if BY_TOKEN else 0) + d, mask=ok, other=0.0)
    top, z = tl.full([BH], float("-inf"), tl.float32), tl.zeros([BH], tl.float32)
    o = tl.zeros([BH, BC], tl.float32)
    for i in tl.range(0, n, num_stages=STAGES):
        v = _load(_row(tl.load(table + i), t * D + d, y, ALIGNED), ok)
        logit = tl.sum(v * q, 1)
        if KEY_NORM or VALUE_NORM:
            r = tl.rsqrt(_total(v * v) / D + eps)
            if KEY_NORM:
                logit *= r
            if VALUE_NORM:
                v *= r
        if KEEP:
            tl.store(s + (i * N + t) * H + head, logit, mask=head_ok)
        if SOFTMAX:
            higher = tl.maximum(top, logit)
            old, new = tl.exp(top - higher), tl.exp(logit - higher)
            top, z, o = higher, z * old + new, o * old[:, None] + new[:, None] * v
        else:
            o += tl.sigmoid(logit)[:, None] * v
    if SOFTMAX:
        if KEEP:
            tl.store(lse + t * H + head, top + tl.log(z), mask=head_ok)
        o /= z[:, None]
    if NORM:
        o *= tl.rsqrt(_total(o * o) / D + out_eps) * tl.load(gain + d, mask=ok, other=0.0)
    tl.store(y + t * D + d, o.to(y.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["N", "n"])
def _backward_kernel(
    table, dy, u, gain, s, lse, du, part, N: tl.int64, n: tl.int32, eps, out_eps,
    D: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, BY_TOKEN: tl.constexpr, KEY_NORM: tl.constexpr,
    VALUE_NORM: tl.constexpr, SOFTMAX: tl.constexpr, NORM: tl.constexpr, BEFORE: tl.constexpr, LAST: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    head, c = tl.arange(0, BH), tl.arange(0, BC)
    d = head[:, None] * (D // H) + c[None, :]
    head_ok = head < H
    ok = head_ok[:, None] & (c < D // H)[None, :]
    # The weight of an only source is 1 whatever its logit.
    several = tl.where(n > 1, 1.0, 0.0)
    du_all, dgain = tl.zeros([BH, BC], tl.float32), tl.zeros([BH, BC], tl.float32)
    for t in tl.range(tl.program_id(0).to(tl.int64), N, tl.num_programs(0), num_stages=1):
        q = tl.load(u + (t * D if BY_TOKEN else 0) + d, mask=ok, other=0.0)
        o, z = tl.zeros([BH, BC], tl.float32), tl.zeros([BH], tl.float32)
        if SOFTMAX:
            z = tl.load(lse + t * H + head, mask=head_ok, other=0.0)
        if SOFTMAX or NORM:
            for i in range(n):
                logit = tl.load(s + (i * N + t) * H + head, mask=head_ok, other=0.0)
                v = _load(_row(tl.load(table + 3 * i), t * D + d, dy, ALIGNED), ok)
                if VALUE_NORM:
                    v *= tl.rsqrt(_total(v * v) / D + eps)
                o += _weight(logit, z, SOFTMAX)[:, None] * v
        g = _load(dy + t * D + d, ok)
        if NORM:
            rho = tl.rsqrt(_total(o * o) / D + out_eps)
            dgain += g * o * rho
            g *= tl.load(gain + d, mask=ok, other=0.0)
            g = rho * (g - o * (_total(g * o) * rho * rho / D))
        delta = tl.sum(g * o, 1)
        # This token's part of du. A long sum in one accumulator would be less exact.
        token_du = tl.zeros([BH, BC], tl.float32)
        for i in range(n):
            v = _load(_row(tl.load(table + 3 * i), t * D + d, dy, ALIGNED), ok)
            logit = tl.load(s + (i * N + t) * H + head, mask=head_ok, other=0.0)
            p, dp = _weight(logit, z, SOFTMAX), tl.sum(g * v, 1)
            if KEY_NORM or VALUE_NORM:
                r = tl.rsqrt(_total(v * v) / D + eps)
            if VALUE_NORM:
                dp *= r
            ds = p * (dp - delta) * several if SOFTMAX else dp * p * (1 - p)
            dv = p[:, None] * g
            if VALUE_NORM:
                dv = r * dv - (tl.sum(p * dp, 0) * r * r / D) * v
            if KEY_NORM:
                dv -= (tl.sum(ds * logit, 0) * r * r / D) * v
                ds *= r
            dv += ds[:, None] * q
            token_du += ds[:, None] * v
            if BEFORE:
                dv += _load(_row(tl.load(table + 3 * i + 1), t * D + d, s, ALIGNED), ok)
            if LAST:
                tl.store(_row(tl.load(table + 3 * i + 2), t * D + d, dy, ALIGNED), dv.to(dy.dtype.element_ty), mask=ok)
            else:
                tl.store(_row(tl.load(table + 3 * i + 2), t * D + d, s, ALIGNED), dv, mask=ok)
        if BY_TOKEN:
            tl.store(du + t * D + d, token_du, mask=ok)
        else:
            du_all += token_du
    part += tl.program_id(0).to(tl.int64) * ((not BY_TOKEN) + NORM) * D + d
    if not BY_TOKEN:
        tl.store(part, du_all, mask=ok)
    if NORM:
        tl.store(part + (not BY_TOKEN) * D, dgain, mask=ok)


def _shape(
    dim: int, heads: int, u: Tensor, gain: Tensor | None, key_norm: bool, softmax: bool, value_norm: bool
) -> dict[str, object]:
    rows, columns = next_power_of_2(heads), next_power_of_2(dim // heads)
    return {
        "D": dim, "H": heads, "BH": rows, "BC": columns, "BY_TOKEN": u.ndim > 1, "KEY_NORM": key_norm, "VALUE_NORM": value_norm,
        "SOFTMAX": softmax, "NORM": gain is not None, "num_warps": min(32, max(1, rows * columns // 512)),
    }  # fmt: skip


def _programs(tokens: int, warps: object, like: Tensor) -> int:
    """Return the number of programs of the backward: more than run at a time, because long sums are less exact."""
    assert isinstance(warps, int)
    return min(tokens, 8 * programs_for(tokens, warps, like))


def read(
    u: Tensor, gain: Tensor | None, sources: Sequence[Tensor], *, eps: float, out_eps: float, key_norm: bool, heads: int,
    softmax: bool, value_norm: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the mixture, shaped like a source.

    With `keep` also return what the backward needs: logits [n, N, H] and, for softmax, their log-sum-exp [N, H].
    u: [D] or [N, D], in fp32; all tensors contiguous.
    """
    v = sources[-1]
    dim, tokens = v.shape[-1], v.numel() // v.shape[-1]
    y, kept = torch.empty_like(v), tokens if keep else 0
    s = torch.empty(len(sources), kept, heads, dtype=torch.float32, device=v.device)
    lse = torch.empty(kept if softmax else 0, heads, dtype=torch.float32, device=v.device)
    if tokens:
        launch(
            _read_kernel, (tokens,), v,
            address_table(tuple(x.data_ptr() for x in sources), v.device),
            u, u if gain is None else gain, y, s, lse, tokens, len(sources), eps, out_eps,
            KEEP=keep, ALIGNED=aligned(dim // heads, sources), STAGES=stages(4, v, 1),
            **_shape(dim, heads, u, gain, key_norm, softmax, value_norm),
        )  # fmt: skip
    return y, s, lse


def backward(
    dy: Tensor, u: Tensor, gain: Tensor | None, sources: Sequence[Tensor], s: Tensor, lse: Tensor, *, eps: float,
    out_eps: float, key_norm: bool, heads: int, softmax: bool, value_norm: bool, before: Sequence[Tensor] | None, last: bool,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:  # fmt: skip
    """Compute the gradients of u, of the gain and of every source, given that of the mixture.

    before: source gradients from other ways, to which this launch adds. They stay in fp32 until the last way.
    """
    dim, tokens = dy.shape[-1], dy.numel() // dy.shape[-1]
    dv = [torch.empty_like(x, dtype=x.dtype if last else torch.float32) for x in sources]
    if not tokens:
        return torch.zeros_like(u), None if gain is None else torch.zeros_like(gain), dv
    shape = _shape(dim, heads, u, gain, key_norm, softmax, value_norm)
    programs, shared = _programs(tokens, shape["num_warps"], dy), u.ndim == 1
    part = torch.empty(programs, shared + (gain is not None), dim, dtype=torch.float32, device=dy.device)
    du = torch.empty_like(u)
    addresses = zip(sources, before or dv, dv, strict=True)
    launch(
        _backward_kernel, (programs,), dy,
        address_table(tuple(t.data_ptr() for of_one in addresses for t in of_one), dy.device),
        dy, u, u if gain is None else gain, s, lse, du, part, tokens, len(sources), eps, out_eps,
        BEFORE=before is not None, LAST=last, ALIGNED=aligned(dim // heads, sources, before or (), dv), **shape,
    )  # fmt: skip
    sums = sum_programs(part) if part.shape[1] else part
    return sums[0] if shared else du, None if gain is None else sums[-1], dv
