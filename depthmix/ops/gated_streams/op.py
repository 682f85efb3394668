"""write_norm and gated_mean: kernels where they can run, plain PyTorch elsewhere."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backend import choose
from depthmix.ops.checks import KERNEL_DTYPES, why_too_wide
from depthmix.ops.depth_attention.op import power_of_two
from depthmix.ops.gated_streams import library  # noqa: F401  (registers the operators)
from depthmix.ops.gated_streams.reference import gated_mean_reference, write_norm_reference
from depthmix.ops.precision import widen, without_autocast


class _WriteNorm(torch.autograd.Function):
    """Compute `write_norm` with kernels. Saves the streams before and after the write; the former are those of the step before."""

    @staticmethod
    def forward(
        ctx: Any, eps: float, x: Tensor, y: Tensor | None, post: Tensor | None, gain: Tensor
    ) -> tuple[Tensor, Tensor]:
        from depthmix.ops.gated_streams.kernels.norm_and_mean import write_norm

        new, normed = write_norm(x, y, post, gain, eps)
        ctx.eps = eps
        ctx.save_for_backward(x, y, post, gain, None if y is None else new)
        ctx.set_materialize_grads(False)
        return new, normed

    @staticmethod
    def backward(ctx: Any, dnew: Tensor | None, dnormed: Tensor | None) -> tuple[Tensor | None, ...]:
        from depthmix.ops.gated_streams.kernels.norm_and_mean import write_norm_backward

        x, y, post, gain, new = ctx.saved_tensors
        dnormed = torch.zeros_like(x) if dnormed is None else dnormed
        if torch.is_grad_enabled():
            given = [torch.zeros_like(x) if dnew is None else dnew, dnormed]
            with without_autocast(x):
                reference = partial(write_norm_reference, ctx.eps)
                return None, *reference_gradients(reference, (x, y, post, gain), ctx.needs_input_grad[1:], given)
        dnew = None if dnew is None else dnew.contiguous()
        streams = x if new is None else new
        return None, *write_norm_backward(streams, y, post, gain, dnew, dnormed.contiguous(), ctx.eps)


class _GatedMean(torch.autograd.Function):
    """Compute `gated_mean` with kernels. Saves its inputs."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, normed: Tensor) -> Tensor:
        from depthmix.ops.gated_streams.kernels.norm_and_mean import gated_mean

        ctx.save_for_backward(z, normed)
        return gated_mean(z, normed)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        from depthmix.ops.gated_streams.kernels.norm_and_mean import gated_mean_backward

        z, normed = ctx.saved_tensors
        if torch.is_grad_enabled():
            with without_autocast(z):
                return tuple(reference_gradients(gated_mean_reference, (z, normed), ctx.needs_input_grad, [dh]))
        return gated_mean_backward(z, normed, dh.contiguous())


def why_unsupported(*tensors: Tensor | None) -> str | None:
    """Return why the kernels cannot take these tensors, the first of which are streams [..., n, D], or None if they can."""
    given = [t for t in tensors if t is not None]
    if any(t.dtype not in KERNEL_DTYPES for t in given):
        return "they know float32, bfloat16 and float16"
    n, dim = given[0].shape[-2:]
    return why_too_wide(dim, power_of_two(n) * power_of_two(dim))


def _kernels(op: str, x: Tensor, *others: Tensor | None) -> bool:
    return choose(op, x, why_unsupported(x, *others)) == "triton"


def write_norm(x: Tensor, y: Tensor | None, post: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Write to n residual streams and norm each of them.

    Args:
        x: streams [N, n, D].
        y: a sublayer's output [N, D], or None: nothing is written.
        post: weights of the write [N, n], or None.
        gain: of the norm, [n, D].
        eps: of the norm.

    Returns:
        The streams after the write, and normed: [N, n, D] in x's dtype.
    """
    with without_autocast(x):
        if _kernels("write_norm", x, y, post, gain):
            gain = widen(gain, torch.float32)
            if torch.compiler.is_compiling():
                new, normed = torch.ops.depthmix.write_norm(x, y, post, gain, eps)
                return x if y is None else new, normed
            rows = (x.contiguous(), None if y is None else y.contiguous(), None if post is None else post.contiguous())
            new, normed = _WriteNorm.apply(eps, *rows, gain.contiguous())
            return new, normed
        return write_norm_reference(eps, x, y, post, gain)


def gated_mean(z: Tensor, normed: Tensor) -> Tensor:
    """Average normed streams with a gate for each channel.

    Args:
        z: logits of the gates [N, n, D].
        normed: streams [N, n, D].

    Returns:
        [N, D], rounded once to the streams' dtype.
    """
    with without_autocast(normed):
        if _kernels("gated_mean", normed, z):
            if torch.compiler.is_compiling():
                h: Tensor = torch.ops.depthmix.gated_mean(z, normed)
            else:
                h = _GatedMean.apply(z.contiguous(), normed.contiguous())
            return h
        return gated_mean_reference(z, normed)
