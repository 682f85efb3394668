"""Medians of interleaved rounds. Contenders take turns, so that a drifting clock affects all of them."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

# Upper bound of a GPU's clock cycles per second.
CYCLES = 2.0e9
Mark = Callable[[], None]
Name = TypeVar("Name", bound=Hashable)
# Does the work and calls its argument at the end of every phase.
Run = Callable[[Mark], None]


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of every phase and of the whole, and the spread of the middle half of the rounds."""

    phases: tuple[float, ...]
    total: float
    spread: float  # interquartile range of the total over its median


class Clock:
    """A clock by CUDA events on a GPU, and by wall time elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def launch(self, run: Run) -> float:
        """Return the seconds that launching a run takes."""
        if self.device.type != "cuda":
            return 0.0
        self.synchronize()
        torch.cuda._sleep(int(0.2 * CYCLES))
        begun = time.perf_counter()
        run(lambda: None)
        took = time.perf_counter() - begun
        self.synchronize()
        return took

    def phases(self, run: Run, asleep: float = 0.0) -> list[float]:
        """Return the milliseconds between the marks of one run.

        Args:
            run: the run.
            asleep: seconds that the GPU sleeps before. What is launched meanwhile runs without gaps. Without this, a kernel
                shorter than its launch would measure the launch, and a stack without real sublayers the speed of Python.
        """
        self.synchronize()
        if self.device.type != "cuda":
            times = [time.perf_counter()]
            run(lambda: times.append(time.perf_counter()))
            return [1e3 * (b - a) for a, b in itertools.pairwise(times)]
        events: list[torch.cuda.Event] = []

        def mark() -> None:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()

        torch.cuda._sleep(int(asleep * CYCLES))
        mark()
        run(mark)
        self.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the wall-clock seconds of one call, including everything that it compiles and tunes."""
        self.synchronize()
        begun = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - begun


def interleaved(runs: Mapping[Name, Run], rounds: int, warmup: int, device: torch.device) -> dict[Name, Timing]:
    """Run each contender `warmup` times, then time it once in each of `rounds` rounds. Launch times are hidden."""
    clock, sleep_seconds = Clock(device), dict.fromkeys(runs, 0.0)
    for name, run in runs.items():
        for _ in range(warmup):
            clock.phases(run)
        sleep_seconds[name] = 0.005 + 1.5 * clock.launch(run)
    times: dict[Name, list[list[float]]] = {name: [] for name in runs}
    gc.collect()
    # A garbage collection during a pass would be counted as the kernel's time.
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in runs.items():
                times[name].append(clock.phases(run, sleep_seconds[name]))
    finally:
        gc.enable()
    return {name: _summary(t) for name, t in times.items()}


def _summary(rounds: list[list[float]]) -> Timing:
    totals = [sum(phases) for phases in rounds]
    median = statistics.median(totals)
    low, _, high = statistics.quantiles(totals, n=4, method="inclusive") if len(totals) > 1 else (median,) * 3
    phases = tuple(statistics.median(p) for p in zip(*rounds, strict=True))
    return Timing(phases, median, (high - low) / median if median else 0.0)


def extra_memory(run: Run, device: torch.device) -> int | None:
    """Return the peak bytes of GPU memory that a run adds to those allocated before it, or None without a GPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run(lambda: None)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
