"""Commands replace what they wrote before, and nothing else. Each refusal ends in one clear sentence."""

import json
import shutil

import pytest

from depthmix.cli import main
from depthmix.errors import CHECKPOINT, DATA, DISK, USAGE
from depthmix.ownership import RUN_FILES, check_replaceable
from depthmix.runs import folder as runs
from train import bad, small
from train.bad import COMPARE, TRAIN, table

fails = bad.fails

INSPECT = "inspect --run {run} --tokens 64 --causal-tokens 0 --device cpu"
REPORT = "report {run} --tokens 64 --causal-tokens 0 --device cpu"
PLAN = "plan --arms residual --dim 64 --n-blocks 4 --n-heads 4 --gpus 2 --layout pp=2"


@pytest.fixture
def copied(tmp_path):
    return shutil.copytree(small.run().path, tmp_path / "copy")


WRITING = [(f"{INSPECT} --json", "inspection", "x.json"), (f"{REPORT} --out", "page", "x.html")]
WRITING += [(f"{PLAN} --figure", "figure", f"x.{ending}") for ending in ("png", "svg", "pdf")]


@table([(kind + name, line, kind, name) for line, kind, name in WRITING])
def test_one_file(case, fails, tmp_path, monkeypatch):
    """A command's own document is written again; a file of the user's, a link or a pipe is left alone."""
    _, line, kind, name = case
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("depthmix.parallel.plan.figure.MICROS", 16)  # of the steps that a figure of a plan simulates
    for draw in ("draw_curves", "draw_insides"):  # tests/compare has them
        monkeypatch.setattr(f"depthmix.compare.report.{draw}", lambda *_: [])
    argv = [part.format(run=small.run().path) for part in f"{line} {name}".split()]
    for _ in range(2):
        assert main(argv) == 0
    mine = {"schema": 1, "notes": "mine"} if kind == "inspection" else "<html>mine</html>"
    (tmp_path / name).write_text(json.dumps(mine))
    before = (tmp_path / name).read_bytes()
    fails(f"{line} {name}", USAGE, f"{name} exists and is no {kind} of depthmix's, so it is left alone")
    assert (tmp_path / name).read_bytes() == before
    (tmp_path / name).rename(tmp_path / "mine")
    (tmp_path / name).symlink_to(tmp_path / "mine")
    fails(f"{line} {name}", USAGE, f"{name} is a symbolic link")
    assert (tmp_path / "mine").read_bytes() == before


@table([("recipe", "recipe.yaml"), ("unfinished", "result.json"), ("in a checkpoint", "checkpoints/x.json")])
def test_inspecting_into_a_run(case, fails, copied):
    """What a run holds, or will hold, is not replaced, but a document may lie beside it."""
    name = case[1]
    (copied / "result.json").unlink()
    before = (copied / "recipe.yaml").read_bytes()
    fails(f"{INSPECT} --json {copied / name}", USAGE, f"belongs to the run in {copied}", run=copied)
    assert (copied / "recipe.yaml").read_bytes() == before
    assert not (copied / "result.json").exists()
    check_replaceable(copied / "inside.json", "inspection")


def test_every_file_of_a_run_is_known(tmp_path, copied):
    written = {path.name for path in copied.iterdir() if path.is_file()}
    known = {getattr(runs, name) for name in ("RECIPE", "ENVIRONMENT", "METRICS", "SPEED", "DYNAMICS", "LOG", "RESULT")}
    known |= {runs.TOKENIZER, runs.LOCK, runs.WANDB, runs.DATA_META}
    assert written | known <= RUN_FILES


def test_no_file_in_prepared_data(fails, tmp_path):
    data = shutil.copytree(small.data(), tmp_path / "data")
    fails(f"{INSPECT} --json {data / 'x.json'}", USAGE, f"lies in the prepared data {data}")
    (tmp_path / "link").symlink_to(data)
    fails(f"{INSPECT} --json {tmp_path / 'link' / 'x.json'}", USAGE, "lies in the prepared data")
    assert not (data / "x.json").exists()


def test_a_report_leaves_the_figures_of_others_alone(fails, tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "loss-tokens.svg").write_text("<svg>mine</svg>")
    fails(f"{REPORT} --out {tmp_path / 'r.html'}", USAGE, "loss-tokens.svg exists and is no figure of depthmix's")
    assert (tmp_path / "figures" / "loss-tokens.svg").read_text() == "<svg>mine</svg>"
    assert not (tmp_path / "r.html").exists()


@table([("train", TRAIN), ("compare", f"{COMPARE} --arms residual")])
def test_folders_inside_others(case, fails, tmp_path, copied):
    """A run in prepared data would be deleted with it; files of one in another run's folder cannot be told apart."""
    line = case[1]
    data = shutil.copytree(small.data(), tmp_path / "prepared")
    for place, kind in ((data / "runs" / "a", "prepared data"), (copied / "a", "a run")):
        above = data if kind == "prepared data" else copied
        words = f"lies in {above}, which holds {kind}: choose another folder"
        fails(line.replace("--out run", f"--out {place}"), DATA, words)
        assert not place.exists()
        assert not (data / "runs").exists()
    (tmp_path / "link").symlink_to(data)
    fails(line.replace("--out run", f"--out {tmp_path / 'link' / 'a'}"), DATA, f"lies in {data}, which holds")


def test_a_runs_folder_is_for_no_other_results(fails, copied):
    before = sorted(copied.iterdir())
    fails(f"{COMPARE} --arms residual".replace("--out run", f"--out {copied}"), DATA, str(copied))
    assert sorted(copied.iterdir()) == before


def test_tables_of_others(fails, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "table.md").write_text("mine")
    fails(
        f"{COMPARE} --arms residual", CHECKPOINT, "run holds table.md and no runs.jsonl, so that file is not depthmix's"
    )
    assert (tmp_path / "run" / "table.md").read_text() == "mine"
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["table.md"]


@pytest.mark.parametrize("name", [".lock", "log.txt", "metrics.jsonl"])
def test_a_run_writes_through_no_link(name, fails, tmp_path):
    assert main(TRAIN.format(data=small.data()).replace("--out run", f"--out {tmp_path / 'run'}").split()) == 0
    run = tmp_path / "run"
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    (tmp_path / "mine").write_text("")
    (run / name).unlink()
    (run / name).symlink_to(tmp_path / "mine")
    fails(TRAIN, DISK, f"{name}: it is a symbolic link")
    assert (tmp_path / "mine").read_text() == ""
