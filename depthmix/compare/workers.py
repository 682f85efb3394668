"""Train several runs of a comparison at once, each in a process of its own with its share of the CPU's cores.

this process                          worker                           worker
takes the next run ──── run ────────> make_run, on half of the cores
takes the next run ──── run ──────────────────────────────────────────> make_run, on the other half
keeps the outcome  <─── outcome ─────
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from depthmix.compare.modules import load_modules, loaded_files
from depthmix.compare.plan import Deadline, PlannedRun
from depthmix.compare.runs import Outcome, make_run
from depthmix.data.prepared import open_data

# Of a worker: set when its run should stop.
_stopping: Any = None


@contextmanager
def threads_of_a_run(jobs: int) -> Iterator[None]:
    """Compute with as many threads as each of several concurrent runs has, so that step times are measured as in a run."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // jobs))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Workers:
    """Processes that train runs, each with the threads that this process has. Leaving the context stops their runs.

    Args:
        jobs: Number of processes.
        deadline: End of the time limit.
    """

    def __init__(self, jobs: int, deadline: Deadline) -> None:
        # Forked, a process would inherit locks that threads of torch hold.
        context = multiprocessing.get_context("spawn")
        self.stopping = context.Event()
        self.deadline = deadline
        self.pool = ProcessPoolExecutor(jobs, context, _begin, (torch.get_num_threads(), loaded_files(), self.stopping))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self.pool.shutdown(cancel_futures=True)

    def stop(self) -> None:
        """Ask the runs under way to save and stop."""
        self.stopping.set()

    def submit(
        self, run: PlannedRun, checksum: str, environment: Mapping[str, Any], out: Path | None, label: str
    ) -> Future[Outcome]:
        """Start a run; arguments as for `make_run`, without those that no process can receive."""
        return self.pool.submit(_make, run, checksum, dict(environment), out, label, self.deadline)


def _begin(threads: int, modules: list[str], stopping: Any) -> None:
    """Prepare a worker."""
    global _stopping
    _stopping = stopping
    # A terminal's Ctrl-C and `timeout` signal every process. Between runs, only the process that hands them out acts on it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # A worker would wait for its next run for ever if the process that hands them out was killed.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Progress bars of several processes would overwrite each other.
    os.environ["TERM"] = "dumb"
    torch.set_num_threads(threads)
    load_modules(Path(), modules, "compare: modules")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _make(
    run: PlannedRun,
    checksum: str,
    environment: Mapping[str, Any],
    out: Path | None,
    label: str,
    deadline: Deadline,
) -> Outcome:
    def stop(left: float) -> bool:
        return _stopping.is_set() or not deadline.fits(left)

    return make_run(run, open_data(run.config.data), checksum, environment, out, label, stop)
