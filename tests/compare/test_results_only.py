"""Comparisons without run folders, in pieces: order, resuming, deadlines and signals, results of several machines, other code, and what is written."""

import csv
import json
import os
import signal
import time

import pytest

from compare import recipes
from depthmix.cli import main
from depthmix.compare.engine import compare
from depthmix.compare.records import read_records
from depthmix.errors import CHECKPOINT, DATA, DIVERGED, INTERNAL, INTERRUPTED, USAGE
from depthmix.runs import code_checksums
from train import small
from train.refused import refused


def run(path, tmp_path, **changes):
    return compare(recipes.config(path, tmp_path / "out", **changes))


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]


def table(tmp_path):
    return (tmp_path / "out" / "table.md").read_text()


def test_all_arms_of_a_seed_come_before_the_next(training, tmp_path):
    arms = [*recipes.ARMS, {"mixer": "rezero", "seeds": [1, 5]}]
    run(recipes.write(tmp_path, arms=arms), tmp_path)
    first = [("residual", 0), ("attnres", 0), ("dca", 0)]
    assert training.made == [*first, ("residual", 1), ("attnres", 1), ("dca", 1), ("rezero", 1), ("rezero", 5)]


def test_it_goes_on_where_it_stopped_and_repeats_nothing(training, tmp_path):
    path = recipes.write(tmp_path)

    def kill(config):
        if len(training.made) == 4:
            raise KeyboardInterrupt  # as a kill would, in the midst of a run

    training.during = kill
    with pytest.raises(KeyboardInterrupt):
        run(path, tmp_path)
    assert len([x for x in lines(tmp_path) if x["kind"] == "run"]) == 4
    training.during = None
    run(path, tmp_path)
    assert len(training.made) == 6
    assert len(set(training.made)) == 6
    run(path, tmp_path)
    assert len(training.made) == 6
    assert not list((tmp_path / "out").glob(".*"))


def test_the_table_and_how_it_was_made(training, tmp_path):
    run(recipes.write(tmp_path), tmp_path)
    rows = [line for line in table(tmp_path).splitlines() if line.startswith("| ")]
    assert rows[0] == "| arm | words: val. loss | words: against residual | seeds |"
    assert rows[1] == "| residual | 4.0050 | – | 2 |"
    assert rows[2] == "| attnres:block_size=2 | 3.9050 | -0.1000 ± 0.0000 | 2 |"
    assert rows[3] == "| slow | 3.9550 | -0.0500 ± 0.0000 | 2 |"
    text = table(tmp_path)
    for words in (
        "Which \\| is better?",
        "6 of 6 runs are done",
        "varies by 0.005 nats",
        "needs 5 paired seeds",
        "Measured here, words: 0.0000, by all arms together; a difference of 0.01 needs 1 paired seed;",
    ):
        assert words in text
    assert str(tmp_path) not in text
    found = list(csv.DictReader((tmp_path / "out" / "table.csv").read_text().splitlines()))
    assert [(r["arm"], r["seeds"], r["domain"]) for r in found[1:]] == [
        ("attnres:block_size=2", "2", "words"),
        ("slow", "2", "words"),
    ]
    assert float(found[1]["val_loss"]) == 3.905
    assert found[0]["parameters"] == "1000"


def test_results_are_small_and_hold_no_paths(training, tmp_path):
    run(recipes.write(tmp_path), tmp_path)
    text = (tmp_path / "out" / "runs.jsonl").read_text()
    assert len(text) < 20_000
    assert str(tmp_path) not in text
    assert str(small.place()) not in text
    first = next(x for x in lines(tmp_path) if x["kind"] == "run")
    assert first["result"]["train_curve"] == [[3, 5.1235], [6, 4.0]]
    assert first["config"]["mixer"] == "residual"
    assert first["environment"]["torch"]


# Time.


