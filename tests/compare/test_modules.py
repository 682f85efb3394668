"""Mechanisms that a study brings along: files that it names, run once, counted as its code, and refused in one sentence."""

from pathlib import Path

import pytest

from compare import recipes
from depthmix import create_mixer, list_mixers
from depthmix.errors import USAGE
from depthmix.mixers import registry as rules
from depthmix.runs.code_checksums import code_of
from train.refused import refused

OWN = """
from depthmix.mixers import register
from depthmix.mixers.residual import Residual


@register("{name}")
class Own(Residual):
    "As plain as can be."
"""


def write(folder, **texts):
    folder.mkdir(exist_ok=True)
    for stem, text in texts.items():
        (folder / f"{stem}.py").write_text(text)


def test_files_and_folders_from_the_study_s_file(tmp_path, monkeypatch):
    write(tmp_path / "own", first=OWN.format(name="first"), _helper="raise OSError", second=OWN.format(name="second"))
    write(tmp_path, third=OWN.format(name="third"))
    path = recipes.write(tmp_path, modules=["own", "third.py"], arms=["residual", "first", "third"])
    before, elsewhere = set(list_mixers()), tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert recipes.read(path).labels == ["residual", "first", "third"]
    assert set(list_mixers()) - before == {"first", "second", "third"}
    assert create_mixer("second", dim=4, n_blocks=1).name == "second"
    assert {"first.py", "mixers/residual.py"} <= set(code_of("first"))
    assert "first.py" not in code_of("third")


def test_names_by_which_code_is_known_are_there_once(tmp_path):
    for folder in ("one", "other"):
        write(tmp_path / folder, same=OWN.format(name=folder))
    path = str(recipes.write(tmp_path, modules=["one", "other"], arms=["residual"]))
    refused(lambda: recipes.read(Path(path)), "same.py is called like another", code=USAGE)
    write(tmp_path, device=OWN.format(name="third"))
    path = str(recipes.write(tmp_path, modules=["device.py"], arms=["residual"]))
    refused(lambda: recipes.read(Path(path)), "device.py is called like a file of the package", code=USAGE)
    assert not {"one", "other", "third"} & set(list_mixers())


def test_a_study_is_read_twice_and_its_files_run_once(tmp_path):
    write(tmp_path, own=OWN.format(name="own") + "\nopen(__file__ + '.runs', 'a').write('.')\n")
    path = str(recipes.write(tmp_path, modules=["own.py"], arms=["own"]))
    recipes.read(Path(path))
    del rules._MIXERS["own"]  # as where another test begins
    assert recipes.read(Path(path)).labels == ["own"]
    assert (tmp_path / "own.py.runs").read_text() == "."


@pytest.mark.parametrize(
    ("named", "text", "words"),
    [
        ("own.py", OWN.format(name="own"), ["modules must be a list", "'own.py'"]),
        ([3], OWN.format(name="own"), ["modules must be text, got 3"]),
        (["none.py"], "", ["none.py", "there is no Python file there"]),
        (["own.yaml"], "", ["own.yaml", "there is no Python file there"]),
        (["own.py"], "import nowhere", ["own.py cannot be loaded", "ModuleNotFoundError", "nowhere"]),
        (["own.py"], "def (", ["own.py cannot be loaded", "SyntaxError"]),
        (["own.py"], OWN.format(name="dca"), ["own.py: there is a mixer 'dca' already, depthmix.mixers.dca.DCA"]),
        (["own.py"], OWN.format(name="own") + "raise KeyError('late')", ["own.py cannot be loaded", "late"]),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(tmp_path, named, text, words):
    write(tmp_path, own=text)
    (tmp_path / "own.yaml").write_text("")
    before = dict(rules._MIXERS)
    refused(lambda: recipes.read(recipes.write(tmp_path, modules=named)), *words, code=USAGE)
    assert before == rules._MIXERS
