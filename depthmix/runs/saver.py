"""Save the checkpoints of a training, of one process or of many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from depthmix.parallel.world import World
from depthmix.runs.checkpoint import save_checkpoint

if TYPE_CHECKING:
    from depthmix.runs import sharded


class Saver:
    """Saves the checkpoints of one process, synchronously."""

    def __init__(self, folder: Path, keep: int, saved: Callable[[Path], None]) -> None:
        """Remember where to save. `saved` is called with each checkpoint on the disk, before older ones are removed."""
        self.folder, self.keep, self.saved = folder, keep, saved

    def save(
        self, step: int, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: dict[str, Any]
    ) -> None:
        """Save a checkpoint."""
        save_checkpoint(self.folder, step, model, optimizer, state, self.keep, self.saved)

    def wait(self) -> None:
        """Do nothing: `save` has waited until the checkpoint is on the disk."""


def open_saver(
    world: World, folder: Path, keep: int, saved: Callable[[Path], None], names: Callable[[], list[str]]
) -> Saver | sharded.Saver:
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
    from depthmix.runs.sharded import Saver as ShardedSaver  # slow to import

    return ShardedSaver(world, folder, keep, saved, names())
