"""Scores of a fresh source for all of its readers, from one read of it, and their gradient: thin matrix products.

    fresh = v + add;      scores = fresh wᵀ;      dw = dscoresᵀ v

On tensor cores, fp32 weights and gradients are split into two halves of the sources' precision, so that nothing of them is lost.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.depth_attention.kernels.tiling import SplitRows
from depthmix.ops.gpu.addresses import address_table
from depthmix.ops.gpu.launch import launch
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2
from depthmix.ops.matmul import matmul, wide_product


@triton.jit(do_not_specialize=["N", "rows"])
def _score_kernel(
    v, add, fresh, high, low, s, N: tl.int64, rows: tl.int32,
    D: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr,
    ACROSS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    row = tl.arange(0, BR)
    dots = tl.zeros([BT, BR], tl.float32)
    for k in range(0, D, BK):
        d = k + tl.arange(0, BK)
        at, inside = t[:, None] * D + d[None, :], (t < N)[:, None] & (d < D)[None, :]
        x = tl.load(v + at, mask=inside, other=0.0)
        if ADD:
            x = (x.to(tl.float32) + tl.load(add + at, mask=inside, other=0.0).to(tl.float32)).to(v.dtype.element_ty)
            tl.store(fresh + at, x, mask=inside)
        w_ok = (row < rows)[:, None] & (d < D)[None, :]
        w = tl.load(high + row[:, None] * D + d[None, :], mask=w_ok, other=0.0)
        dots = tl.dot(x, tl.trans(w), dots, input_precision="ieee")
        if SPLIT:
            rest = tl.load(low + row[:, None] * D + d[None, :], mask=w_ok, other=0.0)
            dots = tl.dot(x, tl.trans(rest), dots, input_precision="ieee")
    at = row.to(tl.int64)[None, :] * N + t[:, None] if ACROSS else t[:, None] * rows + row[None, :]
    tl.store(s + at, dots, mask=(t < N)[:, None] & (row < rows)[None, :])


def add_and_score(
    v: Tensor, add: Tensor | None, w: Tensor | SplitRows, *, across: bool = False
) -> tuple[Tensor, Tensor]:
    """Return v + add, rounded once (v itself without add), and its dot products [N, R] fp32 with the rows of w [R, D] fp32.

    w: rows, or their halves in v's dtype.
    across: store the products of one row contiguously, which reads without gradients prefer.
    """
    dim = v.shape[-1]
    tokens = v.numel() // dim
    high, low = w if isinstance(w, SplitRows) else SplitRows.of(w, v.dtype)
    fresh = v if add is None else torch.empty_like(v)
    shape = (len(high), tokens) if across else (tokens, len(high))
    scores = torch.empty(shape, dtype=torch.float32, device=v.device)
    if tokens:
        small = v.element_size() == 2
        up = max(16, next_power_of_2(len(high)))
        long = dim >= 1024 and small and up <= 64
        # With so few tokens larger tiles leave cores idle.
        few = across and tokens < 1 << 15
        tile = 128 if up <= 64 and small and not long and not few else 64
        warps, stages = 8 if tile == 128 else 4, 4 if long else 3 if small and up <= 64 else 2
        if few and add is not None and small and up <= 64:
            tile, warps, stages = 32, 2, 3
        depth = min(64 if small else 32, max(16, next_power_of_2(dim)))
        launch(
            _score_kernel, (cdiv(tokens, tile),), v,
            v, v if add is None else add, fresh, high, low, scores, tokens, len(high),
            D=dim, BT=tile, BR=up, BK=depth, ADD=add is not None, SPLIT=small, ACROSS=across,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return fresh, scores.t() if across else scores


@triton.jit(do_not_specialize=["N", "columns"])
def _gather_kernel(table, out, N: tl.int64, columns: tl.int32, BT: tl.constexpr, BC: tl.constexpr, SPLIT: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    column_ok = c < columns
    base = tl.load(table + 2 * c, mask=column_ok, other=0)
    stride = tl.load(table + 2 * c + 1, mask=column_ok, other=0)
    # Padding columns have no address.
    filled = column_ok & (base != 0)
    at = base.to(tl.pointer_type(tl.float32))[None, :] + t[:, None] * stride[None, :]
    x = tl.load(at, mask=(t < N)[:, None] & filled[None, :], other=0.0)
    head = x.to(out.dtype.element_ty)
    to = out + t[:, None] * ((1 + SPLIT) * columns) + c[None, :]
    inside = (t < N)[:, None] & column_ok[None, :]
    tl.store(to, head, mask=inside)
    if SPLIT:
        tl.store(to + columns, (x - head.to(tl.float32)).to(out.dtype.element_ty), mask=inside)


def score_backward(v: Tensor, ds: Sequence[Tensor]) -> Tensor:
    """Compute the gradients of the R rows that scored a source: [1 or 2, R, D] fp32, whose first dimension is to be summed."""
    dim, n = v.shape[-1], len(ds)
    tokens = v.numel() // dim
    if not tokens or not n:
        return torch.zeros(1, n, dim, dtype=torch.float32, device=v.device)
    # fp16 is not split: its range is too small for gradients.
    split = v.dtype == torch.bfloat16
    # Whole rows of 16 bytes.
    columns = -(-n // 8) * 8
    both = torch.empty(tokens, (1 + split) * columns, dtype=v.dtype if split else torch.float32, device=v.device)
    fields = [(x.data_ptr(), x.stride(0)) for x in ds] + [(0, 0)] * (columns - n)
    wide = min(128, next_power_of_2(columns))
    launch(
        _gather_kernel, (cdiv(tokens, 32), cdiv(columns, wide)), v,
        address_table(tuple(a for pair in fields for a in pair), v.device), both, tokens, columns,
        BT=32, BC=wide, SPLIT=split, num_warps=4,
    )  # fmt: skip
    return _products(both, v, columns)[:, :n]


def rows_from_halves(both: Tensor, v: Tensor, columns: int) -> Tensor:
    """Return the sums over tokens of a column's number times v: [columns, D] fp32.

    both: [N, columns]; for bf16 the high and low halves side by side.
    """
    dw = _products(both, v, columns)
    return dw[0] if len(dw) == 1 else dw[0] + dw[1]


def _products(both: Tensor, v: Tensor, columns: int) -> Tensor:
    """Return those sums for each half: [1 or 2, columns, D]."""
    rows = v.reshape(-1, v.shape[-1])
    if both.dtype == torch.float32:
        return matmul(both.t(), rows.float()).unsqueeze(0)
    return wide_product(both.t(), rows).view(2, columns, -1)
