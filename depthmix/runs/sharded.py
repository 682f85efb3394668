"""Checkpoints of several processes, by torch.distributed.checkpoint. Each process writes its part while the training
continues.

    step-00000400/parts/shard-00001-…safetensors   process 0's part of the model and the optimizer, and so on
    step-00000400/model.safetensors                the whole model, assembled from the parts, for other readers
    step-00000400/state.json, manifest.json        as in checkpoint.py

Any number of processes in any layout can resume from such a checkpoint, and from a checkpoint of one process. All processes must
see the same folder. Parts are safetensors, so nothing is pickled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from depthmix.errors import CHECKPOINT, UserError
from depthmix.files import file_sha256, write_hashed
from depthmix.parallel.world import SharedError, World
from depthmix.runs.checkpoint import (
    MODEL,
    PARTS,
    STATE,
    VERSION_IN_PARTS,
    begin,
    publish,
    remove_old,
    safetensors,
    state_file,
    writing_checkpoint,
)
from depthmix.runs.parts import Parts


class Saver:
    """Saves checkpoints in the background, one at a time, in order."""

    def __init__(self, world: World, folder: Path, keep: int, saved: Callable[[Path], None], names: list[str]) -> None:
        """Remember where to save.

        Args:
            world: The processes.
            folder: Folder of checkpoints.
            keep: Checkpoints to keep.
            saved: Called in the first process when a checkpoint has its final name.
            names: Parameters of the undivided model.
        """
        self.world, self.folder, self.keep, self.saved, self.names = world, folder, keep, saved, names
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def save(
        self, step: int, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: dict[str, Any]
    ) -> None:
        """Copy all tensors and begin to write them, after waiting for the previous checkpoint."""
        self.wait()
        temporary = self.world.by_first(lambda: self._begin(step))
        # The copy is on the CPU. A CPU's own tensors are copied here: the training changes them in place.
        tensors = {
            name: t.detach().clone() if t.device.type == "cpu" else t for name, t in {**model, **optimizer}.items()
        }
        writer = HuggingFaceStorageWriter(str(temporary / PARTS), save_distributed=True)
        written: Any = dcp.async_save(tensors, storage_writer=writer, process_group=self.world.beside)
        self.thread = threading.Thread(target=self._finish, args=(written, temporary, step, state), name="saver")
        self.thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint is on the disk. Raises UserError, in all processes, if it could not be written."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def _begin(self, step: int) -> Path:
        with writing_checkpoint(self.folder, step):
            temporary = begin(self.folder, step)
            (temporary / PARTS).mkdir()
            return temporary

    def _finish(self, written: Any, temporary: Path, step: int, state: dict[str, Any]) -> None:
        """Finish a checkpoint in a thread. A separate process group keeps its messages apart from the training's."""
        try:
            written.result()
            written_here = sorted((temporary / PARTS).glob(f"shard-{self.world.rank + 1:05d}-*.safetensors"))
            files: list[Any] = [None] * self.world.size
            dist.all_gather_object(
                files, {f"{PARTS}/{p.name}": _entry(p) for p in written_here}, group=self.world.beside
            )
            outcome: list[Any] = [None]
            if self.world.first:
                outcome[0] = self._publish(temporary, step, state, {k: v for f in files for k, v in f.items()})
            dist.broadcast_object_list(outcome, src=0, group=self.world.beside)
            if outcome[0] is not None:
                self.error = SharedError(*outcome[0])
        except BaseException as error:
            self.error = error

    def _publish(
        self, temporary: Path, step: int, state: dict[str, Any], files: dict[str, Any]
    ) -> tuple[str, int] | None:
        """Publish a checkpoint, in the first process; returns (message, exit code) of an error."""
        try:
            with writing_checkpoint(self.folder, step):
                parts = Parts(temporary / PARTS)
                empty = {n: torch.empty(parts.shapes[n], dtype=parts.dtypes[n], device="meta") for n in self.names}
                files = {
                    MODEL: write_hashed(temporary / MODEL, safetensors(empty, parts.get)),
                    **files,
                    STATE: write_hashed(temporary / STATE, [state_file(step, state)]),
                }
                path = publish(temporary, self.folder, step, files, VERSION_IN_PARTS)
            self.saved(path)
            remove_old(self.folder, step, self.keep)
        except UserError as error:
            return str(error), error.exit_code
        return None


def _entry(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": file_sha256(path)}


def load_into(
    path: Path, model: Mapping[str, torch.Size], places: Callable[[str, torch.Size], Tensor | None]
) -> dict[str, Tensor]:
    """Load a checkpoint into tensors that are already divided among the processes.

    Args:
        path: The checkpoint.
        model: Names and shapes of the undivided model's parameters, all of which the checkpoint must hold.
        places: Maps a tensor's name and shape to a tensor to load into: a meta tensor if it belongs to another
            process, None if no process has a place for it.

    Returns:
        The loaded tensors of this process.

    Raises:
        UserError: The checkpoint is of another model or optimizer.
    """
    folder = path / PARTS if (path / PARTS).is_dir() else path
    saved_shapes = Parts(folder).shapes
    for name, shape in model.items():
        if name not in saved_shapes:
            raise UserError(f"the checkpoint {path} lacks {name}: it is of another model or optimizer", CHECKPOINT)
        if saved_shapes[name] != shape:
            shapes = f"{list(saved_shapes[name])}, not {list(shape)}"
            raise UserError(f"the checkpoint {path} has {name} of shape {shapes}: it is of another size", CHECKPOINT)
    loaded: dict[str, Tensor] = {}
    for name, shape in saved_shapes.items():
        place = places(name, shape)
        if place is None:
            raise UserError(f"the checkpoint {path} has {name}: it is of another model or optimizer", CHECKPOINT)
        if not place.is_meta:
            loaded[name] = place
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(folder)))
    return loaded
