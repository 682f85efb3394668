"""Products of the streams with W and their backward, as products of large matrices:

    z = x' W;      P = dz Wᵀ, the gradient of x' through z;      dW = x'ᵀ dz

over all n D channels for mHC (W [n D, K]), stream by stream for Hyper-Connections (W [D, K], so few columns that the backward of
the write forms P itself). For bf16 streams the products run in bf16 with fp32 sums. The fp32 factors W and dz become sums of two
bf16 numbers, padded to K' columns (whole 16 bytes), one part after the other:

    Wᵀ: high, low, high;      dz: high, high, low

Few tokens without gradients use W alone: their kernels split the part of W that they have loaded (`split_by_kernels`).

z and dW lose nothing this way. P, one product over 3 K' columns, loses only what is below 2^-16 and its own rounding.
"""

from typing import Any

import torch
from torch import Tensor

from depthmix.ops.matmul import matmul, wide_product

# bf16 has the range of fp32; fp16 has not.
HALF = torch.bfloat16
FEW_TOKENS = 64


def padded(columns: int) -> int:
    """Return K': the number of columns padded to whole 16 bytes of bf16."""
    return -(-columns // 8) * 8


def halves_of(w: Tensor) -> Tensor:
    """Split W [..., C, K] in fp32 into bf16 rows high, low and high again: [..., 3 K', C]."""
    rows, columns = w.mT, w.shape[-1]
    out = torch.zeros(*w.shape[:-2], 3, padded(columns), w.shape[-2], dtype=HALF, device=w.device)
    high = out[..., 0, :columns, :].copy_(rows)
    out[..., 1, :columns, :].copy_(rows - high)
    out[..., 2, :columns, :].copy_(high)
    return out.flatten(-3, -2)


def split_by_kernels(x: Tensor, w: Tensor) -> bool:
    """Return whether kernels split W [C, K] themselves: the same numbers without `halves_of`, which launches five kernels.

    Each program splits all of W, so this is for the tokens of one program. W must be the transpose of a contiguous [K, C].
    """
    return x.dtype == HALF and x.shape[0] <= FEW_TOKENS and w.ndim == 2 and w.stride() == (1, len(w))


def product(x: Tensor, w: Tensor, halves: Tensor | None, joint: bool) -> Tensor:
    """Return z of streams [N, n, D]: [N, K] if joint, otherwise [N, n, K], in fp32."""
    rows, columns = _rows(x, w), w.shape[-1]
    if halves is None and not (x.is_cuda and split_by_kernels(x, w)):
        z = matmul(rows.float(), w)
    else:
        if halves is None:
            high = low = w.mT
        else:
            half = padded(columns)
            high, low = halves[:columns], halves[half : half + columns]
        if x.is_cuda:
            from depthmix.ops.depth_sum.kernels.scores import SplitRows, add_and_score

            # The fastest tiles that still fit on small GPUs. A kernel that splits W needs more room.
            deep = len(w) >= 128 and columns <= 32 and halves is not None
            shape: dict[str, Any] = {"tile": 64, "depth": 128, "warps": 4} if deep else {}
            z = add_and_score(rows, None, SplitRows(high, low), **shape)[1]
        else:
            z = matmul(rows.float(), (high.float() + low.float()).t())
    return z if joint else z.view(*x.shape[:2], columns)


def product_backward(dz: Tensor, w: Tensor, halves: Tensor | None, n: int) -> Tensor:
    """Return P [N, n, D] of mHC's dz: fp32 for dz [N, K] in fp32, bf16 for dz in parts [N, 3 K']."""
    if halves is None:
        p = matmul(dz, w.t())
    elif dz.is_cuda:
        from depthmix.ops.stream_mix.kernels.thin_product import thin_product

        p = thin_product(dz, halves)
    else:
        p = matmul(dz.float(), halves.float()).to(HALF)
    return p.view(len(dz), n, len(w) // n)


def weight_gradient(x: Tensor, dz: Tensor, w: Tensor, n: int) -> Tensor:
    """Return dW in fp32.

    x: [N, n, D], or [N, D] if every stream is a copy of it. dz: in fp32, or in parts that end with high and low.
    """
    if x.ndim == 2:
        x = x.unsqueeze(1).expand(-1, n, -1)
    columns, half = w.shape[-1], padded(w.shape[-1])
    if dz.dtype != HALF:
        return matmul(dz.view(-1, columns).t(), _rows(x, w).float()).t()
    high_and_low = dz.view(-1, dz.shape[-1])[:, -2 * half :].t()
    both = wide_product(high_and_low, _rows(x, w))
    return (both[:columns] + both[half : half + columns]).t()


def _rows(x: Tensor, w: Tensor) -> Tensor:
    """Return the rows that W multiplies: all streams of a token together, or each stream for itself."""
    return x.reshape(-1, len(w))
