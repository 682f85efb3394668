"""RMSNorm as mixers round it: computed in fp32 (fp64 for fp64), one rounding to the input's dtype."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.precision import compute_dtype, rms_normalize, widen, without_autocast
from depthmix.ops.torch_internals import calls_only_its_forward


class RMSNorm(nn.RMSNorm):
    """Extend torch's RMSNorm to inputs narrower than its gain, as under autocast: an fp32 gain and bf16 activations."""

    def forward(self, x: Tensor) -> Tensor:
        wide = compute_dtype(x) if self.weight is None else compute_dtype(x, self.weight)
        gain = None if self.weight is None else self.weight.to(wide)
        return functional.rms_norm(x.to(wide), self.normalized_shape, gain, eps_of(self, x)).to(x.dtype)


def normed(o: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y = gain ⊙ ρ o and ρ = (mean(o²) + eps)^(-1/2) [..., 1], for operators with a hand-written backward."""
    rho = torch.linalg.vector_norm(o, dim=-1, keepdim=True).square_().div_(o.shape[-1]).add_(eps).rsqrt_()
    return (o * rho).mul_(gain), rho


def normed_backward(o: Tensor, gain: Tensor, rho: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `normed`.

    do = ρ (gain ⊙ dy − (gain · (o ⊙ dy)) ρ² / D · o) and dgain = Σ_tokens ρ o ⊙ dy.
    """
    dim = o.shape[-1]
    product = (o * dy).reshape(-1, dim)
    along = product.mv(gain).view(rho.shape).mul_(rho).mul_(rho)
    do = (dy * gain).addcmul_(o, along, value=-1 / dim).mul_(rho)
    return do, product.T.mv(rho.reshape(-1))


class _Normed(torch.autograd.Function):
    """Compute `rms_norm` as one autograd node that saves its input, the gain and ρ."""

    @staticmethod
    def forward(ctx: Any, eps: float, x: Tensor, gain: Tensor) -> Tensor:
        wide = compute_dtype(x, gain)
        y, rho = normed(widen(x, wide), widen(gain, wide), eps)
        ctx.eps = eps
        ctx.save_for_backward(x, gain, rho)
        return widen(y, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gain, rho = ctx.saved_tensors
        with without_autocast(dy):
            if torch.is_grad_enabled():
                needed = ctx.needs_input_grad[1:]
                return None, *reference_gradients(partial(_normed_reference, ctx.eps), (x, gain), needed, [dy])
            wide = rho.dtype
            dx, dgain = normed_backward(widen(x, wide), widen(gain, wide), rho, widen(dy, wide))
            return None, widen(dx, x.dtype), widen(dgain, gain.dtype)


def _normed_reference(eps: float, x: Tensor, gain: Tensor) -> Tensor:
    wide = compute_dtype(x, gain)
    return (rms_normalize(x.to(wide), eps) * gain.to(wide)).to(x.dtype)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm as one autograd node, for reads that fuse the norm that follows them.

    Args:
        x: activations [..., D].
        gain: [D].
        eps: added to the mean square.

    Returns:
        [..., D], computed in fp32 or wider and rounded once to x's dtype.
    """
    with without_autocast(x):
        y: Tensor = _Normed.apply(eps, x, gain)
        return y


_FORWARD = {nn.RMSNorm: nn.RMSNorm.forward, RMSNorm: RMSNorm.forward}


def is_plain_rms_norm(norm: object, dim: int) -> TypeGuard[nn.RMSNorm]:
    """Return whether a module is certainly an RMSNorm with a gain [dim] and nothing else, so that a kernel may replace its call.

    Hooks, a replaced forward, and a gain that is parametrised, quantised or sharded all make the answer False.
    """
    if type(norm) not in _FORWARD:
        return False
    assert isinstance(norm, nn.RMSNorm)
    if type(norm).forward is not _FORWARD[type(norm)] or not calls_only_its_forward(norm):
        return False
    return type(norm.weight) in (nn.Parameter, Tensor) and norm.weight.shape == norm.normalized_shape == (dim,)


def eps_of(norm: nn.RMSNorm, x: Tensor) -> float:
    """Return the norm's eps. When it is None, torch uses the eps of the dtype it computes in, which is fp32 for bf16 and fp16."""
    return torch.finfo(compute_dtype(x)).eps if norm.eps is None else norm.eps


def fused_gains(norms: Sequence[Any], x: Tensor) -> tuple[list[Tensor], float] | None:
    """Return the gain [D] of each norm and their common eps, or None if a kernel may not replace these norms."""
    rms = [n for n in norms if is_plain_rms_norm(n, x.shape[-1])]
    if len(rms) < len(norms) or any(n.eps != rms[0].eps for n in rms):
        return None
    return [n.weight for n in rms], eps_of(rms[0], x)


def side_by_side(rows: Tensor | Sequence[Tensor]) -> Tensor:
    """Return rows [D] as one tensor [W, D]; several rows are copied."""
    if isinstance(rows, Tensor):
        return rows
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(tuple(rows))
