"""Save the checkpoints of a training, of one process or of many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from depthmix.parallel.world import World
from depthmix.runs.checkpoint import save_checkpoint


class Saves(Protocol):
    """Interface of a saver."""

    def save(
        self, step: int, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: dict[str, Any]
    ) -> None:
        """Save a checkpoint, or begin to."""

    def wait(self) -> None:
        """Wait until the checkpoint is on the disk. Raises UserError if it could not be written."""


class Saver:
    """Saves the checkpoints of one process, synchronously."""

    def __init__(self, folder: Path, keep: int, saved: Callable[[Path], None]) -> None:
        """Remember where to save. `saved` is called with each checkpoint on the disk, before older ones are removed."""
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
    """Make the saver of a training.

    Args:
        world: The processes.
        folder: Folder of checkpoints.
        keep: Checkpoints to keep.
        saved: Called in the first process with each checkpoint that is on the disk.
        names: Returns the parameters of the undivided model.
    """
    if not world.several:
        return Saver(folder, keep, saved)
    from depthmix.runs import sharded  # slow to import

    return sharded.Saver(world, folder, keep, saved, names())
