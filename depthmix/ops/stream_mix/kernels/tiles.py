"""Device functions that the kernels of residual streams share. A tile is BT tokens by BK channels; n streams are a tuple of n tiles.

A lane holds V neighbouring channels of a tile. A sum over channels stays L = BK / V partial sums per token until the last
chunk: one shuffle per program instead of one per chunk.
"""

# Triton knows no other way to add to a tuple:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.sizes import next_power_of_2

# Streaming multiprocessors of an H200. A constant, so that results do not depend on the GPU.
SMS = 132


@triton.jit
def load_streams(x, t, d, ok, D: tl.constexpr, n: tl.constexpr, COPIES: tl.constexpr):
    """Load n tiles in fp32. COPIES: x is [N, D], and every stream is a copy of it."""
    out = ()
    for i in tl.static_range(n):
        at = t[:, None] * D if COPIES else t[:, None] * (n * D) + i * D
        out = out + (tl.load(x + at + d[None, :], mask=ok, other=0.0).to(tl.float32),)
    return out


@triton.jit
def load_weights(at, t, inside, n: tl.constexpr, STATIC: tl.constexpr):
    """Load n numbers per token, a tuple of n [BT, 1]. STATIC: all tokens share them."""
    out = ()
    for i in tl.static_range(n):
        p = at + t * 0 + i if STATIC else at + t * n + i
        out = out + (tl.load(p, mask=inside, other=0.0)[:, None],)
    return out


@triton.jit
def weighted(xs, weights, n: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr):
    """Return Σ_i weights[FIRST + i STEP] x_i."""
    acc = weights[FIRST] * xs[0]
    for i in tl.static_range(1, n):
        acc = acc + weights[FIRST + i * STEP] * xs[i]
    return acc


@triton.jit
def written(xs, y, res, post, kind, n: tl.constexpr, RES: tl.constexpr):
    """Return x'_o = Σ_i res[o, i] x_i + post[o] y for every o, rounded: n tiles of the streams' dtype."""
    out = ()
    for o in tl.static_range(n):
        acc = weighted(xs, res, n, o * n, 1) if RES else xs[o]
        out = out + ((acc + post[o] * y).to(kind),)
    return out


@triton.jit
def fold(v, BT: tl.constexpr, L: tl.constexpr, V: tl.constexpr):
    """Reduce partial sums over channels: [BT, L V] -> [BT, L]."""
    return tl.sum(tl.reshape(v, [BT, L, V]), 2)


@triton.jit
def zeros(count: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """Return a tuple of zero accumulators."""
    out = ()
    for _ in tl.static_range(count):
        out = out + (tl.zeros([BT, BK], tl.float32),)
    return out


@triton.jit
def load_products(w, row, w_ok, k, C: tl.constexpr, K: tl.constexpr, LOW: tl.constexpr):
    """Load rows of W [BK, KP].

    LOW = 0: from W in fp32. LOW > 0: from the two parts of its transpose [.., C], LOW apart (products.py). LOW < 0: from its transpose
    in fp32, which is split here.
    """
    if LOW < 0:
        whole = tl.load(w + k.to(tl.int64)[None, :] * C + row[:, None], mask=w_ok, other=0.0)
        high = whole.to(tl.bfloat16)
        low = (whole - high.to(tl.float32)).to(tl.bfloat16)
    elif LOW > 0:
        at = w + k.to(tl.int64)[None, :] * C + row[:, None]
        high, low = tl.load(at, mask=w_ok, other=0.0), tl.load(at + LOW, mask=w_ok, other=0.0)
    else:
        high = tl.load(w + row[:, None] * K + k[None, :], mask=w_ok, other=0.0)
        low = high
    return high, low


@triton.jit
def dot_right(a, high, low, acc, SPLIT: tl.constexpr):
    """Return acc + a W for a in the activations' precision, losing nothing of W."""
    if SPLIT:
        acc = tl.dot(a, low, acc)
        acc = tl.dot(a, high, acc)
    else:
        acc = tl.dot(a, high, acc, input_precision="ieee")
    return acc


def vector(x: Tensor) -> int:
    """Return how many channels one load of 16 bytes brings."""
    return 16 // x.element_size()


def splits(x: Tensor) -> bool:
    """Return whether products with fp32 weights use two halves: bf16 has the range of fp32, fp16 has not."""
    return x.dtype == torch.bfloat16


def row_tile(dim: int, tokens: int) -> tuple[int, int]:
    """Return tokens and channels of a tile of whole rows: 2048 numbers, so that 4 warps keep those of n streams in registers."""
    block = next_power_of_2(dim)
    return max(1, min(2048 // block, 16, next_power_of_2(tokens))), block
