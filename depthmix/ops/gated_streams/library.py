"""Register the kernels of gated residual streams as PyTorch operators, for torch.compile. Eager code has op.py's own nodes."""

from typing import Any

import torch
from torch import Tensor

from depthmix.ops.registration import library, register

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def _rows(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.contiguous() for t in tensors]


def _or_empty(found: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if found is None else found


def _write_norm(x: Tensor, y: Tensor | None, post: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from depthmix.ops.gated_streams.kernels.norm_and_mean import write_norm

    x, y, post, gain = _rows(x, y, post, gain)
    new, normed = write_norm(x, y, post, gain, eps)
    # An operator's output must not be one of its inputs.
    return x.new_empty(0) if y is None else new, normed


def _write_norm_fake(
    x: Tensor, y: Tensor | None, post: Tensor | None, gain: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(0 if y is None else x.shape), x.new_empty(x.shape)


def _write_norm_backward(
    new: Tensor,
    y: Tensor | None,
    post: Tensor | None,
    gain: Tensor,
    dnew: Tensor | None,
    dnormed: Tensor,
    eps: float,
) -> Gradients:
    from depthmix.ops.gated_streams.kernels.norm_and_mean import write_norm_backward

    new, y, post, gain, dnew, dnormed = _rows(new, y, post, gain, dnew, dnormed)
    dx, dy, dpost, dgain = write_norm_backward(new, y, post, gain, dnew, dnormed, eps)
    return dx, _or_empty(dy, new), _or_empty(dpost, new), dgain


def _write_norm_backward_fake(
    new: Tensor,
    y: Tensor | None,
    post: Tensor | None,
    gain: Tensor,
    dnew: Tensor | None,
    dnormed: Tensor,
    eps: float,
) -> Gradients:
    dy, dpost = (new.new_empty(0) if t is None else t.new_empty(t.shape) for t in (y, post))
    return new.new_empty(new.shape), dy, dpost, gain.new_empty(gain.shape)


def _gated_mean(z: Tensor, normed: Tensor) -> Tensor:
    from depthmix.ops.gated_streams.kernels.norm_and_mean import gated_mean

    return gated_mean(*_rows(z, normed))


def _gated_mean_fake(z: Tensor, normed: Tensor) -> Tensor:
    return normed.new_empty(normed.shape[0], normed.shape[-1])


def _gated_mean_backward(z: Tensor, normed: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    from depthmix.ops.gated_streams.kernels.norm_and_mean import gated_mean_backward

    return gated_mean_backward(*_rows(z, normed, dh))


def _gated_mean_backward_fake(z: Tensor, normed: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), normed.new_empty(normed.shape)


register(
    "write_norm(Tensor x, Tensor? y, Tensor? post, Tensor gain, float eps) -> (Tensor new, Tensor normed)",
    _write_norm,
    _write_norm_fake,
)
register(
    "write_norm_backward(Tensor new, Tensor? y, Tensor? post, Tensor gain, Tensor? dnew, Tensor dnormed, float eps)"
    " -> (Tensor dx, Tensor dy, Tensor dpost, Tensor dgain)",
    _write_norm_backward,
    _write_norm_backward_fake,
)
register("gated_mean(Tensor z, Tensor normed) -> Tensor", _gated_mean, _gated_mean_fake)
register(
    "gated_mean_backward(Tensor z, Tensor normed, Tensor dh) -> (Tensor dz, Tensor dnormed)",
    _gated_mean_backward,
    _gated_mean_backward_fake,
)


def _setup_write(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, y, post, gain, ctx.eps = inputs
    ctx.save_for_backward(x if y is None else output[0], y, post, gain)
    ctx.set_materialize_grads(False)


def _write_backward(ctx: Any, dnew: Tensor | None, dnormed: Tensor | None) -> tuple[Any, ...]:
    new, y, post, gain = ctx.saved_tensors
    dnew = None if y is None else dnew
    dnormed = torch.zeros_like(new) if dnormed is None else dnormed
    dx, dy, dpost, dgain = torch.ops.depthmix.write_norm_backward(new, y, post, gain, dnew, dnormed, ctx.eps)
    return dx, None if y is None else dy, None if post is None else dpost, dgain, None


def _setup_mean(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _mean_backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor]:
    z, normed = ctx.saved_tensors
    gradients: tuple[Tensor, Tensor] = torch.ops.depthmix.gated_mean_backward(z, normed, dh)
    return gradients


torch.library.register_autograd("depthmix::write_norm", _write_backward, setup_context=_setup_write, lib=library)
torch.library.register_autograd("depthmix::gated_mean", _mean_backward, setup_context=_setup_mean, lib=library)
