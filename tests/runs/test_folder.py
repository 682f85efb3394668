"""Run folders: what is written, what is refused, and what a kill leaves."""

import dataclasses
import json
import math
import os
import random
import shutil
import subprocess
import time

import pytest
import yaml

import forking
from depthmix.config import CompareConfig, TrainConfig
from depthmix.errors import DATA, DISK
from depthmix.runs.folder import METRICS, SPEED, RunFolder
from train.full_disk import file_size_limit
from train.refused import refused

CONFIG = TrainConfig(data="d", out="o", mixer="attnres", mixer_options={"ways": (1, 2), "x": 1e-9}, device="cpu")


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run", CONFIG)


def test_recipe_and_environment(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["depthmix", "compare", "--x=\udcff"])
    config = CompareConfig(data="dätä", out=": # '\n", device="cpu", lr=1e-5, n_kv_heads=None, seeds=[1, 2])
    run = RunFolder.create(tmp_path / "a" / "b" / "run", config)
    recipe = run.read_recipe()
    assert recipe == dataclasses.asdict(config)
    assert list(recipe) == [f.name for f in dataclasses.fields(config)]
    assert CompareConfig(**recipe) == config
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["command"] == ["depthmix", "compare", "--x=\udcff"]
    for key in ("depthmix", "python", "torch", "numpy", "platform", "device_name", "cpu_count", "started"):
        assert environment[key], key
    assert environment["device"] == "cpu"
    assert sorted(p.name for p in run.path.iterdir()) == [".lock", "checkpoints", "environment.json", "recipe.yaml"]
    assert RunFolder.open(str(run.path)).path == run.path


def test_the_commit_is_that_of_depthmix_and_of_nobody_else(tmp_path):
    from depthmix.runs.environment import _git_commit

    source = tmp_path / "pkg" / "__init__.py"
    source.parent.mkdir()
    source.touch()
    assert _git_commit(source) is None
    if not shutil.which("git"):
        pytest.skip("no git")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    assert _git_commit(source) is None  # installed below somebody else's checkout
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "y"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert _git_commit(source) == head
    source.write_text("changed")
    assert _git_commit(source) == f"{head}-dirty"


def test_folders_that_are_not_for_this_run(tmp_path, run):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    refused(lambda: RunFolder.create(tmp_path / "foreign", CONFIG), "thesis.tex", "not a run folder")
    assert [p.name for p in (tmp_path / "foreign").iterdir()] == ["thesis.tex"]
    refused(lambda: RunFolder.open(tmp_path / "foreign"), "recipe.yaml")
    refused(lambda: RunFolder.open(tmp_path / "nowhere"), "does not exist")
    (tmp_path / "file").touch()
    refused(lambda: RunFolder.open(tmp_path / "file"), "is a file")
    refused(lambda: RunFolder.create(tmp_path / "file", CONFIG), "is a file")
    refused(lambda: RunFolder.create(tmp_path / "file" / "below", CONFIG), "file")
    refused(lambda: RunFolder.create(run.path, CONFIG), "already holds a run")
    refused(lambda: RunFolder.open_or_create(tmp_path / ("x" * 300), CONFIG), "too long")
    refused(lambda: RunFolder.create("/proc/nothing/here", CONFIG), "/proc/nothing", code=DISK)


def test_a_creation_cut_short_is_done_again(tmp_path, run):
    (run.path / "recipe.yaml").unlink()  # it comes last
    (run.path / ".tmp-recipe.yaml-1").write_text("dat")
    assert RunFolder.open_or_create(run.path, CONFIG).read_recipe()["mixer"] == "attnres"
    assert not (run.path / ".tmp-recipe.yaml-1").exists()


def test_going_on_takes_the_same_recipe(tmp_path):
    path = tmp_path / "run"
    free = {"data", "keep"}
    first = RunFolder.open_or_create(path, CONFIG, free)
    before = (path / "recipe.yaml").read_bytes()
    assert RunFolder.open_or_create(path, CONFIG, free).path == path  # the tuple of the options is a list in YAML
    assert (path / "recipe.yaml").read_bytes() == before
    first.append(METRICS, {"step": 1})
    other = dataclasses.replace(CONFIG, lr=0.5, dim=64, keep=9)
    refused(lambda: RunFolder.open_or_create(path, other, free), "lr was 0.0015 and is 0.5", "dim was 512")
    assert (path / "recipe.yaml").read_bytes() == before
    RunFolder.open_or_create(path, dataclasses.replace(CONFIG, data="moved"), free)
    assert first.read_recipe()["data"] == "moved"
    assert "data 'd' -> 'moved'" in (path / "log.txt").read_text()
    recipe = first.read_recipe()
    del recipe["clip"]  # written before there was such an option
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    RunFolder.open_or_create(path, dataclasses.replace(CONFIG, data="moved"), free)
    refused(lambda: RunFolder.open_or_create(path, dataclasses.replace(CONFIG, clip=2.0), free), "clip was 1.0")
    first.write_result({})
    RunFolder.open_or_create(path, dataclasses.replace(CONFIG, keep=7), free)
    assert first.read_recipe()["keep"] == 2  # a finished run stays as it is


