"""The README's table, on a committed study: rows arrive one by one, and one seed is called a lead."""

import dataclasses
import re

import pytest

from lab.claims import read_results
from lab.readme_table import headline, replace, rows_of, table
from project import ROOT

BLOCK = "attnres:block_size=4"


@pytest.fixture
def results(monkeypatch):
    """Runs of many rules with up to nine seeds, in the first cell of a study."""
    monkeypatch.chdir(ROOT)
    found = read_results("mechanisms-18m")
    cell = next(iter(found.runs))
    return dataclasses.replace(found, runs={cell: found.runs[cell]})


def only(results, **seeds):
    """The same study with these seeds of these arms."""
    wanted = {(BLOCK if arm == "block" else arm): set(which) for arm, which in seeds.items()}
    ((cell, runs),) = results.runs.items()
    return dataclasses.replace(results, runs={cell: [run for run in runs if run.seed in wanted.get(run.arm, ())]})


def test_a_rule_without_a_common_seed_has_no_row_yet(results):
    assert rows_of(only(results, residual=[0], dca=[1])) == []


def test_one_seed_is_a_lead_and_has_no_interval(results):
    here = only(results, residual=[0, 1], dca=[0])
    (row,) = rows_of(here)
    runs = {(run.arm, run.seed): run for run in next(iter(results.runs.values()))}
    assert row.difference == pytest.approx(runs["dca", 0].val_loss - runs["residual", 0].val_loss)
    assert str(row).endswith("| 1 seed: a lead |")
    assert " to " not in str(row)
    assert "That is a lead from one seed" in headline(here)
    assert "a lead, not a result" in table(here)


def test_two_seeds_are_a_result_with_an_interval(results):
    here = only(results, residual=[0, 1, 2], block=[0, 1, 2], dca=[0])
    row = next(row for row in rows_of(here) if row.arm == BLOCK)
    losses = {(run.arm, run.seed): run.val_loss for run in next(iter(results.runs.values()))}
    assert row.difference == pytest.approx(sum(losses[BLOCK, s] - losses["residual", s] for s in range(3)) / 3)
    low, high = (float(x) for x in re.search(r"\((\S+) to (\S+)\)", str(row)).groups())
    assert low < row.difference < high < 0
    assert str(row).endswith("| 3 seeds |")
    assert f"The 95% interval over 3 seeds is {-high:.3f} to {-low:.3f}" in headline(here)
    assert "26M training tokens" in headline(here)


def test_step_times_of_a_busy_machine_are_not_shown(results):
    ((cell, runs),) = only(results, residual=[0], block=[0]).runs.items()

    def with_times(**milliseconds):
        """The two runs with the lower quartile, the median and the upper quartile of their steps."""
        timed = []
        for run in runs:
            low, middle, high = milliseconds["block" if run.arm == BLOCK else run.arm]
            quartiles = (low / 1e3, high / 1e3)
            timed.append(dataclasses.replace(run, shared=False, step_seconds=middle / 1e3, step_quartiles=quartiles))
        return dataclasses.replace(results, runs={cell: timed})

    quiet = with_times(residual=(9.9, 10, 10.1), block=(10.9, 11, 11.1))
    assert rows_of(quiet)[0].step_ratio == pytest.approx(1.1)
    assert "| 1.10 |" in table(quiet)
    busy = with_times(residual=(9.9, 10, 15), block=(10.9, 11, 11.1))
    assert rows_of(busy)[0].step_ratio is None
    assert "step time" not in table(busy)


def test_an_interval_that_includes_zero_is_said(results):
    """Every seed of GRN-v2 ends within a few thousandths of the residual model."""
    here = only(results, residual=[0, 1], **{"grn:version=2": [0, 1]})
    assert "The 95% interval over 2 seeds includes zero" in headline(here)


def test_only_the_text_between_the_markers_changes():
    page = "before\n<!-- table: written by python -m lab.readme_table -->\nold\n<!-- end of table -->\nafter\n"
    assert replace(page, "table", "new") == page.replace("old", "new")
    with pytest.raises(SystemExit, match="leave exactly one"):
        replace("no markers", "table", "new")
