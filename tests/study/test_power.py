"""The power of the paired test, against tabulated values and a simulation."""

import random
import statistics

import pytest

from depthmix.study.interval import half_width
from depthmix.study.power import detectable, power, seeds_needed
from project import ROOT


def test_seeds_are_those_of_the_tables():
    """Sample sizes of the two-sided paired t-test at 5% and 80%, by effect size (Cohen 1988, and any calculator since)."""
    assert {d: seeds_needed(d, 1.0) for d in (0.5, 0.8, 1.0, 1.5, 2.0)} == {0.5: 34, 0.8: 15, 1.0: 10, 1.5: 6, 2.0: 5}


def test_power_is_what_a_simulation_finds():
    rng = random.Random(0)
    draws = 4000
    shown = 0
    for _ in range(draws):
        values = [rng.gauss(0.01, 0.006) for _ in range(4)]
        shown += abs(statistics.fmean(values)) > half_width(values)
    assert power(0.01, 0.006, 4) == pytest.approx(shown / draws, abs=0.03)


def test_without_a_difference_one_in_twenty_is_shown():
    assert power(0.0, 1.0, 5) == pytest.approx(0.05, abs=1e-3)


def test_what_the_page_on_studies_says():
    page = (ROOT / "docs" / "study.md").read_text()
    needed, least = seeds_needed(0.01, 0.006), detectable(0.006, 3)
    assert f"vary by 0.006 nats, one of 0.01 needs {needed} seeds, and three seeds show {least:.3f}." in page


def test_extremes():
    assert power(0.1, 1.0, 1) == 0
    assert power(0.1, 0.0, 2) == 1
    assert seeds_needed(0.001, 1.0) is None
    assert detectable(0.01, 1) is None
    assert detectable(0.006, 3) > detectable(0.006, 4) > detectable(0.003, 4)
    assert power(detectable(0.006, 4), 0.006, 4) == pytest.approx(0.8, abs=1e-3)
