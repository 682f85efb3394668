"""What can go wrong among many processes: they disagree, one of them dies, one is asked to stop."""

import os
import re
import signal

import pytest

from depthmix.errors import INTERNAL, INTERRUPTED, USAGE
from depthmix.runs.checkpoint import list_checkpoints
from depthmix.runs.folder import RunFolder
from parallel.test_training import config
from train import small

KILLS = int(os.environ.get("DEPTHMIX_TEST_KILLS", "1"))
AT_EASE = {"steps": 400, "save_every": 5, "eval_every": 1000, "warmup": 2}


def command(out, **changes):
    return ["train", *small.flags(config(out, **{"parallel": {"dp": 2}, **changes}))]


def run(workers, tmp_path, argvs, signalled=None, patches=None):
    [found] = workers.run(0, "parallel.commands:run", argvs, str(tmp_path), signalled, patches)
    return found


def said(found):
    """What all processes together have said, without warnings of torch."""
    return [line for _, output, _ in found for line in output.splitlines() if line.startswith("depthmix:")]


@pytest.mark.parametrize("what", ["recipe", "code"])
def test_processes_that_disagree_are_refused(workers, tmp_path, what):
    argvs = [command(tmp_path / "run") for _ in range(2)]
    patches = {}
    if what == "recipe":
        argvs[1] = command(tmp_path / "run", lr=0.02)
    else:
        patches = {1: {"__version__": "0.0"}}
    found = run(workers, tmp_path, argvs, patches=patches)
    assert [code for code, *_ in found] == [USAGE, USAGE], found
    [line] = said(found)
    name = "lr is 0.02 there and 0.01 on rank 0" if what == "recipe" else "the version of depthmix is '0.0 "
    assert f"rank 1 differs from rank 0: {name}" in line
    assert not (tmp_path / "run").exists()


def test_other_data_is_refused(workers, tmp_path):
    from depthmix.config import DataConfig
    from depthmix.data.prepare import prepare

    other = prepare(
        DataConfig(input=[str(small.corpus())], out=str(tmp_path / "data"), vocab_size=small.VOCAB, val_fraction=0.3)
    )
    found = run(workers, tmp_path, [command(tmp_path / "run"), command(tmp_path / "run", data=str(other))])
    assert [code for code, *_ in found] == [USAGE, USAGE], found
    [line] = said(found)
    assert "rank 1 differs from rank 0: the data is" in line


def test_what_is_wrong_in_all_is_said_once(workers, tmp_path):
    found = run(workers, tmp_path, [command(tmp_path / "run", lr=-1.0)] * 2)
    assert [code for code, *_ in found] == [USAGE, USAGE], found
    assert said(found) == ["depthmix: rank 0: lr must be a finite number above 0, got -1.0"]


def test_the_others_name_a_process_that_was_killed(workers, tmp_path):
    out = tmp_path / "run"
    signalled = (1, signal.SIGKILL, str(out / "metrics.jsonl"), 11)
    found = run(workers, tmp_path, [command(out, **AT_EASE)] * 2, signalled)
    (code, output, seconds), (killed, *_) = found
    assert killed == -signal.SIGKILL
    assert code == INTERNAL, output
    assert seconds < 10
    [line] = said(found)
    assert line.startswith("depthmix: rank 0: rank 1 of 2 died or cannot be reached")
    assert list_checkpoints(out / "checkpoints")  # that of step 5 was waited for at step 10


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_one_is_asked_to_stop_and_all_save(workers, tmp_path, name):
    out = tmp_path / "run"
    signalled = (1, getattr(signal, name), str(out / "metrics.jsonl"), 3)
    found = run(workers, tmp_path, [command(out, **{**AT_EASE, "save_every": 1000})] * 2, signalled)
    assert [code for code, *_ in found] == [INTERRUPTED, INTERRUPTED], found
    [line] = said(found)
    step = int(re.search(r"stopped by a signal to another process after step (\d+) of 400, and saved", line)[1])
    assert [p.name for p in list_checkpoints(out / "checkpoints")] == [f"step-{step:08d}"]
    assert RunFolder(out).read_metrics()[-1]["step"] == step


def test_torchrun_starts_over_and_nothing_is_lost(workers, tmp_path):
    """Random processes are killed at random instants; torchrun starts all again, and the curve is that of an undisturbed run."""
    changes, out, kills = {"steps": 9 * (KILLS + 1), "save_every": 2, "eval_every": 20}, tmp_path / "run", KILLS
    metrics = str(out / "metrics.jsonl")
    workers.run(0, "parallel.commands:elastic", command(out, **changes), str(tmp_path / "logs"), metrics, kills)
    logs = {p: p.read_text() for p in (tmp_path / "logs").rglob("stderr.log")}
    assert len({p.parent.parent.name for p in logs}) == kills + 1  # attempts
    said = [line for text in logs.values() for line in text.splitlines() if line.startswith("depthmix:")]
    assert len(said) == kills
    for line in said:
        assert re.match(r"depthmix: rank (0: rank 1|1: rank 0) of 2 died or cannot be reached", line)
    assert "resuming at step" in (out / "log.txt").read_text()
    whole = config(tmp_path / "whole", **{**changes, "save_every": 1000})
    workers.run(2, "parallel.jobs:trains", {"dp": 2}, whole)
    assert RunFolder(out).read_metrics() == RunFolder(whole.out).read_metrics()
    ours, theirs = (list_checkpoints(RunFolder(p).checkpoints)[0] / "model.safetensors" for p in (out, whole.out))
    assert ours.read_bytes() == theirs.read_bytes()
