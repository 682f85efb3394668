"""Helpers for operators with a hand-written backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.torch_internals import transformed


def uses_custom_backward() -> bool:
    """Return whether an operator may use its hand-written backward.

    It may not under torch.compile and torch.func, which derive a backward themselves.
    """
    return torch.is_grad_enabled() and not torch.compiler.is_compiling() and not transformed()


def reference_gradients(
    reference: Callable[..., Any], inputs: Sequence[Tensor | None], needed: Sequence[bool], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """Differentiate the reference implementation, for a backward pass with create_graph=True.

    A hand-written backward computes with saved intermediates that have no autograd history. Differentiating it again would silently
    lose terms.

    Args:
        reference: the operator in plain PyTorch, a function of `inputs`.
        inputs: tensors that the operator saved.
        needed: for each input, whether it needs a gradient.
        grads: gradients of the operator's outputs.

    Returns:
        A gradient for each input, None where none is needed.
    """
    # An alias for each input, so that a tensor passed twice has two gradients.
    aliases = [None if t is None else t.view_as(t) for t in inputs]
    differentiated = [t for t, n in zip(aliases, needed, strict=True) if n and t is not None]
    gradients = iter(
        torch.autograd.grad(reference(*aliases), differentiated, grads, create_graph=True, allow_unused=True)
    )
    return [next(gradients) if n else None for n in needed]
