"""The power of the paired test, against tabulated values and a simulation."""

import random
import statistics

import pytest

from depthmix.compare.interval import half_width
from depthmix.compare.power import detectable, power, seeds_needed
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


def test_a_spread_that_others_tell_needs_fewer_seeds():
    """Twenty degrees of freedom: one seed may do, and the t of the interval is 2.086."""
    assert seeds_needed(2.0, 1.0, 20) == 3 < seeds_needed(2.0, 1.0)
    assert seeds_needed(4.0, 1.0, 20) == 1
    assert seeds_needed(0.8, 1.0, 3) == seeds_needed(0.8, 1.0)  # those to come will tell as well
    assert seeds_needed(0.8, 1.0, 90) == seeds_needed(0.8, 1.0) == 15  # so many tell alone
    assert power(1.2, 1.0, 6, 90) == power(1.2, 1.0, 6) < power(1.2, 1.0, 5, 90)
    assert power(detectable(0.006, 2, 20), 0.006, 2, 20) == pytest.approx(0.8, abs=1e-3)
    assert detectable(0.006, 2, 1000) == pytest.approx((1.962 + 0.842) * 0.006 / 2**0.5, rel=0.01)
    assert detectable(0.006, 1, 1000) == pytest.approx((1.962 + 0.842) * 0.006, rel=0.01)


def test_without_a_difference_one_in_twenty_is_shown():
    assert power(0.0, 1.0, 5) == pytest.approx(0.05, abs=1e-3)


def test_what_the_page_on_larger_comparisons_says():
    page = (ROOT / "docs" / "guides" / "large-comparisons.md").read_text()
    needed, least = seeds_needed(0.01, 0.006), detectable(0.006, 3)
    assert f"vary by 0.006 nats, one of 0.01 needs {needed} seeds, and three seeds show {least:.3f}." in page


def test_extremes():
    assert power(0.1, 1.0, 1) == 0
    assert power(0.1, 0.0, 2) == 1
    assert seeds_needed(0.001, 1.0) is None
    assert detectable(0.01, 1) is None
    assert detectable(0.006, 3) > detectable(0.006, 4) > detectable(0.003, 4)
    assert power(detectable(0.006, 4), 0.006, 4) == pytest.approx(0.8, abs=1e-3)
