"""Signals that ask a training to stop: the first one asks, the second leaves at once.

A second at the same moment is the same wish: `timeout` signals a process, and then its group, which it is part of.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

A_MOMENT = 0.1  # seconds
ASKING = ("SIGINT", "SIGTERM")
# A terminal that closes, a batch system before the time is up, a limit of CPU time (`ulimit -St`): by default they end a process.
# Where somebody else has said what they do, as nohup does, they keep that meaning.
ENDING = ("SIGHUP", "SIGUSR1", "SIGXCPU")

_inside: list[StopSignal] = []  # in all threads


def known(names: tuple[str, ...]) -> list[signal.Signals]:
    """Return those signals that the operating system has."""
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


class StopSignal:
    """Inside the context a first signal only sets `requested`; the handlers from before come back with it, and at the end.

    Python allows handlers in the main thread alone. A signal that arrives there asks the trainings of all threads.
    """

    def __init__(self) -> None:
        self.requested = False
        self.name = ""
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        _inside.append(self)
        if threading.current_thread() is threading.main_thread():
            taken = [number for number in known(ENDING) if signal.getsignal(number) is signal.SIG_DFL]
            for number in (*known(ASKING), *taken):
                self.before[number] = signal.signal(number, self._request)
        return self

    def _request(self, number: int, frame: FrameType | None) -> None:
        for stop in tuple(_inside):
            stop.requested, stop.name = True, signal.Signals(number).name
        time.sleep(A_MOMENT)  # in which another comes here, too
        cpu_time: dict[int, Any] = {n: self.before[n] for n in known(("SIGXCPU",)) if n in self.before}
        self._restore()  # so that the system itself acts on a second, whatever this process is busy with
        for n in cpu_time:  # the system repeats this one every second of CPU time, and saving may take longer
            signal.signal(n, signal.SIG_IGN)
        self.before |= cpu_time

    def _restore(self) -> None:
        while self.before:
            number, handler = self.before.popitem()
            signal.signal(number, handler)

    def __exit__(self, *exc: object) -> None:
        _inside.remove(self)
        self._restore()
