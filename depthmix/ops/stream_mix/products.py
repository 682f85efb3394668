"""The products of the streams with W and their backward, as products of large matrices:

    z = x' W;      P = dz Wᵀ, what z adds to the gradient of x';      dW = x'ᵀ dz

of all n D channels for mHC (W [n D, K]), stream by stream for Hyper-Connections (W [D, K]). For bf16 streams they run in bf16
with fp32 sums, and W and dz, which are fp32, as sums of two bf16 numbers, side by side with K' columns each, K' whole 16 bytes:

    W: high, low, high;      dz: high, high, low

so that z and dW lose nothing, and P, one product over 3 K' columns, only what is below 2^-16 and its own rounding.
"""

import torch
from torch import Tensor

from depthmix.ops.matmul import matmul

HALF = torch.bfloat16  # its range is fp32's, fp16's is not


def padded(columns: int) -> int:
    """K'."""
    return -(-columns // 8) * 8


def halves_of(w: Tensor) -> Tensor:
    """W [..., K] in fp32 as high, low and high again: [..., 3 K'] in bf16."""
    columns = w.shape[-1]
    out = torch.zeros(*w.shape[:-1], 3, padded(columns), dtype=HALF, device=w.device)
    high = out[..., 0, :columns].copy_(w)
    out[..., 1, :columns].copy_(w - high)
    out[..., 2, :columns].copy_(high)
    return out.flatten(-2)


def product(x: Tensor, w: Tensor, halves: Tensor | None, joint: bool) -> Tensor:
    """z of streams [N, n, D]: [N, K] or [N, n, K] in fp32; of bf16 streams two parts, still to be added: [..., 2 K']."""
    rows = _rows(x, w)
    z = matmul(rows.float(), w) if halves is None else _wide_mm(rows, halves[:, : halves.shape[-1] // 3 * 2])
    return z if joint else z.view(*x.shape[:2], z.shape[-1])


def product_backward(dz: Tensor, w: Tensor, halves: Tensor | None, n: int) -> Tensor:
    """P [N, n, D] of dz as `coefficients.backward` leaves it: in bf16 if it is in parts, otherwise in fp32."""
    flat = dz.view(-1, dz.shape[-1])
    if halves is None:
        p = matmul(flat, w.t())
    elif dz.is_cuda:
        p = torch.mm(flat, halves.t())
    else:
        p = matmul(flat.float(), halves.t().float()).to(HALF)
    return p.view(len(dz), n, len(w) // n if dz.ndim == 2 else len(w))


def weight_gradient(x: Tensor, dz: Tensor, w: Tensor, n: int) -> Tensor:
    """dW in fp32. x: [N, n, D], or [N, D] of which every stream is a copy."""
    if x.ndim == 2:
        x = x.unsqueeze(1).expand(-1, n, -1)
    columns, half = w.shape[-1], padded(w.shape[-1])
    if dz.dtype != HALF:
        return matmul(dz.view(-1, columns).t(), _rows(x, w).float()).t()
    both = _wide_mm(dz.view(-1, 3 * half)[:, half:].t(), _rows(x, w))
    return (both[:columns] + both[half : half + columns]).t()


def _wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """A product of bf16 matrices in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else matmul(a.float(), b.float())


def _rows(x: Tensor, w: Tensor) -> Tensor:
    """What W multiplies: all streams of a token together or each for itself, whichever W is for."""
    return x.reshape(-1, len(w))
