"""A run's folder says which code made which of its steps."""

import dataclasses
import json

import pytest

from depthmix.errors import INTERRUPTED, UserError
from depthmix.mixers import registry
from depthmix.runs import code_checksums
from depthmix.runs.code_checksums import code_of
from depthmix.runs.code_record import CODE, read_code, record_code
from depthmix.runs.folder import RunFolder
from depthmix.train.loop import train
from train import small


def test_the_record_says_which_code_made_which_steps(tmp_path):
    folder = RunFolder(tmp_path)
    assert read_code(folder) == [None]
    assert record_code(folder, 0, "dca", {"a": "1"}) == []
    assert record_code(folder, 100, "dca", {"a": "1"}) == []
    assert read_code(folder) == [{"a": "1"}]
    assert record_code(folder, 200, "dca", {"a": "2", "kernels of dca": "1"}) == ["a"]
    assert record_code(folder, 300, "dca", {"a": "2", "kernels of dca": "2"}) == []  # they only round otherwise
    assert len(read_code(folder)) == 3
    assert record_code(folder, 100, "dca", {"a": "3"}) == ["a"]  # from an older checkpoint
    assert read_code(folder) == [{"a": "1"}, {"a": "3"}]
    (tmp_path / CODE).unlink()
    assert record_code(folder, 100, "dca", {"a": "3"}) == []
    assert read_code(folder) == [None, {"a": "3"}]


@pytest.fixture
def stops(monkeypatch):
    """Trainings that a signal stops after their first steps, until `stop.clear()`."""
    import depthmix.train.loop as loop

    stop = [True]

    class Signal(loop.StopSignal):
        def __enter__(self):
            super().__enter__()
            self.requested, self.name = bool(stop), "SIGTERM"
            return self

    monkeypatch.setattr(loop, "StopSignal", Signal)
    return stop


def test_a_training_that_goes_on_with_other_code_says_so(tmp_path, monkeypatch, stops, capsys):
    config = small.config(tmp_path / "run", steps=3)
    with pytest.raises(UserError) as caught:
        train(config)
    assert caught.value.exit_code == INTERRUPTED
    assert "code" not in capsys.readouterr().err
    before = code_checksums.checksum
    edited = lambda p: "edited" if p.name == "layers.py" else before(p)  # noqa: E731
    monkeypatch.setattr(code_checksums, "checksum", edited)
    stops.clear()
    folder = train(config)
    words = "the code has changed since step 1 (models/layers.py): the steps from here on are made by other code"
    assert words in capsys.readouterr().err
    assert words in (folder.path / "log.txt").read_text()
    one, other = read_code(folder)
    assert one != other == code_of("residual")
    train(dataclasses.replace(config))  # finished: nothing is recorded
    assert len(json.loads((folder.path / CODE).read_text())) == 2


SOURCE = """
from depthmix.mixers.registry import register
from depthmix.mixers.residual import Residual
@register("cell")
class Cell(Residual):
    def read(self, state, site):
        return super().read(state, site) * {factor}
    @property
    def words(self):
        return {{"a", "b", "c"}} & {{"b", "c", "d"}}
"""


def test_a_rule_that_is_in_no_file_is_known_by_its_methods(monkeypatch):
    """As in a notebook."""
    monkeypatch.setattr(registry, "_MIXERS", dict(registry._MIXERS))
    tables = []
    for factor in (1, 2, 2):
        registry._MIXERS.pop("cell", None)
        exec(SOURCE.format(factor=factor), {"__name__": "a cell of a notebook"})
        tables.append(code_of("cell"))
    assert "the class Cell" in tables[0]
    assert tables[0] != tables[1] == tables[2]
    assert {name for name in tables[0] if tables[0][name] != tables[1][name]} == {"the class Cell"}
