"""Excess risks of linear low-rank networks, and their bounds (Theorems 4.1 and 4.2).

With A - I = U Σ Vᵀ, Δ = A - I - U_r Σ_r V_rᵀ for r = r*, and U_⊥ the rest of U:

    residual  = ||Δ||²                                                              (Eckart and Young)
    GRN-v1   <= ||Δ||² - tr(Δ)²/(d-r)                                               at D = αI, α = 1 + tr(Δ)/(d-r)
    GRN-v2   <= ||Δ||² - max(tr(Δ)²/(d-r), Σ Δ_ii²)                                 or D = I + diag(Δ)
    GRN-v3   <= ||Δ||² - max(tr(Δ)²/(d-r) + ν²/(πc), Σ Δ_ii² + ν̃²/(πc))
    ν = λ_max(sym(Δ) - tr(Δ)/(d-r) U_⊥U_⊥ᵀ),  ν̃ = λ_max(sym(Δ) - diag(Δ))

For a remainder B = A - D - M, Gaussian x and a gate w, E[relu(wᵀx) xxᵀ] = ||w||/√(2π) (I + ŵŵᵀ) and E[relu(wᵀx)² ||x||²] = c/2 ||w||²
with c = d + 2, so that the best ||w|| leaves ||B||² - max(0, tr B + λ_max(sym B))²/(πc). The paper's numbers imply c = d + 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
RULES = ("residual", "grn-v1", "grn-v2", "grn-v3")
# The most steps of alternating minimisation, and the relative gain below which it ends.
STEPS = 150
SETTLED = 1e-7


def paper_constant(d: int) -> int:
    """Return c as the paper's ξ implies it."""
    return d + 1


def gaussian_constant(d: int) -> int:
    """Return c as the Gaussian moment gives it: E[relu(wᵀx)² ||x||²] = (d + 2)/2 ||w||²."""
    return d + 2


def sampled_constant(d: int, samples: int, seed: int = 0) -> float:
    """Estimate c by Monte Carlo: 2 E[relu(x_1)² ||x||²]."""
    x = np.random.default_rng(seed).standard_normal((samples, d))
    return float(2 * np.mean(np.maximum(x[:, 0], 0) ** 2 * np.sum(x**2, axis=1)))


def positive_target(d: int, low: float, high: float, seed: int = 0) -> Matrix:
    """Return A with A - I positive definite: eigenvalues evenly spaced from low to high, eigenvectors random."""
    q, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))
    return np.eye(d) + (q * np.linspace(low, high, d)) @ q.T


def gaussian_target(d: int, seed: int = 0) -> Matrix:
    """Return A with entries N(0, 1)."""
    return np.random.default_rng(seed).standard_normal((d, d))


def low_rank(a: Matrix, r: int) -> Matrix:
    """Return the nearest matrix of rank r."""
    u, s, vt = np.linalg.svd(a)
    return (u[:, :r] * s[:r]) @ vt[:r]


def network_matrix(weights: list[Matrix], layers: list[Matrix]) -> Matrix:
    """Return the end-to-end matrix of a network of linear layers V_t (Theorem 4.1): g_t = Σ_j b_tj ⊙ f_j, f_t = V_t g_t, f_0 = x.

    Args:
        weights: weights[t] holds the b with which layer t + 1 reads, [t + 1] for GRN-v1 or [t + 1, d] for GRN-v2. The last
            entry is the output's.
        layers: the V_t [d, d].
    """
    d = layers[0].shape[0]
    stack = [np.eye(d)]
    for b, layer in zip(weights, [*layers, None], strict=True):
        g = sum((np.reshape(w, (-1, 1)) * f for w, f in zip(b, stack, strict=True)), np.zeros((d, d)))
        if layer is None:
            return g
        stack.append(layer @ g)
    raise AssertionError("the output has no weights")


@dataclass(frozen=True)
class Bounds:
    """The right-hand sides of Theorem 4.2 for one target and one collective rank."""

    residual: float
    v1: float
    v2: float
    v3: float  # with c = d + 2
    v3_paper: float  # with c = d + 1


def bounds(a: Matrix, r: int) -> Bounds:
    """Return the bounds of Theorem 4.2. The bound of the residual network is its risk."""
    d = len(a)
    u, s, vt = np.linalg.svd(a - np.eye(d))
    delta = (u[:, r:] * s[r:]) @ vt[r:]
    rest, trace, diagonal = u[:, r:], np.trace(delta), np.diag(delta)
    total, by_trace, by_diagonal = np.sum(delta**2), trace**2 / (d - r), np.sum(diagonal**2)
    nu = _top(delta - trace / (d - r) * rest @ rest.T)[0]
    nu_tilde = _top(delta - np.diag(diagonal))[0]

    def v3(c: int) -> float:
        return float(total - max(by_trace + nu**2 / (math.pi * c), by_diagonal + nu_tilde**2 / (math.pi * c)))

    v2 = total - max(by_trace, by_diagonal)
    return Bounds(float(total), float(total - by_trace), float(v2), v3(gaussian_constant(d)), v3(paper_constant(d)))


