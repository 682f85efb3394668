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


@pytest.mark.parametrize("name", signals.ENDING)
def test_signals_that_would_end_the_process_ask(name):
    number = getattr(signal, name)
    assert signal.getsignal(number) is signal.SIG_DFL
    with StopSignal() as stop:
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert (stop.requested, stop.name) == (True, name)
        left = signal.SIG_IGN if name == "SIGXCPU" else signal.SIG_DFL  # the system repeats that one
        assert signal.getsignal(number) is left
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_meaning_that_others_gave_is_kept():
    """As nohup does with SIGHUP, or a library of a batch system with SIGUSR1."""
    found = []
    before = [signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGUSR1, lambda *_: found.append(1))]
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)
            assert not stop.requested
            assert found == [1]
    finally:
        for number, handler in zip((signal.SIGHUP, signal.SIGUSR1), before, strict=True):
            signal.signal(number, handler)


def test_a_signal_asks_the_trainings_of_all_threads():
    inside, go_on, found = threading.Event(), threading.Event(), []

    def train():
        with StopSignal() as stop:
            inside.set()
            go_on.wait(60)
            found.append((stop.requested, stop.name))

    with StopSignal() as stop:
        other = threading.Thread(target=train)
        other.start()
        assert inside.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)
        go_on.set()
        other.join()
        assert stop.requested
    assert found == [(True, "SIGTERM")]


def test_afterwards_everything_is_as_before(seen):
    with StopSignal() as stop:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)
    assert not stop.requested
    assert seen == [signal.SIGTERM]
