"""dm.compare_runs: the statistics of `depthmix compare`, for losses from anywhere."""

import random
import statistics
import sys

import pytest

import depthmix as dm
from depthmix.compare.interval import student_t
from depthmix.errors import UserError

PLAIN, MINE = [3.31, 3.35, 3.29], [3.27, 3.30, 3.26]


def test_differences_are_paired_with_students_interval():
    found = dm.compare_runs({"plain": PLAIN, "mine": MINE})
    differences = [m - p for m, p in zip(MINE, PLAIN, strict=True)]
    half = student_t(2) * statistics.stdev(differences) / 3**0.5
    mine = found["mine"]
    assert mine.baseline == "plain"
    assert mine.paired == 3
    assert mine.mean == pytest.approx(statistics.fmean(MINE))
    assert mine.difference == pytest.approx(statistics.fmean(differences))
    assert (mine.low, mine.high) == pytest.approx((mine.difference - half, mine.difference + half))
    assert (found["plain"].difference, found["plain"].low, found["plain"].high) == (None, None, None)
    assert found.verdict == ["mine: 0.040 nats below plain (95% interval 0.015 to 0.065 over 3 seeds)."]


def test_the_interval_holds_the_truth_95_times_in_a_hundred():
    """Four seeds whose own differences vary more than the arms differ: what an unpaired interval would lose."""
    draw, held = random.Random(0), 0
    for _ in range(2000):
        seeds = [draw.gauss(3, 0.5) for _ in range(4)]
        losses = {"plain": seeds, "mine": [s - 0.02 + draw.gauss(0, 0.01) for s in seeds]}
        mine = dm.compare_runs(losses)["mine"]
        held += mine.low <= -0.02 <= mine.high
    assert 0.935 < held / 2000 < 0.965


def test_seeds_that_both_have_are_paired_whatever_their_order():
    found = dm.compare_runs({"plain": {"a": 3.0, "b": 4.0, "x": 9.0}, "mine": {"b": 3.8, "a": 2.9, "y": 1.0}})
    assert found["mine"].paired == 2
    assert found["mine"].difference == pytest.approx(-0.15)
    assert found["mine"].losses == {"b": 3.8, "a": 2.9, "y": 1.0}
    longer = dm.compare_runs({"plain": [3.0, 4.0], "mine": [2.9, 3.8, 1.0]})["mine"]
    assert (longer.paired, longer.difference) == (2, pytest.approx(-0.15))


def test_a_baseline_may_be_named_and_comes_first():
    found = dm.compare_runs({"mine": MINE, "plain": PLAIN}, baseline="plain")
    assert list(found) == ["plain", "mine"]
    assert found["mine"].difference < 0


def test_one_seed_has_no_interval():
    found = dm.compare_runs({"plain": [3.0], "mine": [2.9]})
    assert found["mine"].difference == pytest.approx(-0.1)
    assert (found["mine"].low, found["mine"].high) == (None, None)
    assert found.verdict == [
        "mine: 0.100 nats below plain with one seed, which says nothing about chance; run three or more."
    ]


def test_tensors_arrays_and_frames_are_losses_too():
    import numpy as np
    import torch

    expected = dm.compare_runs({"plain": PLAIN, "mine": MINE})["mine"].difference
    for losses in (
        {"plain": np.array(PLAIN), "mine": np.array(MINE)},
        {"plain": torch.tensor(PLAIN, dtype=torch.float64), "mine": [torch.tensor(x).double() for x in MINE]},
    ):
        assert dm.compare_runs(losses)["mine"].difference == pytest.approx(expected, abs=1e-6)


def test_a_data_frame_has_a_column_per_arm_and_a_row_per_seed():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"plain": PLAIN, "mine": MINE}, index=[10, 11, 12])
    found = dm.compare_runs(frame)
    assert found["mine"].losses == dict(zip([10, 11, 12], MINE, strict=True))
    assert found.table()["low"].to_dict()["mine"] == found["mine"].low


def test_its_tables(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    found = dm.compare_runs({"plain": PLAIN, "<b>mine</b>": MINE})
    mine = found["<b>mine</b>"]
    table = found.table()
    assert table.columns == ["mean", "difference", "low", "high", "paired"]
    assert table["high"] == {"plain": None, "<b>mine</b>": mine.high}
    assert "-0.0648 to -0.0152" in repr(found)
    assert "<th>&lt;b&gt;mine&lt;/b&gt;</th>" in found._repr_html_()
    assert "<b>" not in found._repr_html_()


@pytest.mark.parametrize(
    ("losses", "options", "said"),
    [
        ([1.0, 2.0], {}, "compare_runs takes a dictionary of losses by arm, got list"),
        ({}, {}, "compare_runs needs the losses of at least one arm"),
        ({"plain": []}, {}, "'plain' has no losses"),
        ({"plain": 3.0}, {}, "the losses of 'plain' are one number per seed, got 3.0"),
        ({"plain": [[3.0, 4.0]]}, {}, "the losses of 'plain' are one number per seed"),
        ({"plain": [3.0, float("nan")]}, {}, "the loss of 'plain' with seed 1 is nan: leave that run out"),
        ({"plain": {0: 3.0}, "mine": {1: 2.9}}, {}, r"'mine' and 'plain' share no seed \(1 and 0\)"),
        ({"plain": PLAIN, "mine": MINE}, {"baseline": "plan"}, "no arm 'plan' to compare with; did you mean 'plain'?"),
    ],
)
def test_what_cannot_be_used(losses, options, said):
    with pytest.raises(UserError, match=said):
        dm.compare_runs(losses, **options)


def test_an_arm_that_is_not_there():
    with pytest.raises(KeyError, match="no arm 'min'; there are plain, mine; did you mean 'mine'"):
        dm.compare_runs({"plain": PLAIN, "mine": MINE})["min"]
