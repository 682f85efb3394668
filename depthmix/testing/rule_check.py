"""`depthmix.testing.check_rule`: compare somebody's implementation of a rule with an oracle, and name the mistake."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthmix.errors import UserError
from depthmix.testing.oracles import ORACLES, Mistake, Oracle
from depthmix.testing.oracles.base import with_mistakes
from depthmix.testing.rule_cases import (
    Case,
    Implementation,
    Inputs,
    Results,
    WrongForm,
    cases,
    differences,
    exact,
    make_inputs,
    norms,
    relative_tolerance,
    run,
    tolerances,
)

# Averages of averages need three blocks.
N_BLOCKS = 3
# The second is odd, and no multiple of anything.
DIMS = (32, 21)
# Errors of gradients that nearly vanish are shown relative to this share of the largest one.
SHOWN_FLOOR = 1e-2


class RuleCheckError(AssertionError):
    """Error for an implementation that is not the rule. The message is the report."""


class CaseResult(NamedTuple):
    """The comparison on one input."""

    name: str
    status: str  # "right", "wrong" or "refused", if the implementation raised an error
    worst: str = ""  # the tensor with the largest error, or the error that was raised
    error: float = 0.0  # of that tensor, relative to its norm; of a right result, relative to what its rounding allows


class RuleReport:
    """The result of `check_rule`. `report.passed` is true if every case that ran is right, and one did."""

    def __init__(self, rule: str, results: Sequence[CaseResult], mistakes: Sequence[str], notes: Sequence[str]) -> None:
        self.rule, self.results = rule, list(results)
        # Names of the mistakes that explain all differences. Several names joined by " + " were made together.
        self.mistakes = list(mistakes)
        self.notes = list(notes)

    @property
    def passed(self) -> bool:
        """True if every case that ran is right, at least one ran, and no mistake was found."""
        statuses = [result.status for result in self.results]
        return "wrong" not in statuses and "right" in statuses and not self.mistakes

    @property
    def diagnosis(self) -> str:
        """The report in one sentence."""
        if self.passed:
            worst = max((r.error for r in self.results if r.status == "right"), default=0.0)
            refused = [r.name for r in self.results if r.status == "refused"]
            left = f", not run: {', '.join(refused)}" if refused else ""
            return f"right (largest relative error {worst:.1e}{left})"
        if self.mistakes:
            return "; or ".join(self.mistakes)
        wrong = [r for r in self.results if r.status == "wrong"]
        if not wrong:
            return f"not run: {self.results[0].worst}"
        return f"another function: {wrong[0].worst} is off by {wrong[0].error:.1e} ({wrong[0].name})"

    def raise_if_failed(self) -> None:
        """Raise `RuleCheckError`, which shows the report, unless the implementation passed."""
        if not self.passed:
            raise RuleCheckError(repr(self))

    def __repr__(self) -> str:
        marks = {"right": "✓", "wrong": "✗", "refused": "–"}
        lines = [f"{self.rule}: {self.diagnosis}"]
        for r in self.results:
            shown = {"right": f"relative error {r.error:.1e}", "refused": r.worst}.get(r.status)
            lines.append(f"  {marks[r.status]} {r.name}: {shown or f'{r.worst} is off by {r.error:.1e}'}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def check_rule(
    implementation: Implementation | nn.Module,
    rule: str,
    convention: str | None = None,
    *,
    initial: Mapping[str, Tensor] | None = None,
    n_blocks: int = N_BLOCKS,
    dims: Sequence[int] = DIMS,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    device: str = "cpu",
    only: Sequence[str] = (),
    **options: Any,
) -> RuleReport:
    """Compare an implementation of a published rule with an oracle in fp64: reads, the end, and every gradient.

    Inputs are random and adversarial: ties, large parameters, closed gates, tiny and huge activations, one token of an odd width,
    bf16. If the implementation differs, it is compared with oracles that make a usual mistake, or two of them.

    Args:
        implementation: A function of parameters, an embedding [B, T, D] and a sublayer. It returns the state [B, T, D] after the
            last sublayer, before the final norm. It calls `sublayer(read)` once per sublayer, in order: attention and MLP of each
            block. Attention of a rule with three mixtures calls `sublayer(q, k, v)`. Parameters are a dict of fp32 tensors with the
            names and shapes of `rule_parameters`. A module is called with an embedding and a sublayer, and has parameters of these
            names and shapes, with "_" for ".".
        rule: "attnres", "dca", "denseformer", "hyper" or "mhc".
        convention: How the rule is written where implementations differ. mhc: "paper", "deepseek" or "hy_v4"; attnres: "paper" or
            "inkling2". None is the paper's.
        initial: The implementation's own initial values by name, to compare with the paper's. Those of a module are compared anyway.
        n_blocks: Blocks of attention and an MLP.
        dims: Widths. The first one is used for all inputs but those of odd shape.
        dtypes: Dtypes of the activations. Parameters are fp32.
        device: Where the implementation runs. The oracle runs on the CPU.
        only: Names of the cases to run. Empty: all.
        **options: Options of the rule: block_size and eps (attnres); n, iterations, head and eps (mhc); n, static, tanh, norm and eps
            (hyper); window (dca).

    Returns:
        A report. `print(report)` shows every case, `report.mistakes` has the names.

    Raises:
        UserError: The rule, convention or an option is unknown.

    Examples:
        >>> def theirs(parameters, embedding, sublayer):
        ...     sources = [embedding]
        ...     for query, gain in zip(parameters["query"], parameters["key_gain"]):
        ...         v = torch.stack(sources)
        ...         keys = gain * v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)
        ...         h = ((keys @ query).softmax(0)[..., None] * v).sum(0)
        ...         if len(sources) == len(parameters["query"]):
        ...             return h
        ...         sources.append(sublayer(h))
        >>> depthmix.testing.check_rule(theirs, rule="attnres")
        attnres: right (largest relative error 5.9e-03)
          ✓ random: relative error 2.5e-07
          ...
    """
    oracle = _oracle(rule, convention, n_blocks, options)
    if isinstance(implementation, nn.Module):
        initial = _parameters_of(implementation, oracle, dims[0]) if initial is None else initial
        implementation = _as_function(implementation)
    wanted = [case for case in cases(dims, dtypes) if not only or case.name in only]
    comparisons, results = [], []
    for seed, case in enumerate(wanted):
        inputs = make_inputs(oracle, case, seed)
        right = exact(oracle, inputs)
        allowed = tolerances(oracle, inputs, right, case)
        try:
            found = run(implementation, inputs, device)
        except WrongForm as error:
            results.append(CaseResult(case.name, "wrong", str(error), float("inf")))
            continue
        # Whatever somebody's code raises is a result.
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            results.append(CaseResult(case.name, "refused", f"{type(error).__name__}: {text}"))
            continue
        comparison = Comparison(case, inputs, found, right, allowed)
        comparisons.append(comparison)
        results.append(comparison.result(oracle))
    mistakes, notes = _explain(oracle, comparisons, results)
    mistakes += _initial_mistakes(oracle, initial, dims[0])
    title = rule + (f" ({convention})" if convention else "")
    return RuleReport(title, results, mistakes, notes)


def rule_parameters(
    rule: str, dim: int, convention: str | None = None, *, n_blocks: int = N_BLOCKS, **options: Any
) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the parameters that `check_rule` passes to an implementation.

    Args:
        rule: A rule of `check_rule`.
        dim: Width D.
        convention: As for `check_rule`.
        n_blocks: As for `check_rule`.
        **options: As for `check_rule`.

    Returns:
        A shape for every name. Rows are sites in order, S = 2 n_blocks of them; attnres has one more for the end.

    Raises:
        UserError: The rule, convention or an option is unknown.

    Examples:
        >>> depthmix.testing.rule_parameters("attnres", dim=64)
        {'query': (7, 64), 'key_gain': (7, 64)}
    """
    return _oracle(rule, convention, n_blocks, options).shapes(dim)


