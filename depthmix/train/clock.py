"""How long steps take, and whether they had to wait for others: what a busy machine does to a measurement."""

from __future__ import annotations

import functools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

TASKS = Path("/proc/self/task")
ENOUGH = 8  # steps, for quartiles to mean anything


class StepClock:
    """Seconds of every step: on a GPU its own, between two events on its stream, elsewhere the wall clock's.

    Nobody waits for an event: those of a step are read once a later look finds that the GPU has passed them.
    """

    def __init__(self, device: torch.device, now: Callable[[], Any] | None = None) -> None:
        self.by_events = device.type == "cuda"
        self.now = now or (functools.partial(_recorded, device) if self.by_events else time.perf_counter)
        self.taken: list[float] = []
        self.under_way: deque[tuple[Any, Any]] = deque()
        self.begun: Any = None

    def start(self) -> None:
        """A step begins: what it needs from the host is there."""
        self.begun = self.now()

    def stop(self) -> None:
        """The step's last work has been launched."""
        if not self.by_events:
            self.taken.append(self.now() - self.begun)
            return
        self.under_way.append((self.begun, self.now()))
        while self.under_way and self.under_way[0][1].query():
            self._read_first()

    def seconds(self) -> list[float]:
        """The steps so far, after waiting for those under way."""
        while self.under_way:
            self.under_way[0][1].synchronize()
            self._read_first()
        return self.taken

    def _read_first(self) -> None:
        begun, ended = self.under_way.popleft()
        self.taken.append(begun.elapsed_time(ended) / 1000)


def _recorded(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def quartiles(seconds: Sequence[float]) -> list[float] | None:
    """The first and third quartile; None for too few."""
    if len(seconds) < ENOUGH:
        return None
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return [low, high]


class CoreWait:
    """The share of the CPU time this process wanted, from here on, that it waited for a core because others had them."""

    def __init__(self) -> None:
        self.before = _schedule()

    def share(self) -> float | None:
        """From 0 to 1; None where the system does not say."""
        now = _schedule()
        ran, waited = (sum(n[i] - self.before.get(t, (0, 0))[i] for t, n in now.items()) for i in (0, 1))
        return waited / (ran + waited) if ran > 0 else None


def _schedule() -> dict[str, tuple[int, int]]:
    """Nanoseconds on a core and waiting for one, by thread (Linux)."""
    found = {}
    for path in TASKS.glob("*/schedstat"):
        try:
            ran, waited, *_ = path.read_text().split()
        except (OSError, ValueError):  # a thread that has ended
            continue
        found[path.parent.name] = int(ran), int(waited)
    return found
