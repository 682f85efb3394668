"""Runs in several processes at once: the numbers of one process, stopping, and what is refused."""

import multiprocessing
import os
import signal
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from compare import recipes
from compare.test_fair import own_rule
from depthmix.compare import modules, workers
from depthmix.compare.engine import compare
from depthmix.errors import INTERRUPTED, USAGE
from train.refused import refused


def losses(comparison):
    return {(run["arm"], run["seed"]): run["result"]["val_loss"] for run in comparison.records.runs}


@pytest.fixture
def recipe(tmp_path, light, monkeypatch):
    """A recipe with a rule of its own, in a file that workers must load."""
    monkeypatch.setattr(modules, "_loaded", {})
    monkeypatch.setattr("depthmix.compare.engine.look_inside", lambda _: None)
    own = own_rule(tmp_path, "halving_twice", "x * 0.5 + y")
    return recipes.write(tmp_path, arms=["residual", "halving_twice"], modules=[own], save_models=True)


def test_runs_at_once_end_with_the_numbers_of_one_process(recipe, tmp_path):
    both = losses(compare(recipes.config(recipe, tmp_path / "both", jobs=2)))
    assert len(both) == 4
    assert both == losses(compare(recipes.config(recipe, tmp_path / "one")))


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Fork workers from a process that has imported depthmix: spawned ones need seconds each. They know no rule of a recipe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["compare.forked_runs"])
    # Python 3.11 does not tell that process where this one looks for modules.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    fake = SimpleNamespace(get_context=lambda method: context, parent_process=multiprocessing.parent_process)
    monkeypatch.setattr(workers, "multiprocessing", fake)


def test_a_signal_stops_all_runs_and_their_checkpoints_are_saved(recipe, tmp_path):
    out, over = tmp_path / "out", threading.Event()

    def stop_when_begun():
        while len(list(out.rglob("seed-0"))) < 2 and not over.wait(0.01):
            pass
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop_when_begun)
    stopping.start()
    try:
        endless = recipes.config(recipe, out, jobs=2, steps=10**6)
        refused(lambda: compare(endless), "stopped by SIGTERM: 0 of 4 runs are done", code=INTERRUPTED)
    finally:
        over.set()
        stopping.join()
    assert len(list(out.rglob("checkpoints/*/"))) == 2


def test_runs_share_the_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    with workers.threads_of_a_run(3):
        assert taken == [2]
    assert taken == [2, 7]
    with workers.threads_of_a_run(9):
        assert taken[-1] == 1


def test_runs_at_once_need_the_cpu(recipe, tmp_path, monkeypatch):
    refused(
        lambda: compare(recipes.config(recipe, tmp_path / "out", jobs=0)), "jobs must be at least 1, got 0", code=USAGE
    )
    monkeypatch.setattr("depthmix.compare.engine.choose_device", lambda name: torch.device("cuda"))
    refused(lambda: compare(recipes.config(recipe, tmp_path / "out", jobs=2)), "jobs", "runs on cuda", code=USAGE)