def test_a_run_with_nothing_to_lose_takes_another_recipe(tmp_path, monkeypatch):
    other = dataclasses.replace(CONFIG, batch_size=7)
    for name, begin in (
        ("metrics", lambda run: run.append(METRICS, {"step": 1})),
        ("checkpoint", lambda run: (run.checkpoints / "step-00000001").mkdir()),
        ("result", lambda run: run.write_result({})),
    ):
        run = RunFolder.create(tmp_path / name, CONFIG)
        (run.path / "metrics.jsonl").write_text('{"step"')  # torn
        monkeypatch.setattr("sys.argv", ["again"])
        assert RunFolder.open_or_create(run.path, other).read_recipe()["batch_size"] == 7
        assert json.loads((run.path / "environment.json").read_text())["command"] == ["again"]
        assert "batch_size was 64 and is 7" in (run.path / "log.txt").read_text()
        (run.path / "metrics.jsonl").unlink()
        begin(run)
        refused(lambda path=run.path: RunFolder.open_or_create(path, CONFIG), "batch_size was 7 and is 64")


def test_a_place_below_a_file(tmp_path):
    (tmp_path / "f").write_text("mine")
    for path in (tmp_path / "f" / "run", tmp_path / "f" / "a" / "b"):
        words = f"{path} cannot be written: {tmp_path / 'f'} is a file"
        refused(lambda path=path: RunFolder.open_or_create(path, CONFIG), words, code=DISK)


@pytest.mark.parametrize(
    "recipe",
    [b"", b"\xff\xfe\0", b"a: [", b"- 1", b"7", b"1: 2", b"!!python/object/apply:os.system ['true']", b"[" * 500],
)
def test_damaged_recipe(run, recipe):
    (run.path / "recipe.yaml").write_bytes(recipe)
    refused(run.read_recipe, run.path / "recipe.yaml")
    (run.path / "recipe.yaml").unlink()
    refused(run.read_recipe, "recipe.yaml")


def test_lines_are_there_at_once_and_deterministic(run):
    assert run.read_metrics() == run.read_speed() == []
    run.append(METRICS, {"step": 1, "loss": 0.1 + 0.2, "lr": 1e-5})
    run.append(METRICS, {"step": 2, "loss": math.nan, "grad_norm": math.inf})
    run.append(SPEED, {"step": 2, "seconds": 1.5, "memory_bytes": None})
    expected = '{"step": 1, "loss": 0.30000000000000004, "lr": 1e-05}\n{"step": 2, "loss": null, "grad_norm": null}\n'
    assert (run.path / "metrics.jsonl").read_text() == expected
    assert run.read_metrics()[1] == {"step": 2, "loss": None, "grad_norm": None}
    assert run.read_speed() == [{"step": 2, "seconds": 1.5, "memory_bytes": None}]
    run.sync()
    run.log("hello\nthere ü")
    first, second = (run.path / "log.txt").read_text().splitlines()
    assert first.endswith(" hello")
    assert second == "    there ü"


def test_cut(run):
    lines = [json.dumps({"step": step, "x": x}) + "\n" for step in (10, 20, 30) for x in (1, 2)]
    path = run.path / "speed.jsonl"
    for step, left in ((30, 6), (29, 4), (20, 4), (10, 2), (9, 0), (-1, 0)):
        for torn in ("", "{", '{"step": 10, "x": 1}', "\0\0\0", "\0\0\n{}\n"):
            path.write_text("".join(lines) + torn)
            (run.path / "metrics.jsonl").write_bytes(b"abc")
            run.cut(step, 2)
            assert path.read_text() == "".join(lines[:left])
            assert (run.path / "metrics.jsonl").read_bytes() == b"ab"
    path.unlink()
    run.cut(5, 2)
    assert not path.exists()
    for garbage in ("{}", "", "x", "[1]", '{"step": "1"}', '{"step": NaN}', "[" * 100_000):
        path.write_text(lines[0] + garbage + "\n" + lines[1])
        refused(lambda: run.cut(30, 2), f"{path}:2")
        refused(run.read_speed, f"{path}:2")
        assert path.read_text() == lines[0] + garbage + "\n" + lines[1]
    path.write_text(lines[0] + lines[2] + "garbage\n")
    run.cut(10, 2)  # what is dropped need not be readable
    assert path.read_text() == lines[0]


