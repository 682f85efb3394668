"""scaled_add: kernels where they can run, plain PyTorch elsewhere."""

from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backend import choose
from depthmix.ops.precision import compute_dtype, widen, without_autocast
from depthmix.ops.slots.op import KINDS


class _ScaledAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
        from depthmix.ops.scaled_add.kernels import forward

        ctx.save_for_backward(x.new_empty(0), y, gamma)  # of x its dtype alone
        return forward(x, y, gamma)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        from depthmix.ops.scaled_add.kernels import backward

        x, y, gamma = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True; the sum does not depend on x
            zero = torch.zeros_like(y, dtype=x.dtype, requires_grad=True)
            return tuple(reference_gradients(_reference, (zero, y, gamma), (True, True, True), [d]))
        dy, dgamma = backward(d.contiguous(), y, gamma)
        return d, dy, widen(dgamma, gamma.dtype)


def _reference(x: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
    wide = compute_dtype(x)
    return widen(widen(x, wide) + widen(gamma, wide) * widen(y, wide), x.dtype)


def why_unsupported(x: Tensor, y: Tensor, gamma: Tensor) -> str | None:
    """Why the kernels cannot take these, or None if they can."""
    if any(type(t) not in (Tensor, torch.nn.Parameter) for t in (x, y, gamma)):
        return "they take plain tensors"  # not ones that are divided among processes
    wrong = next((t.dtype for t in (x, y, gamma) if t.dtype not in KINDS), None)
    return None if wrong is None else f"they compute in float32, and got {wrong}"


def scaled_add(x: Tensor, y: Tensor, gamma: Tensor, *, backend: str | None = None) -> Tensor:
    """x + gamma ⊙ y with x and y [..., D] and gamma [D], in fp32 (fp64 for fp64), rounded once to x's dtype.

    backend: "triton" or "reference" forces one; by default, and unless `use_backend` says otherwise, kernels run where they can.
    """
    with without_autocast(x):
        kernels = choose("scaled_add", x, why_unsupported(x, y, gamma), backend) == "triton"
        if kernels and not torch.compiler.is_compiling():
            found: Tensor = _ScaledAdd.apply(x.contiguous(), y.contiguous(), gamma.contiguous())
            return found
        return _reference(x, y, gamma)
