"""Argument checks that the operators share: a clear error instead of an unintended broadcast."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Activations that the kernels know. They compute in float32.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Tensors that do nothing of their own when an operator meets them.
PLAIN = (Tensor, torch.nn.Parameter)
_PLAIN_OR_NONE = {*PLAIN, type(None)}
# Channels of a row that fit in the registers of 32 warps.
MAX_DIM = 16384


def check_sources(op: str, sources: Sequence[Tensor]) -> bool:
    """Raise ValueError unless sources are a non-empty list of floating-point tensors with one shape and device.

    Returns:
        Whether they are also of one dtype, and of no subclass that may want to see what is done with them.
    """
    if isinstance(sources, Tensor) or len(sources) == 0:
        got = "one tensor" if isinstance(sources, Tensor) else "none"
        raise ValueError(f"{op}: expected a non-empty list of source tensors, got {got}")
    first = sources[0]
    _check_source(op, 0, first, first)
    shape, device, dtype = first.shape, first.device, first.dtype
    alike = True
    for i, v in enumerate(sources):
        if not (type(v) in PLAIN and v.dtype == dtype and v.shape == shape and v.device == device):
            _check_source(op, i, v, first)
            alike = False
    return alike


def _check_source(op: str, i: int, v: Tensor, first: Tensor) -> None:
    if not isinstance(v, Tensor) or v.ndim == 0:
        got = "a scalar" if isinstance(v, Tensor) else type(v).__name__
        raise ValueError(f"{op}: expected sources [..., D], source {i} is {got}")
    if not v.is_floating_point():
        raise ValueError(f"{op}: expected floating-point sources, source {i} is {v.dtype}")
    if v.shape != first.shape or v.device != first.device:
        raise ValueError(
            f"{op}: all sources must be alike; source 0 is {list(first.shape)} on {first.device}, "
            f"source {i} is {list(v.shape)} on {v.device}"
        )


def all_plain(*tensors: Tensor | None) -> bool:
    """Return whether none of the tensors is of a subclass, which may want to see what is done with it."""
    return _PLAIN_OR_NONE.issuperset(map(type, tensors))


def why_too_wide(dim: int, room: int | None = None) -> str | None:
    """Return why a token's channels do not fit in a program's registers, or None if they do. room: numbers that they take."""
    fits = (dim if room is None else room) <= MAX_DIM
    return None if fits else f"a token's {dim} channels do not fit; they hold up to {MAX_DIM}"


def leading(x: Tensor) -> int:
    """Return the size of the first dimension, or 1 for a scalar, which a later check rejects."""
    return x.shape[0] if x.ndim else 1


def check_shape(op: str, name: str, x: Tensor, like: Tensor, *shapes: tuple[int, ...]) -> None:
    """Raise ValueError unless x is floating-point, has one of `shapes` and is on the device of `like`."""
    for shape in shapes:
        # Compare lengths first. Comparing tuples of different lengths would make torch.compile specialise a dynamic size.
        if len(shape) == x.ndim and tuple(x.shape) == shape:
            break
    else:
        expected = " or ".join(str(list(s)) for s in shapes)
        raise ValueError(f"{op}: expected {name} of shape {expected}, got {list(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"{op}: expected a floating-point {name}, got {x.dtype}")
    if x.device != like.device:
        raise ValueError(f"{op}: {name} is on {x.device}, the activations are on {like.device}")
