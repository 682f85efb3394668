"""Folders that live as long as the object whose files they hold."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

_KEPT: list[OwnedFolder] = []  # until the process ends


class OwnedFolder:
    """The folder that the caller names or, without one, a temporary folder that goes away with this object."""

    def __init__(self, path: str | os.PathLike[str] | None, name: str) -> None:
        self.temporary = path is None
        if path is None:
            root = tempfile.mkdtemp(prefix="depthmix-")
            weakref.finalize(self, _remove, root, os.getpid())
            # A subfolder, because preparing data replaces its folder as a whole.
            self.path = Path(root) / name
        else:
            self.path = Path(path)

    def keep(self) -> None:
        """Keep a temporary folder until the process ends, whatever becomes of this object."""
        _KEPT.append(self)


def _remove(root: str, pid: int) -> None:
    # A forked process has a copy of the object, and may end first.
    if os.getpid() == pid:
        shutil.rmtree(root, ignore_errors=True)
