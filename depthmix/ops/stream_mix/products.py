"""Products of the streams with W and their backward, as products of large matrices:

    z = x' W;      P = dz Wᵀ, the gradient of x' through z;      dW = x'ᵀ dz

over all n D channels for mHC (W [n D, K]), stream by stream for Hyper-Connections (W [D, K], so few columns that the backward of
the write forms P itself). For bf16 streams the products run in bf16 with fp32 sums. The fp32 factors W and dz become sums of two
bf16 numbers, padded to K' columns (whole 16 bytes), one part after the other:

    Wᵀ: high, low, high;      dz: high, high, low

Few tokens without gradients use W alone: their kernels split the part of W that they have loaded (`split_by_kernels`).
Kernels split the channels of z among programs (kernels/split_product.py), so z comes in slices.

z and dW lose nothing this way. P, one product over 3 K' columns, loses only what is below 2^-16 and its own rounding.
"""

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

    Every tile of tokens splits all of W again, so this is for few of them. W must be the transpose of a contiguous [K, C].
    """
    return x.dtype == HALF and x.shape[0] <= FEW_TOKENS and w.ndim == 2 and w.stride() == (1, len(w))


def product(x: Tensor, w: Tensor, halves: Tensor | None, joint: bool) -> Tensor:
    """Return slices of z of streams [N, n, D], whose sum is z: [S, N, K] if joint, otherwise [S, N, n, K], in fp32."""
    if x.is_cuda and (halves is not None or split_by_kernels(x, w)):
        from depthmix.ops.stream_mix.kernels.split_product import split_product

        return split_product(x, x.shape[1], w, halves, joint=joint)[0]
    if halves is not None:
        columns, half = w.shape[-1], padded(w.shape[-1])
        w = (halves[:columns].float() + halves[half : half + columns].float()).t()
    z = matmul(_rows(x, w).float(), w)
    return (z if joint else z.view(*x.shape[:2], z.shape[-1])).unsqueeze(0)


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
