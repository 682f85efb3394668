"""The page on theory quotes its result file, and the command that makes it says what is wrong."""

import re
from pathlib import Path

import pytest

from lab.theory import __main__ as command
from lab.theory import figures
from lab.theory.rank import Shape
from lab.theory.results import (
    STARTS,
    TARGETS,
    Results,
    equal_parameters,
    risks,
    tables,
    toy_settings,
)
from lab.theory.toy import Size, train
from project import ROOT

PAGE = (ROOT / "lab" / "theory" / "README.md").read_text()
NUMBERS = (ROOT / "lab" / "results" / "theory" / "numbers.md").read_text()


def test_every_number_of_the_page_is_in_its_result_file():
    rows = [line for line in PAGE.splitlines() if re.match(r"\| .*\d\.?\d* \|$", line)]
    assert len(rows) > 25
    assert set(rows) <= set(NUMBERS.splitlines())


@pytest.fixture(scope="module")
def small():
    equal = {name: equal_parameters(make(12), Shape(2, 2)) for name, make in TARGETS.items()}
    found = {name: risks(make(12), [3, 9]) for name, make in TARGETS.items()}
    toy = train(toy_settings(), Size(d=8, n_layers=2, rank=1, steps=2, batch=4), every=1)
    return Results(found, {6: 8.0}, equal, toy)


def test_the_command_writes_every_figure_and_number(small, tmp_path, monkeypatch, capsys):
    def save(make, stem, *_):
        """Make a figure. Drawing it takes seconds."""
        assert make().axes
        Path(f"{stem}.png").touch()

    monkeypatch.setattr(figures, "save_figure", save)
    monkeypatch.setattr(command, "compute", lambda say: small)
    assert command.main(["--out", str(tmp_path / "theory")]) == 0
    written = {path.name for path in (tmp_path / "theory").iterdir()}
    assert written == {path.name for path in (ROOT / "lab" / "results" / "theory").iterdir()}
    said = capsys.readouterr().out
    assert all(str(tmp_path / "theory" / name) in said for name in written)
    for name in written - {"numbers.md"}:
        assert f"(../results/theory/{name})" in PAGE, name


def test_the_tables_have_a_line_for_every_start(small):
    text = tables(small)
    assert text.count("| N(0, 0.") + text.count("| as nn.Linear") == len(STARTS)
    assert "| 0.5 | 0.7135 | 0.3213 | 0.3171 | 0.3171 |" in text


def test_a_place_that_cannot_be_written_is_said_before_anything_is_computed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "compute", lambda say: pytest.fail("computed"))
    (tmp_path / "file").write_text("")
    assert command.main(["--out", str(tmp_path / "file" / "theory")]) == 6
    assert "is a file" in capsys.readouterr().err


def test_without_matplotlib_one_sentence(small, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "load", lambda: False)
    with pytest.raises(Exception, match="matplotlib is not installed"):
        figures.draw(small, tmp_path)
