"""docs/guides/own-rule.md as it stands: the file, the lines that use it, and the commands, at a small size."""

import re
import shlex

import pytest

import depthmix
from depthmix.cli import main
from depthmix.errors import CHECKPOINT, USAGE
from depthmix.mixers import registry
from project import ROOT, code_blocks
from test_commands import small

PAGE = ROOT / "docs" / "guides" / "own-rule.md"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder with the page's file, in a process that does not know it yet."""
    monkeypatch.setattr(registry, "_MIXERS", dict(registry._MIXERS))
    (tmp_path / "fading.py").write_text(code_blocks(PAGE)[0])
    (tmp_path / "corpora" / "sotu").mkdir(parents=True)
    for text in sorted((ROOT / "corpora" / "sotu").glob("*.txt"))[:3]:  # a newcomer's has all
        (tmp_path / "corpora" / "sotu" / text.name).write_text(text.read_text())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_in_python(place, monkeypatch, capsys):
    monkeypatch.syspath_prepend(place)
    exec(code_blocks(PAGE)[1], {})
    assert "torch.Size([1, 5, 5])" in capsys.readouterr().out


def test_it_passes_the_check_that_the_page_names():
    exec(compile(code_blocks(PAGE)[0], "a cell", "exec"), {"__name__": "notebook"})
    assert depthmix.check_mixer("fading").passed


def test_its_commands(capsys):
    commands = re.findall(r"^    (depthmix .*)$", PAGE.read_text(), re.M)
    assert len(commands) == 6
    for command in commands:
        assert main(small(command)) == 0, command
        out = capsys.readouterr().out
        if " list " in command:
            assert "fading: Fading: x_{s+1} = a_s x_s + y_s" in out
            assert "init: a finite number (default: 1.0)" in out


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("inspect runs/fading", CHECKPOINT, ["unknown mixer 'fading'", "in a command with --modules FILE"]),
        ("inspect runs/fading --modules none.py", USAGE, ["--modules, none.py: there is no Python file there"]),
        ("list --modules taken.py", USAGE, ["--modules, taken.py: there is a mixer 'dca' already"]),
        ("list --modules broken.py", USAGE, ["--modules, broken.py cannot be loaded: ZeroDivisionError"]),
        ("list --modles fading.py", USAGE, ["unknown argument '--modles'; did you mean '--modules'?"]),
        ("doctor --modules fading.py", USAGE, ["unknown argument '--modules'"]),
    ],
)
def test_without_the_file_or_with_another(place, line, code, words, capsys):
    if line == "inspect runs/fading":
        train = "train --data data --out runs/fading --mixer fading --modules fading.py"
        assert main(["data", "--input", "corpora/sotu", "--out", "data", "--vocab-size", "300"]) == 0
        assert main(small(f"depthmix {train}")) == 0
        registry._MIXERS.pop("fading")
    (place / "taken.py").write_text(code_blocks(PAGE)[0].replace('"fading"', '"dca"'))
    (place / "broken.py").write_text("1 / 0")
    capsys.readouterr()
    assert main(shlex.split(line)) == code
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    for word in words:
        assert word in said
