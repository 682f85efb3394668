"""How long a step takes: measured in turns, with one model at a time where there is no room for more."""

import weakref

import pytest
import torch

from depthmix.train import step_times
from depthmix.train.loop import Trainer
from depthmix.train.step_times import measure_step_times
from train import small


def test_step_times(tmp_path, monkeypatch):
    monkeypatch.setattr(step_times, "A_SECOND", 0.05)
    configs = [small.config(tmp_path / "x", mixer=mixer) for mixer in ("residual", "mhc")]
    times = measure_step_times(configs, warmup=1, steps=2, rounds=2)
    assert len(times) == 2
    assert all(0 < t < 10 for t in times)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("room", [False, True])
def test_step_times_are_taken_in_turns(tmp_path, monkeypatch, room):
    """With one model at a time or, where there is room for the first, with that one built once."""
    seconds = {"residual": iter([5.0, 1.0, 2.0]), "mhc": iter([7.0, 3.0, 4.0])}
    built, turns, alive = [], [], weakref.WeakSet()

    class Counted(Trainer):
        def __init__(self, config, *rest):
            assert [trainer.config.mixer for trainer in alive] == ["residual"] * (room and bool(built))
            super().__init__(config, *rest)
            self.circle = self  # as checkpointed activations leave
            built.append(config.mixer)
            alive.add(self)

        def step(self, step):
            if step == 0:
                turns.append(self.config.mixer)
                self.pace = next(seconds[self.config.mixer])
            self.clock.start()
            clock[0] += self.pace * (100 if step == 0 else 1)  # the first is warm-up
            self.clock.stop()

    clock = [0.0]
    monkeypatch.setattr(step_times, "Trainer", Counted)
    monkeypatch.setattr(step_times, "mostly_free", lambda device: room and len(alive) < 2)
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: clock[0])
    configs = [small.config(tmp_path / "x", mixer=mixer) for mixer in ("residual", "mhc")]
    assert measure_step_times(configs, warmup=1) == [2.0, 4.0]
    assert turns == ["residual", "mhc", "mhc", "residual", "residual", "mhc"]
    assert built == (["residual", "mhc", "mhc", "mhc"] if room else turns)


def test_steps_count_when_the_device_is_warm(tmp_path, monkeypatch):
    """It stood idle while the model was built: its first three seconds of steps are slow ones."""
    clock = [0.0]

    class Slow(Trainer):
        def step(self, step):
            self.clock.start()
            clock[0] += 0.5 if clock[0] < 3.0 else 0.25
            self.clock.stop()

    monkeypatch.setattr(step_times, "Trainer", Slow)
    monkeypatch.setattr(step_times.time, "perf_counter", lambda: clock[0])
    config = small.config(tmp_path / "x")
    for warm, taken in ({}, 0.5), ({"cpu": 3.0}, 0.25):
        clock[0] = 0.0
        monkeypatch.setattr(step_times, "WARM", warm)
        assert measure_step_times([config], rounds=1, warmup=1, steps=2) == [taken]
    assert clock[0] == 3.0 + step_times.A_SECOND


def test_a_cpu_is_never_called_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda of: (80, 100))
    assert [step_times.mostly_free(torch.device(name)) for name in ("cpu", "cuda")] == [False, True]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda of: (70, 100))
    assert not step_times.mostly_free(torch.device("cuda"))


def test_what_cannot_be_timed_is_told(monkeypatch):
    """Which of several it was, for a study that goes on without it."""
    monkeypatch.setattr(step_times, "A_SECOND", 0.05)
    configs = [small.config("unused", mixer=mixer) for mixer in ("residual", "dca")]
    build = step_times._trainer

    def broken(config):
        if config.mixer == "dca":
            raise RuntimeError("no such kernel")
        return build(config)

    monkeypatch.setattr(step_times, "_trainer", broken)
    with pytest.raises(RuntimeError, match="no such kernel") as caught:
        step_times.measure_step_times(configs)
    assert caught.value.measured == 1
