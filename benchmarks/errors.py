"""`errors`: relative errors in bf16 against fp64 of the output and of every gradient, ours and flash-linear-attention's.

Both get the same input: one read of 16 sources, without and with the RMSNorm that follows, then a whole Full and a whole Block
stack. A ratio within a hundredth of 1 is one rounding of the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks import check, reference, rivals, stacks
from benchmarks.check import Results
from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.stacks import EPS, Problem
from depthmix import ops

SIZE, SMALL = (32, 16384, 2048), (6, 32, 48)  # sites, tokens, dim
SOURCES = 16
TARGET = "<= 1.01"
Operator = Callable[[Tensor, Sequence[Tensor], Tensor, Tensor | None], Tensor]


def errors(options: Options, report: Report) -> None:
    """Report the errors of each case for ours, then for fla, then the ratio of the two."""
    sites, tokens, dim = SMALL if options.small else SIZE
    for label, block_size in (("Full stack", None), ("Block stack", 2 if options.small else 8)):
        case = f"{label}, L={sites}, N={tokens}, D={dim}"
        if options.wanted(case):
            problem = Problem.make(sites, tokens, dim, block_size, options.dtype, options.device)
            contenders: dict[str, Callable[[], Results]] = {
                "ours": lambda p=problem: stacks.results(p, stacks.ours),  # type: ignore[misc]
                "fla": lambda p=problem: stacks.results(p, rivals.fla),  # type: ignore[misc]
            }
            _compare(case, contenders, reference.results(problem), options, report)
    for normed in (False, True):
        case = f"one read of {SOURCES} sources{', RMSNorm' if normed else ''}, N={tokens}, D={dim}"
        if options.wanted(case):
            _read(case, tokens, dim, normed, options, report)


def _ours(query: Tensor, sources: Sequence[Tensor], key_gain: Tensor, out_gain: Tensor | None) -> Tensor:
    h: Tensor = ops.depth_attention(query, sources, key_gain, EPS, out_gain)
    return h


def _read(case: str, tokens: int, dim: int, normed: bool, options: Options, report: Report) -> None:
    generator = torch.Generator(options.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=options.device, generator=generator)

    query, key_gain = normal(dim) / dim**0.5, 1 + 0.1 * normal(dim)
    out_gain = 1 + 0.1 * normal(dim) if normed else None
    sources = [normal(tokens, dim).to(options.dtype) for _ in range(SOURCES)]
    grad = normal(tokens, dim).to(options.dtype)

    def run(operator: Operator) -> Results:
        q, g = (t.clone().requires_grad_() for t in (query, key_gain))
        og = None if out_gain is None else out_gain.clone().requires_grad_()
        vs = [v.clone().requires_grad_() for v in sources]
        out = operator(q, vs, g, og)
        out.backward(grad)
        return {"output": out.detach(), **reference.named_gradients(q, vs, g, og)}

    contenders = {"ours": lambda: run(_ours), "fla": lambda: run(rivals.fla_read)}
    expected = reference.operator_results(query, sources, key_gain, out_gain, grad)
    _compare(case, contenders, expected, options, report)


def _compare(
    case: str,
    contenders: dict[str, Callable[[], Results]],
    expected: Results,
    options: Options,
    report: Report,
) -> None:
    errors_by_contender: dict[str, dict[str, float]] = {}
    for who, results in contenders.items():
        if who != "ours" and who not in options.rivals:
            continue
        reason = "" if who == "ours" else rivals.why_not(who, options.device)
        if reason:
            report.add(case, who, "error of output", None, note=reason)
            continue
        try:
            errors_by_contender[who] = check.errors(results(), expected)
        except Exception as failure:
            if who == "ours":
                raise
            reason_of_failure = f"failed: {type(failure).__name__}: {failure}".splitlines()[0][:200]
            report.add(case, who, "error of output", None, note=reason_of_failure)
            continue
        for name, error in errors_by_contender[who].items():
            report.add(case, who, f"error of {name}", error)
    for name, error in errors_by_contender["ours"].items():
        if errors_by_contender.get("fla", {}).get(name):
            report.add(case, "ours / fla", f"error of {name}", error / errors_by_contender["fla"][name], target=TARGET)
    check.require("ours", errors_by_contender["ours"], check.TOLERANCE[options.dtype])
