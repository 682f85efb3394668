"""Build the model that a training starts with: on one device or divided among processes, compiled or checkpointed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from depthmix.config import TrainConfig
from depthmix.device import autocast
from depthmix.parallel.alone import Alone
from depthmix.parallel.world import World
from depthmix.train.compiled import begin_model
from depthmix.train.task import Task


def prepare_model(model: Any, config: TrainConfig, device: torch.device) -> Any:
    """Move a model to its device and wrap its sublayers as the configuration says."""
    model = model.to(device)
    wrap_sublayers(model, config)
    return model


def divide_model(config: TrainConfig, task: Task, world: World) -> tuple[Alone, dict[str, Any] | None]:
    """Build a task's model, divided among the processes of a world.

    Args:
        config: The training.
        task: The task, which builds the model.
        world: The processes.

    Returns:
        The engine that runs the divided model, and the origin of its weights (None: random).
    """
    from depthmix.parallel.weights import fingerprint, like  # slow to import

    narrow = torch.bfloat16 if isinstance(autocast(world.device, config.precision), torch.autocast) else None
    wrap = functools.partial(wrap_sublayers, config=config)
    divided = _engine(world, task)
    if not config.init:
        return divided(world, task.build, config.seed, narrow, wrap), None
    start = world.together(task.start)  # every process reads the whole model once, and keeps its part
    world.agree({"the model in init": fingerprint(start.model)})
    drawn = torch.get_rng_state()
    engine = divided(world, functools.partial(like, start.model), config.seed, narrow, wrap, start.model)
    torch.set_rng_state(drawn)
    return engine, start.origin


def _engine(world: World, task: Task) -> Callable[..., Alone]:
    """Choose the class that divides a model as the parallel layout says."""
    if world.layout.pp > 1:
        from depthmix.parallel.staged import Staged  # slow to import

        return functools.partial(Staged, microbatches=len(task.batches.rows) // task.micro)
    from depthmix.parallel.apply import Parallel  # slow to import

    return Parallel


def wrap_sublayers(model: Any, config: TrainConfig) -> None:
    """Apply activation checkpointing and torch.compile, as the configuration says."""
    if config.compile != "off":
        begin_model()  # after a handful of models in one process torch would no longer compile, and not say so
    sublayers, norms = model.repeated_parts()
    if config.checkpoint_activations:
        for sublayer in sublayers:
            sublayer.forward = functools.partial(checkpoint, sublayer.forward, use_reentrant=False)
    if config.compile == "model":
        model.compile()
    elif config.compile == "sublayers":
        for module in (*sublayers, *norms):
            module.compile()
