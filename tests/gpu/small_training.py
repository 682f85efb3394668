"""A training of a few steps that a process can be started with."""

import os
from pathlib import Path
from typing import Any

import torch

SIZES = {"dim": 64, "n_blocks": 2, "n_heads": 2, "seq_len": 32, "batch_size": 4}


def training(mixer: str, layout: dict[str, int]) -> tuple[Any, Any]:
    """A configuration and random tokens."""
    from benchmarks.step import random_data
    from depthmix.config import TrainConfig

    config = TrainConfig(mixer=mixer, steps=100, warmup=1, data="random tokens", quiet=True, parallel=layout, **SIZES)
    return config, random_data(64, 4096)


def losses(trainer: Any, steps: range) -> list[float]:
    return [trainer.step(step)[0] for step in steps]


def take_part(rank: int, port: int, folder: str, mixer: str, layout: dict[str, int], device: str) -> None:
    """One of two processes on the same device; the first leaves its losses."""
    from depthmix.parallel.layout import Layout
    from depthmix.parallel.world import join
    from depthmix.train.loop import Trainer

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    config, data = training(mixer, layout)
    with join(Layout.of(layout), device, given=True) as world:
        found = losses(Trainer(config, data, world.device, world), range(3))
    if rank == 0:
        torch.save(found, Path(folder) / "losses.pt")
