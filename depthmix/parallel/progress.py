"""Progress of a process: where it is in its run, for how long, and how long it may stay there."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

# Factor on the limit for first times, which may compile.
FIRST_TIMES = 4


class Progress:
    """Records what this process does now. The training writes it, and a watching thread reads it.

    Args:
        limit: Seconds that the process may stand still.
        count: Returns the number of collectives that it has begun.
    """

    def __init__(self, limit: float, count: Callable[[], int] = lambda: 0) -> None:
        self.limit, self.count = limit, count
        self.place, self.slow, self.marks = "the start", True, 0
        self._done: set[str] = set()
        self._last: tuple[Any, ...] = ()
        self._since = 0.0

    def at(self, kind: str, number: int | None = None, slow: bool = False) -> None:
        """Record what the process does now. `slow`: it may take as long as compilation does, each time."""
        self.slow = slow or kind not in self._done
        self._done.add(kind)
        self.place = kind if number is None else f"{kind} {number}"
        self.marks += 1

    def moved(self) -> None:
        """Record that the process makes progress."""
        self.marks += 1

    def idle(self, now: float) -> float:
        """Return the seconds for which this method has seen no progress."""
        state = self.place, self.marks, self.count()
        if state != self._last:
            self._last, self._since = state, now
        return now - self._since

    def skip(self, seconds: float) -> None:
        """Leave out seconds in which this process could not look."""
        self._since += seconds

    @property
    def allowed(self) -> float:
        """Seconds that the process may stand still where it is."""
        return self.limit * (FIRST_TIMES if self.slow else 1)


def begun_collectives(device: torch.device) -> int:
    """Count the collectives that this process has begun, those beside the training included, as of saving.

    Torch numbers the collectives of each group to find processes that are out of step, and has no public name for the number.
    """
    begun = 0
    for group in list(distributed_c10d._world.pg_map):
        # Saving communicates between CPUs.
        for kind in {device, torch.device("cpu")}:
            # The group is being set up or torn down, or is not for this device.
            with suppress(RuntimeError):
                backend: Any = group._get_backend(kind)
                begun += backend._get_sequence_number_for_group()
    return begun


def main_thread_line() -> str:
    """Return the innermost line of Python that the main thread is in: `read in depthmix/data/dataset.py:88`."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    code = frame.f_code
    path = Path(code.co_filename)
    roots = [n for n, part in enumerate(path.parts) if part in ("depthmix", "torch")]
    shown = Path(*path.parts[roots[-1] :]) if roots else Path(path.name)
    return f"{code.co_name} in {shown.as_posix()}:{frame.f_lineno}"
