"""Decide which trainings may run at the same time in threads of one process.

Some settings of torch exist once per process, and a training that changes one of them would silently change the numbers of the
others:

    deterministic          torch's deterministic mode
    compile                the cache of torch.compile, which a new model clears, and its stance, which dynamics set to eager
    parallel               torch.distributed's group of processes

A training that conflicts with the trainings in other threads is refused before it changes anything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from depthmix.config import TrainConfig
from depthmix.errors import UserError
from depthmix.train.deterministic import deterministic

ADVICE = "train one after the other, or in separate processes"


@dataclass(frozen=True)
class Demands:
    """Process-wide settings that a training needs. deterministic=None: no preference."""

    deterministic: bool | None = None
    compiles: bool = False
    divided: bool = False

    @classmethod
    def of(cls, config: TrainConfig) -> Demands:
        """Read the demands of a configuration."""
        return cls(config.deterministic, config.compile != "off", bool(config.parallel))

    def conflict(self, other: Demands) -> str | None:
        """Explain why this training cannot run beside the other; None if it can."""
        if None not in (self.deterministic, other.deterministic) and self.deterministic != other.deterministic:
            both = f"deterministic is {self.deterministic} in this training and {other.deterministic} in the other"
            return f"{both}, and torch has one setting for all threads"
        if self.compiles and other.compiles:
            return "both compile their models, and torch.compile has one cache for all threads"
        if self.divided and other.divided:
            return "both have `parallel`, and torch.distributed has one group for all threads"
        return None


_lock = threading.Lock()
_running: list[tuple[int, Demands]] = []  # by thread


@contextmanager
def claim(demands: Demands) -> Iterator[None]:
    """Hold process-wide settings inside this context. Raises UserError if a training in another thread needs others."""
    entry = threading.get_ident(), demands
    with _lock:
        for thread, other in _running:
            if thread != entry[0] and (why := demands.conflict(other)):
                raise UserError(f"another thread of this process is training: {why}; {ADVICE}")
        _running.append(entry)
    try:
        yield
    finally:
        with _lock:
            _running.remove(entry)


@contextmanager
def settings_of(config: TrainConfig) -> Iterator[None]:
    """Put the process-wide settings of a training in force.

    Raises:
        UserError: A training in another thread needs other settings.
    """
    with claim(Demands.of(config)), deterministic(config.deterministic):
        yield
