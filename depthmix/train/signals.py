"""SIGINT and SIGTERM: the first asks to stop, the second leaves at once.

A second at the same moment is the same wish: `timeout` signals a process, and then its group, which it is part of.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

A_MOMENT = 0.1  # seconds


class StopSignal:
    """Inside the context a first signal only sets `requested`; the handlers from before come back with it, and at the end."""

    def __init__(self) -> None:
        self.requested = False
        self.name = ""
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._request)
        return self

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested, self.name = True, signal.Signals(number).name
        time.sleep(A_MOMENT)  # in which another comes here, too
        self._restore()  # so that the system itself acts on a second, whatever this process is busy with

    def _restore(self) -> None:
        while self.before:
            number, handler = self.before.popitem()
            signal.signal(number, handler)

    def __exit__(self, *exc: object) -> None:
        self._restore()
