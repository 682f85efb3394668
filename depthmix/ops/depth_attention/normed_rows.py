"""Launches of reads of normed sources and of the sums after them, without gradients of their own: what nodes and operators share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.depth_sum.op import depth_sum
from depthmix.ops.precision import compute_dtype, widen


def new_inlet(like: Tensor) -> Tensor:
    """Return a tensor of the shape and dtype of another that takes no memory."""
    return like.new_zeros(1).expand(like.shape)


def sum_once(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors in the dtype of the first one, rounded once."""
    first, ones = parts[0], torch.ones(1, len(parts), 1, device=parts[0].device, dtype=compute_dtype(*parts))
    total: Tensor = depth_sum(parts, static=ones)[0]
    return widen(total, first.dtype)


def normed_read(
    eps: tuple[float, float],
    dtype: torch.dtype,
    keep: bool,
    u: Tensor,
    gain: Tensor | None,
    stack: Tensor | None,
    add: Tensor | None,
    sources: Sequence[Tensor],
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the mixtures of `NormedRead.forward`, the logits [W, n, N] and their log-sum-exp [W, 1, N]."""
    from depthmix.ops.depth_attention.kernels.read import read

    u, gain, stack, add = _contiguous(u, gain, stack, add)
    options: dict[str, Any] = {"value_norm": True, "store_sum": False, "stack": stack, "dtype": dtype}
    y, _, s, lse, _ = read(u, [v.contiguous() for v in sources], add, gain, *eps, int(keep), **options)
    return y, s, lse


def normed_mixtures(
    eps: tuple[float, float],
    dtype: torch.dtype,
    u: Tensor,
    gain: Tensor | None,
    stack: Tensor | None,
    add: Tensor | None,
    sources: Sequence[Tensor],
) -> list[Tensor]:
    """Return the mixtures of `NormedRead.forward` alone, for calls without gradients."""
    from depthmix.ops.depth_attention.kernels.read import mixtures

    u, gain, stack, add = _contiguous(u, gain, stack, add)
    return mixtures(u, [v.contiguous() for v in sources], add, gain, *eps, True, stack, dtype)


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.contiguous() for t in tensors]


def normed_read_backward(
    dy: Sequence[Tensor],
    g: Tensor | None,
    eps: tuple[float, float],
    u: Tensor,
    gain: Tensor | None,
    s: Tensor,
    lse: Tensor,
    stack: Tensor | None,
    add: Tensor | None,
    sources: Sequence[Tensor],
) -> tuple[Tensor | None, list[Tensor], Tensor, Tensor | None]:
    """Return the gradients of the stack, of the sources, of u and of the gain; `add` has that of the newest source.

    Args:
        dy: gradients of the mixtures.
        g: a gradient of the newest source from elsewhere, or None.
        eps, u, gain, stack, add, sources: as in the forward.
        s, lse: as the forward returned them.
    """
    from depthmix.ops.depth_attention.kernels.layer_backward import layer_backward

    older, own, add_rows = _rows(stack, add, sources)
    dstack = None if stack is None else stack.new_empty(stack.shape)
    rows, g = (None if t is None else t.contiguous() for t in (gain, g))
    rule: dict[str, Any] = {"add": add_rows, "value_norm": True, "dstack": dstack}
    dv, du, dgain = layer_backward(
        [d.contiguous() for d in dy], u.contiguous(), rows, s, lse[:, 0].contiguous(), [*older, *own], g, *eps, **rule
    )
    return dstack, dv[len(older) :], du, None if gain is None else dgain


def _rows(
    stack: Tensor | None, add: Tensor | None, sources: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Return the older sources, the others and what is added to the last of them, as kernels read them."""
    older = [] if stack is None else list(stack.contiguous().unbind(-2))
    return older, [v.contiguous() for v in sources], None if add is None else add.contiguous()
