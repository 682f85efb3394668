"""The frame of an oracle: options, shapes and a run; and how a mistake replaces a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

Parameters = Mapping[str, Tensor]
# Calls a sublayer with what it reads [B, T, D], once or for queries, keys and values, and returns its output.
Sublayer = Callable[..., Tensor]


class Mistake(NamedTuple):
    """A usual mistake: its name, and the class whose methods and attributes replace those of the oracle."""

    name: str
    step: type


class Oracle:
    """A rule. `options` are complete: DEFAULTS, those of the convention, and those that the caller gave."""

    DEFAULTS: ClassVar[dict[str, Any]] = {}
    # Conventions by name, each with the options that it sets. The first one is the default.
    CONVENTIONS: ClassVar[dict[str, dict[str, Any]]] = {"paper": {}}
    eps: float = 1e-6
    # Which gradients are cut: none, "all", "embedding", "inputs" or "parameters". The check finds the limit.
    clipped: str = ""
    # Whether parameters called alpha are weights, not scales of the size one.
    many_averages: ClassVar[bool] = False
    # Logits beyond this value are cut, and lose their gradient.
    largest_logit: float = float("inf")

    def __init__(self, options: Mapping[str, Any], n_blocks: int) -> None:
        self.options, self.n_blocks, self.sites = dict(options), n_blocks, 2 * n_blocks
        if options.get("eps") is not None:
            self.eps = options["eps"]

    def shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter."""
        raise NotImplementedError

    def initial(self, dim: int) -> dict[str, Tensor]:
        """Return every parameter's initial value. Parameters whose papers leave it open are zero."""
        raise NotImplementedError

    def run(self, p: Parameters, e: Tensor, sublayer: Sublayer) -> Tensor:
        """Run a pass: return the state [B, T, D] after the last sublayer, as the final norm reads it."""
        raise NotImplementedError

    def mistakes(self) -> list[Mistake]:
        """Return the mistakes that make a difference under these options."""
        raise NotImplementedError

    def saturated(self, p: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters with which gates and weights are nearly closed. Rules without gates return `p`."""
        return p

    def names_of_initial(self) -> dict[str, str]:
        """Return the name of the mistake if a parameter begins elsewhere, by parameter."""
        return {}

    def rms(self, v: Tensor) -> Tensor:
        """Divide by the root mean square over the last dimension."""
        return v / torch.sqrt(v.square().mean(-1, keepdim=True) + self.eps)

    def cut(self, logits: Tensor) -> Tensor:
        """Return the logits, cut where an implementation cuts them."""
        return logits if self.largest_logit == float("inf") else logits.clamp(-self.largest_logit, self.largest_logit)


class EpsOutside:
    """The mistake of adding eps to the root instead of to the mean."""

    eps: float

    def rms(self, v: Tensor) -> Tensor:
        """Divide by the root mean square plus eps."""
        # The root of zero has no derivative.
        mean = v.square().mean(-1, keepdim=True) + torch.finfo(v.dtype).tiny
        return v / (mean.sqrt() + self.eps)


def other_eps(eps: float) -> list[Mistake]:
    """Return the mistakes of norms with another eps."""
    others = [value for value in (1e-5, 1e-6, 1e-8, 1e-20) if value != eps]
    return [Mistake(f"another eps in the norm ({value:g} instead of {eps:g})", _with("eps", value)) for value in others]


def clamps() -> list[Mistake]:
    """Return the mistakes of cut logits and of cut gradients."""
    logits = [
        Mistake(f"clamped gradients (logits are clamped at {value:g})", _with("largest_logit", value))
        for value in (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0)
    ]
    return logits + clipped_gradients()


def clipped_gradients() -> list[Mistake]:
    """Return the mistakes of gradients that are cut at some value."""
    return [
        Mistake(f"clamped gradients (of {what})", _with("clipped", kind))
        for what, kind in (
            ("all inputs and parameters", "all"),
            ("the embedding", "embedding"),
            ("all inputs", "inputs"),
            ("parameters", "parameters"),
        )
    ]


def _with(attribute: str, value: Any) -> type:
    """Return a step that sets an attribute."""

    class Changed:
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            setattr(self, attribute, value)

    setattr(Changed, attribute, value)
    return Changed


def with_mistakes(oracle: Oracle, *mistakes: Mistake) -> Oracle:
    """Return the same oracle with mistakes.

    Raises:
        ValueError: Two of the mistakes replace the same step.
    """
    replaced = [name for m in mistakes for name in vars(m.step) if not name.startswith("__")]
    if len(set(replaced)) < len(replaced):
        raise ValueError("these mistakes replace the same step")
    kind = type(type(oracle).__name__, (*(m.step for m in mistakes), type(oracle)), {})
    wrong: Oracle = kind(oracle.options, oracle.n_blocks)
    return wrong
