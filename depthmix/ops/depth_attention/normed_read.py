"""Reads of normed sources, keys and values alike, up to three ways in one launch: with kernels, layer by layer.

    o_w = Σ_i p_wi r_i v_i,    p_w = softmax of r_i (u_w · v_i) over the sources,    r_i = (mean(v_i²) + eps)^(-1/2)

Older sources may come as one tensor, as models hand on the sums of their blocks. The newest one may be a sum of two tensors, which is
neither rounded nor stored. So nothing is concatenated, copied or widened.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backward_mail import current_pass_id
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
            u: queries [W, D] in fp32, W up to three.
            gain: [W, D] in fp32, of the norm that follows, or None.
            stack: older sources [..., m, D], or None.
            add: [..., D], what the newest source is short of, or None.
            sources: the other sources [..., D], oldest first.
        """
        from depthmix.ops.depth_attention.kernels.read import read

        older, own, add_rows = _rows(stack, add, sources)
        options: dict[str, Any] = {"value_norm": True, "store_sum": False, "stacked": len(older), "dtype": dtype}
        rows = None if gain is None else gain.contiguous()
        y, _, s, lse, _ = read(u.contiguous(), [*older, *own], add_rows, rows, *eps, int(keep), **options)
        ctx.eps, ctx.dtype = eps, dtype
        ctx.save_for_backward(u, gain, stack, add, s, lse, *sources)
        return tuple(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of all sources, queries and gains in one launch."""
        from depthmix.ops.depth_attention.kernels.layer_backward import layer_backward

        # Refuse compiled autograd, whose tensors have no addresses.
        current_pass_id("depth_attention")
        # Access saved_tensors once: a second access fails inside a checkpointed region.
        u, gain, stack, add, s, lse, *sources = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = (u, gain, stack, add, *sources)
            with without_autocast(u):
                return (
                    None,
                    None,
                    None,
                    *reference_gradients(_reference(ctx.eps, ctx.dtype), inputs, ctx.needs_input_grad[3:], grads),
                )
        older, own, add_rows = _rows(stack, add, sources)
        dstack = None if stack is None else stack.new_empty(stack.shape)
        rows = None if gain is None else gain.contiguous()
        dy = [d.contiguous() for d in grads]
        rule: dict[str, Any] = {"add": add_rows, "value_norm": True, "dstack": dstack}
        dv, du, dgain = layer_backward(
            dy, u.contiguous(), rows, s, lse[:, 0].contiguous(), [*older, *own], None, *ctx.eps, **rule
        )
        dv = dv[len(older) :]
        return None, None, None, du, None if gain is None else dgain, dstack, None if add is None else dv[-1], *dv


def _rows(
    stack: Tensor | None, add: Tensor | None, sources: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Return the older sources, the others and what is added to the last of them, as kernels read them."""
    older = [] if stack is None else list(stack.contiguous().unbind(-2))
    return older, [v.contiguous() for v in sources], None if add is None else add.contiguous()


def _reference(eps: tuple[float, float], dtype: torch.dtype) -> Any:
    """Return the same computation in plain PyTorch, as a function of all tensors."""

    def compute(
        u: Tensor, gain: Tensor | None, stack: Tensor | None, add: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        all_sources = unstacked(stack, add, sources)
        outs = differentiable(Options(eps[0], value_norm=True), eps[1], False, u, gain, *all_sources)
        return tuple(widen(o, dtype) for o in outs)

    return compute


def unstacked(stack: Tensor | None, add: Tensor | None, sources: Sequence[Tensor]) -> list[Tensor]:
    """Return the sources one by one, the newest one in fp32 or wider with `add` added to it."""
    *others, newest = sources
    newest = widen(newest, compute_dtype(newest))
    newest = newest if add is None else newest + add
    return [*(() if stack is None else stack.unbind(-2)), *others, newest]
