"""Several runs at once: the same results, one queue, lanes that die, deadlines and signals."""

import csv
import errno
import json
import multiprocessing
import os
import pickle
import signal
import time

import pytest
import torch

from depthmix.errors import INTERNAL, INTERRUPTED, USAGE
from depthmix.study import lanes
from depthmix.study import study as module
from depthmix.study.pieces import Deadline, Piece, predicted
from depthmix.study.recipe import read_study
from study import studies
from train.refused import refused

SHARED = "Several runs shared the machine"


@pytest.fixture
def training(monkeypatch, tmp_path):
    """Lanes as copies of this process, so that they train as little as it does."""
    fake = studies.Training()
    monkeypatch.setattr("depthmix.train.brief.train_briefly", fake)
    monkeypatch.setattr("depthmix.study.sheet.draw_study", lambda *_: ([], []))
    monkeypatch.setattr("depthmix.device.release_memory", lambda device: None)
    monkeypatch.setattr(lanes, "START", "fork")
    monkeypatch.setattr(lanes, "LOOK", 0.02)
    monkeypatch.chdir(tmp_path)
    return fake


def run(path, tmp_path, **changes):
    return module.study(studies.config(path, tmp_path / "out", **{"lanes": 2, **changes}))


def runs(folder):
    found = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == "run"]


EXACT = ("val_loss", "train_curve", "val_curve", "depth", "spikes", "largest_gradient", "parameters", "bits_per_byte")


