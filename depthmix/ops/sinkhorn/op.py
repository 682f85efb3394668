"""sinkhorn: checks, and the choice between kernels and the reference."""

from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backend import choose
from depthmix.ops.precision import without_autocast
from depthmix.ops.sinkhorn.by_entry import SinkhornByEntry
from depthmix.ops.sinkhorn.reference import sinkhorn_reference
from depthmix.ops.torch_internals import transformed

MAX_N = 8  # rows of a matrix that kernels hold in registers


class _Sinkhorn(torch.autograd.Function):
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
        if torch.is_grad_enabled():  # create_graph=True
            return (
                *reference_gradients(lambda v: sinkhorn_reference(v, *ctx.options), [logits], [True], [dm]),
                None,
                None,
            )
        return backward(logits, dm.contiguous(), *ctx.options), None, None


def why_unsupported(logits: Tensor) -> str | None:
    """Why the kernels cannot normalise these, or None if they can."""
    if logits.dtype == torch.float64:
        return "they compute in float32, and the logits are float64"
    return None if logits.shape[-1] <= MAX_N else f"they hold matrices of up to {MAX_N} rows, got {logits.shape[-1]}"


def sinkhorn(logits: Tensor, iterations: int = 20, convention: str = "paper", *, backend: str | None = None) -> Tensor:
    """An (almost) doubly stochastic matrix from logits [..., n, n], in their layout (conventions in reference.py).

    backend: "triton" or "reference" forces one; by default, and unless `use_backend` says otherwise, kernels run where they can.
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
