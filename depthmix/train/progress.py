"""Show progress: with rich in a terminal, otherwise as plain lines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def _rich() -> bool:
    try:
        import rich  # noqa: F401
    except ModuleNotFoundError:
        return False
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def duration(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03."""
    minutes, s = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}" if hours else f"{minutes}:{s:02d}"


class TrainingProgress:
    """A progress bar with loss, speed, time left and memory; without a terminal, a line every ten seconds."""

    def __init__(self, label: str, start: int, steps: int, quiet: bool, unit: str = "tokens") -> None:
        self.unit = unit
        self.label, self.steps, self.quiet, self.begun, self.first = label, steps, quiet, time.monotonic(), start
        self.bar: Any = None
        self.printed = self.begun
        if quiet or not _rich():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns: list[Any] = [
            "{task.description}",
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[shown]}"),
        ]
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.bar.start()
        self.task = self.bar.add_task(label, total=steps, completed=start, shown="")

    def update(self, step: int, loss: float, per_second: float, memory: int | None, val_loss: float | None) -> None:
        """Show the state after `step` steps."""
        if self.quiet:
            return
        shown = (
            f"loss {loss:.3f}"
            + (f"  val {val_loss:.3f}" if val_loss is not None else "")
            + f"  {per_second:,.0f} {self.unit}/s"
        )
        shown += f"  {memory / 2**30:.1f} GiB" if memory else ""
        if self.bar is not None:
            self.bar.update(self.task, completed=step, shown=shown)
        elif time.monotonic() - self.printed >= 10 or step == self.steps:
            self.printed = time.monotonic()
            remaining = (self.printed - self.begun) / max(1, step - self.first) * (self.steps - step)
            print(
                f"{self.label}  {step}/{self.steps}  {shown}  {duration(remaining)} left", file=sys.stderr, flush=True
            )

    def close(self) -> None:
        """Stop the bar, leaving its last state on the screen."""
        if self.bar is not None:
            self.bar.stop()


@contextmanager
def phases() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show the progress of work in phases, such as preparing data; yields progress(phase, done, total)."""
    if not _rich():
        announced: set[str] = set()

        def note(phase: str, done: int, total: int | None) -> None:
            if phase not in announced:
                announced.add(phase)
                print(f"{phase} …", file=sys.stderr, flush=True)

        yield note
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def show(phase: str, done: int, total: int | None) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total)
            bar.update(tasks[phase], completed=done, total=total)

        yield show