def test_a_run_that_would_not_fit_is_not_begun(training, tmp_path, capsys):
    path = recipes.write(tmp_path)
    run(path, tmp_path, minutes=0.5, quiet=False)  # runs say that they take a hundred seconds
    assert training.made == [("residual", 0)]
    said = capsys.readouterr().out
    assert "No time for attnres:block_size=2, words, seed 0" in said
    assert "1 of 6 runs are done; the same command goes on" in said
    run(path, tmp_path, minutes=10)
    assert len(training.made) == 6


def test_where_the_next_does_not_fit_a_shorter_one_does(training, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "depthmix.compare.engine.predict_seconds", lambda run, *_: 100.0 if run.config.mixer == "attnres" else 1.0
    )
    run(recipes.write(tmp_path), tmp_path, minutes=0.5)
    assert training.made == [("residual", 0), ("dca", 0), ("residual", 1), ("dca", 1)]


def test_a_run_that_turns_out_too_long_is_left_out(training, tmp_path):
    training.during = lambda config: time.sleep(0.3)
    run(recipes.write(tmp_path), tmp_path, minutes=0.2 / 60)
    assert training.made == []
    assert not (tmp_path / "out").exists()


def test_after_a_run_that_was_too_long_the_other_arms_have_their_turn(training, tmp_path, monkeypatch):
    def slow(config, *args, **kwargs):
        return None if config.mixer == "attnres" else training(config, *args, **kwargs)

    monkeypatch.setattr("depthmix.train.brief.train_briefly", slow)
    run(recipes.write(tmp_path), tmp_path)
    assert training.made == [("residual", 0), ("dca", 0), ("residual", 1), ("dca", 1)]


def test_a_signal_ends_it_cleanly(training, tmp_path):
    path = recipes.write(tmp_path)
    training.during = lambda config: len(training.made) == 2 and os.kill(os.getpid(), signal.SIGTERM)
    refused(lambda: run(path, tmp_path), "stopped by SIGTERM", "2 of 6", "goes on", code=INTERRUPTED)
    assert "2 of 6 runs are done" in table(tmp_path)
    training.during = None
    run(path, tmp_path)
    assert len(training.made) == 6


def test_weights_to_start_from_count_not_their_folder(training, tmp_path, monkeypatch):
    monkeypatch.setattr("depthmix.compare.engine.check_planned", lambda *_: None)
    monkeypatch.setattr("depthmix.runs.init.check_finished", lambda init: None)
    monkeypatch.setattr("depthmix.runs.init.settled", lambda config: config)  # that folder holds no model
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    said = {"arms": ["residual"]}

    def start(folder, **more):
        return recipes.write(tmp_path, init=str(tmp_path / folder), **said, **more)

    run(start("here", seeds=[0]), tmp_path)
    run(start("there"), tmp_path)
    assert len(training.made) == 2
    (tmp_path / "there" / "model.safetensors").write_bytes(b"others!")
    refused(lambda: run(start("there", seeds=[0, 1, 2]), tmp_path), "init was", code=CHECKPOINT)
    run(start("nowhere"), tmp_path, report=True)  # where they are not, nothing is said


def test_a_part_is_run_and_the_rest_is_still_to_do(training, tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(
        "depthmix.train.step_times.measure_step_times",
        lambda configs, **_: measured.append([(c.mixer, c.dim) for c in configs]) or [0.1] * len(configs),
    )
    path = recipes.write(tmp_path, sizes={"s": {}, "m": {"dim": 32}}, step_times=True)
    part = {"only": ["residual", "slow", "m", "1"]}
    run(path, tmp_path, **part)
    assert training.made == [("residual", 1), ("dca", 1)]
    assert measured == [[("residual", 32), ("dca", 32)]]  # as soon as that part is there
    assert "2 of 12 runs are done" in table(tmp_path)
    run(path, tmp_path)
    assert len(training.made) == 12
    assert measured[1:] == [[("residual", 16), ("attnres", 16), ("dca", 16)], [("residual", 32), ("attnres", 32)]]


def test_a_part_at_equal_time_measures_what_it_needs(training, tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(
        "depthmix.train.step_times.measure_step_times",
        lambda configs, **_: measured.append([c.mixer for c in configs]) or [0.1] * len(configs),
    )
    run(recipes.write(tmp_path, budget="time", seeds=[0]), tmp_path, only=["slow"])
    assert measured == [["residual", "dca"]]
    assert training.made == [("dca", 0)]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"only": ["slo"]}, ["there is no arm, seed, size or domain 'slo'", "did you mean 'slow'?"]),
        ({"only": ["7"]}, ["there is no arm, seed, size or domain '7'"]),
    ],
)
def test_a_part_that_is_not_there_is_named(training, tmp_path, part, words):
    refused(lambda: run(recipes.write(tmp_path), tmp_path, **part), *words, code=USAGE)
    assert not training.made


