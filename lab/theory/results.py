"""Every number that the page draws or quotes, computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab.theory.rank import Shape, equal_shapes, gain, parameters, rank_left, threshold
from lab.theory.risk import (
    RULES,
    Bounds,
    Matrix,
    best_fit,
    bounds,
    gaussian_constant,
    gaussian_target,
    paper_constant,
    positive_target,
    sampled_constant,
)
from lab.theory.toy import Curves, Init, Setting, train

# Eigenvalues of A - I, as in the paper's Figure 5.
LOW, HIGH = 5.0, 10.0
TARGETS: dict[str, Callable[[int], Matrix]] = {
    "A - I positive, eigenvalues 5 to 10": lambda d: positive_target(d, LOW, HIGH),
    "A Gaussian": gaussian_target,
}
DIMS = (100, 200, 300)
# Initialisation of U and V, and learning rate.
STARTS: tuple[tuple[Init, float], ...] = (
    (0.2, 0.003),
    (0.1, 0.01),
    (0.1, 0.1),
    ("torch", 0.01),
    ("torch", 0.1),
    ("torch", 0.3),
)


@dataclass
class Risks:
    """Risks over collective ranks for one target."""

    ranks: list[int]
    by_rule: dict[str, list[float]]
    bounds: list[Bounds]


def risks(a: Matrix, ranks: Sequence[int]) -> Risks:
    """Compute the risks that alternating minimisation finds for every rule, and Theorem 4.2's bounds."""
    by_rule = {rule: [best_fit(a, r, rule).risk for r in ranks] for rule in RULES}
    return Risks(list(ranks), by_rule, [bounds(a, r) for r in ranks])


@dataclass
class EqualParameters:
    """Risks at a residual network's parameters, for every number of layers that a rule can have."""

    residual: float
    shapes: dict[str, list[Shape]]  # by rule
    risks: dict[str, list[float]]  # by rule, one per shape

    def best(self, rule: str) -> tuple[Shape, float]:
        """Return the shape with the lowest risk, and the risk."""
        risk, shape = min(zip(self.risks[rule], self.shapes[rule], strict=True), key=lambda pair: pair[0])
        return shape, risk


def equal_parameters(a: Matrix, residual: Shape) -> EqualParameters:
    """Compare rules at equal parameters, with whole numbers of layers and ranks.

    There are at least two layers, since one has nothing to mix.
    """
    d = len(a)
    shapes = {rule: [s for s in equal_shapes(rule, d, residual) if s.n_layers > 1] for rule in RULES[1:]}
    ranks = sorted({s.collective for of_rule in shapes.values() for s in of_rule})
    by_rank = {rule: {r: best_fit(a, r, rule).risk for r in ranks} for rule in RULES[1:]}
    risks = {rule: [by_rank[rule][s.collective] for s in of_rule] for rule, of_rule in shapes.items()}
    return EqualParameters(best_fit(a, residual.collective, "residual").risk, shapes, risks)


@dataclass
class Results:
    """All results."""

    risks: dict[str, Risks]
    moments: dict[int, float]  # c by Monte Carlo, by d
    equal: dict[str, EqualParameters]
    toy: Curves


def toy_settings() -> list[Setting]:
    """Return the grid of Figure 1's trainings."""
    return [
        Setting(target, rule, init, lr)
        for target in ("identity", "random")
        for init, lr in STARTS
        for rule in ("residual", "grn-v1")
    ]


def compute(say: Callable[[str], None] = lambda sentence: None) -> Results:
    """Compute all results, in under a minute on a CPU."""
    say("Risks and bounds …")
    over_ranks = {name: risks(make(40), range(0, 31, 3)) for name, make in TARGETS.items()}
    moments = {d: sampled_constant(d, 400_000) for d in (2, 4, 6, 8, 12, 16)}
    say("Equal parameters …")
    equal = {name: equal_parameters(make(40), Shape(5, 3)) for name, make in TARGETS.items()}
    say("The toy training …")
    return Results(over_ranks, moments, equal, train(toy_settings(), every=20))


def tables(results: Results) -> str:
    """Format the numbers as Markdown."""
    text = [
        "Made by `python -m lab.theory`.",
        *_table("Excess risk, d = 40", _risk_rows(results)),
        *_table("c in E[relu(wᵀx)² ||x||²] = c/2 ||w||²", _moment_rows(results)),
        *_table("Largest r*/d at which a rule is better at equal parameters, d = 100", _threshold_rows()),
        *_table("Gain at least, eigenvalues 5 to 10", _gain_rows()),
        *_table("Collective rank left at the residual's parameters, d = 100, at least", _rank_rows()),
        *_table("Equal parameters, d = 40, residual 5 layers of rank 3", _equal_rows(results)),
        *_table("Figure 1, loss per channel after 1,000 steps", _toy_rows(results.toy)),
    ]
    return "\n".join(text) + "\n"


