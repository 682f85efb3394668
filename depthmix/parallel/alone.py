"""Engine of a model in one process. apply.py and staged.py have the same interface for divided models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# (rows of a batch, and what computes their logits if not the model) -> their mean loss.
Loss = Callable[..., Tensor]
# (name, shape) -> the tensor to read that one into, or None.
Place = Callable[[str, torch.Size], Tensor | None]


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
        """Enter the context of a partial batch's loss and backward pass. `last`: its gradients complete those of the
        batch.
        """
        return nullcontext()

    def backward(self, loss: Loss, batch: Tensor, micro: int) -> Tensor:
        """Compute the mean loss of a batch and leave the gradients in the parameters. `micro`: rows per forward pass."""
        total, parts = torch.zeros((), device=batch.device), batch.split(micro)
        for part in parts:
            with self.part(last=part is parts[-1]):
                part_loss = loss(part) * (len(part) / len(batch))
                part_loss.backward()
            total += part_loss.detach()
        return total

    def probe(self, loss: Loss, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of a batch and the norm of its gradient, which is not kept."""
        batch_loss = loss(batch)
        # Not backward(): a recorded step's gradients stay where they are.
        gradients = torch.autograd.grad(batch_loss, self.parameters, allow_unused=True)
        return batch_loss.detach(), torch.nn.utils.get_total_norm([g for g in gradients if g is not None])

    def order_sums(self, loss: Loss, batch: Tensor, micro: int) -> None:
        """Restore the order in which gradients are added, as it is after the first step of a training. For a run that
        resumes.

        Args:
            loss, batch, micro: As in `backward`. No gradient is kept, and the random generator is restored.
        """

    def sums(self, of: Callable[[Any, Tensor], Iterable[float]], dealt: Iterable[tuple[Tensor, bool]]) -> list[float]:
        """Add up numbers over batches.

        Args:
            of: Maps (model, batch) to the numbers.
            dealt: Batches, each with whether it counts.
        """
        total: list[float] = []
        for batch, counts in dealt:
            with self.part():
                numbers = list(of(self, batch))
            total = total or [0.0] * len(numbers)
            total = [a + b for a, b in zip(total, numbers, strict=True)] if counts else total
        self.rest()
        return total

    def whole(self, losses: Tensor) -> Tensor:
        """Return token losses as a plain tensor."""
        return losses

    def clip(self, limit: float) -> Tensor:
        """Scale the gradients so that their norm is at most the limit, and return the norm before."""
        return torch.nn.utils.clip_grad_norm_(self.parameters, limit)

    def rest(self) -> None:
        """Put the parameters back where optimizers and checkpoints look for them, after a pass without a backward."""

    # Names. This process's tensors may be parts of those that the model in one piece has.

    def title(self, name: str) -> str:
        """Return the undivided model's name of one of this process's parameters."""
        return name

    def saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under the undivided model's names (after any path, as in `adamw/exp_avg/head.weight`), for a
        checkpoint.
        """
        return dict(tensors)

    def load(
        self, read: Callable[[Mapping[str, torch.Size], Place], dict[str, Tensor]], place: Place
    ) -> dict[str, Tensor]:
        """Read the model, and return what else a checkpoint holds, under this process's names.

        Args:
            read: Given the shapes that must exist and a place for each tensor, fills the places.
            place: Returns the place of anything else in the checkpoint.
        """
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        shapes = {name: p.shape for name, p in parameters.items()}
        tensors = read(shapes, lambda name, shape: parameters[name] if name in parameters else place(name, shape))
        return {name: t for name, t in tensors.items() if name not in parameters}
