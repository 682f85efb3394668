"""The first signal asks, one at the same moment is the same wish, and a later one goes where it went before."""

import os
import signal
import threading
import time

import pytest

from depthmix.train import signals
from depthmix.train.signals import StopSignal


@pytest.fixture
def seen():
    """Signals that reach the handler from before."""
    found = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


def test_two_at_one_moment_are_one(seen, monkeypatch):
    """As `timeout` sends them: to the process, and to its group."""
    monkeypatch.setattr(signals, "A_MOMENT", 0.3)
    with StopSignal() as stop:
        second = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
        second.start()
        os.kill(os.getpid(), signal.SIGTERM)
        second.join()
        time.sleep(0.01)
        assert (stop.requested, stop.name) == (True, "SIGTERM")
        assert not seen
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert seen == [signal.SIGTERM]


def test_afterwards_everything_is_as_before(seen):
    with StopSignal() as stop:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)
    assert not stop.requested
    assert seen == [signal.SIGTERM]