@pytest.mark.parametrize("torn", ["{", '{"step": 2}', '{"step": 2, "lo', "\0\0", "ü"])
def test_a_torn_last_line_is_no_line(run, torn):
    run.append(METRICS, {"step": 1})
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(torn.encode()[:-1] if torn == "ü" else torn.encode())
    assert run.read_metrics() == [{"step": 1}]


def test_result(run):
    assert not run.has_result()
    refused(run.read_result, "has not finished")
    run.write_result({"val_loss": 0.1 + 0.2, "perplexity": math.inf, "parameters": {"mixing": 3}, "list": [math.nan]})
    assert run.has_result()
    assert run.read_result() == {
        "val_loss": 0.1 + 0.2,
        "perplexity": None,
        "parameters": {"mixing": 3},
        "list": [None],
    }
    for damage in (b"", b"[]", b"\xff", b"{", b"[" * 100_000):
        (run.path / "result.json").write_bytes(damage)
        refused(run.read_result, run.path / "result.json")


def test_data(run, tmp_path):
    """By content: neither file may change, wherever it lies, once there is something to lose."""
    meta, tokenizer = sources = tmp_path / "meta.json", tmp_path / "tokenizer.json"

    def kept():
        return [(run.path / name).read_text() for name in ("data.json", "tokenizer.json")]

    for source in reversed(sources):
        refused(lambda: run.keep_data(*sources), source, code=DATA)
        source.write_text("{1}")
    run.keep_data(*sources)
    tokenizer.write_text("{2}")
    run.keep_data(meta, str(tokenizer))
    assert kept() == ["{1}", "{2}"]
    run.append(METRICS, {"step": 1})
    for source in sources:
        before = source.read_text()
        source.write_text("{3}")
        refused(lambda: run.keep_data(*sources), source, "use the data of then", code=DATA)
        source.write_text(before)
    run.keep_data(*sources)
    assert kept() == ["{1}", "{2}"]
    run.write_result({})
    (run.path / "data.json").unlink()  # as an older version left it
    run.keep_data(*sources)
    assert not (run.path / "data.json").exists()


def test_a_disk_that_takes_no_more(run, tmp_path):
    run.append(METRICS, {"step": 1, "loss": 2.0})
    run.write_result({"a": 1})
    before = {p.name: p.read_bytes() for p in run.path.iterdir() if p.is_file()}
    with file_size_limit(30):
        refused(lambda: run.append(METRICS, {"step": 2, "loss": 1.0}), run.path / "metrics.jsonl", code=DISK)
        refused(lambda: run.write_result({"a": "x" * 100}), run.path / "result.json", code=DISK)
        refused(lambda: RunFolder.create(tmp_path / "new", CONFIG), "environment.json", code=DISK)
        assert {p.name: p.read_bytes() for p in run.path.iterdir() if p.is_file()} == before  # no half lines
        run.cut(0, 0)
    assert run.read_metrics() == []
    assert RunFolder.open_or_create(tmp_path / "new", CONFIG).read_recipe()
    shutil.rmtree(run.path)
    refused(lambda: run.append(METRICS, {"step": 2}), run.path / "metrics.jsonl", code=DISK)
    refused(lambda: run.log("x"), run.path / "log.txt", code=DISK)
    refused(run.sync, run.path, code=DISK)
    refused(run.locked().__enter__, run.path, code=DISK)


HOLDS = """
import sys
from pathlib import Path
from depthmix.runs.folder import METRICS, RunFolder

mine = RunFolder.open(Path(sys.argv[1]))
with mine.locked():
    for i in range(1, 1_000_000):
        mine.append(METRICS, {"step": i, "loss": 1 / i})
"""


def test_two_processes(tmp_path, run):
    with forking.started(HOLDS, run.path, until=lambda: len(run.read_metrics()) > 4) as other:
        refused(run.locked().__enter__, f"process {other} ")
        changed = dataclasses.replace(CONFIG, keep=5)
        refused(lambda: RunFolder.open_or_create(run.path, changed, {"keep"}), f"process {other} ")
        time.sleep(random.Random(0).uniform(0.05, 0.2))  # it writes lines
    with run.locked():  # a killed process holds nothing
        refused(RunFolder(run.path).locked().__enter__, f"process {os.getpid()} ")
        steps = [record["step"] for record in run.read_metrics()]
        assert steps == list(range(1, len(steps) + 1))
        run.cut(3, sum(len(line) for line in run.read_file(METRICS).splitlines(keepends=True)[:3]))
        run.append(METRICS, {"step": 4})
        assert [record["step"] for record in run.read_metrics()] == [1, 2, 3, 4]
    with run.locked():
        pass
