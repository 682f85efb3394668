"""Stop a training on a signal: the first one asks it to save and stop, the second one ends it at once.

Simultaneous signals count as one request. `timeout` signals a process and then its group, of which the process is part.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

# Seconds within which signals count as simultaneous.
A_MOMENT = 0.1
ASKING = ("SIGINT", "SIGTERM")
# Sent by a closing terminal, by a batch system before its time limit, and at a CPU time limit (`ulimit -St`). By default they
# end a process. Handlers that others have set, such as nohup's, stay.
ENDING = ("SIGHUP", "SIGUSR1", "SIGXCPU")

# The contexts entered so far, in all threads.
_inside: list[StopSignal] = []


def known(names: tuple[str, ...]) -> list[signal.Signals]:
    """Return those signals that the operating system has."""
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


class StopSignal:
    """Turn the first signal into `requested` inside this context, then restore the previous handlers.

    Python allows handlers in the main thread only. A signal that arrives there asks the trainings of all threads to
    stop.
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
        time.sleep(A_MOMENT)  # a simultaneous signal arrives here, too
        cpu_time: dict[int, Any] = {n: self.before[n] for n in known(("SIGXCPU",)) if n in self.before}
        # With the previous handlers back, the system itself acts on a second signal, however busy this process is.
        self._restore()
        # The system repeats SIGXCPU every second of CPU time, and saving may take longer.
        for n in cpu_time:
            signal.signal(n, signal.SIG_IGN)
        self.before |= cpu_time

    def _restore(self) -> None:
        while self.before:
            number, handler = self.before.popitem()
            signal.signal(number, handler)

    def __exit__(self, *exc: object) -> None:
        _inside.remove(self)
        self._restore()
