"""Theorems 4.1 and 4.2 of the DeepCrossAttention paper, against samples, constructions and the numbers they must give."""

import math

import numpy as np
import pytest

from lab.theory.risk import (
    RULES,
    best_fit,
    bounds,
    gaussian_target,
    low_rank,
    network_matrix,
    positive_target,
    proof_point,
    risk,
    sampled_constant,
)

TARGETS = {"positive": positive_target(12, 5.0, 10.0, seed=3), "gaussian": gaussian_target(12, seed=3)}


def layers(rng, d, ranks):
    return [rng.standard_normal((d, r)) @ rng.standard_normal((r, d)) for r in ranks]


@pytest.mark.parametrize("rule", ["residual", "grn-v1", "grn-v2"])
def test_a_network_is_its_diagonal_and_a_matrix_of_the_collective_rank(rule):
    rng, d, ranks = np.random.default_rng(0), 9, (1, 2, 2)
    shape = {"residual": lambda t: np.ones(t), "grn-v1": rng.standard_normal, "grn-v2": lambda t: rng.random((t, d))}
    weights = [shape[rule](t) for t in range(1, len(ranks) + 2)]
    a = network_matrix(weights, layers(rng, d, ranks))
    diagonal = np.broadcast_to(weights[-1][0], d)  # with which the output reads x
    assert np.linalg.matrix_rank(a - np.diag(diagonal)) == sum(ranks)


def test_a_residual_network_multiplies_out():
    rng = np.random.default_rng(1)
    v1, v2 = layers(rng, 5, (1, 2))
    a = network_matrix([np.ones(t) for t in (1, 2, 3)], [v1, v2])
    np.testing.assert_allclose(a, (np.eye(5) + v2) @ (np.eye(5) + v1))


def test_the_closed_form_of_the_risk_is_the_mean_over_samples():
    rng, d = np.random.default_rng(2), 6
    a, m, diagonal = gaussian_target(d), low_rank(gaussian_target(d, 5), 2), rng.standard_normal(d)
    w = 0.3 * rng.standard_normal(d)
    x = rng.standard_normal((400_000, d))
    error = x @ (a - np.diag(diagonal) - m).T - np.maximum(x @ w, 0)[:, None] * x
    assert risk(a, diagonal, m, w) == pytest.approx(np.mean(np.sum(error**2, axis=1)), rel=0.01)


def test_the_gaussian_moment_is_d_plus_two_and_not_the_papers_constant():
    assert sampled_constant(6, 400_000) == pytest.approx(8, abs=0.1)


@pytest.mark.parametrize("r", [0, 3, 8])
@pytest.mark.parametrize("name", TARGETS)
def test_the_proofs_networks_have_the_risk_of_the_bounds(name, r):
    a = TARGETS[name]
    b = bounds(a, r)
    by = {(rule, how): proof_point(a, r, rule, how).risk for rule in RULES[2:] for how in ("trace", "diagonal")}
    assert proof_point(a, r, "residual").risk == pytest.approx(b.residual)
    assert proof_point(a, r, "grn-v1").risk == pytest.approx(b.v1)
    assert min(by["grn-v2", "trace"], by["grn-v2", "diagonal"]) == pytest.approx(b.v2)
    assert min(by["grn-v3", "trace"], by["grn-v3", "diagonal"]) == pytest.approx(b.v3)
    assert b.v3_paper < b.v3  # what the paper promises is more than its network does


@pytest.mark.parametrize("r", [2, 7])
@pytest.mark.parametrize("name", TARGETS)
def test_every_rule_undercuts_its_bound_and_the_one_before_it(name, r):
    a, b = TARGETS[name], bounds(TARGETS[name], r)
    fits = [best_fit(a, r, rule) for rule in RULES]
    for fit, bound in zip(fits, (b.residual, b.v1, b.v2, b.v3), strict=True):
        assert fit.risk <= bound * (1 + 1e-9)
        assert np.linalg.matrix_rank(fit.m, tol=1e-8) <= r
        assert fit.risk == pytest.approx(risk(a, fit.diagonal, fit.m, fit.w))
    risks = [fit.risk for fit in fits]
    assert risks == sorted(risks, reverse=True)
    assert len(set(risks)) == 4


@pytest.mark.parametrize(("r", "residual", "v1"), [(5, 1862.75, 58.68), (20, 784.19, 10.93)])
def test_known_numbers_of_a_positive_target(r, residual, v1):
    """Eigenvalues 5 to 10, d = 40: no other α does better than the proof's, so that GRN-v1's bound is its risk."""
    a = positive_target(40, 5.0, 10.0, seed=7)
    b = bounds(a, r)
    assert (b.residual, b.v1) == pytest.approx((residual, v1), abs=0.01)
    others = [
        np.sum(np.linalg.svd(a - alpha * np.eye(40), compute_uv=False)[r:] ** 2) for alpha in np.linspace(1, 12, 60)
    ]
    assert min(others) >= b.v1 * (1 - 1e-9)
    assert best_fit(a, r, "grn-v1").risk == pytest.approx(b.v1)


def test_what_is_no_rule_no_rank_or_no_proof_is_refused():
    a = TARGETS["gaussian"]
    for call in (
        lambda: best_fit(a, 2, "grn-v4"),
        lambda: best_fit(a, 12, "grn-v1"),
        lambda: proof_point(a, 2, "grn-v1", "diagonal"),
    ):
        with pytest.raises(ValueError, match=r"got|proof"):
            call()
    assert math.isfinite(best_fit(a, 0, "grn-v3").risk)
