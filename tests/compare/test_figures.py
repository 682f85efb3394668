"""The figures of a comparison: what they show, and what is said where they cannot be drawn."""

import dataclasses
import math

import pytest

from compare import recipes
from compare.recipes import a_run
from depthmix.compare import figures
from depthmix.compare.figures import draw_figures, mean_difference, plot_differences, plot_training, train_curves
from depthmix.compare.records import Records
from depthmix.compare.results import Results
from depthmix.compare.spread import pooled
from depthmix.compare.table import to_markdown


def records(study, seeds=(0, 1), steps=6):
    training = recipes.Training()
    found = []
    for arm in study.arms:
        for seed in seeds:
            config = dataclasses.replace(study.train_config(arm, study.cells[0], seed), steps=steps)
            place = {"arm": arm.label, "domain": "words", "size": "", "seed": seed}
            found.append(
                {"kind": "run", **place, "result": training(config, None), "config": {}, "environment": {}, "code": "c"}
            )
    return found


def results_of(study, lines):
    return Results(study, Records([{"kind": "code", "id": "c", "files": {}}, *lines]))


def given(study, runs):
    """Results with these runs, of which there are no records."""
    results = results_of(study, [])
    results.__dict__["runs"] = results.__dict__["own_times"] = {"words": runs}
    return results


@pytest.fixture
def study(tmp_path):
    return recipes.read(recipes.write(tmp_path))


def test_a_row_for_every_arm_but_the_first(study):
    axes = plot_differences(results_of(study, records(study))).axes[0]
    means = sorted(
        line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 1 and line.get_marker() == "o"
    )
    assert means == pytest.approx([-0.1, -0.05])
    assert [text.get_text() for text in axes.get_yticklabels()] == study.labels[1:]


def test_arms_that_have_not_run_have_no_row(study):
    runs = [a_run("residual", 0, 4.0), a_run("slow", 0, 3.9)]
    axes = plot_differences(given(study, runs)).axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["slow"]


def test_intervals_of_a_figure_are_those_of_the_table(study):
    runs = [a_run("residual", 0, 4.0), a_run("residual", 1, 5.0), a_run("slow", 0, 3.9), a_run("slow", 1, 4.92)]
    axes = plot_differences(given(study, runs)).axes[0]
    ((start, end),) = (bar.get_segments()[0][:, 0] for bar in axes.collections)
    assert [start, end] == pytest.approx([-0.09 - (half := pooled([runs]).half_width(2)), -0.09 + half])


def test_an_arm_of_six_seeds_has_its_own_interval_in_figure_and_table(study):
    losses = {"residual": [4.0] * 6, "slow": [3.9, 3.8, 3.7, 3.6, 3.5, 3.4], "attnres:block_size=2": [5.0, 3.0] * 3}
    runs = [a_run(arm, s, x) for arm, own in losses.items() for s, x in enumerate(own)]
    wide = 2.5706 * math.sqrt(0.035 / 6)  # t of 5 degrees of freedom; the variance of 0.1 to 0.6 is 0.175 / 5
    axes = plot_differences(given(study, runs)).axes[0]
    ends = [bar.get_segments()[0][:, 0] for bar in axes.collections]
    assert any(end == pytest.approx([-0.35 - wide, -0.35 + wide], abs=1e-4) for end in ends)
    text = to_markdown(given(study, runs))
    assert f"| slow | 3.6500 | -0.3500 ± {wide:.4f} | 6 |" in text
    assert "on these data, and from 6 seeds on with their own" in text
    few = to_markdown(given(study, [run for run in runs if run.seed or run.arm == "residual"]))
    assert "with their own" not in few
    assert f"± {wide:.4f}" not in few


def test_training_is_compared_at_the_same_steps_only(study):
    curves = train_curves([*records(study), *records(study, seeds=[5], steps=8)[:2]])
    x, y = mean_difference(curves, "words", "slow", "residual")
    assert x == [192, 384]
    assert y == pytest.approx([-0.05, -0.05])
    odd = {key: value for key, value in curves.items() if key[2] != 5 or key[1] != "residual"}
    odd["words", "residual", 5] = [(1.0, 4.0)]
    assert mean_difference(odd, "words", "slow", "residual")[1] == pytest.approx([-0.05, -0.05])
    assert mean_difference(curves, "words", "nobody", "residual") == ([], [])
    figure = plot_training(["words"], study.labels, curves)
    assert [line.get_label() for line in figure.axes[0].lines][:2] == study.labels[1:]


def test_files_are_written_or_it_is_said_how(study, tmp_path, monkeypatch):
    results = results_of(study, records(study))
    monkeypatch.setattr(figures, "load", lambda: False)
    drawn, (said,) = draw_figures(results, tmp_path)
    assert drawn == []
    assert "matplotlib is not installed" in said
    assert "--report" in said
    assert not list(tmp_path.glob("*.png"))
    monkeypatch.undo()
    assert draw_figures(results, tmp_path) == (["differences"], [])
    for name in ("differences", "training"):
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")
        assert (tmp_path / f"{name}.png").stat().st_size > 1000


def test_without_a_finished_run_there_is_a_table_all_the_same(study):
    assert "No run has finished yet." in to_markdown(results_of(study, []))
