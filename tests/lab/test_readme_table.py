"""The README's table, on a committed study: rows arrive one by one, and one seed is called a lead."""

import dataclasses
import re

import pytest

from lab.claims import read_results
from lab.readme_table import FIRST, LEADS, committed_rows, headline, replace, rows_of, table
from project import ROOT


@pytest.fixture
def results(monkeypatch):
    """Runs of many rules with up to nine seeds, in the first cell of a study."""
    monkeypatch.chdir(ROOT)
    found = read_results("mechanisms-18m")
    cell = next(iter(found.runs))
    return dataclasses.replace(found, runs={cell: found.runs[cell]})


def only(results, **seeds):
    """The same study with these seeds of these arms."""
    wanted = {("attnres:block_size=4" if arm == "block" else arm): set(which) for arm, which in seeds.items()}
    ((cell, runs),) = results.runs.items()
    return dataclasses.replace(results, runs={cell: [run for run in runs if run.seed in wanted.get(run.arm, ())]})


@pytest.fixture
def rates(monkeypatch):
    monkeypatch.chdir(ROOT)
    return read_results("long-rates")


def test_without_runs_all_rows_are_leads_from_outside(rates):
    lines = [line for line in table(None, rates).splitlines() if line.startswith("| ") and "nats" not in line]
    assert len(lines) == len(LEADS)
    assert all(line.endswith("| 1 seed: a lead, made outside |") for line in lines)
    assert "from one seed" in headline(None)
    assert f"(`{FIRST}`)" in headline(None)


def test_the_better_plain_model_is_said_beside_the_leads(rates):
    """Losses of the table of long-rates: 2.1635 at the leads' batch and rate, 2.1104 at the best."""
    assert f"gives it {2.1635 - 2.1104:.3f} nats" in table(None, rates)


def test_plain_runs_alone_change_nothing(results, rates):
    assert table(only(results, residual=[0, 1]), rates) == table(None, rates)


def test_a_rule_without_a_common_seed_has_no_row_yet(results):
    assert committed_rows(only(results, residual=[0], dca=[1])) == []


def test_one_seed_is_a_lead_and_has_no_interval(results, rates):
    here = only(results, residual=[0, 1], dca=[0])
    (row,) = committed_rows(here)
    runs = {(run.arm, run.seed): run for run in next(iter(results.runs.values()))}
    assert row.difference == pytest.approx(runs["dca", 0].val_loss - runs["residual", 0].val_loss)
    assert str(row).endswith("| 1 seed: a lead |")
    assert " to " not in str(row)
    # The others keep their rows from outside.
    assert {row.arm for row in rows_of(here)} == set(LEADS)
    assert table(here, rates).count("made outside |") == len(LEADS) - 1
    assert f"(`{FIRST}`)" in headline(here)
    assert "300M training tokens" in headline(here)


def test_two_seeds_are_a_result_with_an_interval(results):
    here = only(results, residual=[0, 1, 2], block=[0, 1, 2], dca=[0])
    row = next(row for row in committed_rows(here) if row.arm == FIRST)
    losses = {(run.arm, run.seed): run.val_loss for run in next(iter(results.runs.values()))}
    assert row.difference == pytest.approx(sum(losses[FIRST, s] - losses["residual", s] for s in range(3)) / 3)
    low, high = (float(x) for x in re.search(r"\((\S+) to (\S+)\)", str(row)).groups())
    assert low < row.difference < high < 0
    assert str(row).endswith("| 3 seeds |")
    assert f"The 95% interval over 3 seeds is {-high:.3f} to {-low:.3f}" in headline(here)
    assert "26M training tokens" in headline(here)


def test_an_interval_that_includes_zero_is_said(results):
    """Every seed of GRN-v2 ends within a few thousandths of the residual model."""
    here = only(results, residual=[0, 1], **{"grn:version=2": [0, 1]})
    assert "The 95% interval over 2 seeds includes zero" in headline(here)


def test_only_the_text_between_the_markers_changes():
    page = "before\n<!-- table: written by python -m lab.readme_table -->\nold\n<!-- end of table -->\nafter\n"
    assert replace(page, "table", "new") == page.replace("old", "new")
    with pytest.raises(SystemExit, match="leave exactly one"):
        replace("no markers", "table", "new")