# Several machines, several data sets.


def test_results_of_other_machines_count(training, tmp_path):
    path = recipes.write(tmp_path)
    training.during = lambda config: len(training.made) == 3 and os.kill(os.getpid(), signal.SIGTERM)
    refused(lambda: compare(recipes.config(path, tmp_path / "other")), code=INTERRUPTED)
    training.during = None
    run(path, tmp_path, results=[str(tmp_path / "other" / "runs.jsonl")])
    assert len(training.made) == 6
    assert len([x for x in lines(tmp_path) if x["kind"] == "run"]) == 6
    compare(recipes.config(path, tmp_path / "third", results=[str(tmp_path / "out" / "runs.jsonl")], report=True))
    assert (tmp_path / "third" / "runs.jsonl").read_text() == (tmp_path / "out" / "runs.jsonl").read_text()
    assert len(training.made) == 6


def test_two_processes_lose_nothing_to_each_other(training, tmp_path):
    path = recipes.write(tmp_path)

    def another(config):
        training.during = None
        run(path, tmp_path)  # a whole study meanwhile

    training.during = another
    run(path, tmp_path)
    assert len([x for x in lines(tmp_path) if x["kind"] == "run"]) == 6


def test_domains_and_sizes_are_cells(training, tmp_path):
    data = str(small.data())
    said = {"domains": {"words": data, "more": data}, "sizes": {"s": {}, "m": {"dim": 32}}, "seeds": [3]}
    path = recipes.write(tmp_path, **said)
    run(path, tmp_path, only=["more"])
    assert len(training.made) == 6
    assert {(x["domain"], x["size"], x["config"]["dim"]) for x in lines(tmp_path) if x["kind"] == "run"} == {
        ("more", "s", 16),
        ("more", "m", 32),
    }
    run(path, tmp_path)
    assert len(training.made) == 12
    assert "words m: against residual" in table(tmp_path)
    assert "12 of 12 runs are done" in table(tmp_path)


# What does not go together.


def test_another_recipe_is_refused(training, tmp_path):
    run(recipes.write(tmp_path), tmp_path)
    before = (tmp_path / "out" / "runs.jsonl").read_bytes()
    path = recipes.write(tmp_path, lr=0.5)
    for more in ({}, {"report": True}):
        refused(lambda more=more: run(path, tmp_path, **more), "residual", "lr was 0.0015 and is 0.5", code=CHECKPOINT)
    assert (tmp_path / "out" / "runs.jsonl").read_bytes() == before
    run(recipes.write(tmp_path, eval_every=2, log_every=3), tmp_path)  # no number depends on it


def test_many_processes_are_refused(training, tmp_path):
    path = recipes.write(tmp_path, parallel={"dp": 2})
    refused(lambda: run(path, tmp_path), "compare runs in one process", code=USAGE)


def test_other_data_is_refused(training, tmp_path, monkeypatch):
    path = recipes.write(tmp_path)
    run(path, tmp_path)
    monkeypatch.setattr("depthmix.compare.engine.data_checksum", lambda data: "other")
    refused(lambda: run(path, tmp_path), "residual", "its data was prepared otherwise", code=CHECKPOINT)


def test_a_result_of_another_kind_of_device_is_refused(training, tmp_path):
    path = recipes.write(tmp_path)
    run(path, tmp_path)
    file = tmp_path / "out" / "runs.jsonl"
    file.write_text(file.read_text().replace('"device": "cpu"', '"device": "cuda:0"'))
    refused(lambda: run(path, tmp_path), "it ran on cuda and this is cpu", code=CHECKPOINT)


