"""What a trainer asks of a model, answered for one that is here as a whole; apply.py and staged.py answer for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

Loss = Callable[..., Tensor]  # (rows of a batch, and what gives their logits, if not the model) -> their mean loss
Place = Callable[[str, torch.Size], Tensor | None]  # a tensor to read one of this name and shape into, if there is any


class Alone:
    """A model in one process, with nothing around it."""

    model: Any
    blueprint: Any  # the model in one piece, maybe without memory: its names and shapes
    parameters: list[Tensor]  # of this process, those that train

    def __init__(self, model: Any) -> None:
        self.model = self.blueprint = model
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def __call__(self, *args: Any) -> Tensor:
        return self.model(*args)

    def part(self, last: bool = True) -> AbstractContextManager[Any]:
        """Around the loss of a part of a batch and its backward; last: whether its gradients complete the batch's."""
        return nullcontext()

    def backward(self, loss: Loss, batch: Tensor, micro: int) -> Tensor:
        """The mean loss of a batch, whose gradients are then with the parameters; micro: rows at a time."""
        total, parts = torch.zeros((), device=batch.device), batch.split(micro)
        for part in parts:
            with self.part(last=part is parts[-1]):
                found = loss(part) * (len(part) / len(batch))
                found.backward()
            total += found.detach()
        return total

    def probe(self, loss: Loss, batch: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and the norm of its gradient, which is not kept."""
        found = loss(batch)
        # Not backward(): a recorded step's gradients stay where they are.
        gradients = torch.autograd.grad(found, self.parameters, allow_unused=True)
        return found.detach(), torch.nn.utils.get_total_norm([g for g in gradients if g is not None])

    def order_sums(self, loss: Loss, batch: Tensor, micro: int) -> None:
        """Add gradients from here on in the order that a training has after its first step; for one that goes on from a checkpoint.

        Args:
            loss, batch, micro: as in `backward`. No gradient stays, and the random generator is where it was.
        """

    def sums(self, of: Callable[[Any, Tensor], Iterable[float]], dealt: Iterable[tuple[Tensor, bool]]) -> list[float]:
        """What is found of batches (of: with what gives their logits), added up; dealt: batches, each with whether it counts."""
        total: list[float] = []
        for batch, counts in dealt:
            with self.part():
                found = list(of(self, batch))
            total = total or [0.0] * len(found)
            total = [a + b for a, b in zip(total, found, strict=True)] if counts else total
        self.rest()
        return total

    def whole(self, losses: Tensor) -> Tensor:
        """Losses of tokens as a plain tensor."""
        return losses

    def clip(self, limit: float) -> Tensor:
        """The norm of a finished batch's gradients, after which they are scaled so that it is at most the limit."""
        return torch.nn.utils.clip_grad_norm_(self.parameters, limit)

    def rest(self) -> None:
        """After a pass without a backward: parameters go back to where an optimizer and a checkpoint look for them."""

    # Names. This process's tensors may be parts of those that the model in one piece has.

    def title(self, name: str) -> str:
        """What a parameter of this process's is called in the model in one piece."""
        return name

    def saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by the model's names (after any path: `adamw/exp_avg/head.weight`), as a checkpoint holds them."""
        return dict(tensors)

    def load(
        self, read: Callable[[Mapping[str, torch.Size], Place], dict[str, Tensor]], place: Place
    ) -> dict[str, Tensor]:
        """Read the model, and what else a checkpoint holds, which is returned under this process's names.

        read: given the shapes of what must be there and places for all that is, fills them; place: for what else there is.
        """
        own = {name: p.detach() for name, p in self.model.named_parameters()}
        shapes = {name: p.shape for name, p in own.items()}
        found = read(shapes, lambda name, shape: own[name] if name in own else place(name, shape))
        return {name: t for name, t in found.items() if name not in own}
