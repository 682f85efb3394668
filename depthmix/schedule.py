"""Learning rate schedules, and which of them can be extended by more steps without a break."""

from __future__ import annotations

import math

from depthmix.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the factor on the peak learning rate at a step from 0 to steps - 1."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.schedule == "rsqrt":
        return math.sqrt(max(1, config.warmup) / (step + 1))
    last = config.steps - 1
    if config.schedule == "wsd":
        start = max(config.warmup, config.steps - max(1, round(config.decay_fraction * config.steps)))
        done = 0.0 if step < start else (step - start + 1) / (last - start + 1)
        return 1 - (1 - config.final_lr) * done
    done = (step - config.warmup) / max(1, last - config.warmup)
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def first_changed_step(then: TrainConfig, now: TrainConfig, steps: int) -> int | None:
    """Find the first step made so far whose learning rate would have differed under another configuration.

    A run can continue under another configuration if there is no such step: always with rsqrt, whose rate does not
    depend on the number of steps, with wsd while neither decay has begun, and during the warmup.

    Args:
        then: The configuration of the steps made so far.
        now: The configuration to continue with.
        steps: Number of steps made so far.

    Returns:
        The step, counted from 0; None if all steps have the same learning rate.

    Examples:
        >>> short, long = (TrainConfig(schedule="wsd", warmup=10, steps=steps) for steps in (100, 200))
        >>> first_changed_step(short, long, 80), first_changed_step(short, long, 81)
        (None, 80)
    """
    return next((s for s in range(steps) if learning_rate(then, s) != learning_rate(now, s)), None)