def changed_code(monkeypatch, *names):
    """As if files had other lines."""
    real = code_checksums.checksum
    monkeypatch.setattr(
        code_checksums, "checksum", lambda p: "changed" if code_checksums._name(p) in names else real(p)
    )


def test_other_code_is_refused_until_somebody_says_why_not(training, tmp_path, monkeypatch):
    run(recipes.write(tmp_path, seeds=[0]), tmp_path)
    changed_code(monkeypatch, "models/layers.py")
    run(recipes.write(tmp_path, seeds=[0]), tmp_path)  # nothing to run, nothing to mix
    path = recipes.write(tmp_path)
    refused(lambda: run(path, tmp_path), "models/layers.py", "--accept-code", code=CHECKPOINT)
    assert len(training.made) == 3
    run(path, tmp_path, accept_code="a renamed\nvariable")
    assert len(training.made) == 6
    assert "models/layers.py), accepted because: a renamed variable" in table(tmp_path)
    run(recipes.write(tmp_path, seeds=[0, 1, 2]), tmp_path)  # it need not be said again
    assert len(training.made) == 9
    changed_code(monkeypatch, "models/blocks.py")
    run(recipes.write(tmp_path, seeds=[0, 1, 2, 3]), tmp_path, accept_code="a renamed variable; and another")
    said = [
        line for line in table(tmp_path).splitlines() if "accepted because" in line
    ]  # what goes on is said once, of all files
    assert [line.partition(" are mixed ")[2] for line in said] == [
        "(models/blocks.py, models/layers.py), accepted because: a renamed variable; and another."
    ]


def test_code_of_another_mechanism_does_not_matter(training, tmp_path, monkeypatch):
    arms = recipes.ARMS[:2]
    run(recipes.write(tmp_path, arms=arms, seeds=[0]), tmp_path)
    changed_code(monkeypatch, "mixers/dca.py", "mixers/grn.py")
    run(recipes.write(tmp_path, arms=arms), tmp_path)
    assert len(training.made) == 4
    changed_code(monkeypatch, "mixers/attnres.py")
    path = recipes.write(tmp_path, arms=arms, seeds=[0, 1, 2])
    refused(lambda: run(path, tmp_path), "mixers/attnres.py", code=CHECKPOINT)


# What goes wrong in a run.


def test_a_run_that_diverges_is_a_result(training, tmp_path):
    training.fail["dca", 0] = recipes.diverged()
    path = recipes.write(tmp_path)
    run(path, tmp_path)
    assert "slow with seed 0, words diverged: the loss became nan at step 3." in table(tmp_path)
    run(path, tmp_path)
    assert ("dca", 0) not in training.made
    assert len(training.made) == 5
    one = recipes.write(tmp_path, "one", seeds=[0])
    refused(lambda: run(one, tmp_path / "one"), "1 of 3 runs diverged, all of slow; the table is", code=DIVERGED)
    assert "| slow | diverged | – | 0 |" in table(tmp_path / "one")


def test_an_arm_that_cannot_run_does_not_stop_the_others(training, tmp_path, capsys):
    training.fail["attnres", 0] = RuntimeError("no such\nkernel")
    path = recipes.write(tmp_path)
    refused(lambda: run(path, tmp_path), "1 arm could not be run", "no such kernel", "4 of 6", code=INTERNAL)
    assert "Traceback" in capsys.readouterr().err
    assert ("attnres", 1) not in training.made
    training.fail.clear()
    run(path, tmp_path)
    assert len(training.made) == 6


DAMAGED = {
    "val_loss": "NaN",
    "steps": "0",
    "step_seconds": "0",
    "parameters": "3",
    "train_curve": "{}",
    "tokens": '"9"',
}


def with_damage(line, damage):
    """The text itself, or the line with another value in its result."""
    key, _, value = damage.partition("=")
    if damage.startswith(("{", "[")):
        return damage
    found = json.loads(line)
    found["result"][key] = "damage"
    return json.dumps(found).replace('"damage"', value)


