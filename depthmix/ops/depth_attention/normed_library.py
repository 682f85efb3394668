"""Register reads of normed sources as PyTorch operators, for torch.compile. Eager code has normed_read.py's own nodes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.depth_attention.normed_rows import new_inlet, normed_read, normed_read_backward, sum_once
from depthmix.ops.precision import widen
from depthmix.ops.registration import library, register

Read = tuple[list[Tensor], Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, list[Tensor], Tensor, Tensor]


def _read(
    u: Tensor, gain: Tensor | None, stack: Tensor | None, add: Tensor | None, sources: list[Tensor],
    eps: float, out_eps: float, dtype: torch.dtype, keep: bool, with_inlet: bool,
) -> Read:  # fmt: skip
    y, s, lse = normed_read((eps, out_eps), dtype, keep, u, gain, stack, add, sources)
    return y, s, lse, new_inlet(sources[-1]) if with_inlet else u.new_empty(0)


def _read_fake(
    u: Tensor, gain: Tensor | None, stack: Tensor | None, add: Tensor | None, sources: list[Tensor],
    eps: float, out_eps: float, dtype: torch.dtype, keep: bool, with_inlet: bool,
) -> Read:  # fmt: skip
    like, ways = sources[-1], u.shape[0]
    n, tokens = len(sources) + (0 if stack is None else stack.shape[-2]), like.numel() // like.shape[-1]
    y = [like.new_empty(like.shape, dtype=dtype) for _ in range(ways)]
    s, lse = (u.new_empty(ways, rows, tokens, dtype=torch.float32) for rows in ((n, 1) if keep else (0, 0)))
    return y, s, lse, new_inlet(like) if with_inlet else u.new_empty(0)


def _read_backward(
    dy: list[Tensor], g: Tensor | None, u: Tensor, gain: Tensor | None, s: Tensor, lse: Tensor,
    stack: Tensor | None, add: Tensor | None, sources: list[Tensor], eps: float, out_eps: float,
) -> Gradients:  # fmt: skip
    given = (u, gain, s, lse, stack, add, sources)
    dstack, dv, du, dgain = normed_read_backward(dy, g, (eps, out_eps), *given)
    empty = u.new_empty(0)
    return empty if dstack is None else dstack, dv, du, u.new_empty(0) if dgain is None else dgain


def _read_backward_fake(
    dy: list[Tensor], g: Tensor | None, u: Tensor, gain: Tensor | None, s: Tensor, lse: Tensor,
    stack: Tensor | None, add: Tensor | None, sources: list[Tensor], eps: float, out_eps: float,
) -> Gradients:  # fmt: skip
    dstack, dgain = (u.new_empty(0) if t is None else t.new_empty(t.shape) for t in (stack, gain))
    return dstack, [v.new_empty(v.shape) for v in sources], u.new_empty(u.shape), dgain


def _sum(inlet: Tensor, parts: list[Tensor], last: Tensor) -> Tensor:
    return sum_once([*parts, last])


def _sum_fake(inlet: Tensor, parts: list[Tensor], last: Tensor) -> Tensor:
    return parts[0].new_empty(parts[0].shape)


_SOURCES = "Tensor? stack, Tensor? add, Tensor[] sources"
register(
    f"normed_read(Tensor u, Tensor? gain, {_SOURCES}, float eps, float out_eps, ScalarType dtype, bool keep,"
    " bool with_inlet) -> (Tensor[] y, Tensor s, Tensor lse, Tensor inlet)",
    _read,
    _read_fake,
)
register(
    f"normed_read_backward(Tensor[] dy, Tensor? g, Tensor u, Tensor? gain, Tensor s, Tensor lse, {_SOURCES},"
    " float eps, float out_eps) -> (Tensor dstack, Tensor[] dv, Tensor du, Tensor dgain)",
    _read_backward,
    _read_backward_fake,
)
register("sum_with_inlet(Tensor inlet, Tensor[] parts, Tensor last) -> Tensor", _sum, _sum_fake)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Read) -> None:
    u, gain, stack, add, sources, eps, out_eps, dtype, keep, ctx.with_inlet = inputs
    if not keep:
        raise ValueError("normed_read: a read that is differentiated needs keep=True")
    _, s, lse, _ = output
    ctx.eps, ctx.dtype = (eps, out_eps), dtype
    ctx.save_for_backward(u, gain, s, lse, stack, add, *sources)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grads: Sequence[Tensor | None], ds: Any, dlse: Any, dinlet: Tensor | None) -> tuple[Any, ...]:
    u, gain, s, lse, stack, add, *sources = ctx.saved_tensors
    dy = [torch.zeros_like(sources[-1], dtype=ctx.dtype) if d is None else d for d in grads]
    g = dinlet if ctx.with_inlet else None
    given = (dy, g, u, gain, s, lse, stack, add, sources, *ctx.eps)
    dstack, dv, du, dgain = torch.ops.depthmix.normed_read_backward(*given)
    # An operator's outputs must not be one tensor twice: the two summands of the newest source share a gradient.
    dadd = None if add is None else dv[-1].clone()
    return du, None if gain is None else dgain, None if stack is None else dstack, dadd, dv, *[None] * 5


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    inlet, parts, last = inputs
    ctx.n, ctx.dtypes = len(parts), (inlet.dtype, last.dtype)


def _sum_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    of_inlet, of_last = (widen(g, dtype) for dtype in ctx.dtypes)
    return of_inlet, [None] * ctx.n, of_last


torch.library.register_autograd("depthmix::normed_read", _backward, setup_context=_setup, lib=library)
torch.library.register_autograd("depthmix::sum_with_inlet", _sum_backward, setup_context=_setup_sum, lib=library)
