"""Step times: the GPU's by its events without waiting for them, the wall clock's elsewhere, and what others took of the cores."""

import os
import subprocess
import sys
import time

import pytest
import torch

from depthmix.data.dataset import TokenData
from depthmix.train.clock import CoreWait, StepClock, quartiles
from depthmix.train.loop import Trainer
from train import small

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Stream:
    """A GPU's stream: events lie on it in order, at times that are known once the GPU has come that far."""

    def __init__(self):
        self.milliseconds, self.events, self.passed, self.waits = 0.0, [], 0, 0

    def record(self):
        self.events.append(self.milliseconds)
        return Event(self, len(self.events) - 1)


class Event:
    def __init__(self, stream, number):
        self.stream, self.number = stream, number

    def query(self):
        return self.number < self.stream.passed

    def synchronize(self):
        self.stream.waits += 1
        self.stream.passed = max(self.stream.passed, self.number + 1)

    def elapsed_time(self, other):
        assert self.query()
        assert other.query()
        return self.stream.events[other.number] - self.stream.events[self.number]


def test_a_gpus_steps_are_timed_by_its_events_without_waiting_for_them():
    stream = Stream()
    clock = StepClock(CUDA, stream.record)
    for step, taken in enumerate([40.0, 33.0, 34.0]):
        stream.milliseconds += 5  # what the host does between two steps
        clock.start()
        stream.milliseconds += taken
        clock.stop()
        stream.passed = 2 * step  # the GPU is one step behind
    assert stream.waits == 0
    assert clock.step_seconds == [0.04]
    stream.passed = 3  # in the middle of the second step
    assert clock.seconds() == pytest.approx([0.04, 0.033, 0.034])
    assert stream.waits == 2
    assert clock.seconds() == pytest.approx([0.04, 0.033, 0.034])


def test_elsewhere_the_wall_clock_counts():
    clock = StepClock(CPU)
    clock.start()
    time.sleep(0.02)
    clock.stop()
    assert clock.seconds()[0] >= 0.02
    assert len(clock.seconds()) == 1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_begins_when_its_batch_is_there_and_ends_with_the_update(tmp_path, monkeypatch, optimizer):
    config = small.config(tmp_path / "run", optimizer=optimizer)
    trainer = Trainer(config, TokenData.open(config.data), CPU)
    order = []
    for owner, name in ((trainer.batches, "get"), (trainer.clock, "start"), (trainer.clock, "stop")):
        called = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, f=called, n=name: (order.append(n), f(*a))[1])
    for key, one in trainer.optimizers.items():
        monkeypatch.setattr(one, "step", lambda k=key, f=one.step: (order.append(k), f())[1])
    trainer.step(0)
    assert order == ["get", "start", *trainer.optimizers, "stop"]
    assert len(trainer.clock.seconds()) == 1


def test_quartiles():
    assert quartiles([1.0] * 7) is None
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]) == [3.0, 7.0]


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="this system does not say who waits")
def test_waiting_for_a_core_that_another_process_has_is_noticed():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # of this thread, and of the process it starts
    try:
        neighbour = subprocess.Popen([sys.executable, "-S", "-c", "print(1, flush=True)\nwhile True: pass"], stdout=-1)
        neighbour.stdout.read(1)
        waiting, begun = CoreWait(), time.perf_counter()
        while time.perf_counter() - begun < 0.4:
            pass
        share = waiting.share()
        neighbour.kill()
        neighbour.communicate()
    finally:
        os.sched_setaffinity(0, cores)
    assert 0.25 < share < 1


def test_without_a_system_that_says_so_nothing_is_claimed(monkeypatch, tmp_path):
    monkeypatch.setattr("depthmix.train.clock.TASKS", tmp_path)
    assert CoreWait().share() is None
