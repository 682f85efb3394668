"""Events of a training, for callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StepEvent:
    """A finished optimizer step.

    Attributes:
        arm: The arm's label in a comparison; the mixer's name in a single training.
        seed: Seed of the run.
        step: Steps finished so far, from 1.
        steps: Steps of the whole run.
        loss: Training loss of this step, in nats (natural-log loss units) per token or image.
        val_loss: Validation loss if this step ended with an evaluation, else None.
    """

    arm: str
    seed: int
    step: int
    steps: int
    loss: float
    val_loss: float | None = None


OnStep = Callable[[StepEvent], object]