class Comparison(NamedTuple):
    """A case with what the implementation and the oracle returned."""

    case: Case
    inputs: Inputs
    found: Results
    right: Results
    allowed: dict[str, float]

    def excess(self, expected: Results, allowed: Mapping[str, float], oracle: Oracle) -> dict[str, float]:
        """Return every difference from what an oracle returned over what is allowed. Up to 1 is right."""
        found = differences(self.found, expected, oracle)
        return {name: value / max(allowed.get(name, 0.0), 1e-300) for name, value in found.items()}

    def explained_by(self, oracle: Oracle, strict: bool) -> bool:
        """Return whether an oracle with mistakes returns what the implementation does.

        Args:
            oracle: The oracle.
            strict: Allow reads no more than from the right oracle. Otherwise the mistake's own rounding is allowed for.
        """
        # Reads are cheap to compute, and most mistakes change them.
        values = exact(oracle, self.inputs, backward=False).values
        if strict and any(not self._near(name, value) for name, value in values.items()):
            return False
        expected = exact(oracle, self.inputs)
        if _within(self.excess(expected, self.allowed, oracle)):
            return True
        return _within(self.excess(expected, tolerances(oracle, self.inputs, expected, self.case), oracle))

    def _near(self, name: str, value: Tensor) -> bool:
        found = self.found.values.get(name)
        allowed = max(self.allowed.get(name, 0.0), relative_tolerance(self.case) * float(value.norm()))
        return found is not None and float((found - value).norm()) <= allowed

    def result(self, oracle: Oracle) -> CaseResult:
        """Compare with the oracle."""
        excess = self.excess(self.right, self.allowed, oracle)
        # Reads come in order, before gradients: the first one that is wrong is the cause.
        first = next((name for name, value in excess.items() if not value <= 1.0), "")
        if first:
            error = excess[first] * self.allowed.get(first, 0.0) / norms(self.right, SHOWN_FLOOR).get(first, 1.0)
            return CaseResult(self.case.name, "wrong", first, error)
        worst = max(excess, key=lambda name: excess[name])
        return CaseResult(self.case.name, "right", worst, excess[worst] * relative_tolerance(self.case))

    def reads_are_right(self) -> bool:
        """Return whether only gradients differ."""
        return all(self._near(name, value) for name, value in self.right.values.items())


