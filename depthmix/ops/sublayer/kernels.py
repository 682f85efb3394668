"""Kernels for the work between the matrix products of a sublayer, one launch each, for passes without gradients.

turn_and_store   queries, keys and values [B, T, heads, d] as their products return them: RMSNorm of queries and keys (or
                 none), rotary positions, and keys and values stored in a cache
activate         silu(gate) * up, or relu(up)²
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.dependent_launch import dependent_launch, wait_for_previous_kernel
from depthmix.ops.gpu.launch import launch
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2


@triton.jit
def _turn(x, out, at, to, gain, c, ok, cos, sin, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """Normalise and rotate rows of heads: channels c and c + HALF rotate together. cos, sin: pointers to those of the token."""
    a = tl.load(x + at, mask=ok, other=0.0).to(tl.float32)
    z = tl.load(x + at + HALF, mask=ok, other=0.0).to(tl.float32)
    inside = c < HALF
    # The norm's result is rounded.
    if NORM:
        r = tl.rsqrt(tl.sum(a * a + z * z, 1) / (2 * HALF) + eps)[:, None]
        a = a * r * tl.load(gain + c, mask=inside, other=0.0).to(tl.float32)[None, :]
        z = z * r * tl.load(gain + HALF + c, mask=inside, other=0.0).to(tl.float32)[None, :]
        a, z = a.to(x.dtype.element_ty).to(tl.float32), z.to(x.dtype.element_ty).to(tl.float32)
    first = (
        a * tl.load(cos + c, mask=inside, other=0.0)[None, :] - z * tl.load(sin + c, mask=inside, other=0.0)[None, :]
    )
    cos, sin = cos + HALF, sin + HALF
    second = (
        z * tl.load(cos + c, mask=inside, other=0.0)[None, :] + a * tl.load(sin + c, mask=inside, other=0.0)[None, :]
    )
    tl.store(out + to, first.to(out.dtype.element_ty), mask=ok)
    tl.store(out + to + HALF, second.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["T", "cos_row", "slots"])
def _turn_kernel(
    q, k, v, cos, sin, q_gain, k_gain, position, q_out, keys, values, T: tl.int32, cos_row: tl.int32, slots: tl.int64, eps,
    H: tl.constexpr, BH: tl.constexpr, KV: tl.constexpr, BKV: tl.constexpr, HALF: tl.constexpr, BHALF: tl.constexpr,
    NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = 2 * HALF
    if EARLY:
        wait_for_previous_kernel()
    # One of B * T.
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    c = tl.arange(0, BHALF)
    cos, sin = cos + (b * cos_row + t) * D, sin + (b * cos_row + t) * D
    if tl.program_id(1) == 0:
        head = tl.arange(0, BH)
        ok = (head < H)[:, None] & (c < HALF)[None, :]
        at = (token * H + head)[:, None] * D + c[None, :]
        to = ((b * H + head) * T + t)[:, None] * D + c[None, :]
        _turn(q, q_out, at, to, q_gain, c, ok, cos, sin, eps, HALF, NORM)
    else:
        # Other names than in the first branch: a name that both branches define must have one shape.
        kv_head = tl.arange(0, BKV)
        kv_ok = (kv_head < KV)[:, None] & (c < HALF)[None, :]
        row = (token * KV + kv_head)[:, None] * D + c[None, :]
        place = ((b * KV + kv_head) * slots + tl.load(position) + t)[:, None] * D + c[None, :]
        _turn(k, keys, row, place, k_gain, c, kv_ok, cos, sin, eps, HALF, NORM)
        tl.store(values + place, tl.load(v + row, mask=kv_ok, other=0.0), mask=kv_ok)
        tl.store(values + place + HALF, tl.load(v + row + HALF, mask=kv_ok, other=0.0), mask=kv_ok)


@triton.jit(do_not_specialize=["n"])
def _activate_kernel(
    gate, up, out, n: tl.int64, UNIT: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        wait_for_previous_kernel()
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # A multiple of 16 bytes where D allows it.
    ok = i < n * UNIT
    x = tl.load(up + i, mask=ok, other=0.0).to(tl.float32)
    if GATED:
        g = tl.load(gate + i, mask=ok, other=0.0).to(tl.float32)
        # Round, as PyTorch's operators do.
        g = (g / (1.0 + tl.exp(-g))).to(out.dtype.element_ty).to(tl.float32)
        y = g * x
    else:
        y = tl.maximum(x, 0.0)
        y = y * y
    tl.store(out + i, y.to(out.dtype.element_ty), mask=ok)


def turn_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_gain: Tensor | None, k_gain: Tensor | None, eps: float,
    position: Tensor, keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    """Return the queries [B, heads, T, d], and store keys and values.

    keys, values: caches [B, kv heads, slots, d], which change from position [1] on. cos, sin: [B or 1, 1, T, d].
    """
    batch, length, heads, dim = q.shape
    out = q.new_empty(batch, heads, length, dim)
    if q.numel():
        block, rows = next_power_of_2(dim // 2), next_power_of_2(heads)
        launch(
            _turn_kernel, (batch * length, 2), q,
            q, k, v, cos, sin, q if q_gain is None else q_gain, q if k_gain is None else k_gain, position, out, keys, values,
            length, length if len(cos) > 1 else 0, keys.shape[2], eps,
            H=heads, BH=rows, KV=k.shape[2], BKV=next_power_of_2(k.shape[2]), HALF=dim // 2, BHALF=block,
            NORM=q_gain is not None, num_warps=min(8, max(1, rows * block // 256)), **dependent_launch(q),
        )  # fmt: skip
    return out


def activate(gate: Tensor | None, up: Tensor) -> Tensor:
    """Return silu(gate) * up, or relu(up)² without a gate."""
    out = torch.empty_like(up)
    n = up.numel()
    if n:
        # Small blocks, so that few numbers are spread over several cores.
        block, unit = 1024 if n >= 1 << 20 else 256, 8 if n % 8 == 0 else 1
        launch(
            _activate_kernel, (cdiv(n, block),), up,
            up if gate is None else gate, up, out, n // unit, UNIT=unit, BLOCK=block, GATED=gate is not None,
            num_warps=max(1, block // 256), **dependent_launch(up),
        )  # fmt: skip
    return out
