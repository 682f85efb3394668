"""The reference of depth attention in few PyTorch operators, with a backward that saves no more than it needs."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.depth_attention.reference import depth_attention_reference
from depthmix.ops.precision import rms_normalize, widen, without_autocast


class Options(NamedTuple):
    """Say how sources are weighed, in the order of `depth_attention_reference`."""

    eps: float
    key_norm: bool = True
    heads: int = 1
    activation: str = "softmax"
    value_norm: bool = False


class Mixed(NamedTuple):
    """Intermediates of a read, by way: results (not rounded), weights and logits [n, ..., H], ρ [..., 1]; and r [n, ..., 1]."""

    outs: list[Tensor]
    p: list[Tensor]
    s: list[Tensor]
    rho: list[Tensor]
    r: Tensor | None


class DepthAttention(torch.autograd.Function):
    """Compute the reference with a backward that saves references to the sources and a few numbers per token.

    With a gain g for the norm of the result, y = g ⊙ ρ o with ρ = (mean(o²) + out_eps)^(-1/2), and o is mixed again:

        dg = Σ_tokens ρ o ⊙ dy
        do = ρ (g ⊙ dy − (g · (o ⊙ dy)) ρ² / D · o)

    With do_w the gradient of o_w, and a weight's own gradient dp where the caller uses the weights:

        dp_i += do · v_i                       per head
        ds_i  = p_i (dp_i − Σ_j p_j dp_j)      softmax;   dp_i p_i (1 − p_i)   sigmoid
        dv_i  = Σ_w  p_i do + ds_i r_i u − (Σ_heads ds_i s_i) r_i² / D · v_i
        du    = Σ_i ds_i r_i v_i               summed over tokens unless u is per token

    With value_norm do · v_i gets the factor r_i, p_i do too, and Σ_heads ds_i s_i becomes Σ_heads ds_i s_i + p_i r_i (do · v_i).
    """

    @staticmethod
    def forward(
        ctx: Any, options: Options, out_eps: float, with_weights: bool, u: Tensor, gain: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        mixed = attend(options, out_eps, u, gain, sources)
        ctx.options, ctx.out_eps, ctx.with_weights, ctx.n = options, out_eps, with_weights, len(sources)
        ctx.save_for_backward(u, gain, mixed.r, *sources, *mixed.p, *mixed.s, *mixed.rho)
        return (*mixed.outs, *mixed.p) if with_weights else tuple(mixed.outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Access saved_tensors once: a second access fails inside a checkpointed region.
        u, gain, r, *rest = ctx.saved_tensors
        n, ways, needs = ctx.n, u.shape[0], ctx.needs_input_grad[3:]
        sources, by_way = rest[:n], rest[n:]
        mixed = Mixed([], by_way[:ways], by_way[ways : 2 * ways], by_way[2 * ways :], r)
        with without_autocast(u):
            if torch.is_grad_enabled():
                reference = partial(differentiable, ctx.options, ctx.out_eps, ctx.with_weights)
                gradients = reference_gradients(reference, (u, gain, *sources), needs, grads)
            else:
                gradients = _backward(ctx.options, u, gain, sources, mixed, grads[:ways], grads[ways:], needs)
        return (None, None, None, *gradients)


def differentiable(
    options: Options, out_eps: float, with_weights: bool, u: Tensor, gain: Tensor | None, *sources: Tensor
) -> tuple[Tensor, ...]:
    """Compute what DepthAttention computes by the reference itself, for any order and mode of differentiation."""
    outs, p = depth_attention_reference(u, sources, *options)
    if gain is not None:
        outs = tuple(rms_normalize(o, out_eps) * g for o, g in zip(outs, gain, strict=True))
    return (*outs, *p.movedim(-2, 1)) if with_weights else outs


def attend(options: Options, out_eps: float, u: Tensor, gain: Tensor | None, sources: Sequence[Tensor]) -> Mixed:
    """Compute the mixtures and the intermediates that the backward needs."""
    eps, key_norm, heads, activation, value_norm = options
    ways, norms = u.unbind(), []
    dots: list[list[Tensor]] = [[] for _ in ways]
    for source in sources:
        v = widen(source, u.dtype)
        for dots_w, u_w in zip(dots, ways, strict=True):
            dots_w.append(_dot(u_w, v, heads))
        if key_norm or value_norm:
            norms.append(torch.linalg.vector_norm(v, dim=-1, keepdim=True))
    mixed = Mixed([], [], [], [], _rstd(torch.stack(norms), u.shape[-1], eps) if norms else None)
    for w, dots_w in enumerate(dots):
        s = _stack(dots_w, heads)
        s = s if mixed.r is None or not key_norm else s.mul_(mixed.r)
        p = torch.softmax(s, dim=0) if activation == "softmax" else torch.sigmoid(s)
        o = _mix(_source_weights(options, p, mixed.r), sources)
        if gain is not None:
            mixed.rho.append(_rstd(torch.linalg.vector_norm(o, dim=-1, keepdim=True), u.shape[-1], out_eps))
            o.mul_(mixed.rho[-1]).mul_(gain[w])
        mixed.outs.append(o)
        mixed.p.append(p)
        mixed.s.append(s)
    return mixed


def _backward(
    options: Options,
    u: Tensor,
    gain: Tensor | None,
    sources: Sequence[Tensor],
    mixed: Mixed,
    dy: Sequence[Tensor],
    dweights: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    _, key_norm, heads, activation, value_norm = options
    (need_u, _, *need_v), dim, r = needs, u.shape[-1], mixed.r
    ways, weights, radial = u.unbind(), [_source_weights(options, p, r) for p in mixed.p], None
    do, dgain, steps, du = list(dy), [], [], []
    for w, (p, s) in enumerate(zip(mixed.p, mixed.s, strict=True)):
        if gain is not None:
            rho, o = mixed.rho[w], _mix(weights[w], sources)
            product = (o * dy[w]).reshape(-1, dim)
            dgain.append(product.T.mv(rho.reshape(-1)))
            along = product.mv(gain[w]).view_as(rho).mul_(rho).mul_(rho)
            do[w] = (dy[w] * gain[w]).addcmul_(o, along, value=-1 / dim).mul_(rho)
        dp = _stack([_dot(do[w], widen(v, u.dtype), heads) for v in sources], heads)
        along_source = None
        if r is not None and value_norm:
            dp = dp * r
            along_source = p * dp * r
        dp = dp + dweights[w] if dweights else dp
        ds = p * (dp - (p * dp).sum(0)) if activation == "softmax" else dp * p * (1 - p)  # [n, ..., H]
        if r is not None and key_norm:
            ds = ds * r
            along_source = ds * s if along_source is None else along_source.addcmul_(ds, s)
        if r is not None and along_source is not None:
            part = along_source if heads == 1 else along_source.sum(-1, keepdim=True)
            radial = part * r if radial is None else radial.addcmul_(part, r)  # [n, ..., 1]
        steps.append(ds.unbind())
        if need_u:
            by_token = _mix(steps[w], sources)
            du.append(by_token if u.ndim > 2 else by_token.reshape(-1, dim).sum(0))
    dv: list[Tensor | None] = [None] * len(sources)
    for i, source in enumerate(sources):
        if need_v[i]:
            total = _mix([p_w[i] for p_w in weights], do)
            for u_w, t_w in zip(ways, steps, strict=True):
                _by_head(total, heads).addcmul_(_by_head(u_w, heads), _to_group(t_w[i]))
            if radial is not None:
                total.addcmul_(radial[i], widen(source, u.dtype), value=-1 / dim)
            dv[i] = widen(total, source.dtype)
    return [torch.stack(du) if need_u else None, torch.stack(dgain) if dgain else None, *dv]


def _source_weights(options: Options, p: Tensor, r: Tensor | None) -> tuple[Tensor, ...]:
    """Return what each source is multiplied with, by head: n times [..., H]."""
    return (p if r is None or not options.value_norm else p * r).unbind()


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Split the channels of x into groups, [..., D] -> [..., H, D/H]; with one head return x."""
    return x if heads == 1 else x.unflatten(-1, (heads, -1))


