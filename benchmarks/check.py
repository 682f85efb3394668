"""Correctness first: nothing is timed before its output and every gradient agree with fp64."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# Relative errors in the 2-norm. The tight tolerance, in fp32, finds a missing term. The loose one is what bf16 may lose over a
# whole stack. It catches a kernel that is only wrong in the dtype or at the size that is timed.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}

Results = dict[str, Tensor]  # "output" and the gradients, by name


class WrongResult(Exception):
    """An implementation disagrees with the reference, so it is not timed."""


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return ‖a − b‖ / ‖b‖ in fp64. The error is infinite if a is not finite."""
    if actual.shape != expected.shape:
        raise WrongResult(f"shape {list(actual.shape)} instead of {list(expected.shape)}")
    a, b = actual.detach().double(), expected.detach().double()
    if not bool(torch.isfinite(a).all()):
        return float("inf")
    norm = float(b.norm())
    difference = float((a - b).norm())
    return difference / norm if norm else (0.0 if difference == 0 else float("inf"))


def errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative errors of the output and of every gradient.

    Raises:
        WrongResult: one is missing.
    """
    if missing := [name for name in expected if name not in actual]:
        raise WrongResult(f"no {missing[0]}")
    return {name: relative_error(actual[name], value) for name, value in expected.items()}


def require(who: str, errors: Mapping[str, float], tolerance: float) -> None:
    """Refuse an implementation with an error above the tolerance.

    Raises:
        WrongResult: the errors are too large.
    """
    wrong = {name: e for name, e in errors.items() if not e <= tolerance}
    if wrong:
        shown = ", ".join(f"{name} {e:.2g}" for name, e in wrong.items())
        raise WrongResult(f"{who} is wrong and is not timed: relative error of {shown}; allowed is {tolerance:.0e}")
