"""Find out which process is gone when a collective fails, and which one hangs. torch reports only that a connection
broke.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from depthmix.errors import INTERNAL
from depthmix.parallel.progress import Progress
from depthmix.parallel.watchdog import SILENT, Watchdog, ranks

# Seconds between signs of life.
EVERY = 0.5
# Seconds between two looks at the store.
POLL = 0.01
# Keys of the store: the reason to end the run, and a mark that some process has printed it.
STRUCK, SAID = "struck", "said"
ADVICE = "the run stops; torchrun's --max-restarts, or the same command, goes on from the last checkpoint"


class Log(Protocol):
    """Destination of a process's log lines: its view of the run folder."""

    path: Path

    @property
    def log_path(self) -> Path:
        """The file that `log` writes to."""

    def log(self, message: str) -> None:
        """Write a line with the time."""


class Heartbeat:
    """Writes this process's signs of life, and its reason when it leaves, to the store that all processes share.

    The thread that writes them also watches for a run that stands still (watchdog.py). It warns first. In the end it
    writes the stacks of this process to its log and ends it, whatever the main thread is waiting for.
    """

    def __init__(self, store: Any, rank: int, size: int, progress: Progress, in_order: bool = True) -> None:
        """Start the thread. `in_order`: whether all processes begin the same collectives, which those of a pipeline do
        not.
        """
        self.store, self.rank, self.size, self.progress = store, rank, size, progress
        self.watchdog = Watchdog(store, rank, size, progress, in_order)
        self.log: Log | None = None
        self.ended, self.struck = threading.Event(), threading.Event()
        self._open = ExitStack()
        # Standard error, until there is a log.
        self._stacks_file: Any = 2
        self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.thread.start()

    def write_to(self, log: Log) -> None:
        """Write warnings and stacks into a run folder's log from now on."""
        # The first write to the log reports the error.
        with suppress(OSError):
            log.log_path.parent.mkdir(exist_ok=True)
            self._stacks_file = self._open.enter_context(log.log_path.open("a", encoding="utf-8"))
            self.log = log

    def _beat(self) -> None:
        # Without the store the process that kept it is gone, and so is the run.
        with suppress(RuntimeError):
            before = time.monotonic()
            self.watchdog.beat(before)
            while not self.ended.wait(EVERY):
                now = time.monotonic()
                if now - before > SILENT:
                    # The process was suspended, or one call blocked all threads.
                    self.progress.skip(now - before)
                before = now
                self.watchdog.beat(now)
                if self.size > 1:
                    # Where a call of C keeps this thread waiting, too, Python still writes the stacks.
                    faulthandler.dump_traceback_later(self.progress.allowed + SILENT, file=self._stacks_file)
                    self._look(now)

    def _look(self, now: float) -> None:
        warning, why = self.watchdog.look(now)
        if warning is not None:
            self._tell(f"warning: {warning}; the run ends after {self.progress.allowed:g} s without progress")
        if why is not None:
            self.store.set(STRUCK, why)
            self._end(why, speaks=True)
        elif self.store.check([STRUCK]):
            self._end(self.store.get(STRUCK).decode(), speaks=False)

    def _end(self, why: str, speaks: bool) -> None:
        """Write the stacks of this process and end it. `speaks`: print the reason once all others have written theirs."""
        self.struck.set()
        # A full disk must not keep the process from ending.
        with suppress(Exception):
            if self.log is not None:
                self.log.log(f"{why}; the stacks of this process:")
            faulthandler.dump_traceback(file=self._stacks_file)
        with suppress(RuntimeError):
            self.store.set(f"stacks/{self.rank}", "")
            others = [f"stacks/{rank}" for rank in range(self.size)]
            self._wait(others if speaks else [SAID], SILENT if speaks else 2 * SILENT)
            if speaks:
                folder = None if self.log is None else self.log.path
                where = "above" if folder is None else f"in {folder / 'log.txt'} and {folder / 'ranks'}"
                self._tell(f"{why}; the stacks of all processes are {where}; {ADVICE}")
                self.store.set(SAID, "")
                # The store may live in this process, and the others still read it.
                time.sleep(EVERY)
        # The main thread waits inside torch, where nothing else ends it.
        os._exit(INTERNAL)

    def _wait(self, keys: list[str], seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.store.check(keys):
            time.sleep(POLL)

    def _tell(self, sentence: str) -> None:
        with suppress(Exception):
            if self.log is not None:
                self.log.log(sentence)
        with suppress(OSError):
            print(f"depthmix: rank {self.rank}: {sentence}", file=sys.stderr, flush=True)

    def leave(self, reason: str) -> None:
        """Announce that this process leaves, and why. An empty reason: because another one did."""
        with suppress(RuntimeError):
            self.store.set(f"left/{self.rank}", reason)

    def stop(self) -> None:
        """Stop the signs of life."""
        self.ended.set()
        self.thread.join(EVERY)
        if self.size > 1:
            faulthandler.cancel_dump_traceback_later()
        self._open.close()

    def find_the_dead(self) -> str | None:
        """Name the processes that have died or left for a reason of their own; None if all are present."""
        if self.struck.is_set():
            # That thread ends this process.
            self.thread.join()
        if threading.current_thread() is threading.main_thread():
            # torchrun ends this process too. Find out the reason first.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            before, until, reasons_by_rank = self._read("beat"), time.monotonic() + SILENT, self._read("left")
            while time.monotonic() < until and not any(reasons_by_rank.values()):
                time.sleep(EVERY)
                reasons_by_rank = self._read("left")
            if reasons := {rank: reason for rank, reason in reasons_by_rank.items() if reason and rank != self.rank}:
                return "; ".join(f"rank {rank} has stopped: {reason}" for rank, reason in sorted(reasons.items()))
            after = self._read("beat")
        except RuntimeError:
            return "the process where all met cannot be reached any more"
        self.leave("")
        still = [
            r for r in range(self.size) if r != self.rank and r not in reasons_by_rank and before.get(r) == after.get(r)
        ]
        return f"{ranks(still, self.size)} died or cannot be reached" if still else None

    def _read(self, kind: str) -> dict[int, str]:
        keys = {rank: f"{kind}/{rank}" for rank in range(self.size)}
        return {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}
