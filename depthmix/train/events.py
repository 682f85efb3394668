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


def call_back(
    on_step: OnStep,
    event: StepEvent,
    save: Callable[[int], None] | None,
    wait: Callable[[], None],
    log: Callable[[str], None],
) -> None:
    """Call on_step. An exception in it ends the run, which can be resumed from this very step.

    Args:
        on_step: The caller's function.
        event: The step.
        save: Begins to write a checkpoint of a step; None if there is nothing to write.
        wait: Waits until checkpoints are written.
        log: Writes a sentence to the run's log.
    """
    try:
        on_step(event)
    except BaseException as error:
        if save is not None:
            save(event.step)
        wait()
        log(f"stopped by {type(error).__name__} in on_step after step {event.step}")
        raise
