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
from depthmix.ops.depth_attention.reference_autograd import Options, differentiable
from depthmix.ops.depth_sum.op import depth_sum
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

    older, own, add_rows = _rows(stack, add, sources)
    options: dict[str, Any] = {"value_norm": True, "store_sum": False, "stacked": len(older), "dtype": dtype}
    rows = None if gain is None else gain.contiguous()
    y, _, s, lse, _ = read(u.contiguous(), [*older, *own], add_rows, rows, *eps, int(keep), **options)
    return y, s, lse


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
