"""token_loss: kernels where they can run, PyTorch's cross entropy in fp32 elsewhere."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backend import choose
from depthmix.ops.precision import without_autocast
from depthmix.ops.slots.op import KINDS


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        from depthmix.ops.token_loss.kernels import forward

        losses, sums = forward(logits, targets)
        ctx.save_for_backward(logits, targets, sums)
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, None]:
        from depthmix.ops.token_loss.kernels import backward

        logits, targets, sums = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            (found,) = reference_gradients(lambda x: _reference(x, targets), [logits], [True], [dlosses])
            return found, None
        return backward(logits, targets, sums, dlosses.contiguous()), None


def _reference(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), targets, reduction="none")


def why_unsupported(logits: Tensor, targets: Tensor) -> str | None:
    """Why the kernels cannot take these, or None if they can."""
    if type(logits) is not Tensor or type(targets) is not Tensor:
        return "they take plain tensors"  # not one that is divided among processes
    if logits.dtype not in KINDS:
        return f"they compute in float32, and the logits are {logits.dtype}"
    return None if logits.shape[-1] < 2**30 else "they count columns in 32 bits"


def token_loss(logits: Tensor, targets: Tensor, *, backend: str | None = None) -> Tensor:
    """Nats of every token, fp32 [N], from logits [N, V] and targets [N]; the logits' gradient is rounded once to their dtype.

    backend: "triton" or "reference" forces one; by default, and unless `use_backend` says otherwise, kernels run where they can.
    """
    with without_autocast(logits):
        kernels = choose("token_loss", logits, why_unsupported(logits, targets), backend) == "triton"
        if kernels and not torch.compiler.is_compiling():
            found: Tensor = _TokenLoss.apply(logits.contiguous(), targets.contiguous())
            return found
        return _reference(logits, targets)
