"""What a trainer asks of a model, answered for one that is here as a whole; apply.py answers for the others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Alone:
    """A model in one process, with nothing around it."""

    def __init__(self, model: Any) -> None:
        self.model = self.blueprint = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def __call__(self, *args: Any) -> Tensor:
        return self.model(*args)

    def part(self, last: bool = True) -> AbstractContextManager[Any]:
        """Around the loss of a part of a batch and its backward; last: whether its gradients complete the batch's."""
        return nullcontext()

    def whole(self, losses: Tensor) -> Tensor:
        """Losses of tokens as a plain tensor."""
        return losses

    def clip(self, limit: float) -> Tensor:
        """The norm of a finished batch's gradients, after which they are scaled so that it is at most the limit."""
        return torch.nn.utils.clip_grad_norm_(self.parameters, limit)

    def norm_of(self, loss: Tensor) -> Tensor:
        """The norm of a loss's gradient, which is not kept."""
        # Not backward(): a recorded step's gradients stay where they are.
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return torch.nn.utils.get_total_norm([g for g in gradients if g is not None])

    def rest(self) -> None:
        """After a pass without a backward: parameters go back to where an optimizer and a checkpoint look for them."""