def _to_group(p: Tensor) -> Tensor:
    """Shape numbers per head [..., H] so that they multiply channel groups of `_by_head`."""
    return p if p.shape[-1] == 1 else p.unsqueeze(-1)


def _dot(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """Return a · b by head, for a [D] or [..., D] and b [..., D]: [..., H], or [...] with one head."""
    if a.ndim == 1 and heads == 1:
        # A matrix times a vector: no setting lets a GPU compute that in TF32.
        return b @ a
    return _by_head(a * b, heads).sum(-1)


def _stack(dots: list[Tensor], heads: int) -> Tensor:
    """Stack the dot products of n sources as [n, ..., H]."""
    return torch.stack(dots).unsqueeze_(-1) if heads == 1 else torch.stack(dots)


def _rstd(norm: Tensor, dim: int, eps: float) -> Tensor:
    """Turn |x| into (mean(x²) + eps)^(-1/2), in place."""
    return norm.square_().div_(dim).add_(eps).rsqrt_()


def _mix(p: Sequence[Tensor], sources: Sequence[Tensor]) -> Tensor:
    """Return Σ_i p_i v_i [..., D] for n weights [..., H] and n sources [..., D]."""
    heads = p[0].shape[-1]
    o = _by_head(sources[0], heads) * _to_group(p[0])
    for p_i, v in zip(p[1:], sources[1:], strict=True):
        o.addcmul_(_by_head(widen(v, o.dtype), heads), _to_group(p_i))
    return o if heads == 1 else o.flatten(-2)