def _table(title: str, rows: Sequence[Sequence[str]]) -> list[str]:
    heading, *lines = ("| " + " | ".join(row) + " |" for row in rows)
    return ["", f"## {title}", "", heading, "|" + "---|" * len(rows[0]), *lines]


def _risk_rows(results: Results) -> list[list[str]]:
    rows = [
        ["target", "r*", "residual", "v1", "bound", "v2", "bound", "v3", "bound, c = d + 2", "bound, c = d + 1"],
    ]
    for name, target_risks in results.risks.items():
        for i, r in enumerate(target_risks.ranks):
            if r in (3, 9, 21, 30):
                b, best = target_risks.bounds[i], {rule: values[i] for rule, values in target_risks.by_rule.items()}
                values = (
                    best["residual"],
                    best["grn-v1"],
                    b.v1,
                    best["grn-v2"],
                    b.v2,
                    best["grn-v3"],
                    b.v3,
                    b.v3_paper,
                )
                rows.append([name, str(r), *(f"{v:.2f}" for v in values)])
    return rows


def _moment_rows(results: Results) -> list[list[str]]:
    rows = [["d", "Monte Carlo", "d + 2", "d + 1 (paper)"]]
    for d, value in results.moments.items():
        rows.append([str(d), f"{value:.2f}", str(gaussian_constant(d)), str(paper_constant(d))])
    return rows


def _threshold_rows() -> list[list[str]]:
    rows = [["κ", "v1", "v2", "v3, c = d + 2", "v3, c = d + 1"]]
    for kappa in (0.1, 0.25, 0.5, 0.75, 0.9):
        v1, v2, v3 = (threshold(rule, kappa, 100) for rule in RULES[1:])
        rows.append([f"{kappa:g}", *(f"{v:.4f}" for v in (v1, v2, v3, threshold("grn-v3", kappa, 100, paper=True)))])
    return rows


def _gain_rows() -> list[list[str]]:
    rows = [["r*", *(f"v{v}, d = {d}" for v in (1, 2) for d in DIMS)]]
    for r in (0, 25, 50, 75, 100):
        rows.append([str(r), *(f"{gain(f'grn-v{v}', LOW, HIGH, d, r):.0f}" for v in (1, 2) for d in DIMS)])
    return rows


def _rank_rows() -> list[list[str]]:
    rows = [["r*", "v1", "v2", "v3"]]
    for r in (10, 30, 60, 90):
        rows.append([str(r), *(f"{rank_left(rule, 100, r):.2f}" for rule in RULES[1:])])
    return rows


def _equal_rows(results: Results) -> list[list[str]]:
    rows = [["target", "rule", "layers x rank", "parameters", "risk", "risk with 5 layers"]]
    for name, equal in results.equal.items():
        rows.append([name, "residual", "5 x 3", str(parameters("residual", 40, 5, 15)), f"{equal.residual:.2f}", "–"])
        for rule in RULES[1:]:
            shape, risk = equal.best(rule)
            spent = parameters(rule, 40, shape.n_layers, shape.collective)
            same = [f for f, s in zip(equal.risks[rule], equal.shapes[rule], strict=True) if s.n_layers == 5]
            as_deep = f"{same[0]:.2f}" if same else "too dear"
            rows.append([name, rule, f"{shape.n_layers} x {shape.rank}", str(spent), f"{risk:.2f}", as_deep])
    return rows


def _toy_rows(toy: Curves) -> list[list[str]]:
    kinds = [(target, rule) for target in ("identity", "random") for rule in ("residual", "grn-v1")]
    rows = [["U and V", "lr", *(f"{target}, {rule}" for target, rule in kinds)]]
    for init, lr in STARTS:
        losses = [loss_text(toy.final(Setting(target, rule, init, lr))) for target, rule in kinds]
        rows.append([init_name(init), f"{lr:g}", *losses])
    return rows


def init_name(init: Init) -> str:
    """Describe the initial U and V in words."""
    return "as nn.Linear" if init == "torch" else f"N(0, {init:g}²)"


def loss_text(loss: float) -> str:
    """Format a loss with two significant digits, or say that it diverged."""
    return f"{loss:.2g}" if math.isfinite(loss) and loss < 1e6 else "diverged"
