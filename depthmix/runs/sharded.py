"""Checkpoints of many processes, by torch.distributed.checkpoint: each writes its part, beside the training.

    step-00000400/parts/shard-00001-…safetensors   what process 0 holds of the model and the optimizer; and so on
    step-00000400/model.safetensors                the model in one piece, put together from the parts, for everybody else
    step-00000400/state.json, manifest.json        as ever (checkpoint.py)

Any number of processes in any layout can go on from it, and from a checkpoint of one process; and one process from this.
All processes must see the same folder. Parts are safetensors, so nothing here is pickled.
"""

from __future__ import annotations

import hashlib
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
    write_hashed,
    writing_checkpoint,
)
from depthmix.runs.parts import Parts


class Saver:
    """Saves checkpoints while the training goes on; one at a time, in the order they were asked for."""

    def __init__(self, world: World, folder: Path, keep: int, saved: Callable[[Path], None], names: list[str]) -> None:
        """saved: called in the first process when a checkpoint has its name; names: of the parameters of the model in one piece."""
        self.world, self.folder, self.keep, self.saved, self.names = world, folder, keep, saved, names
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def save(
        self, step: int, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: dict[str, Any]
    ) -> None:
        """Take a copy of everything and begin to write it; waits for the checkpoint before."""
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
        """Until what was begun is on the disk; UserError, in all processes, if it could not be written."""
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
        """In a thread of its own, with a group of its own: what it sends does not get among the training's messages."""
        try:
            written.result()
            own = sorted((temporary / PARTS).glob(f"shard-{self.world.rank + 1:05d}-*.safetensors"))
            files: list[Any] = [None] * self.world.size
            dist.all_gather_object(files, {f"{PARTS}/{p.name}": _entry(p) for p in own}, group=self.world.beside)
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
        """In the first process; what went wrong, with its exit code."""
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
    with open(path, "rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def load_into(
    path: Path, model: Mapping[str, torch.Size], places: Callable[[str, torch.Size], Tensor | None]
) -> dict[str, Tensor]:
    """Read a checkpoint into tensors that are divided as they are to be, and return those.

    model: the names and shapes of the model in one piece, all of which must be there. places: gives a tensor for one of the
    checkpoint's, by its name and shape; one without memory if it is another process's; None if nobody has a place for it.
    """
    folder = path / PARTS if (path / PARTS).is_dir() else path
    found = Parts(folder).shapes
    for name, shape in model.items():
        if name not in found:
            raise UserError(f"the checkpoint {path} lacks {name}: it is of another model or optimizer", CHECKPOINT)
        if found[name] != shape:
            shapes = f"{list(found[name])}, not {list(shape)}"
            raise UserError(f"the checkpoint {path} has {name} of shape {shapes}: it is of another size", CHECKPOINT)
    own: dict[str, Tensor] = {}
    for name, shape in found.items():
        place = places(name, shape)
        if place is None:
            raise UserError(f"the checkpoint {path} has {name}: it is of another model or optimizer", CHECKPOINT)
        if not place.is_meta:
            own[name] = place
    dcp.load(own, storage_reader=HuggingFaceStorageReader(str(folder)))
    return own