def _within(excess: Mapping[str, float]) -> bool:
    return all(value <= 1.0 for value in excess.values())


def _explain(
    oracle: Oracle, comparisons: Sequence[Comparison], results: Sequence[CaseResult]
) -> tuple[list[str], list[str]]:
    """Return the mistakes that explain all differences in fp32, one or two at a time, and notes."""
    if all(result.status != "wrong" for result in results):
        return [], []
    exact_cases = [c for c in comparisons if c.case.dtype == torch.float32]
    wrong = [c for c in exact_cases if c.result(oracle).status == "wrong"]
    if not wrong:
        rough = [r for r in results if r.status == "wrong" and r.error < float("inf")]
        if exact_cases and rough:
            names = ", ".join(r.name for r in rough)
            return [f"intermediate results rounded to {names}"], []
        return [], []
    # The inputs that differ most tell mistakes apart first.
    ordered = wrong + [c for c in exact_cases if c not in wrong]
    single = oracle.mistakes()
    # Clamps have too many values to be combined.
    joined = [m for m in single if not m.name.startswith("clamped")]
    for count, among in ((1, single), (2, joined)):
        found = []
        for chosen in combinations(among, count):
            mistaken = _combined(oracle, chosen)
            if mistaken is not None and all(c.explained_by(mistaken, c is ordered[0]) for c in ordered):
                found.append(" + ".join(mistake.name for mistake in chosen))
        if found:
            return found, []
    right = [c.case.name for c in exact_cases if c not in wrong]
    notes = ["no known mistake, nor two of them, explain the differences"]
    if right:
        notes.append(f"right on: {', '.join(right)}")
    if all(c.reads_are_right() for c in wrong):
        notes.append("all reads are right, only gradients differ")
    return [], notes


def _combined(oracle: Oracle, mistakes: Sequence[Mistake]) -> Oracle | None:
    try:
        return with_mistakes(oracle, *mistakes)
    except (ValueError, TypeError):
        return None


def _initial_mistakes(oracle: Oracle, initial: Mapping[str, Tensor] | None, dim: int) -> list[str]:
    """Return the names of parameters that do not begin as the paper has them."""
    names, expected = oracle.names_of_initial(), oracle.initial(dim)
    found = []
    for name, value in (initial or {}).items():
        if name not in expected:
            raise UserError(f"check_rule: the rule has no parameter {name!r}; it has {', '.join(expected)}")
        if name not in names:
            continue
        start = value.detach().cpu().double()
        same_form = start.shape == expected[name].shape or bool((expected[name] == expected[name].flatten()[0]).all())
        target = expected[name] if start.shape == expected[name].shape else expected[name].flatten()[0]
        if not same_form or bool(((start - target).abs() > 1e-6).any()):
            found.append(names[name])
    return list(dict.fromkeys(found))


def _oracle(rule: str, convention: str | None, n_blocks: int, options: dict[str, Any]) -> Oracle:
    if rule not in ORACLES:
        raise UserError(f"check_rule: there is no oracle for {rule!r}; there is one for {', '.join(ORACLES)}")
    kind = ORACLES[rule]
    chosen = convention if convention is not None else next(iter(kind.CONVENTIONS))
    if chosen not in kind.CONVENTIONS:
        known = ", ".join(kind.CONVENTIONS)
        raise UserError(f"check_rule: {rule} has no convention {chosen!r}; it has {known}")
    unknown = [name for name in options if name not in kind.DEFAULTS]
    if unknown:
        known = ", ".join(kind.DEFAULTS) or "none"
        raise UserError(f"check_rule: {rule} has no option {unknown[0]!r} here; options are {known}")
    return kind({**kind.DEFAULTS, **kind.CONVENTIONS[chosen], **options, "convention": chosen}, n_blocks)


def _parameters_of(module: nn.Module, oracle: Oracle, dim: int) -> dict[str, Tensor]:
    """Return a module's parameters by the oracle's names, and refuse a module that has others."""
    own = dict(module.named_parameters())
    found: dict[str, Tensor] = {}
    for name, shape in oracle.shapes(dim).items():
        theirs = name.replace(".", "_")
        if theirs not in own:
            raise UserError(f"check_rule: the module has no parameter {theirs!r} of shape {list(shape)}")
        found[name] = own[theirs]
    return found


def _as_function(module: nn.Module) -> Implementation:
    def call(parameters: dict[str, Tensor], embedding: Tensor, sublayer: Any) -> Tensor:
        named = {name.replace(".", "_"): p for name, p in parameters.items()}
        out: Tensor = torch.func.functional_call(module, named, (embedding, sublayer))
        return out

    return call
