"""scaled_add, alone and with the norm after it: kernels where they can run, plain PyTorch elsewhere."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backend import choose
from depthmix.ops.checks import KERNEL_DTYPES, why_too_wide
from depthmix.ops.precision import compute_dtype, rms_normalize, widen, without_autocast


class _ScaledAdd(torch.autograd.Function):
    """Compute scaled_add with kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
        from depthmix.ops.scaled_add.kernels import forward

        # Of x the backward needs the dtype only.
        ctx.save_for_backward(x.new_empty(0), y, gamma)
        return forward(x, y, gamma)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        from depthmix.ops.scaled_add.kernels import backward

        x, y, gamma = ctx.saved_tensors
        # create_graph=True. The gradients do not depend on x: any x of its shape will do.
        if torch.is_grad_enabled():
            zero = torch.zeros_like(y, dtype=x.dtype, requires_grad=True)
            return tuple(reference_gradients(_reference, (zero, y, gamma), ctx.needs_input_grad, [d]))
        dy, dgamma = backward(d.contiguous(), y, gamma)
        return d, dy, widen(dgamma, gamma.dtype)


def _reference(x: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
    wide = compute_dtype(x)
    return widen(widen(x, wide) + widen(gamma, wide) * widen(y, wide), x.dtype)


class _ScaledAddNorm(torch.autograd.Function):
    """Compute scaled_add_norm with kernels."""

    @staticmethod
    def forward(ctx: Any, eps: float, x: Tensor, y: Tensor, gamma: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        from depthmix.ops.scaled_add.norm_kernels import forward

        out, h, rms = forward(x, y, gamma, gain, eps)
        ctx.eps = eps
        ctx.save_for_backward(out, y, gamma, gain, rms)
        ctx.set_materialize_grads(False)
        return out, h

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        from depthmix.ops.scaled_add import kernels, norm_kernels

        out, y, gamma, gain, rms = ctx.saved_tensors
        # create_graph=True. x is not saved: it is the sum minus gamma ⊙ y.
        if torch.is_grad_enabled():
            grads = [torch.zeros_like(out) if d is None else d for d in (d_out, dh)]
            x, reference = out - _reference(torch.zeros_like(out), y, gamma), partial(_normed_reference, ctx.eps)
            return None, *reference_gradients(reference, (x, y, gamma, gain), ctx.needs_input_grad[1:], grads)
        if dh is None:
            if d_out is None:
                return (None,) * 5
            dy, dgamma = kernels.backward(d_out.contiguous(), y, gamma)
            return None, d_out, dy, widen(dgamma, gamma.dtype), None
        d_out = None if d_out is None else d_out.contiguous()
        dx, dy, dgamma, dgain = norm_kernels.backward(d_out, dh.contiguous(), out, y, gamma, gain, rms)
        return None, dx, dy, widen(dgamma, gamma.dtype), widen(dgain, gain.dtype)


def _normed_reference(eps: float, x: Tensor, y: Tensor, gamma: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    out = _reference(x, y, gamma)
    wide = compute_dtype(out)
    return out, widen(rms_normalize(widen(out, wide), eps) * widen(gain, wide), out.dtype)


def why_unsupported(x: Tensor, y: Tensor, gamma: Tensor) -> str | None:
    """Return why the kernels cannot take these tensors, or None if they can."""
    if any(type(t) not in (Tensor, torch.nn.Parameter) for t in (x, y, gamma)):
        # Not DTensors, which are sharded across processes.
        return "they take plain tensors"
    wrong = next((t.dtype for t in (x, y, gamma) if t.dtype not in KERNEL_DTYPES), None)
    return None if wrong is None else f"they compute in float32, and got {wrong}"


def scaled_add(x: Tensor, y: Tensor, gamma: Tensor, *, backend: str | None = None) -> Tensor:
    """Compute x + gamma ⊙ y in fp32 (fp64 for fp64), rounded once to x's dtype.

    Args:
        x, y: [..., D].
        gamma: [D].
        backend: "triton" or "reference". By default `use_backend` decides, then kernels run where they can.

    Raises:
        BackendError: "triton" was asked for and cannot run this call.
    """
    with without_autocast(x):
        kernels = choose("scaled_add", x, why_unsupported(x, y, gamma), backend) == "triton"
        if kernels and not torch.compiler.is_compiling():
            out: Tensor = _ScaledAdd.apply(x.contiguous(), y.contiguous(), gamma.contiguous())
            return out
        return _reference(x, y, gamma)


def scaled_add_norm(
    x: Tensor, y: Tensor, gamma: Tensor, gain: Tensor, eps: float, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Compute x + gamma ⊙ y, and its RMSNorm times a gain.

    Args:
        x, y: [..., D].
        gamma, gain: [D].
        eps: of the norm.
        backend: "triton" or "reference". By default `use_backend` decides, then kernels run where they can.

    Returns:
        The sum and its norm [..., D], each rounded once to x's dtype.

    Raises:
        BackendError: "triton" was asked for and cannot run this call.
    """
    with without_autocast(x):
        why = why_unsupported(x, y, gamma) or why_unsupported(x, y, gain) or why_too_wide(x.shape[-1])
        if choose("scaled_add", x, why, backend) == "triton" and not torch.compiler.is_compiling():
            inputs = (t.contiguous() for t in (x, y, gamma, gain))
            out, h = _ScaledAddNorm.apply(eps, *inputs)
            return out, h
        return _normed_reference(eps, x, y, gamma, gain)
