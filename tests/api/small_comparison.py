"""A small comparison, made once a process, and what makes comparisons quick."""

import functools

import pytest

import depthmix as dm
from train import small

ARMS = ["residual", "attnres:block_size=2"]
OPTIONS = {"dim": 16, "n_blocks": 2, "n_heads": 2, "seq_len": 16, "batch_size": 4, "warmup": 2, "lr": 0.01}
OPTIONS |= {"steps": 4, "eval_every": 2, "save_every": 2, "eval_tokens": 64, "device": "cpu"}


def leave_out_figures(monkeypatch):
    """Leave out figures and cut connections, which take most of the time and have tests of their own."""
    monkeypatch.setattr("depthmix.compare.engine.draw_figures", lambda *_: ([], []))
    monkeypatch.setattr("depthmix.compare.engine.look_inside", lambda *_: None)
    monkeypatch.setattr("depthmix.compare.engine.release_memory", lambda device: None)


@functools.cache
def result_and_events():
    """The result of two arms with two seeds, and what on_step was told."""
    events = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        leave_out_figures(monkeypatch)
        return dm.compare(small.data(), ARMS, seeds=2, on_step=events.append, **OPTIONS), events
