"""Where operators bring a backward of their own, and a second derivative for those whose own has only a first."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.torch_internals import transformed


def own_backward() -> bool:
    """Whether an operator may bring a backward of its own: not where a compiler or torch.func derives one itself."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling() and not transformed()


def reference_gradients(
    reference: Callable[..., Any], inputs: Sequence[Tensor | None], needed: Sequence[bool], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients by autograd through the reference, for a backward under create_graph=True.

    A hand-written backward computes with saved intermediates that have no history, so differentiating it again would
    silently lose terms. inputs: of the operator, as saved; needed: which of them want a gradient; grads: of the outputs.
    """
    aliases = [None if t is None else t.view_as(t) for t in inputs]  # one node each, even if a tensor is given twice
    wanted = [t for t, n in zip(aliases, needed, strict=True) if n and t is not None]
    found = iter(torch.autograd.grad(reference(*aliases), wanted, grads, create_graph=True, allow_unused=True))
    return [next(found) if n else None for n in needed]
