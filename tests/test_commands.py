"""The commands in the documents run, and the demo's path works, both at a tenth of their size or less."""

import re
import shlex
import shutil

import pytest

from depthmix.cli import main
from project import ROOT

SMALL = {
    "train": "--steps 6 --warmup 2 --n-blocks 2 --dim 32 --n-heads 2 --seq-len 32 --batch-size 4 --eval-every 3 --eval-tokens 2000 --quiet",
    "compare": "--steps 6 --warmup 2 --n-blocks 2 --dim 32 --n-heads 2 --seq-len 32 --batch-size 4 --eval-every 3 --eval-tokens 2000 --quiet",
}
PAGES = ("quickstart", "data", "comparing")


def commands(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return re.findall(r"^    (depthmix (?:data|train|compare|eval|generate|list|doctor)\b.*)$", text, re.M)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder like the project's, with prepared data, where commands may write."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("recipes", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "corpora" / "sotu").mkdir(parents=True)
    for path in sorted((ROOT / "corpora" / "sotu").glob("*.txt"))[:12]:
        shutil.copy(path, folder / "corpora" / "sotu")
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_runs(page, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert commands(page)
    for name in ("data", "runs"):
        shutil.rmtree(place / name, ignore_errors=True)
    if page != "quickstart":
        assert main(["data", "--input", "corpora/sotu", "--out", "data/sotu", "--vocab-size", "300"]) == 0
    if page == "comparing":
        shutil.copytree("data/sotu", "data/my-corpus")
    for command in commands(page):
        argv = shlex.split(command)[1:] + shlex.split(SMALL.get(shlex.split(command)[1], ""))
        if argv[0] == "data":
            shutil.rmtree(argv[argv.index("--out") + 1], ignore_errors=True)
        assert main(argv) == 0, f"{command}: {capsys.readouterr().err}"


def test_the_demo_at_a_tenth_of_its_size(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    shutil.rmtree("runs", ignore_errors=True)
    if not (place / "data" / "sotu").exists():
        assert main(["data", "--input", "corpora/sotu", "--out", "data/sotu", "--vocab-size", "512"]) == 0
    recipe = [
        "--recipe",
        "recipes/demo.yaml",
        "--steps",
        "30",
        "--warmup",
        "4",
        "--eval-every",
        "10",
        "--eval-tokens",
        "2000",
        "--quiet",
    ]
    assert main(["compare", *recipe, "--seeds", "0"]) == 0
    out = capsys.readouterr().out
    assert "residual" in out
    assert "My fellow Americans" in out
    report = (place / "runs" / "demo" / "report.html").read_text()
    assert "<svg" in report or "data:image" in report
    assert (place / "runs" / "demo" / "table.csv").read_text().count("\n") >= 4
