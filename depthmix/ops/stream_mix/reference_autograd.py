"""The reference's reads and writes with a backward of their own: one pass for each term, and no zeros for the streams that a term leaves out.

read:   dpre[i] = u' · x_i;    dx_i = pre[i] u'                              for u' the gradient of u
write:  dx_i = Σ_o res[o, i] g_o;    dres[o, i] = g_o · x_i;    dpost[o] = g_o · y;    dy = Σ_o post[o] g_o
"""

from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.precision import compute_dtype, without_autocast
from depthmix.ops.stream_mix.reference import stream_read_reference, stream_write_reference


class StreamRead(torch.autograd.Function):
    """u, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pre: Tensor) -> Tensor:
        ctx.save_for_backward(x, pre)
        return stream_read_reference(x, pre).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, pre = ctx.saved_tensors
        with without_autocast(g):
            if torch.is_grad_enabled():
                return tuple(reference_gradients(_read, (x, pre), ctx.needs_input_grad, [g]))
            g = g.to(compute_dtype(x, pre)).unsqueeze(-2)
            need_x, need_pre = ctx.needs_input_grad
            dx = (pre.unsqueeze(-1) * g).to(x.dtype) if need_x else None
            return dx, _like(pre, (x * g).sum(-1)) if need_pre else None


class StreamWrite(torch.autograd.Function):
    """x', rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, res: Tensor | None, post: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, res, post, y)
        return stream_write_reference(x, res, post, y).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, res, post, y = ctx.saved_tensors
        with without_autocast(g):
            if torch.is_grad_enabled():
                return tuple(reference_gradients(_write, (x, res, post, y), ctx.needs_input_grad, [g]))
            need_x, need_res, need_post, need_y = ctx.needs_input_grad
            g = g.to(compute_dtype(x, post, y) if res is None else compute_dtype(x, res, post, y))
            dx = dres = None
            if need_x:
                dx = (g if res is None else _mixed(res.transpose(-1, -2), g)).to(x.dtype)
            if need_res and res is not None:
                streams = range(x.shape[-2])
                dres = _like(res, torch.stack([(g * x[..., i, :].unsqueeze(-2)).sum(-1) for i in streams], dim=-1))
            dpost = _like(post, (g * y.unsqueeze(-2)).sum(-1)) if need_post else None
            dy = (post.unsqueeze(-1) * g).sum(-2).to(y.dtype) if need_y else None
            return dx, dres, dpost, dy


def _read(x: Tensor, pre: Tensor) -> Tensor:
    return stream_read_reference(x, pre).to(x.dtype)


def _write(x: Tensor, res: Tensor | None, post: Tensor, y: Tensor) -> Tensor:
    return stream_write_reference(x, res, post, y).to(x.dtype)


def _mixed(weights: Tensor, x: Tensor) -> Tensor:
    """Σ_i weights[o, i] x_i for every o."""
    out = weights[..., 0].unsqueeze(-1) * x[..., 0, :].unsqueeze(-2)
    for i in range(1, x.shape[-2]):
        out = torch.addcmul(out, weights[..., i].unsqueeze(-1).to(x.dtype), x[..., i, :].unsqueeze(-2))
    return out


def _like(weight: Tensor, g: Tensor) -> Tensor:
    """Of weights that all tokens share, the sum over the tokens."""
    return g.sum_to_size(weight.shape).to(weight.dtype)
