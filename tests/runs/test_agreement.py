"""Recipe, checkpoints, metrics, data and tokenizer of a run belong together, and whoever reads a run compares them."""

import dataclasses
import hashlib
import inspect
import json
import shutil

import pytest
import yaml

import depthmix
from depthmix.compare.report import report
from depthmix.config import FREE, EvalConfig, InspectConfig, ReportConfig, TrainConfig
from depthmix.errors import CHECKPOINT, DATA
from depthmix.mixers import create_mixer, mixer_class
from depthmix.mixers.defaults import all_options, chosen_options
from depthmix.runs.checkpoint import list_checkpoints, load_checkpoint
from depthmix.runs.folder import RunFolder
from depthmix.runs.init import init_values
from depthmix.train.generate import generate_text
from depthmix.train.inspect import inspect_run
from depthmix.train.loop import train
from depthmix.train.measure import evaluate_run
from train import small
from train.refused import refused


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run that may be changed. Reports of it have no figures: tests/compare has them."""
    for draw in ("draw_curves", "draw_insides"):
        monkeypatch.setattr(f"depthmix.compare.report.{draw}", lambda *_: [])
    shutil.copytree(small.run().path, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def edit(folder, **changes):
    """Change recipe.yaml as an editor would."""
    found = folder.read_recipe()
    assert found.keys() >= changes.keys()
    (folder.path / "recipe.yaml").write_text(yaml.safe_dump({**found, **changes}))


def go_on(folder):
    """The command that goes on with an interrupted run, as its recipe says."""
    (folder.path / "result.json").unlink(missing_ok=True)
    return train(TrainConfig(**{**folder.read_recipe(), "out": str(folder.path)}))


READERS = {
    "load": lambda folder: depthmix.load(folder.path, "cpu"),
    "load one checkpoint": lambda folder: depthmix.load(list_checkpoints(folder.checkpoints)[1], "cpu"),
    "eval": lambda folder: evaluate_run(EvalConfig(run=str(folder.path), device="cpu")),
    "generate": lambda folder: generate_text(folder.path, "The", 2, device="cpu"),
    "inspect": lambda folder: inspect_run(
        InspectConfig(run=str(folder.path), device="cpu", tokens=64, causal_tokens=0)
    ),
    "report": lambda folder: report(
        ReportConfig(run=[str(folder.path)], out=str(folder.path / "r.html"), device="cpu", tokens=64, causal_tokens=0)
    ),
    "init": lambda folder: train(
        small.config(folder.path.with_name("child"), **init_values(str(folder.path)), init=str(folder.path))
    ),
    "train again": lambda folder: train(TrainConfig(**{**folder.read_recipe(), "out": str(folder.path)})),
    "resume": go_on,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_changed_recipe_is_refused_by_every_reader(run, reader):
    edit(run, norm_eps=0.1)
    words = "recipe.yaml was changed since the run was trained: norm_eps is 0.1 and was 1e-06; put the recipe back"
    refused(lambda: READERS[reader](run), words)


@pytest.mark.parametrize(
    ("name", "value"), [("rope_theta", 500.0), ("seq_len", 16), ("lr", 0.5), ("seed", 3), ("batch_size", 4)]
)
def test_every_option_of_the_recipe_counts(run, name, value):
    before = run.read_recipe()[name]
    edit(run, **{name: value})
    for reader in ("load", "resume"):
        refused(lambda: READERS[reader](run), f"{name} is {value!r} and was {before!r}")  # noqa: B023


def test_a_line_that_is_missing_counts_as_the_default(run):
    lines = (run.path / "recipe.yaml").read_text().splitlines(keepends=True)
    (run.path / "recipe.yaml").write_text("".join(line for line in lines if not line.startswith("seq_len:")))
    refused(lambda: READERS["eval"](run), "seq_len is 512 and was 32")


def test_many_differences_are_counted(run):
    edit(run, lr=1.0, dim=8, n_heads=4, seed=5, steps=9)
    refused(lambda: READERS["load"](run), "dim is 8 and was 32, n_heads is 4 and was 2, ", " and 2 more; put")


def test_free_options_stay_free(run):
    changed = {"device": "auto", "keep": 5, "save_every": 7, "log_every": 3, "quiet": False, "on_nan": "skip"}
    assert changed.keys() <= FREE
    edit(run, **changed, data=str(small.data()) + "/")
    assert depthmix.load(run.path, "cpu").step == 60
    assert go_on(run).read_recipe()["keep"] == 5


def test_more_steps_are_another_recipe_where_they_change_the_schedule(tmp_path, run):
    """What `train --steps` refuses, an editor cannot bring about either."""
    edit(run, steps=90)
    for reader in ("load", "resume"):
        refused(lambda: READERS[reader](run), "steps is 90 and was 60")  # noqa: B023
    folder = train(small.config(tmp_path / "rsqrt", schedule="rsqrt"))
    edit(folder, steps=9)
    assert READERS["load"](folder).step == 6
    assert go_on(folder).read_metrics()[-1]["step"] == 9
    edit(folder, steps=8)
    refused(lambda: READERS["load"](folder), "steps is 8 and was 9")


def test_checkpoints_of_another_run_are_refused(tmp_path, run):
    """Also of one with the same recipe and seed: its history is another."""
    other = train(dataclasses.replace(TrainConfig(**run.read_recipe()), out=str(tmp_path / "other"), steps=60))
    shutil.rmtree(run.checkpoints)
    shutil.copytree(other.checkpoints, run.checkpoints)
    words = f"the checkpoint is of run {other.identity()} and {run.path} is run {run.identity()}"
    for reader in ("load", "eval", "resume", "train again", "report"):
        refused(lambda: READERS[reader](run), words, "put the run's own ones back")  # noqa: B023


def test_a_run_that_lost_its_environment_keeps_its_identity(run):
    known = run.identity()
    (run.path / "environment.json").unlink()
    assert READERS["load"](run).step == 60
    go_on(run)
    assert run.identity() == known


def test_checkpoints_without_a_recipe_are_not_given_another(run):
    config = TrainConfig(**{**run.read_recipe(), "out": str(run.path)})
    (run.path / "recipe.yaml").unlink()
    newest = list_checkpoints(run.checkpoints)[0]
    words = f"holds checkpoints and no recipe.yaml: put that file back, whose content is under config in {newest}"
    refused(lambda: train(dataclasses.replace(config, lr=0.5)), words)
    saved = json.loads((newest / "state.json").read_text())["state"]["config"]
    (run.path / "recipe.yaml").write_text(yaml.safe_dump(saved))
    assert go_on(run).has_result()


@pytest.mark.parametrize("name", ["tokenizer.json", "data.json"])
def test_what_a_run_keeps_of_its_data_may_not_change(run, name):
    content = json.loads((run.path / name).read_text())
    (run.path / name).write_text(json.dumps(content))  # the same, and nobody looks into it to see that
    for reader in ("load", "generate"):
        refused(lambda: READERS[reader](run), f"{name} is not that of this run: its SHA-256 was ")  # noqa: B023
    refused(lambda: READERS["resume"](run), str(run.path / name), "this run began with", code=DATA)


def test_the_hash_of_the_data_in_the_checkpoint_counts(run):
    meta = json.loads((run.path / "data.json").read_text())
    sums = {**meta["sha256"], "val-00000.bin": "0" * 64}
    (run.path / "data.json").write_text(json.dumps({**meta, "sha256": sums}))
    refused(lambda: READERS["load"](run), "data.json is that of other data: its SHA-256 is ")


# metrics.jsonl


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: b"", "has 0 bytes and had {n} at step 60: lines are missing"),
        (lambda raw: raw[:-9], "at step 60: lines are missing"),
        (lambda raw: raw.replace(b"0", b"1", 1), "does not hold the lines that it had at step 60: it was changed"),
        (lambda raw: b"\n".join(reversed(raw.split(b"\n"))), "it was changed"),
    ],
    ids=["emptied", "cut", "changed", "reordered"],
)
def test_changed_metrics_are_refused(run, change, words):
    path = run.path / "metrics.jsonl"
    raw = path.read_bytes()
    path.write_bytes(change(raw))
    for reader in ("resume", "train again", "report"):
        (run.path / "result.json").write_bytes((small.run().path / "result.json").read_bytes())
        message = refused(lambda: READERS[reader](run), words.format(n=len(raw)))  # noqa: B023
        assert message.startswith(str(path))
    assert path.read_bytes() == change(raw)


def test_state_says_what_the_metrics_were(tmp_path):
    folder = train(small.config(tmp_path / "run", keep=9))
    raw = (folder.path / "metrics.jsonl").read_bytes()
    for path in list_checkpoints(folder.checkpoints):
        saved = load_checkpoint(path)
        said = saved.state["run"]["metrics"]
        part = raw[: said["bytes"]]
        assert hashlib.sha256(part).hexdigest() == said["sha256"]
        assert json.loads(part.splitlines()[-1])["step"] <= saved.step
        assert saved.state["run"]["id"] == folder.identity()


def test_a_run_is_cut_back_to_the_checkpoint_it_goes_on_from(tmp_path):
    """Lines after it are dropped, whatever they say, and the run ends with the same metrics."""
    folder = train(small.config(tmp_path / "run", steps=9))
    raw = (folder.path / "metrics.jsonl").read_bytes()
    newest, older = list_checkpoints(folder.checkpoints)
    (newest / "model.safetensors").write_bytes(b"torn")
    (folder.path / "result.json").unlink()
    with open(folder.path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 2, "loss": 0.0}\nnonsense\n')
    go_on(folder)
    assert (folder.path / "metrics.jsonl").read_bytes() == raw
    (newest / "model.safetensors").write_bytes(b"torn")
    length = load_checkpoint(older).state["run"]["metrics"]["bytes"]
    (folder.path / "metrics.jsonl").write_bytes(raw[:length])
    refused(lambda: depthmix.load(folder.path, "cpu"), "model.safetensors has 4 bytes")
    train(
        TrainConfig(**{**folder.read_recipe(), "out": str(folder.path)})
    )  # finished: a broken newest one says nothing


# result.json


def test_a_changed_result_is_refused(run):
    before = run.read_result()
    assert "sha256" not in before
    text = (run.path / "result.json").read_text()
    changed = text.replace(f'"val_loss": {before["val_loss"]}', f'"val_loss": {before["val_loss"] - 0.1}')
    assert changed != text
    (run.path / "result.json").write_text(changed)
    for reader in ("report", "train again"):
        refused(lambda: READERS[reader](run) and run.read_result(), "result.json is damaged", "checksum")  # noqa: B023
    content = {k: v for k, v in json.loads(text).items() if k != "sha256"}
    (run.path / "result.json").write_text(json.dumps(content))  # as older versions wrote it
    assert run.read_result() == before


# Options of the mixer


def test_options_of_the_mixer_are_spelt_out(tmp_path):
    config = small.config(tmp_path / "run", mixer="attnres", mixer_options={"ways": 2})
    folder = train(config)
    everything = all_options("attnres", {"ways": 2})
    assert len(everything) > 5
    assert folder.read_recipe()["mixer_options"] == everything
    state = load_checkpoint(list_checkpoints(folder.checkpoints)[0]).state
    assert state["config"]["mixer_options"] == everything
    assert json.loads((folder.path / "config.json").read_text())["mixer_options"] == everything
    assert folder.read_result()["mixer_options"] == {"ways": 2}  # as tables call it
    assert chosen_options("attnres", everything) == {"ways": 2}
    assert train(config).path == folder.path  # the command is still the same


def test_a_default_that_changes_later_changes_no_run(tmp_path, monkeypatch):
    folder = train(small.config(tmp_path / "run", mixer="attnres", n_blocks=2))
    before = evaluate_run(EvalConfig(run=str(folder.path), device="cpu"))[0].loss
    cls = mixer_class("attnres")
    constructor = inspect.unwrap(cls.__init__)
    monkeypatch.setattr(constructor, "__kwdefaults__", {**constructor.__kwdefaults__, "block_size": 2})
    changed = {**cls.options, "block_size": dataclasses.replace(cls.options["block_size"], default=2)}
    monkeypatch.setattr(cls, "options", changed)
    assert create_mixer("attnres", dim=8, n_blocks=2).block_size == 2
    assert evaluate_run(EvalConfig(run=str(folder.path), device="cpu"))[0].loss == before
    config = small.config(folder.path, mixer="attnres", n_blocks=2)
    refused(lambda: train(config), "another recipe: mixer_options was", code=CHECKPOINT)
