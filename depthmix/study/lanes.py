"""Several runs of a study at once on one machine: while one is built, compiled or evaluated, another makes its steps.

One process keeps the queue and writes the results; the lanes, processes of their own, train what they are given and say what
came of it. A lane that dies takes its own run with it, if it has one, and another takes its place.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from depthmix.study.making import Outcome, make_run
from depthmix.study.modules import load_too
from depthmix.study.pieces import Deadline, Piece
from depthmix.train.signals import known

START = "spawn"  # a copy of a process that has used CUDA, or threads, cannot
LOOK = 0.5  # seconds between two looks at whether to stop


@dataclass(frozen=True)
class Place:
    """What every lane needs besides its runs."""

    lanes: int
    folders: Mapping[str, str]  # of data, by domain
    marks: Mapping[str, str]
    environment: Mapping[str, Any]
    deadline: Deadline
    compiles: bool
    threads: int  # of torch: sums on a CPU depend on how many there are
    modules: tuple[Path, ...] = ()  # mechanisms that the study brings along


def run_in_lanes(
    place: Place,
    take: Callable[[], tuple[Piece, float] | None],
    keep: Callable[[Piece, Outcome], None],
    stopping: Callable[[], bool],
) -> None:
    """Give every lane the next run until there is none; take: a run, and how long its evaluation may take."""
    context: Any = multiprocessing.get_context(START)
    at_work: dict[Connection, tuple[Any, Piece]] = {}

    def begin(task: tuple[Piece, float] | None) -> None:
        """Start a lane with a task; where no process can be started, with the first task for which one can."""
        while task is not None:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, place))
            try:
                with _without_interrupts():
                    process.start()
            except OSError as error:
                ours.close()
                keep(task[0], Outcome(error=f"its lane could not be started: {error.strerror or error}"))
                task = take()
                continue
            finally:
                theirs.close()  # so that the end of the lane is the end of what it says
            at_work[ours] = process, task[0]
            with suppress(OSError):  # a lane that has died already is found out where its outcome is read
                ours.send(task)
            return

    def leave(ours: Connection) -> Any:
        process, _ = at_work.pop(ours)
        ours.close()
        process.join()
        return process.exitcode

    try:
        for _ in range(place.lanes):
            begin(take())
        while at_work and not stopping():
            for ours in wait(list(at_work), LOOK):
                assert isinstance(ours, Connection)
                piece = at_work[ours][1]
                try:
                    outcome = ours.recv()
                except (EOFError, OSError):
                    keep(piece, Outcome(error=f"its lane died, exit code {leave(ours)}"))
                    begin(take())  # this ends, since an arm is not tried twice
                    continue
                keep(piece, outcome)
                task = take()
                try:
                    ours.send(task)
                except OSError:  # it died after its last run, and the next one is not to blame
                    what = f"a lane died between two runs, exit code {leave(ours)}"
                    print(f"{what}; no run is lost", file=sys.stderr, flush=True)
                    begin(task)
                    continue
                if task is None:
                    leave(ours)
                else:
                    at_work[ours] = at_work[ours][0], task[0]
    finally:
        for process, _ in at_work.values():
            process.terminate()  # a lane writes nothing: what it was at is left out
        for process, _ in at_work.values():
            process.join()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Keep from what is started inside the signals that a terminal or a batch system sends to all: its parent decides."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # the first process starts it, and that lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, known(("SIGINT", "SIGHUP", "SIGUSR1")))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection, place: Place) -> None:
    """A lane: runs, one after the other, until there is no more."""
    import torch

    from depthmix.data.prepared import open_data
    from depthmix.device import choose_device, release_memory
    from depthmix.train.compiled import compiled_once

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # where the process is a copy it has the other's
    torch.set_num_threads(place.threads)
    load_too(place.modules)
    parent = multiprocessing.parent_process()
    data: dict[str, Any] = {}

    def ends(left: float, evaluating: float) -> bool:
        alone = parent is not None and not parent.is_alive()
        return alone or not place.deadline.fits(left + (evaluating or left / 20))

    with compiled_once(place.compiles):
        try:
            while (task := pipe.recv()) is not None:
                piece, evaluating = task
                domain = piece.cell.domain
                if domain not in data:
                    data[domain] = open_data(place.folders[domain])
                release_memory(choose_device(piece.config.device))  # the last run's memory is not this one's
                stop = _stopper(ends, evaluating)
                pipe.send(make_run(piece, data[domain], place.marks[domain], place.environment, stop, place.lanes))
        except (EOFError, BrokenPipeError):
            pass  # nobody is left to tell


def _stopper(ends: Callable[[float, float], bool], evaluating: float) -> Callable[[float], bool]:
    return lambda left: ends(left, evaluating)
