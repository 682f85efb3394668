"""Depth-mixing matrices as an output: `output_depth_weights=True` in a call of a model and in `generate`.

The layers of a retrofitted model add their outputs to a record, which each call passes to them as an argument, so that concurrent
calls have separate records. `generate` collects the weights of its steps.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from depthmix.mixers.base import Mixer

ASKED, OUTPUT = "output_depth_weights", "depth_weights"
RECORD = "depthmix_record"  # argument of a retrofitted base model and of its layers


class Record:
    """Sources of one pass, and the depth weights computed from them."""

    def __init__(self) -> None:
        self.sources: list[Tensor] | None = []
        self.weights: Tensor | None = None

    def add(self, source: Tensor) -> None:
        """Keep the embedding or a sublayer's output; nothing after `close`, when a checkpoint recomputes a layer."""
        if self.sources is not None:
            self.sources.append(source.detach())

    def close(self, mixer: Mixer) -> None:
        """Compute the weights [B, T, ways, sites + 1, sites + 1], unless the pass ended before the last site."""
        if self.sources is not None and len(self.sources) == mixer.n_sites + 1:
            self.weights = mixer.mixing(self.sources, per_token=True)
        self.sources = None


def asked_for(given: bool | None, config: Any, name: str = ASKED) -> bool:
    """Tell whether an output is asked for in the call or, where the call does not say, in the configuration."""
    return bool(getattr(config, name, False) if given is None else given)


def forward_with_weights(plain: Any) -> Callable[..., Any]:
    """Return the forward of a model class with `output_depth_weights` as an argument. The base model fills the record."""

    @functools.wraps(plain.forward)
    def forward(self: Any, *args: Any, output_depth_weights: bool | None = None, **kwargs: Any) -> Any:
        if RECORD in kwargs or not asked_for(output_depth_weights, self.config):
            return plain.forward(self, *args, **kwargs)
        record = Record()
        return with_weights(plain.forward(self, *args, **{**kwargs, RECORD: record}), record.weights)

    signature = inspect.signature(plain.forward)
    kinds = inspect.Parameter
    at = next(
        (i for i, p in enumerate(signature.parameters.values()) if p.kind is kinds.VAR_KEYWORD),
        len(signature.parameters),
    )
    parameters = list(signature.parameters.values())
    parameters.insert(at, kinds(ASKED, kinds.KEYWORD_ONLY, default=None, annotation="bool | None"))
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return forward


def with_weights(output: Any, weights: Tensor | None) -> Any:
    """Add depth weights to a model's output, by name or as the last entry of a tuple."""
    if weights is None:
        return output
    if isinstance(output, tuple):
        return (*output, weights)
    output[OUTPUT] = weights
    return output


# Depth weights of each step of the `generate` call in this context. The `generate` of an assistant model runs inside.
_steps: ContextVar[list[Tensor] | None] = ContextVar("depthmix_steps", default=None)


class GeneratesDepthWeights:
    """A causal language model whose `generate` returns `depth_weights`: one tensor per step, of the tokens that the step read."""

    config: Any
    generation_config: Any

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as usual. output_depth_weights=True needs return_dict_in_generate=True."""
        if not asked_for(kwargs.get(ASKED), self.config):
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        config = kwargs.get("generation_config") or self.generation_config
        if kwargs.get(ASKED) and not kwargs.get("return_dict_in_generate", config.return_dict_in_generate):
            raise ValueError(
                f"generate: {ASKED}=True needs return_dict_in_generate=True, or there is no place for them"
            )
        steps: list[Tensor] = []
        token = _steps.set(steps)
        try:
            made = super().generate(*args, **kwargs)  # type: ignore[misc]
        finally:
            _steps.reset(token)
        return made if isinstance(made, Tensor) else with_weights(made, tuple(steps))  # type: ignore[arg-type]

    def _update_model_kwargs_for_generation(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Collect the depth weights of a step. `generate` calls this after every step."""
        steps, weights = _steps.get(), getattr(outputs, OUTPUT, None)
        if steps is not None and weights is not None:
            steps.append(weights)
        return super()._update_model_kwargs_for_generation(outputs, *args, **kwargs)  # type: ignore[misc]