DAMAGES = [
    '{"kind": "run"',
    '{"kind": "ran"}',
    "[]",
    '{"kind": "run", "arm": "residual"}',
    *(f"{k}={v}" for k, v in DAMAGED.items()),
    "train_curve=[[1, 2, 3]]",
    "tokens=0",
    'parameters={"total": "many"}',
    'peak_memory="x"',
    'accuracy="x"',
    "step_quartiles=[1]",
    'depth={"block_rms": [1]}',
    "val_loss=1" + "0" * 400,
    '{"kind": "code", "id": "a", "files": {"f.py": ["b"]}}',
    '{"kind": "accept", "reason": "none", "files": {"f.py": [{}]}}',
    '{"kind": "accept", "reason": "none", "files": {"f.py": "b"}}',
    '{"kind": "step_times", "domain": "", "size": "", "seconds": {"residual": 0}}',
]


def test_a_damaged_line_is_named_and_nothing_is_lost(training, tmp_path):
    path = recipes.write(tmp_path)
    run(path, tmp_path)
    file = tmp_path / "out" / "runs.jsonl"
    good = file.read_text().splitlines()
    for damage in DAMAGES:
        print(damage)  # shown where it is not refused
        file.write_text("\n".join([good[0], with_damage(good[1], damage), *good[2:]]) + "\n")
        before = file.read_bytes()
        refused(lambda: run(path, tmp_path), f"{file}:2", "damaged", code=CHECKPOINT)
        assert file.read_bytes() == before
    assert not read_records([tmp_path / "nowhere"]).lines


def test_a_run_without_its_code_is_refused(training, tmp_path):
    path = recipes.write(tmp_path)
    run(path, tmp_path)
    file = tmp_path / "out" / "runs.jsonl"
    file.write_text("".join(f"{json.dumps(x)}\n" for x in lines(tmp_path) if x["kind"] != "code"))
    refused(lambda: run(path, tmp_path), "lack the line on the code", code=CHECKPOINT)


def test_data_that_is_not_there(training, tmp_path):
    path = recipes.write(tmp_path, domains={"words": "data/none"})
    refused(lambda: run(path, tmp_path), "no folder data/none", "depthmix data", code=DATA)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"arms": [{"mixer": "residual", "set": {"groups": [{"match": "mixer.b.*", "lr": 2}]}}]},
            ["matches no parameter"],
        ),
        ({"arms": [{"mixer": "residual", "set": {"n_heads": 3}}]}, ["arm 'residual'", "n_heads"]),
        ({"arms": ["attnres:heads=5"]}, ["arm 'attnres:heads=5'", "heads"]),
    ],
)
def test_what_cannot_be_built_is_said_before_anything_runs(training, tmp_path, changes, words):
    refused(lambda: run(recipes.write(tmp_path, **changes), tmp_path), *words, code=USAGE)
    assert not (tmp_path / "out").exists()


def test_the_command(training, tmp_path, capsys):
    path = recipes.write(tmp_path)
    argv = ["compare", str(path), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "6 of 6 runs are done." in said
    sentence, report = said.splitlines()[-2:]
    assert sentence.startswith("With attnres:block_size=2 (Attention Residuals) the model predicts unseen text better")
    assert "On words, after 6 steps, its loss is 0.1000 nats lower" in sentence
    assert report == f"Report: {tmp_path / 'out' / 'report.html'}"
    assert main(["compare", "--recipe", str(path), "--out", str(tmp_path / "out"), "--report", "--quiet"]) == 0
    assert main(["compare", str(path), "--out", str(tmp_path / "out"), "--results", "nothing.jsonl"]) == CHECKPOINT
    assert main(["compare", str(path), "--out", str(tmp_path / "out"), "--minutes", "-1"]) == USAGE
    assert main(["compare"]) == USAGE
    capsys.readouterr()
    assert main(["study", str(path)]) == USAGE
    assert "studies are run by `depthmix compare`" in capsys.readouterr().err
