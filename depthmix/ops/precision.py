"""The project's rule of precision: mixing arithmetic is fp32 (fp64 for fp64 inputs) and rounds once, at the end."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype to compute in: fp64 if any tensor is fp64, otherwise fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def promoted_dtype(tensors: list[Tensor] | tuple[Tensor, ...]) -> torch.dtype:
    """Return the dtype that results are rounded to: the widest of the tensors, which differ under autocast only."""
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        if t.dtype != dtype:
            dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which autocast cannot lower the precision of computations on x."""
    kind = x.device.type
    # The meta device has no autocast.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def widen(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`. Cheaper than `x.to(dtype)` when x already has it: the call itself costs host time."""
    return x if x.dtype == dtype else x.to(dtype)


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) over the last dimension, in fp32 or wider, not rounded back."""
    x = widen(x, compute_dtype(x))
    return x * rms_scale(x, eps)


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x²) + eps) over the last dimension [..., 1], in fp32 or wider."""
    return torch.rsqrt(widen(x, compute_dtype(x)).square().mean(-1, keepdim=True) + eps)