def test_a_lane_finds_what_one_process_finds(tmp_path, monkeypatch):
    """Bit for bit; the lane works in this process, since new ones take seconds to begin."""
    monkeypatch.setattr("depthmix.study.sheet.draw_study", lambda *_: ([], []))
    path = studies.write(tmp_path, seeds=[0], set={**studies.SIZES, "dynamics_every": 100}, arms=studies.ARMS[1:])
    module.study(studies.config(path, tmp_path / "one"))
    one, study = runs(tmp_path / "one"), read_study(str(path))
    marks = {"words": one[0]["data"]}
    place = lanes.Place(
        2, study.domains, marks, one[0]["environment"], Deadline(0, 0.0), False, torch.get_num_threads()
    )
    ours, theirs = multiprocessing.Pipe()
    for arm in reversed(study.arms):
        config = study.config(arm, study.cells[0], 0, device="cpu", out="out", quiet=True)
        ours.send((Piece(arm, study.cells[0], config), 0.0))
    ours.send(None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    lanes._work(theirs, place)
    for alone in reversed(one):
        code, shared = ours.recv().lines
        assert code["kind"] == "code"
        assert {k: alone["result"][k] for k in EXACT} == {k: shared["result"][k] for k in EXACT}
        assert all(alone[k] == shared[k] for k in ("arm", "seed", "config", "data", "code"))
        assert ("lanes" in alone, shared["lanes"]) == (False, 2)


def test_what_shared_a_machine_is_no_cost(training, tmp_path):
    path = studies.write(tmp_path)
    module.study(studies.config(path, tmp_path / "one"))
    run(path, tmp_path)
    alone, shared = ((tmp_path / name / "table.md").read_text() for name in ("one", "out"))
    costs = ("| step, ms | ratio | memory, GiB |", "| time |", "“ratio”")
    assert all(words in alone for words in costs)
    assert not any(words in shared for words in costs)
    assert (SHARED in alone, SHARED in shared) == (False, True)
    times = [line["step_seconds"] for line in csv.DictReader((tmp_path / "out" / "results.csv").open())]
    assert times == [""] * 6


def test_a_process_that_begins_anew_gets_all_it_needs(tmp_path):
    """As START asks for, which takes seconds for each."""
    study = read_study(str(studies.write(tmp_path)))
    piece = Piece(study.arms[0], study.cells[0], study.config(study.arms[0], study.cells[0], 2))
    place = lanes.Place(2, study.domains, {"words": "mark"}, {"device": "cpu"}, Deadline(3, 0.0), False, 1)
    assert lanes.START == "spawn"
    assert pickle.loads(pickle.dumps((piece, 0.5))) == (piece, 0.5)
    assert pickle.loads(pickle.dumps(place)).deadline.end == place.deadline.end
    assert pickle.loads(pickle.dumps(lanes._work)) is lanes._work


def test_every_run_is_made_once_and_by_more_than_one(training, tmp_path):
    made = tmp_path / "made"
    made.mkdir()

    def note(config):
        time.sleep(0.02)
        (made / f"{config.mixer}-{config.seed}-{os.getpid()}").touch()

    training.during = note
    path = studies.write(tmp_path)
    run(path, tmp_path)
    found = [file.name.rsplit("-", 1) for file in made.iterdir()]
    assert len({name for name, _ in found}) == len(found) == 6
    assert len({lane for _, lane in found} - {str(os.getpid())}) == 2
    assert len(runs(tmp_path / "out")) == 6
    run(path, tmp_path)
    assert len(list(made.iterdir())) == 6
    assert not training.made  # nothing was trained in this process


@pytest.mark.parametrize(("threads", "told"), [(2, True), (1, False)])
def test_lanes_that_share_cores_are_told_so(training, tmp_path, monkeypatch, capsys, threads, told):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    run(studies.write(tmp_path), tmp_path, quiet=False)
    words = "2 lanes of 2 threads share 2 cores and wait for each other: one lane is faster, or OMP_NUM_THREADS=1."
    assert (words in capsys.readouterr().out) == told


def test_a_lane_that_dies_takes_its_run_alone(training, tmp_path):
    training.during = lambda config: config.mixer == "attnres" and os.kill(os.getpid(), signal.SIGKILL)
    path = studies.write(tmp_path)
    refused(lambda: run(path, tmp_path), "attnres:block_size=2: its lane died, exit code -9", "4 of 6", code=INTERNAL)
    assert {(r["arm"], r["seed"]) for r in runs(tmp_path / "out")} == {
        (a, s) for a in ("residual", "slow") for s in (0, 1)
    }
    training.during = None
    run(path, tmp_path)
    assert len(runs(tmp_path / "out")) == 6


def test_a_lane_that_dies_between_two_runs_takes_no_run_with_it(training, tmp_path, monkeypatch, capfd):
    """Killed when its outcome is here and before it has the next task: writing to it is a broken pipe."""
    keep, killed = module.Worker._keep, []

    def keep_and_kill(self, piece, outcome):
        keep(self, piece, outcome)
        if not killed:
            pid = int((tmp_path / f"{piece.config.mixer}-{piece.config.seed}").read_text())
            killed.extend(child for child in multiprocessing.active_children() if child.pid == pid)
            killed[0].kill()
            killed[0].join()

    training.during = lambda c: (tmp_path / f"{c.mixer}-{c.seed}").write_text(str(os.getpid()))
    monkeypatch.setattr(module.Worker, "_keep", keep_and_kill)
    run(studies.write(tmp_path), tmp_path)
    assert len(runs(tmp_path / "out")) == 6
    assert (tmp_path / "out" / "table.md").exists()
    assert "a lane died between two runs, exit code -9; no run is lost" in capfd.readouterr().err


def test_without_processes_the_table_is_written_and_the_reason_said(training, tmp_path, monkeypatch):
    """As where memory or the number of processes is limited: what was found before is kept."""
    path = studies.write(tmp_path)
    run(path, tmp_path, arms=["residual"])
    (tmp_path / "out" / "table.md").unlink()

    def start(self):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(multiprocessing.get_context("fork").Process, "start", start)
    words = "its lane could not be started: Resource temporarily unavailable"
    refused(lambda: run(path, tmp_path), "2 arms could not be run", words, "2 of 6", code=INTERNAL)
    assert (tmp_path / "out" / "table.md").exists()


def test_an_error_and_a_divergence_come_back(training, tmp_path):
    training.fail = {("attnres", 0): RuntimeError("no such kernel"), ("dca", 1): studies.diverged()}
    refused(lambda: run(studies.write(tmp_path), tmp_path), "no such kernel", code=INTERNAL)
    found = {(r["arm"], r["seed"]): r for r in runs(tmp_path / "out")}
    assert "diverged" in found["slow", 1]
    assert ("attnres:block_size=2", 0) not in found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_lanes(training, tmp_path, number):
    parent, begun, others = os.getpid(), time.monotonic(), set(multiprocessing.active_children())

    def wait(config):
        if config.seed == 1:
            if config.mixer == "residual":
                os.kill(parent, number)
            time.sleep(30)

    training.during = wait
    refused(lambda: run(studies.write(tmp_path), tmp_path), f"stopped by {number.name}", "goes on", code=INTERRUPTED)
    assert time.monotonic() - begun < 20
    assert 2 <= len(runs(tmp_path / "out")) <= 3
    assert set(multiprocessing.active_children()) <= others  # other tests keep theirs


def test_time_holds_for_lanes(training, tmp_path, capsys):
    run(studies.write(tmp_path), tmp_path, minutes=0.5, quiet=False)  # runs say that they take a hundred seconds
    assert 1 <= len(runs(tmp_path / "out")) <= 2  # those begun before anything was known
    assert "No time for" in capsys.readouterr().out


def test_equal_time_is_that_of_steps_measured_before(training, tmp_path, monkeypatch):
    monkeypatch.setattr("depthmix.train.step_times.measure_step_times", lambda configs, **_: [0.1, 0.2, 0.3])
    run(studies.write(tmp_path, budget="time"), tmp_path)
    steps = {r["arm"]: r["config"]["steps"] for r in runs(tmp_path / "out")}
    assert steps == {"residual": 6, "attnres:block_size=2": 3, "slow": 2}
    text = (tmp_path / "out" / "table.md").read_text()
    assert "Step times were measured in turns" in text
    assert SHARED not in text


def test_no_lane_is_refused(training, tmp_path):
    refused(lambda: run(studies.write(tmp_path), tmp_path, lanes=0), "lanes must be at least 1", code=USAGE)


def test_step_times_measured_apart_are_costs(training, tmp_path, monkeypatch):
    monkeypatch.setattr("depthmix.train.step_times.measure_step_times", lambda configs, **_: [0.1, 0.2, 0.4])
    run(studies.write(tmp_path, step_times=True), tmp_path)
    text = (tmp_path / "out" / "table.md").read_text()
    assert SHARED not in text
    assert "Step times were measured in turns" in text
    assert "| 200.0 | 2.00 | – |" in text  # and no memory
    assert [r["config"]["steps"] for r in runs(tmp_path / "out")] == [6] * 6  # and no budget


def test_arms_that_were_timed_have_costs_beside_others_that_were_not(training, tmp_path, monkeypatch):
    monkeypatch.setattr("depthmix.train.step_times.measure_step_times", lambda configs, **_: [0.1, 0.2])
    path = studies.write(tmp_path, step_times=True)
    run(path, tmp_path, arms=["residual", "attnres:block_size=2"])  # timed, since all that is asked for is there
    with monkeypatch.context() as patch:
        patch.setattr("depthmix.study.study.Worker._measure", lambda self, signal: None)
        run(path, tmp_path)
    text = (tmp_path / "out" / "table.md").read_text()
    assert SHARED not in text
    assert "| 1k | 10 | 200.0 | 2.00 | – | 6 | 1.2 s | 2 |" in text
    assert "| 1k | 10 | – | – | – | 6 | – | 2 |" in text
    assert "that arm was not timed with the others" in text


def test_what_runs_that_share_will_take(tmp_path):
    study = read_study(str(studies.write(tmp_path)))
    piece = Piece(study.arms[0], study.cells[0], study.config(study.arms[0], study.cells[0], 2))
    alone = {"arm": "residual", "domain": "words", "size": "", "environment": {"device_name": "x"}}
    alone["result"] = {"wall_seconds": 10.0, "steps": 6}
    assert predicted(piece, [alone], "x") == 10
    assert predicted(piece, [alone], "x", lanes=3) == 30
    assert predicted(piece, [{**alone, "lanes": 3}], "x", lanes=3) == 10
    assert predicted(piece, [{**alone, "lanes": 5}], "x") == 2
