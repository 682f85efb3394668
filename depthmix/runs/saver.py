"""What saves the checkpoints of a training, of one process or of many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from depthmix.parallel.world import World
from depthmix.runs.checkpoint import save_checkpoint


class Saves(Protocol):
    """What a training asks of it."""

    def save(
        self, step: int, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: dict[str, Any]
    ) -> None:
        """Save a checkpoint, or begin to."""

    def wait(self) -> None:
        """Until what was begun is on the disk; UserError if it could not be written."""


class Saver:
    """Saves the checkpoints of one process, at once."""

    def __init__(self, folder: Path, keep: int, saved: Callable[[Path], None]) -> None:
        """saved: called with every checkpoint that is on the disk, before older ones go."""
        self.folder, self.keep, self.saved = folder, keep, saved

    def save(
        self, step: int, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: dict[str, Any]
    ) -> None:
        save_checkpoint(self.folder, step, model, optimizer, state, self.keep, self.saved)

    def wait(self) -> None:
        pass


def open_saver(
    world: World, folder: Path, keep: int, saved: Callable[[Path], None], names: Callable[[], list[str]]
) -> Saves:
    """What saves into a folder of checkpoints; saved: called, in the first process, with every one that is on the disk.

    names: of the parameters of the model in one piece.
    """
    if not world.several:
        return Saver(folder, keep, saved)
    from depthmix.runs import sharded  # slow to import

    return sharded.Saver(world, folder, keep, saved, names())
