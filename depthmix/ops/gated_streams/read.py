"""gated_read: a write, the network of the gates and the read through them as one autograd node.

Only x' is handed on to the next write, and nothing else reads it. So no gradient [N, n, D] is ever added to another by autograd, and
of the tensors [N, n, D] inside a read only the logits of the gates are kept.
"""

from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backend import choose
from depthmix.ops.checks import KERNEL_DTYPES
from depthmix.ops.gated_streams.op import why_unsupported
from depthmix.ops.gated_streams.reference import Inputs, gated_read_reference
from depthmix.ops.precision import without_autocast

# Up to this number of tokens without gradients, a read is three launches that read the weights once.
FEW_TOKENS = 64
Read = tuple[Tensor, Tensor, Tensor | None]


class _GatedRead(torch.autograd.Function):
    """Compute a read with kernels."""

    @staticmethod
    def forward(ctx: Any, eps: float, offset: float, *inputs: Tensor | None) -> Any:
        from depthmix.ops.gated_streams.kernels import read

        a = Inputs(*inputs)  # type: ignore[arg-type]
        new, h, post, kept = read.forward(a, eps, offset)
        ctx.eps, ctx.offset = eps, offset
        ctx.save_for_backward(*a, None if a.y is None else new, post, *kept)
        ctx.set_materialize_grads(False)
        # x itself if nothing is written, so that the next write's gradient comes here instead of being added by autograd.
        return new, h, post

    @staticmethod
    def backward(ctx: Any, dnew: Tensor | None, dh: Tensor | None, dpost: Tensor | None) -> tuple[Any, ...]:
        x, y, post, gain, down, up, inject, new, next_post, *rest = ctx.saved_tensors
        inputs = (x, y, post, gain, down, up, inject)
        needed = ctx.needs_input_grad[2:]
        # create_graph=True.
        if torch.is_grad_enabled():
            return None, None, *_reference_backward(ctx, inputs, needed, (dnew, dh, dpost))
        from depthmix.ops.gated_streams.kernels import read

        grads = read.OutputGradients(*(None if g is None else g.contiguous() for g in (dnew, dh, dpost)))
        streams, kept = x if new is None else new, read.Kept(*rest)
        with without_autocast(x):
            found = read.backward(Inputs(*inputs), streams, next_post, kept, grads, ctx.offset, Inputs(*needed))
        return None, None, *(g if need else None for g, need in zip(found, needed, strict=True))


def _reference_backward(ctx: Any, inputs: Any, needed: Any, grads: Any) -> list[Tensor | None]:
    given = [g for g in grads if g is not None]

    def reference(*inputs: Tensor | None) -> list[Tensor]:
        outs = gated_read_reference(ctx.eps, ctx.offset, *inputs)
        return [o for o, g in zip(outs, grads, strict=True) if o is not None and g is not None]

    with without_autocast(inputs[0]):
        return reference_gradients(reference, inputs, needed, given)


def can_read(x: Tensor, y: Tensor | None, gain: Tensor, down: Tensor, up: Tensor, inject: Tensor | None = None) -> bool:
    """Return whether kernels compute `gated_read` of these tensors.

    Products need operands of one dtype. Under autocast and torch.compile the operators of `op` and PyTorch's products are used.
    """
    kind = x.dtype
    alike = down.dtype is kind and up.dtype is kind and (y is None or y.dtype is kind)
    if not alike or (inject is not None and inject.dtype is not kind) or gain.dtype not in KERNEL_DTYPES:
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type) or not x.shape[0]:
        return False
    return choose("gated_read", x, why_unsupported(x)) == "triton"


def gated_read(inputs: Inputs, eps: float, offset: float) -> Read:
    """Write to n residual streams, and read them through gates, with kernels. `can_read` says whether these can run.

    Args:
        inputs: streams, what is written to them, and the weights of the read.
        eps: of the norm.
        offset: added to the gain.

    Returns:
        The streams after the write [N, n, D], the read [N, D], and the weights of the next write [N, n] in fp32.
    """
    a = Inputs._make(map(_contiguous, inputs))
    if not torch.is_grad_enabled():
        if a.x.shape[0] <= FEW_TOKENS:
            from depthmix.ops.gated_streams.kernels import few_tokens

            return few_tokens.read(a, eps, offset)
        from depthmix.ops.gated_streams.kernels import read

        return read.forward(a, eps, offset)[:3]
    new, h, post = _GatedRead.apply(eps, offset, *a)
    return new, h, post


def few_write(x: Tensor, y: Tensor, post: Tensor) -> Tensor | None:
    """Write y [N, D] to streams x [N, n, D] with the weights post [N, n], for few tokens without gradients; None in other cases."""
    if torch.is_grad_enabled() or not 0 < x.shape[0] <= FEW_TOKENS or torch.compiler.is_compiling():
        return None
    if choose("gated_read", x, why_unsupported(x, y, post)) != "triton":
        return None
    from depthmix.ops.gated_streams.kernels import few_tokens

    return few_tokens.write(x.contiguous(), y.contiguous(), post.contiguous())


def _contiguous(t: Any) -> Any:
    return None if t is None else t.contiguous()
