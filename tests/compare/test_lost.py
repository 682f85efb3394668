"""What a comparison does when files of it are lost or damaged, or every run diverged: its advice leads somewhere."""

import errno
import os
from pathlib import Path

import pytest

from compare.fake_training import configuration
from compare.run_folders import write_run
from depthmix.compare.engine import compare
from depthmix.compare.figures import draw_curves
from depthmix.compare.recipe import check_recipe
from depthmix.compare.rows import read_run
from depthmix.errors import DISK, DIVERGED, UserError


def test_with_every_run_diverged_no_table_is_promised(tmp_path, trainer):
    trainer.fail = {(m, 0): UserError("the loss became nan", DIVERGED) for m in ("residual", "attnres", "dca")}
    with pytest.raises(UserError) as caught:
        compare(configuration(tmp_path))
    assert caught.value.exit_code == DIVERGED
    assert "3 of 3 runs diverged" in str(caught.value)
    assert "there is nothing to compare" in str(caught.value)
    assert str(caught.value).endswith("lower lr or leave those arms out, with another --out")


@pytest.mark.parametrize("loss", [None, float("nan")])
def test_a_run_that_finished_without_a_loss_stops_no_other_run(tmp_path, trainer, loss):
    trainer.results = {("residual", 0): {"val_loss": loss}}
    for _ in range(2):  # the first time, and again with that run in place
        with pytest.raises(UserError, match="1 of 3 runs diverged, all of residual") as caught:
            compare(configuration(tmp_path))
        assert caught.value.exit_code == DIVERGED
        assert str(tmp_path / "out" / "table.md") in str(caught.value)
        assert "residual with seed 0 diverged" in (tmp_path / "out" / "table.md").read_text()
    assert len(trainer.calls) == 3
    # What the message advises works.
    assert not compare(configuration(tmp_path, out=str(tmp_path / "other"), arms=["attnres", "dca"])).unfinished


def test_a_single_seed_is_refused_with_the_way_to_say_it(tmp_path):
    with pytest.raises(UserError, match="not from --seed: --seeds 3"):
        check_recipe(configuration(tmp_path, seed=3))


@pytest.fixture
def full_disk(monkeypatch):
    """From now on there is no room for a new version of the file of this name."""

    def full(name):
        def replace(source, target, put=os.replace):
            if Path(target).name == name:
                raise OSError(errno.ENOSPC, "No space left on device")
            put(source, target)

        monkeypatch.setattr(os, "replace", replace)

    return full


@pytest.mark.parametrize("name", ["comparison.yaml", "runs.jsonl", "table.csv", "table.md", "report.html"])
def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path, trainer, full_disk, name):
    compare(configuration(tmp_path, budget="time"))
    out = tmp_path / "out"
    before = (out / name).read_bytes()
    full_disk(name)
    with pytest.raises(UserError, match=f"{name}: the disk is full") as caught:
        compare(configuration(tmp_path, budget="time", arms=["residual", "attnres:block_size=4", "dca", "rezero"]))
    assert caught.value.exit_code == DISK
    assert (out / name).read_bytes() == before
    assert not list(out.glob(".tmp*"))


def test_a_full_disk_leaves_the_old_figure(tmp_path, full_disk):
    pytest.importorskip("matplotlib")
    run = read_run(write_run(tmp_path / "run", [6.0, 5.0, 4.0]), "arm")
    (tmp_path / "loss-tokens.svg").write_text("old")
    full_disk("loss-tokens.svg")
    with pytest.raises(UserError, match=r"loss-tokens.svg: the disk is full"):
        draw_curves([run], ["arm"], tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"run", "loss-tokens.svg"}
    assert (tmp_path / "loss-tokens.svg").read_text() == "old"
