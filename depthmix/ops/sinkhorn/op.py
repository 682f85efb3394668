"""sinkhorn: check arguments and choose between kernels and the reference."""

from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backend import choose
from depthmix.ops.precision import without_autocast
from depthmix.ops.sinkhorn.reference import sinkhorn_reference
from depthmix.ops.sinkhorn.reference_autograd import SinkhornByEntry
from depthmix.ops.torch_internals import transformed

# Rows of a matrix that kernels hold in registers.
MAX_N = 8


class _Sinkhorn(torch.autograd.Function):
    """Run the kernels. The backward runs the iterations again from the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, convention: str) -> Tensor:
        from depthmix.ops.sinkhorn.kernels import forward

        ctx.options = iterations, convention
        ctx.save_for_backward(logits)
        return forward(logits, iterations, convention)

    @staticmethod
    def backward(ctx: Any, dm: Tensor) -> tuple[Tensor | None, ...]:
        from depthmix.ops.sinkhorn.kernels import backward

        (logits,) = ctx.saved_tensors
        # create_graph=True.
        if torch.is_grad_enabled():
            return (
                *reference_gradients(lambda v: sinkhorn_reference(v, *ctx.options), [logits], [True], [dm]),
                None,
                None,
            )
        return backward(logits, dm.contiguous(), *ctx.options), None, None


def why_unsupported(logits: Tensor) -> str | None:
    """Return why the kernels cannot normalise these logits, or None if they can."""
    if logits.dtype == torch.float64:
        return "they compute in float32, and the logits are float64"
    return None if logits.shape[-1] <= MAX_N else f"they hold matrices of up to {MAX_N} rows, got {logits.shape[-1]}"


def sinkhorn(logits: Tensor, iterations: int = 20, convention: str = "paper", *, backend: str | None = None) -> Tensor:
    """Normalise exp(logits) into an (almost) doubly stochastic matrix.

    Args:
        logits: [..., n, n].
        iterations: number of normalisations of rows and columns, at least 1.
        convention: "paper" or "deepseek" (both in reference.py).
        backend: "triton" or "reference". By default `use_backend` decides, then kernels run where they can.

    Returns:
        [..., n, n] in fp32 (fp64 for fp64), in the layout of the logits.

    Raises:
        ValueError: wrong shape, dtype, iterations or convention.
        BackendError: "triton" was asked for and cannot run this call.

    Examples:
        >>> sinkhorn(torch.zeros(2, 16, 4, 4)).sum(-1)  # every row sums to one
    """
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2] or not logits.is_floating_point():
        raise ValueError(
            f"sinkhorn: expected floating-point logits [..., n, n], got {list(logits.shape)} of {logits.dtype}"
        )
    if iterations < 1:
        raise ValueError(f"sinkhorn: expected at least one iteration, got {iterations}")
    if convention not in ("paper", "deepseek"):
        raise ValueError(f"sinkhorn: convention must be 'paper' or 'deepseek', got {convention!r}")
    with without_autocast(logits):
        kernels = choose("sinkhorn", logits, why_unsupported(logits), backend) == "triton"
        if kernels and not torch.compiler.is_compiling():
            return _Sinkhorn.apply(logits.contiguous(), iterations, convention)
        if not torch.compiler.is_compiling() and not transformed():
            return SinkhornByEntry.apply(logits, iterations, convention)
        return sinkhorn_reference(logits, iterations, convention)
