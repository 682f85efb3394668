"""Which process is gone, when a collective fails: torch says that a connection broke, not whose."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress
from typing import Any

EVERY = 0.5  # seconds between signs of life
LONG = 2.5  # seconds without one, after which a process counts as gone


class Heartbeat:
    """Every process leaves signs of life in the store where they met, and a word when it goes by itself."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.thread.start()

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store is gone: so is whoever kept it, and the run with it
            n = 0
            while not self.ended.wait(EVERY if n else 0):
                n += 1
                self.store.set(f"beat/{self.rank}", str(n))

    def leave(self, reason: str) -> None:
        """Say that this process goes, and why; nothing: because another one did."""
        with suppress(RuntimeError):
            self.store.set(f"left/{self.rank}", reason)

    def stop(self) -> None:
        """No more signs."""
        self.ended.set()
        self.thread.join(EVERY)

    def gone(self) -> str | None:
        """The processes that have died or gone for a reason of their own, in words; None if all are there."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends us too: not before we know why
        try:
            before, until, left = self._read("beat"), time.monotonic() + LONG, self._read("left")
            while time.monotonic() < until and not any(left.values()):
                time.sleep(EVERY)
                left = self._read("left")
            if reasons := {rank: reason for rank, reason in left.items() if reason and rank != self.rank}:
                return "; ".join(f"rank {rank} has stopped: {reason}" for rank, reason in sorted(reasons.items()))
            after = self._read("beat")
        except RuntimeError:
            return "the process where all met cannot be reached any more"
        self.leave("")
        still = [r for r in range(self.size) if r != self.rank and r not in left and before.get(r) == after.get(r)]
        if not still:
            return None
        return f"rank{'s' * (len(still) > 1)} {', '.join(map(str, still))} of {self.size} died or cannot be reached"

    def _read(self, kind: str) -> dict[int, str]:
        keys = {rank: f"{kind}/{rank}" for rank in range(self.size)}
        return {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}
