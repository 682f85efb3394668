"""Give the projections of queries, keys and values of an attention inputs of their own.

An attention of transformers hands one tensor to all of its projections. A rule with several ways reads two or three. They reach the
attention as a tuple in the place of that tensor, so they belong to the call: concurrent calls cannot see each other's, and a
checkpoint that recomputes the attention, in whatever thread, keeps them as it keeps any argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.hf.architectures import Architecture

OURS = "_depthmix"  # an attribute of each module that a retrofit changes: what the module has to know


class SeparateInputs:
    """An attention whose hidden states may be a tuple: the inputs of queries, keys and values, or of queries and keys, and of values."""

    plain_class: Any  # the attention's own

    def forward(self, hidden_states: Tensor | tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        """Run the attention's own forward, on a view of the attention if there are several inputs.

        Args:
            hidden_states: [B, T, D], or two or three of them.
            args, kwargs: the attention's others.

        Returns:
            What the attention returns.
        """
        if not isinstance(hidden_states, tuple):
            return self.plain_class.forward(self, hidden_states, *args, **kwargs)
        queries, *others = hidden_states
        inputs = (queries, *others) if len(others) == 2 else (queries, queries, *others)
        view = _AttentionView(self, vars(self)[OURS][0], inputs)
        return self.plain_class.forward(view, queries, *args, **kwargs)


class _AttentionView:
    """An attention as one call sees it: everything is the attention's, but each projection has its input already."""

    def __init__(self, attention: Any, structure: Architecture, inputs: Sequence[Tensor]) -> None:
        self._attention = attention
        # Looked up in each call: an adapter may have put its own module in a projection's place.
        if len(structure.projections) == 1:
            name = structure.projections[0]
            heads_of = attention.head_size if structure.by_head else None
            setattr(self, name, _fused_projection(getattr(attention, name), inputs, heads_of))
        else:
            for name, tensor in zip(structure.projections, inputs, strict=True):
                setattr(self, name, _projection(getattr(attention, name), tensor))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_attention"], name)


def _projection(module: Any, tensor: Tensor) -> Callable[..., Tensor]:
    """Return a call of a projection that takes its own input instead of the one it is handed."""
    return lambda _, *args: module(tensor, *args)


def _fused_projection(module: Any, inputs: Sequence[Tensor], head_size: int | None) -> Callable[..., Tensor]:
    """Return a call of the projection of all three at once: what each of them is of its own input.

    head_size: where the output has queries, keys and values head by head; None where they lie one after the other.
    """

    def project(_: Tensor, *args: Any) -> Tensor:
        whole = [module(tensor, *args) for tensor in inputs]
        if head_size is None:
            return torch.cat([out.chunk(3, -1)[k] for k, out in enumerate(whole)], dim=-1)
        parts = [out.unflatten(-1, (-1, 3 * head_size)).chunk(3, -1)[k] for k, out in enumerate(whole)]
        return torch.cat(parts, dim=-1).flatten(-2)

    return project
