"""The reference's reads and writes with hand-written backwards: one pass per term, and no zeros for streams a term leaves out.

read:   dpre[i] = u' · x_i;    dx_i = pre[i] u'                              for u' the gradient of u
write:  dx_i = Σ_o res[o, i] g_o;    dres[o, i] = g_o · x_i;    dpost[o] = g_o · y;    dy = Σ_o post[o] g_o
rule:   z = r x W of a stream, r⁻² = its variance, or mean(x²), + eps; with dz the gradient of z
        dx = (r dz) Wᵀ − r² (dz · z) / D (x − its mean, or x);    dW = Σ xᵀ (r dz)
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.matmul import matmul
from depthmix.ops.norm import normed, normed_backward
from depthmix.ops.precision import compute_dtype, rms_normalize, widen, without_autocast
from depthmix.ops.stream_mix.reference import stream_read_reference, stream_write_reference
from depthmix.ops.stream_mix.rules import Rule


class StreamRead(torch.autograd.Function):
    """Compute stream_read, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pre: Tensor) -> Tensor:
        ctx.save_for_backward(x, pre)
        wide = compute_dtype(x, pre)
        return widen(_weighted(widen(pre, wide), widen(x, wide)), x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, pre = ctx.saved_tensors
        with without_autocast(g):
            if torch.is_grad_enabled():
                return tuple(reference_gradients(_read, (x, pre), ctx.needs_input_grad, [g]))
            g = widen(g, compute_dtype(x, pre)).unsqueeze(-2)
            need_x, need_pre = ctx.needs_input_grad
            dx = widen(pre.unsqueeze(-1) * g, x.dtype) if need_x else None
            return dx, _like(pre, (x * g).sum(-1)) if need_pre else None


class StreamWrite(torch.autograd.Function):
    """Compute stream_write, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, res: Tensor | None, post: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, res, post, y)
        wide = _wide(x, res, post, y)
        out = widen(post, wide).unsqueeze(-1) * y.unsqueeze(-2)
        return widen(out.add_(x) if res is None else _mix_into(out, widen(res, wide), widen(x, wide)), x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, res, post, y = ctx.saved_tensors
        with without_autocast(g):
            if torch.is_grad_enabled():
                return tuple(reference_gradients(_write, (x, res, post, y), ctx.needs_input_grad, [g]))
            need_x, need_res, need_post, need_y = ctx.needs_input_grad
            wide = _wide(x, res, post, y)
            g, post = widen(g, wide), widen(post, wide)
            dx = dres = None
            # One buffer for all products: allocating memory costs as much as filling it.
            product = torch.empty_like(g)
            if need_x:
                dx = widen(g if res is None else _mix_into(None, widen(res, wide).transpose(-1, -2), g), x.dtype)
            if need_res and res is not None:
                dots = [torch.mul(g, x_i, out=product).sum(-1) for x_i in x.unsqueeze(-3).unbind(-2)]
                dres = _like(res, torch.stack(dots).movedim(0, -1))
            dpost = _like(post, torch.mul(g, y.unsqueeze(-2), out=product).sum(-1)) if need_post else None
            return dx, dres, dpost, widen(_weighted(post, g), y.dtype) if need_y else None


class StreamRuleRead(torch.autograd.Function):
    """Compute stream_rule_read: u, normed with a gain and rounded once, post and res.

    Small tensors, with a number for every stream and column of W, are stored column by column: [n + 2, M] for the M streams of all
    tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, rule: Rule, eps: float, x: Tensor, columns: Tensor, bases: Tensor, scales: Tensor, gain: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, wide, dim = rule.n + 2, compute_dtype(x, columns), x.shape[-1]
        streams = widen(x, wide)
        rows = streams.reshape(-1, dim)
        z = matmul(widen(columns, wide), rows.T)
        r = torch.linalg.vector_norm(rows, dim=-1).square_().div_(dim)  # [M]
        mean = None
        if rule.centred:
            z, mean = z[:k], z[k]
            r.addcmul_(mean, mean, value=-1).clamp_(min=0)
        z.mul_(r.add_(rule.eps).rsqrt_())
        f = torch.tanh(z) if rule.tanh else z
        # Repeat what all tokens share for a row of tokens; otherwise every inner loop is only n long.
        period = _period(x)
        tiled = widen(bases, wide).unsqueeze(1).expand(-1, period // rule.n, -1).reshape(k, 1, period)
        made = torch.addcmul(tiled, f.view(k, -1, period), widen(scales, wide).view(k, 1, 1)).view(k, *x.shape[:-1])
        pre = made[0]
        o = _weighted(pre, streams)
        u, rho = (o, None) if gain is None else normed(o, widen(gain, wide), eps)
        ctx.rule, ctx.eps = rule, eps
        ctx.save_for_backward(x, columns, bases, scales, gain, r, mean, z, f, pre, None if gain is None else o, rho)
        return widen(u, x.dtype), made[1], made[2:].movedim(0, -2)

    @staticmethod
    def backward(ctx: Any, du: Tensor, dpost: Tensor, dres: Tensor) -> tuple[Tensor | None, ...]:
        x, columns, bases, scales, gain, r, mean, z, f, pre, o, rho = ctx.saved_tensors
        needs, wide, dim, k = ctx.needs_input_grad[2:], z.dtype, x.shape[-1], len(z)
        with without_autocast(x):
            if torch.is_grad_enabled():
                reference = partial(rule_read_reference, ctx.rule, ctx.eps)
                gradients = reference_gradients(reference, (x, columns, bases, scales, gain), needs, (du, dpost, dres))
                return (None, None, *gradients)
            du, dgain, dx, dcolumns = widen(du, wide), None, None, None
            if gain is not None:
                du, dgain = normed_backward(o, widen(gain, wide), rho, du)
                dgain = widen(dgain, gain.dtype)
            streams, du = widen(x, wide), du.unsqueeze(-2)
            rows, products = streams.reshape(-1, dim), r.new_empty(len(columns), len(r))
            dz = products[:k]
            made = dz.view(k, *x.shape[:-1])
            torch.sum(streams * du, dim=-1, out=made[0])
            made[1].copy_(dpost)
            made[2:].copy_(dres.movedim(-2, 0))
            dbases = dz.view(k, -1, _period(x)).sum(1).view(k, -1, x.shape[-2]).sum(1)
            dscales = (dz * f).sum(1)
            dz.mul_(widen(scales, wide).view(k, 1))
            if ctx.rule.tanh:
                dz.addcmul_(dz * f, f, value=-1)
            along = (dz * z).sum(0).mul_(r).mul_(r)  # [M]
            dz.mul_(r)
            if mean is not None:
                torch.mul(along, mean, out=products[k])
            if needs[0]:
                dx = matmul(products.T, widen(columns, wide)).addcmul_(rows, along.unsqueeze(-1), value=-1 / dim)
                dx = widen(dx.view(x.shape).addcmul_(pre.unsqueeze(-1), du), x.dtype)
            if needs[1]:
                dcolumns = widen(matmul(products, rows), columns.dtype)
            return None, None, dx, dcolumns, widen(dbases, bases.dtype), widen(dscales, scales.dtype), dgain


def rule_read_reference(
    rule: Rule, eps: float, x: Tensor, columns: Tensor, bases: Tensor, scales: Tensor, gain: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute StreamRuleRead in plain PyTorch."""
    k, wide = rule.n + 2, compute_dtype(x, columns)
    streams, columns, bases, scales = (widen(t, wide) for t in (x, columns, bases, scales))
    z, variance = matmul(streams, columns.T), streams.square().mean(-1)
    if rule.centred:
        variance = (variance - z[..., k].square()).clamp(min=0)
    z = z[..., :k] * torch.rsqrt(variance + rule.eps).unsqueeze(-1)
    made = bases.T + scales * (torch.tanh(z) if rule.tanh else z)  # [..., n, n + 2]
    u = stream_read_reference(streams, made[..., 0])
    u = u if gain is None else rms_normalize(u, eps) * gain.to(wide)
    return u.to(x.dtype), made[..., 1], made[..., 2:].transpose(-1, -2)


def _period(x: Tensor) -> int:
    """Return how many streams a row of tokens has."""
    return x.shape[-2] * (x.shape[-3] if x.ndim > 2 else 1)


def _read(x: Tensor, pre: Tensor) -> Tensor:
    return stream_read_reference(x, pre).to(x.dtype)


def _write(x: Tensor, res: Tensor | None, post: Tensor, y: Tensor) -> Tensor:
    return stream_write_reference(x, res, post, y).to(x.dtype)


def _wide(x: Tensor, res: Tensor | None, post: Tensor, y: Tensor) -> torch.dtype:
    return compute_dtype(x, post, y) if res is None else compute_dtype(x, res, post, y)


def _weighted(weights: Tensor, x: Tensor) -> Tensor:
    """Return Σ_i weights[i] x_i [..., C] for weights [..., n] or [n] and x [..., n, C]."""
    out = None
    for p, x_i in zip(weights.unsqueeze(-1).unbind(-2), x.unbind(-2), strict=True):
        out = p * x_i if out is None else out.addcmul_(p, x_i)
    assert out is not None
    return out


def _mix_into(out: Tensor | None, weights: Tensor, x: Tensor) -> Tensor:
    """Add Σ_i weights[o, i] x_i for every o to `out`, in place."""
    for p, x_i in zip(weights.unsqueeze(-1).unbind(-2), x.unsqueeze(-3).unbind(-2), strict=True):
        out = p * x_i if out is None else out.addcmul_(p, x_i)
    assert out is not None
    return out


def _like(weight: Tensor, g: Tensor) -> Tensor:
    """Sum a gradient over the tokens that share a weight."""
    return widen(g.sum_to_size(weight.shape), weight.dtype)
