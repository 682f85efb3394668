"""Weight gradients that are computed later than input gradients, for zero-bubble schedules (arXiv 2401.10241).

    backward:  dx = dy W        at once, for the stage before
    later:     dW = dyᵀ x       when the schedule has nothing better to do

Torch splits a backward by walking through autograd's graph, which it cannot where one parameter spans the sites of a stage, as a
mixer's do. Here only matrices wait; gains and the mixer's parameters, which cost little, have their gradients at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Deferred:
    """Weight-gradient products that a backward pass has postponed."""

    def __init__(self) -> None:
        self.products: list[Callable[[], None]] = []

    def take(self) -> list[Callable[[], None]]:
        """Return and remove the products of the last backward pass."""
        products, self.products = self.products, []
        return products


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, linear: nn.Linear, deferred: Deferred) -> Tensor:
        y = functional.linear(x, weight)
        ctx.save_for_backward(x, weight)
        ctx.linear, ctx.deferred = linear, deferred
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight) = grads, ctx.saved_tensors
        # Not the saved weight: what a checkpoint gives back is another tensor with the same values.
        ctx.deferred.products.append(functools.partial(_add_product, ctx.linear.weight, x, dy))
        dx = (dy @ weight.to(dy.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


@torch.no_grad()
def _add_product(weight: Tensor, x: Tensor, dy: Tensor) -> None:
    product = (dy.flatten(0, -2).T @ x.flatten(0, -2).to(dy.dtype)).to(weight.dtype)
    weight.grad = product if weight.grad is None else weight.grad + product


def defer(module: nn.Module) -> Deferred:
    """Make the linear layers of a module postpone their weight gradients."""
    deferred = Deferred()
    for linear in module.modules():
        if isinstance(linear, nn.Linear) and linear.bias is None and linear.weight.requires_grad:
            linear.forward = functools.partial(_forward, linear, deferred)
    return deferred


def _forward(linear: nn.Linear, deferred: Deferred, x: Tensor) -> Tensor:
    return _Linear.apply(x, linear.weight, linear, deferred)
