"""Argument checks that the operators share: a clear error instead of an unintended broadcast."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Activations that the kernels know. They compute in float32.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Channels of a row that fit in the registers of 32 warps.
MAX_DIM = 16384


def check_sources(op: str, sources: Sequence[Tensor]) -> None:
    """Raise ValueError unless sources are a non-empty list of floating-point tensors with one shape and device."""
    if isinstance(sources, Tensor) or len(sources) == 0:
        got = "one tensor" if isinstance(sources, Tensor) else "none"
        raise ValueError(f"{op}: expected a non-empty list of source tensors, got {got}")
    first = sources[0]
    for i, v in enumerate(sources):
        if not isinstance(v, Tensor) or v.ndim == 0:
            got = "a scalar" if isinstance(v, Tensor) else type(v).__name__
            raise ValueError(f"{op}: expected sources [..., D], source {i} is {got}")
        if not v.is_floating_point():
            raise ValueError(f"{op}: expected floating-point sources, source {i} is {v.dtype}")
        if i == 0:
            shape, device = v.shape, v.device
        elif v.shape != shape or v.device != device:
            raise ValueError(
                f"{op}: all sources must be alike; source 0 is {list(first.shape)} on {first.device}, "
                f"source {i} is {list(v.shape)} on {v.device}"
            )


def why_too_wide(dim: int, room: int | None = None) -> str | None:
    """Return why a token's channels do not fit in a program's registers, or None if they do. room: numbers that they take."""
    fits = (dim if room is None else room) <= MAX_DIM
    return None if fits else f"a token's {dim} channels do not fit; they hold up to {MAX_DIM}"


def leading(x: Tensor) -> int:
    """Return the size of the first dimension, or 1 for a scalar, which a later check rejects."""
    return x.shape[0] if x.ndim else 1


def check_shape(op: str, name: str, x: Tensor, like: Tensor, *shapes: tuple[int, ...]) -> None:
    """Raise ValueError unless x is floating-point, has one of `shapes` and is on the device of `like`."""
    # Compare lengths first. Comparing tuples of different lengths would make torch.compile specialise a dynamic size.
    if not any(len(shape) == x.ndim and tuple(x.shape) == shape for shape in shapes):
        expected = " or ".join(str(list(s)) for s in shapes)
        raise ValueError(f"{op}: expected {name} of shape {expected}, got {list(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"{op}: expected a floating-point {name}, got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"{op}: {name} is on {x.device}, the activations are on {like.device}")
