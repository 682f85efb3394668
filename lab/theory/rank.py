"""Compute what parameters buy: thresholds of the collective rank, gains, and comparisons at equal parameters (Theorem 4.3, Lemma C.1).

Let A - I be positive definite with eigenvalues from λ_min to λ_max, κ = λ_min/λ_max. A GRN spends parameters on its weights. Its
collective rank is therefore lower than that of a residual network with as many parameters:

    parameters of T layers:   residual 2dr*;   v1 + T(T-1)/2;   v2 + dT(T-1)/2;   v3 + dT(T-1)/2 + dT
    ranks left at least:      v1 r* - (√(d+r*) - √d)²;   v2 r* - (√(1+r*) - 1)²;   v3 r* - (√(1.6+r*) - 1)²     (layers of rank one: the worst case)
    better than residual if   v1 r*/d <= (1-κ²+√(κ⁴+κ²))² - 1
                              v2 r*   <= (1-κ²+√(κ⁴+κ²d))² - 1
                              v3 r*   <= (1-η²+√(η⁴+η²(d+0.6)))² - 1.6
    η² = ((κ(1+ξ) - ξ)² + ξ)/(1+ξ),  ξ = 1/(π(d-1)c),  c = d + 1 in the paper, d + 2 by the Gaussian moment (risk.py)
    gain at least             G = λ_max² (κ²(d-r*) - (1-κ²) × rank lost)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lab.theory.risk import RULES, gaussian_constant, paper_constant


def parameters(rule: str, d: int, n_layers: int, collective_rank: int) -> int:
    """Count the parameters of layers V_t = (d x r_t)(r_t x d) and of the weights that mix them, as the paper does."""
    pairs = n_layers * (n_layers - 1) // 2
    added = {"residual": 0, "grn-v1": pairs, "grn-v2": d * pairs, "grn-v3": d * pairs + d * n_layers}
    return 2 * d * collective_rank + added[rule]


def rank_left(rule: str, d: int, r: float) -> float:
    """Return the least collective rank of a rule with the parameters of a residual network of rank r (Lemma C.1)."""
    return r - rank_lost(rule, d, r)


def rank_lost(rule: str, d: int, r: float) -> float:
    """Return the collective rank that Lemma C.1 subtracts."""
    lost = {
        "residual": 0.0,
        "grn-v1": (math.sqrt(d + r) - math.sqrt(d)) ** 2,
        "grn-v2": (math.sqrt(1 + r) - 1) ** 2,
        "grn-v3": (math.sqrt(1.6 + r) - 1) ** 2,
    }
    return lost[rule]


def eta_squared(kappa: float, d: int, c: int) -> float:
    """Return η², which replaces κ² in the statements about GRN-v3."""
    xi = 1 / (math.pi * (d - 1) * c)
    return ((kappa * (1 + xi) - xi) ** 2 + xi) / (1 + xi)


def threshold(rule: str, kappa: float, d: int, paper: bool = False) -> float:
    """Return r*/d up to which a rule is better than the residual network at equal parameters (Theorem 4.3).

    Args:
        rule: "grn-v1", "grn-v2" or "grn-v3".
        kappa: λ_min / λ_max.
        d: channels.
        paper: use the paper's constant c instead of the Gaussian moment's.
    """
    k = kappa**2
    if rule == "grn-v1":
        return (1 - k + math.sqrt(k * k + k)) ** 2 - 1
    if rule == "grn-v2":
        return ((1 - k + math.sqrt(k * k + k * d)) ** 2 - 1) / d
    if rule == "grn-v3":
        h = eta_squared(kappa, d, paper_constant(d) if paper else gaussian_constant(d))
        return ((1 - h + math.sqrt(h * h + h * (d + 0.6))) ** 2 - 1.6) / d
    raise ValueError(f"there is a threshold for {', '.join(RULES[1:])}, got {rule!r}")


def gain(rule: str, low: float, high: float, d: int, r: float) -> float:
    """Return the least gain in risk of GRN-v1 or v2 over a residual network of rank r with as many parameters."""
    if rule not in ("grn-v1", "grn-v2"):
        raise ValueError(f"the paper gives a gain of grn-v1 and grn-v2, got {rule!r}")
    k = (low / high) ** 2
    return high**2 * (k * (d - r) - (1 - k) * rank_lost(rule, d, r))


def sufficient_rank(kappa_squared: float, d: int, r: float) -> float:
    """Return the collective rank with which GRN-v1 and v2 beat a residual network of rank r (Proposition 4.4).

    For GRN-v3, η² replaces κ².
    """
    return (r - d * kappa_squared) / (1 - kappa_squared)


@dataclass(frozen=True)
class Shape:
    """A network of n_layers layers of equal rank."""

    n_layers: int
    rank: int

    @property
    def collective(self) -> int:
        return self.n_layers * self.rank


def equal_shapes(rule: str, d: int, residual: Shape) -> list[Shape]:
    """Return every number of layers, with the largest whole rank, that a rule can have with a residual network's parameters."""
    budget, shapes = parameters("residual", d, residual.n_layers, residual.collective), []
    for n_layers in range(1, residual.collective + 1):
        remaining = budget - parameters(rule, d, n_layers, 0)
        if (rank := remaining // (2 * d * n_layers)) >= 1:
            shapes.append(Shape(n_layers, rank))
    return shapes
