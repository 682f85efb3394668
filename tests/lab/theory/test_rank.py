"""Thresholds, gains and equal parameters: the numbers that the paper's formulas and figures must give."""

import math

import numpy as np
import pytest

from lab.theory.rank import (
    Shape,
    equal_shapes,
    gain,
    parameters,
    rank_left,
    sufficient_rank,
    threshold,
)
from lab.theory.results import equal_parameters
from lab.theory.risk import best_fit, bounds, positive_target

GRNS = ("grn-v1", "grn-v2", "grn-v3")


def test_thresholds_at_kappa_one_half():
    found = [threshold(rule, 0.5, 100) for rule in GRNS]
    assert found == pytest.approx([0.7135, 0.3213, 0.3171], abs=5e-5)
    paper = threshold("grn-v3", 0.5, 100, paper=True)
    assert paper == pytest.approx(0.3171, abs=5e-5)
    assert paper != found[-1]


@pytest.mark.parametrize("rule", ["grn-v1", "grn-v2"])
@pytest.mark.parametrize("kappa", [0.2, 0.5, 0.8])
def test_the_gain_is_zero_at_the_threshold(rule, kappa):
    r = 200 * threshold(rule, kappa, 200)
    assert gain(rule, 10 * kappa, 10, 200, r) == pytest.approx(0, abs=1e-8)
    assert gain(rule, 10 * kappa, 10, 200, r - 1) > 0 > gain(rule, 10 * kappa, 10, 200, r + 1)


def test_gains_of_figure_5():
    assert [gain("grn-v1", 5, 10, d, 0) for d in (100, 200, 300)] == [2500, 5000, 7500]
    assert gain("grn-v1", 5, 10, 100, 100) == pytest.approx(-1287, abs=1)
    assert gain("grn-v2", 5, 10, 100, 100) == pytest.approx(-6143, abs=1)
    for rule in ("grn-v1", "grn-v2"):
        assert [gain(rule, 10, 10, d, 50) for d in (100, 200, 300)] == [5000, 15000, 25000]
    with pytest.raises(ValueError, match="grn-v1 and grn-v2"):
        gain("grn-v3", 5, 10, 100, 50)


@pytest.mark.parametrize("rule", GRNS)
@pytest.mark.parametrize("r", [4, 17, 60])
def test_lemma_c1_is_what_layers_of_rank_one_leave(rule, r):
    """With T = r' layers of rank one the budget is spent to the last, but for what the lemma rounds off."""
    d = 50
    left = rank_left(rule, d, r)
    affordable = max(s for s in range(r + 1) if parameters(rule, d, s, s) <= parameters("residual", d, 1, r))
    assert math.floor(left) <= affordable <= left + 1.5


@pytest.mark.parametrize("rule", GRNS)
def test_equal_shapes_spend_no_more_and_cannot_spend_a_rank_more(rule):
    d, residual = 40, Shape(5, 3)
    budget = parameters("residual", d, 5, 15)
    assert budget == 2 * 40 * 15
    shapes = equal_shapes(rule, d, residual)
    assert shapes
    for s in shapes:
        assert parameters(rule, d, s.n_layers, s.collective) <= budget
        assert parameters(rule, d, s.n_layers, s.collective + s.n_layers) > budget


def test_the_paper_counts_parameters_so():
    assert [parameters(rule, 100, 10, 30) - 6000 for rule in ("residual", *GRNS)] == [0, 45, 4500, 5500]


def test_equal_parameters_on_a_positive_target():
    """Below the threshold a GRN wins at equal parameters; the residual network's own risk is the theorem's."""
    a = positive_target(20, 5.0, 10.0)
    equal = equal_parameters(a, Shape(2, 2))
    assert equal.residual == pytest.approx(bounds(a, 4).residual)
    for rule in GRNS:
        shape, risk = equal.best(rule)
        assert risk < equal.residual
        assert risk == pytest.approx(best_fit(a, shape.collective, rule).risk)


def test_proposition_4_4_a_lower_rank_is_enough():
    """On the spectrum for which it is tight: λ_max on top, λ_min below."""
    d, kappa, r = 24, 0.5, 12
    enough = math.ceil(sufficient_rank(kappa**2, d, r))
    assert 0 < enough < r
    values = np.linspace(5.0, 10.0, d)
    for rule in ("grn-v1", "grn-v2"):
        a = np.eye(d) + np.diag(values)
        assert best_fit(a, enough, rule).risk <= bounds(a, r).residual


def test_unknown_rules_have_no_threshold():
    with pytest.raises(ValueError, match="grn-v1, grn-v2, grn-v3"):
        threshold("residual", 0.5, 100)
