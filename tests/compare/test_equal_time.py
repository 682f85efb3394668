"""Studies whose arms have equal time, or sizes and seeds of their own: what is measured, run and counted."""

import os
import signal

import pytest

from compare import recipes
from compare.test_results_only import changed_code, lines, run, table
from depthmix.errors import CHECKPOINT, INTERNAL, INTERRUPTED
from train import small
from train.refused import refused


def test_equal_time(training, tmp_path, monkeypatch):
    measured = []

    def measure(configs, **_):
        measured.append([c.mixer for c in configs])
        return [
            {"residual": 0.1, "attnres": 0.2, "dca": 0.3, "rezero": 0.05}[c.mixer] * 3 ** (len(measured) - 1)
            for c in configs
        ]

    monkeypatch.setattr("depthmix.train.step_times.measure_step_times", measure)
    sizes = {"steps": 12, "budget": "time", "seeds": [0]}
    run(recipes.write(tmp_path, **sizes), tmp_path)

    def steps():
        return {x["arm"]: (x["config"]["steps"], x["config"]["warmup"]) for x in lines(tmp_path) if x["kind"] == "run"}

    assert steps() == {"residual": (12, 2), "attnres:block_size=2": (6, 1), "slow": (4, 1)}
    run(recipes.write(tmp_path, arms=[*recipes.ARMS, "rezero"], **sizes), tmp_path)  # on a machine three times slower
    assert measured == [["residual", "attnres", "dca"], ["residual", "rezero"]]
    assert steps()["rezero"] == (24, 4)
    assert len(training.made) == 4
    run(recipes.write(tmp_path, arms=[*recipes.ARMS, "rezero"], **sizes), tmp_path, report=True)
    assert "the steps that fit into the baseline's time" in table(tmp_path)


def test_at_equal_time_one_arm_that_cannot_run_does_not_stop_the_others(training, tmp_path, monkeypatch):
    def measure(configs, **_):
        for i, config in enumerate(configs):
            if config.mixer in broken:
                error = RuntimeError("no such\nkernel")
                error.measured = i
                raise error
        return [0.1] * len(configs)

    broken = {"attnres"}
    monkeypatch.setattr("depthmix.train.step_times.measure_step_times", measure)
    path = recipes.write(tmp_path, budget="time")
    words = ["1 arm could not be run (attnres:block_size=2: no such kernel)", "4 of 6 runs"]
    refused(lambda: run(path, tmp_path), *words, code=INTERNAL)
    assert {arm for arm, _ in training.made} == {"residual", "dca"}
    broken.clear()
    run(path, tmp_path)
    assert len(training.made) == 6
    broken.add("residual")  # which the others are compared with
    other = recipes.write(tmp_path, "other", budget="time")
    with pytest.raises(RuntimeError, match="no such"):
        run(other, tmp_path / "other")


