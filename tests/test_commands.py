"""The commands in the documents run, and the demo's path works, at a tenth of their size or less."""

import re
import shlex
import shutil

import pytest

from depthmix.cli import main
from depthmix.train import step_times
from project import ROOT

MODEL = "--n-blocks 2 --dim 32 --n-heads 2 --seq-len 32 --batch-size 4"
SMALL = f"{MODEL} --steps 6 --warmup 2 --eval-every 3 --eval-tokens 500 --quiet"
PAGES = ("quickstart", "data", "comparing", "study", "insight")
DEMO = "depthmix compare --recipe recipes/demo.yaml"


def commands(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = re.findall(
        r"^    (depthmix (?:data|train|compare|study|eval|generate|inspect|list|doctor)\b.*)$", text, re.M
    )
    assert found, page
    return found


def small(command):
    """A command's arguments, at a size that takes a second or two."""
    argv = shlex.split(re.sub(r" --seeds( \d+)+", "", command))[1:]
    if argv[0] in ("train", "compare"):
        argv += shlex.split(SMALL)
    if argv[0] == "inspect":
        argv += shlex.split("--tokens 100 --causal-tokens 64 --batch-size 2")
    if argv[0] == "compare":  # more seeds: tests/study
        argv += ["--seeds", "0"]
    return argv


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder like the project's, where commands may write."""
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    tiny = tmp_path / "recipes" / "studies" / "tiny.yaml"
    tiny.write_text(tiny.read_text().replace("steps: 40, warmup: 4", "steps: 4, warmup: 1"))
    (tmp_path / "corpora" / "sotu").mkdir(parents=True)
    for path in sorted((ROOT / "corpora" / "sotu").glob("*.txt"))[:6]:
        shutil.copy(path, tmp_path / "corpora" / "sotu")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(step_times, "A_SECOND", 0.05)  # how exact step times are is tested elsewhere
    return tmp_path


def test_every_command_of_the_pages_runs(place, capsys):
    """In a reader's order, in one folder, and once where pages repeat each other; of the demo also what it promises."""
    shown = {}
    for command in dict.fromkeys(c for page in PAGES for c in commands(page)):
        if "data/my-corpus" in command:
            shutil.copytree("data/sotu", "data/my-corpus")
        assert main(small(command)) == 0, f"{command}: {capsys.readouterr().err}"
        shown[command] = capsys.readouterr().out
    assert "residual" in shown[DEMO]
    assert "My fellow Americans" in shown[DEMO]
    report = (place / "runs" / "demo" / "report.html").read_text()
    assert "<svg" in report or "data:image" in report
    assert (place / "runs" / "demo" / "table.csv").read_text().count("\n") >= 4
    assert "6 of 6 runs are done." in shown["depthmix study tiny"]
    assert "6 of 6 are done" in (place / "docs" / "results" / "tiny" / "table.md").read_text()
    assert (place / "docs" / "results" / "tiny" / "differences.png").stat().st_size > 1000
