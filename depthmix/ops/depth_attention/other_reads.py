"""Reads that the kernels of whole stacks do not know, heads, sigmoid, keys without a norm and queries by token, with kernels of their own."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.depth_attention.reference_autograd import Options, differentiable
from depthmix.ops.precision import widen


class OtherRead(torch.autograd.Function):
    """One mixture; it keeps references to the sources, and a number for each source, token and head."""

    @staticmethod
    def forward(ctx: Any, options: Options, out_eps: float, u: Tensor, gain: Tensor | None, *sources: Tensor) -> Tensor:
        from depthmix.ops.depth_attention.kernels.other_reads import read

        eps, key_norm, heads, activation = options
        rows, own_gain = _rows(u), None if gain is None else gain.contiguous()
        near = [v.contiguous() for v in sources]
        y, s, lse = read(rows, own_gain, near, eps, out_eps, key_norm, heads, activation == "softmax")
        ctx.options, ctx.out_eps = options, out_eps
        ctx.save_for_backward(u, gain, s, lse, *sources)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from depthmix.ops.depth_attention.kernels.other_reads import backward

        u, gain, s, lse, *sources = ctx.saved_tensors  # once: a second access fails inside a checkpointed region
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            reference = partial(_reference, ctx.options, ctx.out_eps)
            return (None, None, *reference_gradients(reference, (u, gain, *sources), needs, grads))
        eps, key_norm, heads, activation = ctx.options
        (dy,) = grads
        near = [v.contiguous() for v in sources]
        du, dgain, dv = backward(
            dy.contiguous(), _rows(u), None if gain is None else gain.contiguous(), near, s, lse, eps, ctx.out_eps,
            key_norm, heads, activation == "softmax",
        )  # fmt: skip
        return (None, None, du.view(u.shape), dgain, *dv)


def _rows(u: Tensor) -> Tensor:
    """A query [D] as it is, those of tokens as [N, D]."""
    return (u if u.ndim == 1 else u.reshape(-1, u.shape[-1])).contiguous()


def _reference(options: Options, out_eps: float, u: Tensor, gain: Tensor | None, *sources: Tensor) -> Tensor:
    gains = None if gain is None else gain.unsqueeze(0)
    (o,) = differentiable(options, out_eps, False, u.unsqueeze(0), gains, *sources)
    return widen(o, sources[0].dtype)
