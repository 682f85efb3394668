"""Reads of normed sources, keys and values alike, up to three ways in one launch: with kernels, layer by layer.

    o_w = Σ_i p_wi r_i v_i,    p_w = softmax of r_i (u_w · v_i) over the sources,    r_i = (mean(v_i²) + eps)^(-1/2)

Older sources may come as one tensor, as models hand on the sums of their blocks. The newest one may be a sum of two tensors, which is
neither rounded nor stored. So nothing is concatenated, copied or widened.

A model goes on with the newest source after the read: it adds to it. A read may return an inlet, through which the gradient of that
comes to the read's backward, which adds it before it rounds:

    v_n = h + y -> [read] -> inlet -> [sum_with_inlet] v_n + z;      dh = dy = round(gradient of the read + gradient of the sum)

An inlet has the shape of v_n and no memory. Without one, autograd rounds the read's gradient, and then its sum with the other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backward_mail import current_pass_id
from depthmix.ops.depth_attention import normed_library  # noqa: F401  (registers the operators)
from depthmix.ops.depth_attention.normed_rows import (
    new_inlet,
    normed_mixtures,
    normed_read,
    normed_read_backward,
    sum_once,
)
from depthmix.ops.depth_attention.reference_autograd import Options, differentiable
from depthmix.ops.precision import compute_dtype, widen, without_autocast


def reads_normed(options: Options) -> bool:
    """Return whether `NormedRead` computes what options say, for queries that all tokens share."""
    return options == Options(options.eps, value_norm=True)


class NormedRead(torch.autograd.Function):
    """Compute W mixtures. Saves references to its inputs and one number per way, source and token."""

    @staticmethod
    def forward(
        ctx: Any,
        eps: tuple[float, float],
        dtype: torch.dtype,
        keep: bool,
        with_inlet: bool,
        u: Tensor,
        gain: Tensor | None,
        stack: Tensor | None,
        add: Tensor | None,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        """Read the sources [..., D].

        Args:
            ctx: of autograd.
            eps: of the norm of sources, and of the norm that follows.
            dtype: of the results.
            keep: whether a backward may follow.
            with_inlet: whether to return an inlet behind the mixtures.
            u: queries [W, D] in fp32, W up to three.
            gain: [W, D] in fp32, of the norm that follows, or None.
            stack: older sources [..., m, D], or None.
            add: [..., D], what the newest source is short of, or None.
            sources: the other sources [..., D], oldest first.
        """
        y, s, lse = normed_read(eps, dtype, keep, u, gain, stack, add, sources)
        ctx.eps, ctx.dtype, ctx.with_inlet = eps, dtype, with_inlet
        ctx.save_for_backward(u, gain, stack, add, s, lse, *sources)
        ctx.set_materialize_grads(False)
        return (*y, new_inlet(sources[-1])) if with_inlet else tuple(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients of all sources, queries and gains in one launch."""
        # Refuse compiled autograd, whose tensors have no addresses.
        current_pass_id("depth_attention")
        # Access saved_tensors once: a second access fails inside a checkpointed region.
        u, gain, stack, add, s, lse, *sources = ctx.saved_tensors
        g = grads[-1] if ctx.with_inlet else None
        dy = [torch.zeros_like(sources[-1], dtype=ctx.dtype) if d is None else d for d in grads[: len(u)]]
        if torch.is_grad_enabled():
            inputs, given = (u, gain, stack, add, *sources), dy if g is None else [*dy, g]
            reference = _reference(ctx.eps, ctx.dtype, with_sum=g is not None)
            with without_autocast(u):
                return None, None, None, None, *reference_gradients(reference, inputs, ctx.needs_input_grad[4:], given)
        dstack, dv, du, dgain = normed_read_backward(dy, g, ctx.eps, u, gain, s, lse, stack, add, sources)
        return None, None, None, None, du, dgain, dstack, None if add is None else dv[-1], *dv


class SumWithInlet(torch.autograd.Function):
    """Add tensors in fp32 and round once. The inlet and the last tensor have the sum's gradient, the others none."""

    @staticmethod
    def forward(ctx: Any, inlet: Tensor, *parts: Tensor) -> Tensor:
        ctx.dtypes = inlet.dtype, parts[-1].dtype
        return sum_once(parts)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        of_inlet, of_last = (widen(g, dtype) for dtype in ctx.dtypes)
        return of_inlet, *[None] * (len(ctx.needs_input_grad) - 2), of_last


def _reference(eps: tuple[float, float], dtype: torch.dtype, with_sum: bool) -> Any:
    """Return the same computation in plain PyTorch, as a function of all tensors. with_sum: also return the newest source."""

    def compute(
        u: Tensor, gain: Tensor | None, stack: Tensor | None, add: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        all_sources = unstacked(stack, add, sources)
        outs = differentiable(Options(eps[0], value_norm=True), eps[1], False, u, gain, *all_sources)
        newest = (widen(all_sources[-1], sources[-1].dtype),) if with_sum else ()
        return (*(widen(o, dtype) for o in outs), *newest)

    return compute


def unstacked(stack: Tensor | None, add: Tensor | None, sources: Sequence[Tensor]) -> list[Tensor]:
    """Return the sources one by one, the newest one in fp32 or wider with `add` added to it."""
    *others, newest = sources
    newest = widen(newest, compute_dtype(newest))
    newest = newest if add is None else newest + add
    return [*(() if stack is None else stack.unbind(-2)), *others, newest]


def read_normed(
    eps: tuple[float, float],
    dtype: torch.dtype,
    then_sum: bool,
    u: Tensor,
    gain: Tensor | None,
    stack: Tensor | None,
    add: Tensor | None,
    sources: Sequence[Tensor],
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Read with kernels: return the mixtures, and an inlet if `then_sum` and gradients are recorded.

    The arguments are those of `NormedRead.forward`.
    """
    keep = torch.is_grad_enabled()
    with_inlet = then_sum and keep
    if torch.compiler.is_compiling():
        rest = (list(sources), *eps, dtype, keep, with_inlet)
        y, _, _, inlet = torch.ops.depthmix.normed_read(u, gain, stack, add, *rest)
        return tuple(y), inlet if with_inlet else None
    if not keep:
        return tuple(normed_mixtures(eps, dtype, u, gain, stack, add, sources)), None
    found = NormedRead.apply(eps, dtype, keep, with_inlet, u, gain, stack, add, *sources)
    return (found[:-1], found[-1]) if with_inlet else (found, None)


def sum_with_inlet(inlet: Tensor | None, parts: Sequence[Tensor], last: Tensor) -> Tensor:
    """Return the sum of tensors in the dtype of the first one, rounded once.

    Args:
        inlet: of the read whose newest source is the sum of the parts, or None: the parts have gradients of their own.
        parts: tensors [..., D].
        last: one more.
    """
    if inlet is None:
        return sum_once((*parts, last))
    parts = [t.detach() for t in parts]
    if torch.compiler.is_compiling():
        total: Tensor = torch.ops.depthmix.sum_with_inlet(inlet, parts, last)
    else:
        total = SumWithInlet.apply(inlet, *parts, last)
    return total