def _top(b: Matrix) -> tuple[float, Matrix]:
    """Return the largest eigenvalue of the symmetric part, and its eigenvector."""
    values, vectors = np.linalg.eigh((b + b.T) / 2)
    return float(values[-1]), vectors[:, -1]


@dataclass
class Fit:
    """A network (D + M)x + relu(wᵀx)x and its excess risk."""

    diagonal: Matrix  # [d], D's
    m: Matrix  # [d, d], of rank r
    w: Matrix  # [d]
    risk: float


def risk(a: Matrix, diagonal: Matrix, m: Matrix, w: Matrix) -> float:
    """Return E||A x - (D + M)x - relu(wᵀx)x||² for Gaussian x, in closed form."""
    d, b, length = len(a), a - np.diag(diagonal) - m, float(np.linalg.norm(w))
    if length == 0:
        return float(np.sum(b**2))
    direction = w / length
    linear = length / math.sqrt(2 * math.pi) * (np.trace(b) + direction @ b @ direction)
    return float(np.sum(b**2) - 2 * linear + gaussian_constant(d) / 2 * length**2)


def proof_point(a: Matrix, r: int, rule: str, by: str = "trace") -> Fit:
    """Return the network with which the proof of Theorem 4.2 bounds a rule's risk.

    Args:
        a: target [d, d].
        r: collective rank.
        rule: one of RULES.
        by: D comes from Δ's "trace" or from its "diagonal".
    """
    if by not in ("trace", "diagonal") or (by == "diagonal" and rule in ("residual", "grn-v1")):
        raise ValueError(f"{rule} has no proof by {by!r}")
    d = len(a)
    u, s, vt = np.linalg.svd(a - np.eye(d))
    delta, top = (u[:, r:] * s[r:]) @ vt[r:], u[:, :r]
    m = (top * s[:r]) @ vt[:r]
    diagonal = np.ones(d)
    if rule != "residual" and by == "trace":
        shift = np.trace(delta) / (d - r)
        diagonal, m = diagonal + shift, m - shift * top @ top.T
    elif by == "diagonal":
        diagonal = diagonal + np.diag(delta)
    w = _gate(a - np.diag(diagonal) - m) if rule == "grn-v3" else np.zeros(d)
    return Fit(diagonal, m, w, risk(a, diagonal, m, w))


def _gate(b: Matrix) -> Matrix:
    """Return the w that lowers the risk of a remainder most."""
    value, vector = _top(b)
    gain = max(0.0, float(np.trace(b)) + value)
    return vector * (2 * gain / math.sqrt(2 * math.pi) / gaussian_constant(len(b)))


def _moment(w: Matrix) -> Matrix:
    """Return E[relu(wᵀx) xxᵀ]."""
    length = np.linalg.norm(w)
    if length == 0:
        return np.zeros((len(w), len(w)))
    return length / math.sqrt(2 * math.pi) * (np.eye(len(w)) + np.outer(w / length, w / length))


def best_fit(a: Matrix, r: int, rule: str) -> Fit:
    """Return the network of the lowest risk that alternating minimisation finds for a rule. The residual network's is exact, by SVD.

    D, M and w are minimised in turns, each exactly given the others, from D = I and from the D of GRN-v1. No step can raise the risk.
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    if not 0 <= r < len(a):
        raise ValueError(f"r must be at least 0 and below d={len(a)}, got {r}")
    if rule == "residual":
        return proof_point(a, r, rule)
    starts = [np.ones(len(a)), proof_point(a, r, "grn-v1").diagonal]
    if rule == "grn-v3":
        # GRN-v3 contains GRN-v2, and starts from the best GRN-v2.
        starts = [best_fit(a, r, "grn-v2").diagonal]
    return min((_alternate(a, r, rule, start) for start in starts), key=lambda fit: fit.risk)


def _alternate(a: Matrix, r: int, rule: str, diagonal: Matrix) -> Fit:
    w, last = np.zeros(len(a)), math.inf
    for _ in range(STEPS):
        # Completing the square: the gate shifts the matrix that D and M are fitted to.
        target = a - _moment(w)
        m = low_rank(target - np.diag(diagonal), r)
        diagonal = np.diag(target - m).copy()
        if rule == "grn-v1":
            diagonal[:] = diagonal.mean()
        if rule == "grn-v3":
            w = _gate(a - np.diag(diagonal) - m)
        now = risk(a, diagonal, m, w)
        if last - now <= SETTLED * abs(now):
            break
        last = now
    return Fit(diagonal, m, w, now)
