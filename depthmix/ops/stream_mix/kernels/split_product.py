"""z = x' W for residual streams, with the channels split among programs, and the sums of x' where no write computes them.

                          channels of all streams
                  +-------------+-------------+-------------+
     tokens 0..63 | program 0,0 | program 0,1 | program 0,2 |    program (tile, part) stores slice z[part] for its tokens,
    tokens 64.127 | program 1,0 | program 1,1 | program 1,2 |    and slices of Σ x'² (and Σ x' of each stream)
                  +-------------+-------------+-------------+

W has so few columns that tiles of tokens alone are few programs: a single one in decoding, which walks over all channels and
waits for memory at every step. The kernel of the coefficients adds the slices up in a fixed order (coefficients.py). There are no
atomics, so a result has the same bits every time.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.launch import launch
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2
from depthmix.ops.stream_mix.kernels.tiles import SMS, dot_right, fold, load_products, splits, vector
from depthmix.ops.stream_mix.products import FEW_TOKENS, padded, split_by_kernels

# Parts of the channels: at most so many, of at least so many channels.
MAX_PARTS, MIN_CHANNELS = 64, 256


@triton.jit(do_not_specialize=["N", "blocks"])
def _product_kernel(
    x, w, z, sums, N: tl.int64, blocks: tl.int32,
    D: tl.constexpr, n: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, LOW: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    V: tl.constexpr, COPIES: tl.constexpr, REPEAT: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    # A block is BK channels of one stream. A program adds up `blocks` of them, of all n streams one after the other.
    PER_STREAM: tl.constexpr = (D + BK - 1) // BK
    SPLIT: tl.constexpr = LOW != 0
    part = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    inside = t < N
    k = tl.arange(0, KP)
    row = x + t[:, None] * (D if COPIES else n * D)
    dots = tl.zeros([BT, KP], tl.float32)
    squares, totals = tl.zeros([BT, BK // V], tl.float32), tl.zeros([BT, BK // V], tl.float32)
    first = tl.program_id(1) * blocks
    for block in range(first, tl.minimum(first + blocks, n * PER_STREAM)):
        start = block // PER_STREAM * D
        d = block % PER_STREAM * BK + tl.arange(0, BK)
        column = d if COPIES else start + d
        a = tl.load(row + column[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        high, low = load_products(w, start + d, (d < D)[:, None] & (k < K)[None, :], k, n * D, K, LOW)
        if SUMS > 0:
            v = a.to(tl.float32)
            squares += fold(v * v, BT, BK // V, V)
            if SUMS == 2:
                totals += fold(v, BT, BK // V, V)
        dots = dot_right(a if SPLIT else a.to(tl.float32), high, low, dots, SPLIT)
    slot = part * N + t
    for i in tl.static_range(REPEAT):
        at = z + (slot[:, None] * REPEAT + i) * K + k[None, :]
        tl.store(at, dots, mask=inside[:, None] & (k < K)[None, :])
    if SUMS == 1:
        tl.store(sums + slot, tl.sum(squares, 1), mask=inside)
    if SUMS == 2:
        for i in tl.static_range(REPEAT):
            tl.store(sums + (slot * REPEAT + i) * 2, tl.sum(totals, 1), mask=inside)
            tl.store(sums + (slot * REPEAT + i) * 2 + 1, tl.sum(squares, 1), mask=inside)


def count_parts(tiles: int, channels: int) -> int:
    """Return into how many parts to split the channels: a power of two, for 2 to 4 programs per multiprocessor.

    The count depends on the shape alone, not on the GPU, so that all GPUs add in the same order.

    tiles: of tokens.
    """
    wanted = min(MAX_PARTS, 4 * SMS // max(1, tiles), channels // MIN_CHANNELS)
    return 1 << (max(1, wanted).bit_length() - 1)


class Plan(NamedTuple):
    """Describe how programs share the work."""

    tile: int  # tokens of a program
    depth: int  # channels of a block
    tiles: int
    blocks: int  # of a part
    parts: int


@functools.lru_cache
def plan(rows: int, few: bool, streams: int, dim: int, split: bool) -> Plan:
    """Return how programs share the products of `rows` tokens. split: W in halves."""
    tile = 16 if few else 64
    depth = min(128 if split else 16, max(16, next_power_of_2(dim)))
    tiles, all_blocks = cdiv(rows, tile), streams * cdiv(dim, depth)
    blocks = cdiv(all_blocks, count_parts(tiles, streams * dim))
    return Plan(tile, depth, tiles, blocks, cdiv(all_blocks, blocks))


def split_product(
    x: Tensor, n: int, w: Tensor, halves: Tensor | None, *, joint: bool, sums: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return slices of z [S, N, K] if joint, otherwise [S, N, n, K], in fp32, and slices of the sums.

    Args:
        x: streams [N, n, D], or [N, D] if every stream is a copy of it.
        n: number of streams.
        w: [n D, K] if joint, otherwise [D, K], in fp32.
        halves: parts of w for bf16 streams (`halves_of`); None: the kernel splits w (`split_by_kernels`), or multiplies in fp32.
        joint: the streams of a token together.
        sums: also Σ x² [S, N] if joint, otherwise Σ x and Σ x² [S, N, n, 2].
    """
    copies, tokens, dim, columns = x.ndim == 2, x.shape[0], x.shape[-1], w.shape[-1]
    rows, streams, repeat = (tokens, n, 1) if joint else (tokens, 1, n) if copies else (tokens * n, 1, 1)
    low = 0
    if splits(x):
        low = padded(columns) * len(w) if halves is not None else -1 if split_by_kernels(x, w) else 0
    tile, depth, tiles, blocks, parts = plan(rows, tokens <= FEW_TOKENS, streams, dim, low != 0)
    shape = (parts, tokens) if joint else (parts, tokens, n)
    z = torch.empty((*shape, columns), dtype=torch.float32, device=x.device)
    found = None
    if sums:
        found = torch.empty(shape if joint else (*shape, 2), dtype=torch.float32, device=x.device)
    if rows:
        launch(
            _product_kernel, (tiles, parts), x,
            x, halves if low > 0 else w if low else w.contiguous(), z, z if found is None else found, rows, blocks,
            D=dim, n=streams, K=columns, KP=max(16, next_power_of_2(columns)), LOW=low, BT=tile, BK=depth, V=vector(x), COPIES=copies,
            REPEAT=repeat, SUMS=0 if found is None else 1 if joint else 2,
            # One stage with sums, which read the same tile as the products (tests/ops/test_kernel_stages.py).
            num_warps=4, num_stages=1 if sums else 3,
        )  # fmt: skip
    return z, found
