"""token_loss: kernels where they can run, PyTorch's cross entropy in fp32 elsewhere."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backend import choose
from depthmix.ops.checks import KERNEL_DTYPES
from depthmix.ops.precision import without_autocast


class _TokenLoss(torch.autograd.Function):
    """Compute token_loss with kernels."""

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
        # create_graph=True.
        if torch.is_grad_enabled():
            (dlogits,) = reference_gradients(lambda x: _reference(x, targets), [logits], [True], [dlosses])
            return dlogits, None
        return backward(logits, targets, sums, dlosses.contiguous()), None


def _reference(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), targets, reduction="none")


def why_unsupported(logits: Tensor, targets: Tensor) -> str | None:
    """Return why the kernels cannot take these tensors, or None if they can."""
    if type(logits) is not Tensor or type(targets) is not Tensor:
        # Not DTensors, which are sharded across processes.
        return "they take plain tensors"
    if logits.dtype not in KERNEL_DTYPES:
        return f"they compute in float32, and the logits are {logits.dtype}"
    return None if logits.shape[-1] < 2**30 else "they count columns in 32 bits"


def token_loss(logits: Tensor, targets: Tensor, *, backend: str | None = None) -> Tensor:
    """Compute the cross entropy of every token in nats. The logits' gradient is rounded once to their dtype.

    Args:
        logits: [N, V].
        targets: [N], column numbers.
        backend: "triton" or "reference". By default `use_backend` decides, then kernels run where they can.

    Returns:
        Losses [N] in fp32.

    Raises:
        BackendError: "triton" was asked for and cannot run this call.
    """
    with without_autocast(logits):
        kernels = choose("token_loss", logits, why_unsupported(logits, targets), backend) == "triton"
        if kernels and not torch.compiler.is_compiling():
            losses: Tensor = _TokenLoss.apply(logits.contiguous(), targets.contiguous())
            return losses
        return _reference(logits, targets)
