"""Measure step times, and how long the process waited for a busy CPU."""

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
# Steps that quartiles need to mean anything.
ENOUGH = 8


class StepClock:
    """Record the seconds of every step: on a GPU between two CUDA events, elsewhere by the wall clock.

    The host never waits for an event. The clock reads a step's events on a later call, once the GPU has passed them.
    """

    def __init__(self, device: torch.device, now: Callable[[], Any] | None = None) -> None:
        self.by_events = device.type == "cuda"
        self.now = now or (functools.partial(_recorded, device) if self.by_events else time.perf_counter)
        self.step_seconds: list[float] = []
        self.in_flight: deque[tuple[Any, Any]] = deque()
        self.begin: Any = None

    def start(self) -> None:
        """Begin a step. Its batch is already on the device."""
        self.begin = self.now()

    def stop(self) -> None:
        """End a step, whose last kernel has been launched."""
        if not self.by_events:
            self.step_seconds.append(self.now() - self.begin)
            return
        self.in_flight.append((self.begin, self.now()))
        while self.in_flight and self.in_flight[0][1].query():
            self._read_first()

    def seconds(self) -> list[float]:
        """Return the seconds of all steps so far, after waiting for those in flight."""
        while self.in_flight:
            self.in_flight[0][1].synchronize()
            self._read_first()
        return self.step_seconds

    def _read_first(self) -> None:
        begun, ended = self.in_flight.popleft()
        self.step_seconds.append(begun.elapsed_time(ended) / 1000)


def _recorded(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def quartiles(seconds: Sequence[float]) -> list[float] | None:
    """Return the first and third quartile, or None for fewer than `ENOUGH` steps."""
    if len(seconds) < ENOUGH:
        return None
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return [low, high]


class CoreWait:
    """Measure how long this process waits for a CPU core that others occupy, from construction on."""

    def __init__(self) -> None:
        self.before = _schedule()

    def share(self) -> float | None:
        """Return waiting time / (running + waiting time), from 0 to 1; None where the system does not report it."""
        current = _schedule()
        ran, waited = (sum(n[i] - self.before.get(t, (0, 0))[i] for t, n in current.items()) for i in (0, 1))
        return waited / (ran + waited) if ran > 0 else None


def _schedule() -> dict[str, tuple[int, int]]:
    """Read (nanoseconds running, nanoseconds waiting for a core) of each thread, on Linux."""
    times = {}
    for path in TASKS.glob("*/schedstat"):
        try:
            ran, waited, *_ = path.read_text().split()
        except (OSError, ValueError):  # the thread has ended
            continue
        times[path.parent.name] = int(ran), int(waited)
    return times
