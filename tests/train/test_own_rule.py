"""A rule of one's own that reads tokens to come has a loss that says nothing: every command that makes a loss refuses it."""

import pytest
import torch

from depthmix.cli import main
from depthmix.errors import USAGE
from depthmix.mixers import registry
from depthmix.mixers.leaks import check_rule
from depthmix.runs.folder import RunFolder
from train import small

RULE = """
from depthmix.mixers import register
from depthmix.mixers.one_stream import OneStream


@register("own")
class Own(OneStream):
    "A rule of one's own."

    def __init__(self, dim, n_blocks):
        super().__init__(dim, n_blocks)

    def _join(self, state, site, y):
        return {join}
"""
HONEST, AHEAD = "state.x + y", "state.x + y.roll(-1, -2)"
SAID = "mixer 'own' cannot be used: what a site reads of a token depends on tokens to come"


@pytest.fixture
def rule(tmp_path, monkeypatch):
    """Writes a file that registers a rule, in a process that does not know it yet."""
    monkeypatch.setattr(registry, "_MIXERS", dict(registry._MIXERS))

    def write(join, name="own.py"):
        (tmp_path / name).write_text(RULE.format(join=join))
        return ["--modules", str(tmp_path / name)]

    return write


def refused(argv, capsys):
    capsys.readouterr()
    assert main([str(word) for word in argv]) == USAGE
    said = capsys.readouterr().err
    assert SAID in said
    assert len(said.splitlines()) == 1


def test_training_refuses_it_before_anything_is_written(rule, tmp_path, capsys):
    config = small.config(tmp_path / "run", mixer="own")
    refused(["train", *small.flags(config), *rule(AHEAD)], capsys)
    assert not (tmp_path / "run").exists()


def test_a_comparison_refuses_it_before_its_first_run(rule, tmp_path, capsys):
    shape = ["--dim", "16", "--n-blocks", "1", "--n-heads", "2", "--steps", "2", "--warmup", "1", "--device", "cpu"]
    given = [
        "compare",
        "--arms",
        "residual",
        "own",
        "--data",
        str(small.data()),
        "--out",
        str(tmp_path / "runs"),
        *shape,
    ]
    refused([*given, "--seeds", "0", *rule(AHEAD)], capsys)
    assert not (tmp_path / "runs").exists()


def test_evaluation_refuses_it_where_an_older_version_has_trained_it(rule, tmp_path, capsys, monkeypatch):
    config = small.config(tmp_path / "run", mixer="own", steps=3, eval_every=3)
    assert main(["train", *small.flags(config), *rule(HONEST)]) == 0
    assert RunFolder(tmp_path / "run").has_result()
    registry._MIXERS.pop("own")
    refused(["eval", tmp_path / "run", "--device", "cpu", *rule(AHEAD, "changed.py")], capsys)


def test_the_trial_draws_nothing_from_the_generator(rule):
    from pathlib import Path

    from depthmix.compare.modules import load_modules

    load_modules(Path(), [rule(HONEST)[1]], "--modules")
    before = torch.get_rng_state()
    check_rule("own", {}, 16, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_file_that_ends_the_program_is_named(tmp_path, capsys):
    (tmp_path / "ends.py").write_text("import sys\nsys.exit('done')\n")
    assert main(["list", "--modules", str(tmp_path / "ends.py")]) == USAGE
    said = capsys.readouterr().err
    assert "--modules, ends.py ends the program with 'done' instead of registering mixers" in said
    assert len(said.splitlines()) == 1