def test_at_equal_time_what_is_not_measured_is_still_to_do(training, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("depthmix.train.step_times.measure_step_times", lambda configs, **_: [0.1] * len(configs))
    path = recipes.write(tmp_path, budget="time", sizes={"s": {}, "m": {"dim": 32}})
    run(path, tmp_path, only=["s"], quiet=False)
    assert "6 of 12 runs are done; the same command goes on" in capsys.readouterr().out
    run(path, tmp_path / "none", minutes=0.1, quiet=False)  # six seconds, of which three arms need twelve
    assert "0 of 12 runs are done; the same command goes on" in capsys.readouterr().out


def test_step_times_of_another_process_are_taken_over(training, tmp_path, monkeypatch):
    """What it has run meanwhile has the steps that they gave."""
    path, first = recipes.write(tmp_path, budget="time"), [True]

    def measure(configs, **_):
        if first.pop():
            first.append(False)
            run(path, tmp_path)  # the other one, in the same folder
            first[:] = [True]
            return [0.1, 0.3, 0.3]
        first.append(False)
        return [0.1, 0.2, 0.2]

    monkeypatch.setattr("depthmix.train.step_times.measure_step_times", measure)
    run(path, tmp_path)
    run(path, tmp_path, report=True)
    assert {x["config"]["steps"] for x in lines(tmp_path) if x["kind"] == "run" and x["arm"] == "slow"} == {3}
    assert len(training.made) == 6


def test_a_signal_ends_measuring(training, tmp_path, monkeypatch):
    measured = []

    def measure(configs, **_):
        measured.append(configs)
        os.kill(os.getpid(), signal.SIGTERM)
        return [0.1] * len(configs)

    monkeypatch.setattr("depthmix.train.step_times.measure_step_times", measure)
    path = recipes.write(tmp_path, budget="time", sizes={"s": {}, "m": {"dim": 32}})
    refused(lambda: run(path, tmp_path), "stopped by SIGTERM: 0 of 12", code=INTERRUPTED)
    assert len(measured) == 1
    assert not training.made


def test_a_signal_ends_measuring_between_two_arms(training, tmp_path, monkeypatch):
    """Nothing of it is kept, as times are of arms that take turns."""
    built = []

    def build(config):
        built.append(config.mixer)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("depthmix.train.step_times._trainer", build)
    monkeypatch.setattr("depthmix.train.step_times._step_seconds", lambda *_: 0.1)
    path = recipes.write(tmp_path, budget="time")
    refused(lambda: run(path, tmp_path), "stopped by SIGTERM: 0 of 6", code=INTERRUPTED)
    assert built == ["residual"]
    assert not (tmp_path / "out").exists()


def test_domains_with_as_many_words_have_the_same_step_times(training, tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(
        "depthmix.train.step_times.measure_step_times",
        lambda configs, **_: measured.append(configs[0].data) or [0.1 * len(measured)] * len(configs),
    )
    words, fewer = str(small.data()), str(small.other_data())
    data = {"words": words, "again": words, "fewer": fewer}
    path = recipes.write(tmp_path, budget="time", domains=data, seeds=[0])
    run(path, tmp_path)
    times = {x["domain"]: x["seconds"]["slow"] for x in lines(tmp_path) if x["kind"] == "step_times"}
    assert times == pytest.approx({"words": 0.1, "again": 0.1, "fewer": 0.2})
    assert measured == [words, fewer]
    run(path, tmp_path)
    assert len(measured) == 2


def test_kernels_matter_at_equal_time_only(training, tmp_path, monkeypatch):
    monkeypatch.setattr("depthmix.train.step_times.measure_step_times", lambda configs, **_: [0.1 for _ in configs])
    for budget in ("tokens", "time"):
        run(recipes.write(tmp_path, budget, budget=budget, seeds=[0]), tmp_path / budget)
    changed_code(monkeypatch, "ops/depth_attention/op.py")
    run(recipes.write(tmp_path, "tokens"), tmp_path / "tokens")
    assert "attnres were made with more than one version of the kernels" in table(tmp_path / "tokens")
    path = recipes.write(tmp_path, "time", budget="time")
    refused(lambda: run(path, tmp_path / "time"), "kernels of attnres changed", code=CHECKPOINT)


def test_an_arm_is_run_at_its_own_sizes(training, tmp_path, monkeypatch):
    timed = []
    monkeypatch.setattr(
        "depthmix.train.step_times.measure_step_times",
        lambda configs, **_: [timed.append(c.mixer) or 0.1 for c in configs],
    )

    def write(size):
        arms = ["residual", {"mixer": "dca", "sizes": [size]}]
        return recipes.write(tmp_path, sizes={"s": {}, "m": {"dim": 32}}, arms=arms, step_times=True)

    run(write("m"), tmp_path)
    assert sorted(training.made) == [("dca", 0), ("dca", 1), *[("residual", 0)] * 2, *[("residual", 1)] * 2]
    assert timed == ["residual", "residual", "dca"]
    assert "6 of 6 runs are done" in table(tmp_path)
    run(write("s"), tmp_path, report=True)
    assert "2 runs in runs.jsonl are of arms, seeds, sizes or data that the recipe does not name" in table(tmp_path)


def test_what_seeds_can_show_goes_by_those_of_a_size(training, tmp_path):
    sizes = {"s": {}, "m": {"dim": 32, "seeds": [0, 1]}}
    run(recipes.write(tmp_path, sizes=sizes, seeds=[0, 1, 2]), tmp_path)
    said = [line for line in table(tmp_path).splitlines() if line.startswith("* Measured here")]
    assert ["3 seeds show" in line for line in said] == [True, False]
    assert ["2 seeds show" in line for line in said] == [False, True]


def test_a_size_leaves_seeds_out(training, tmp_path):
    arms = ["residual", {"mixer": "dca", "seeds": [1]}]
    sizes = {"s": {}, "m": {"dim": 32, "seeds": [0]}}
    run(recipes.write(tmp_path, sizes=sizes, arms=arms), tmp_path)
    assert training.made == [("residual", 0), ("residual", 0), ("residual", 1), ("dca", 1)]
    assert "4 of 4 runs are done" in table(tmp_path)
