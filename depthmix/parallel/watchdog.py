"""Watch a run for standstill: warn with the name of the process that hangs, and in the end exit.

In a collective all processes wait for the one that hangs, so that all of them stand still. The one that hangs has begun the fewest
collectives, or it gives no signs of life at all:

    rank 0   step 12, 480 collectives, waits in all_reduce     warns after 30 s: it is the first that gives signs of life
    rank 1   step 12, 478 collectives, is in dataset.py:88     is named
    rank 2   step 12, 480 collectives, waits in all_reduce

When every process that gives signs of life has stood still for longer than it may, the run is to end.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from depthmix.parallel.progress import Progress, main_thread_line

# Seconds without progress.
WARN_AFTER = 30.0
# Seconds without a sign of life, after which a process counts as silent.
SILENT = 2.5
# Number of ranks that watch all others. With a thousand ranks, not each needs to.
WATCHERS = 8
# Most ranks that a sentence names.
NAMED = 8


class Watchdog:
    """Judges the progress of all processes by their signs of life.

    Args:
        store: Shared by the processes; `beat/3` holds the last sign of life of rank 3.
        progress: This process's own.
        in_order: Whether all processes begin the same collectives, which those of a pipeline do not.
        where: Returns the line that this process is at.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        progress: Progress,
        in_order: bool = True,
        where: Callable[[], str] = main_thread_line,
    ) -> None:
        self.store, self.rank, self.size, self.progress = store, rank, size, progress
        self.in_order, self.where = in_order, where
        self._n = 0
        # Last sign of life, by rank.
        self._said: dict[int, dict[str, Any]] = {}
        # Time at which the last sign of life changed, by rank.
        self._changed: dict[int, float] = {}
        self._looking_since: float | None = None
        self._warned = False

    def beat(self, now: float) -> None:
        """Write a sign of life: what this process does, and for how long it has stood still."""
        self._n += 1
        idle = self.progress.idle(now)
        sign = {"n": self._n, "place": self.progress.place, "count": self.progress.count(), "idle": idle}
        sign |= {"allowed": self.progress.allowed, "slow": self.progress.slow, "where": self.where()}
        self._said[self.rank] = sign
        self._changed[self.rank] = now
        self.store.set(f"beat/{self.rank}", json.dumps(sign))

    def look(self, now: float) -> tuple[str | None, str | None]:
        """Return (warning, reason to end the run), each None unless it is due and this process is the one to report it."""
        idle = self.progress.idle(now)
        if self.rank >= WATCHERS or idle < min(WARN_AFTER, self.progress.allowed):
            self._looking_since, self._warned = None, False
            return None, None
        self._read(now)
        if self._looking_since is None:
            self._looking_since = now
        # It takes this long to see which process is silent.
        if now - self._looking_since < SILENT:
            return None, None
        heard = [rank for rank, since in sorted(self._changed.items()) if now - since < SILENT]
        if heard[0] != self.rank:
            return None, None
        still = [self._said[rank] for rank in heard]
        if all(said["idle"] > said["allowed"] for said in still):
            return None, self._sentence(heard, min(said["idle"] for said in still))
        if self._warned or any(said["idle"] < WARN_AFTER / 2 for said in still):
            return None, None
        self._warned = True
        if len(heard) == self.size == len(self._behind(heard)) and any(said["slow"] for said in still):
            # All processes do something for the first time, such as compiling, and none is behind.
            return None, None
        return self._sentence(heard, idle), None

    def _read(self, now: float) -> None:
        for rank in range(self.size):
            if rank == self.rank or not self.store.check([f"beat/{rank}"]):
                continue
            sign = json.loads(self.store.get(f"beat/{rank}"))
            if sign["n"] != self._said.get(rank, {}).get("n"):
                self._changed[rank] = now
            self._said[rank] = sign

    def _behind(self, heard: list[int]) -> list[int]:
        """Return the ranks that the others wait for, as far as known; else all ranks."""
        if self.in_order:
            least = min(self._said[rank]["count"] for rank in heard)
            return [rank for rank in heard if self._said[rank]["count"] == least]
        at_work = [rank for rank in heard if " in torch/" not in self._said[rank]["where"]]
        return at_work or heard

    def _sentence(self, heard: list[int], idle: float) -> str:
        silent = [rank for rank in range(self.size) if rank not in heard]
        named = silent or self._behind(heard)
        last = [self._said[rank] for rank in named if rank in self._said]
        places = " and ".join(dict.fromkeys(said["place"] for said in last)) or "the start"
        one = "s" if len(named) == 1 else ""
        if silent:
            what = f"{ranks(named, self.size)} give{one} no signs of life, last in {places}"
        elif len(named) == self.size:
            what = f"all {self.size} processes stand still in {places}"
        else:
            lines = "; ".join(dict.fromkeys(said["where"] for said in last))
            what = f"{ranks(named, self.size)} hang{one} in {places}, at {lines}"
        return f"no progress for {idle:.0f} s: {what}"


def ranks(named: list[int], size: int) -> str:
    """Format ranks: `rank 1 of 3`."""
    more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
    return f"rank{'s' * (len(named) > 1)} {', '.join(map(str, named[:NAMED]))}{more} of {size}"
