"""What a comparison does when files of it are lost or damaged, or every run diverged: its advice leads somewhere."""

import errno
import json
import os
from pathlib import Path

import pytest

from depthmix.errors import CHECKPOINT, DISK, DIVERGED, UserError
from depthmix.compare.compare import compare
from depthmix.compare.figures import draw_figures
from depthmix.compare.plan import check_config
from depthmix.compare.rows import read_run
from compare.fake_training import configuration
from compare.test_table import write_run

DAMAGE = {"empty": lambda text: "", "truncated": lambda text: text[: len(text) // 2], "gone": None}


def damage(path, how):
    path.unlink() if DAMAGE[how] is None else path.write_text(DAMAGE[how](path.read_text()))


@pytest.mark.parametrize("budget", ["tokens", "time"])
@pytest.mark.parametrize("how", DAMAGE)
def test_a_lost_comparison_is_made_again_from_its_runs(tmp_path, trainer, how, budget):
    config = configuration(tmp_path, seeds=[0, 1], budget=budget)
    rows, runs = compare(config).rows, len(trainer.calls)
    before = json.loads((tmp_path / "out" / "comparison.json").read_text())
    damage(tmp_path / "out" / "comparison.json", how)
    said = []
    assert compare(config, say=said.append).rows == rows
    assert any("made again from the runs" in text for text in said)
    assert len(trainer.calls) == runs
    assert json.loads((tmp_path / "out" / "comparison.json").read_text()) == before


@pytest.mark.parametrize("budget", ["tokens", "time"])
@pytest.mark.parametrize("how", ["empty", "gone"])
def test_runs_of_another_recipe_are_not_taken_over(tmp_path, trainer, how, budget):
    compare(configuration(tmp_path, budget=budget))
    damage(tmp_path / "out" / "comparison.json", how)
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"seed-0 is a run of another recipe \(lr was 0.0015 and is 0.1\)"
        ) as caught:
            compare(configuration(tmp_path, lr=0.1, budget=budget))
        assert caught.value.exit_code == CHECKPOINT
    meta = tmp_path / "out" / "residual" / "seed-0" / "data.json"
    meta.write_text(meta.read_text() + "\n")
    with pytest.raises(UserError, match="its data was prepared otherwise"):
        compare(configuration(tmp_path, budget=budget))


def test_without_budgets_runs_at_equal_time_cannot_go_on(tmp_path, trainer):
    config = configuration(tmp_path, budget="time")
    compare(config)
    for name in ("comparison.json", "step_times.json"):
        (tmp_path / "out" / name).write_text("")
    with pytest.raises(UserError, match=r"how long each was to train, are lost; delete .*out or choose another"):
        compare(config)
    assert len(trainer.measured) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '"text"', '{"residual": "slow"}', '{"residual": null, "dca": -1}'])
def test_damaged_step_times_are_taken_from_the_comparison(tmp_path, trainer, text):
    config = configuration(tmp_path, budget="time")
    rows = compare(config).rows
    path = tmp_path / "out" / "step_times.json"
    whole = json.loads(path.read_text())
    path.write_text(text)
    assert compare(config).rows == rows
    assert len(trainer.measured) == 1
    assert json.loads(path.read_text()) == whole


def test_damaged_step_times_of_no_run_are_measured(tmp_path, trainer):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "step_times.json").write_text('{"residual": "slow", "dca": true}')
    assert compare(configuration(tmp_path, budget="time")).finished
    assert len(trainer.measured) == 1


def test_with_every_run_diverged_no_table_is_promised(tmp_path, trainer):
    trainer.fail = {(m, 0): UserError("the loss became nan", DIVERGED) for m in ("residual", "attnres", "dca")}
    with pytest.raises(UserError) as caught:
        compare(configuration(tmp_path))
    assert caught.value.exit_code == DIVERGED
    assert "3 of 3 runs diverged" in str(caught.value)
    assert "table.md" not in str(caught.value)
    assert str(caught.value).endswith("lower lr or leave those arms out, with another --out")
    assert not (tmp_path / "out" / "table.md").exists()


@pytest.mark.parametrize("loss", [None, float("nan")])
def test_a_run_that_finished_without_a_loss_stops_no_other_run(tmp_path, trainer, loss):
    trainer.results = {("residual", 0): {"val_loss": loss}}
    for _ in range(2):  # the first time, and again with that run in place
        with pytest.raises(UserError, match="1 of 3 runs diverged") as caught:
            compare(configuration(tmp_path))
        assert caught.value.exit_code == DIVERGED
        assert str(tmp_path / "out" / "table.md") in str(caught.value)
        assert "residual with seed 0 diverged" in (tmp_path / "out" / "table.md").read_text()
    assert len(trainer.calls) == 3
    # What the message advises works.
    assert compare(configuration(tmp_path, out=str(tmp_path / "other"), arms=["attnres", "dca"])).finished


def test_a_single_seed_is_refused_with_the_way_to_say_it(tmp_path):
    with pytest.raises(UserError, match="not from --seed: --seeds 3"):
        check_config(configuration(tmp_path, seed=3))


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


@pytest.mark.parametrize("name", ["comparison.json", "table.csv", "table.md", "report.html", "step_times.json"])
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
        draw_figures([run], ["arm"], tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"run", "loss-tokens.svg"}
    assert (tmp_path / "loss-tokens.svg").read_text() == "old"
