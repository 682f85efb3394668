"""mHC's P = dz Wᵀ for bf16 streams: a product over so few columns that its time is that of writing the result.

P = dz_high W_highᵀ + dz_high W_lowᵀ + dz_low W_highᵀ        (products.py), rounded once
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.launch import launch
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2

# Tokens, channels and warps of a program, and the parts of the channels that programs walk over.
TOKENS, CHANNELS, WARPS, PARTS = 128, 128, 8, 4


@triton.jit(do_not_specialize=["N"])
def _thin_kernel(
    dz, w, out, N: tl.int64,
    C: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PART: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    # dz: [N, 3 K], high, high and low; w: [3 K, C], high, low and high
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    k = tl.arange(0, KP)
    inside = (t < N)[:, None]
    dz_row = dz + t[:, None] * (3 * K) + k[None, :]
    high = tl.load(dz_row, mask=inside & (k < K)[None, :], other=0.0)
    low = tl.load(dz_row + 2 * K, mask=inside & (k < K)[None, :], other=0.0)
    first = tl.program_id(1) * PART
    for start in tl.range(first, first + PART, BC, num_stages=3):
        c = start + tl.arange(0, BC)
        at = w + k[:, None] * C + c[None, :]
        w_ok = (k < K)[:, None] & (c < C)[None, :]
        w_high, w_low = tl.load(at, mask=w_ok, other=0.0), tl.load(at + K * C, mask=w_ok, other=0.0)
        acc = tl.dot(low, w_high)
        acc = tl.dot(high, w_low, acc)
        acc = tl.dot(high, w_high, acc)
        tl.store(out + t[:, None] * C + c[None, :], acc.to(out.dtype.element_ty), mask=inside & (c < C)[None, :])


def thin_product(dz: Tensor, halves: Tensor) -> Tensor:
    """Multiply dz [N, 3 K'] by the parts of Wᵀ [3 K', C], both bf16: [N, C]."""
    tokens, channels, k = len(dz), halves.shape[1], len(halves) // 3
    out = torch.empty(tokens, channels, dtype=dz.dtype, device=dz.device)
    if tokens:
        part = cdiv(cdiv(channels, PARTS), CHANNELS) * CHANNELS
        launch(
            _thin_kernel, (cdiv(tokens, TOKENS), cdiv(channels, part)), dz, dz, halves, out, tokens,
            C=channels, K=k, KP=max(16, next_power_of_2(k)), PART=part, BT=TOKENS, BC=CHANNELS, num_warps=WARPS,
        )  # fmt: skip
    return out
