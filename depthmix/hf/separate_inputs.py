"""Give the query, key and value projections of an attention separate inputs.

An attention of transformers applies all projections to one tensor. A rule with several ways reads two or three tensors. The attention
receives them as a tuple instead of that tensor. As an argument the tuple belongs to its call: concurrent calls do not mix, and a
checkpoint that recomputes the attention in another thread keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.hf.architectures import Architecture

OURS = "_depthmix"  # attribute of each module that a retrofit changes, with the data that its forward needs


class SeparateInputs:
    """An attention whose hidden states may be a tuple: inputs of (queries, keys, values), or of (queries and keys, values)."""

    plain_class: Any  # the attention's own

    def forward(self, hidden_states: Tensor | tuple[Tensor, ...], *args: Any, **kwargs: Any) -> Any:
        """Run the attention's own forward, on a view of the attention if there are several inputs.

        Args:
            hidden_states: [B, T, D], or two or three of them.
            args, kwargs: The attention's other arguments.

        Returns:
            The attention's output.
        """
        if not isinstance(hidden_states, tuple):
            return self.plain_class.forward(self, hidden_states, *args, **kwargs)
        queries, *others = hidden_states
        inputs = (queries, *others) if len(others) == 2 else (queries, queries, *others)
        view = _AttentionView(self, vars(self)[OURS][0], inputs)
        return self.plain_class.forward(view, queries, *args, **kwargs)


class _AttentionView:
    """A view of an attention for one call. Everything is the attention's except its projections, which have fixed inputs."""

    def __init__(self, attention: Any, structure: Architecture, inputs: Sequence[Tensor]) -> None:
        self._attention = attention
        # Looked up in each call, because an adapter may have replaced a projection.
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
    """Return a projection with a fixed input, which ignores its argument."""
    return lambda _, *args: module(tensor, *args)


def _fused_projection(module: Any, inputs: Sequence[Tensor], head_size: int | None) -> Callable[..., Tensor]:
    """Return a fused projection with a fixed input for each of q, k and v, which ignores its argument.

    Args:
        module: The fused projection.
        inputs: The inputs of queries, keys and values, each [B, T, D].
        head_size: Size of a head if the output holds q, k and v head by head; None if they follow one another.
    """

    def project(_: Tensor, *args: Any) -> Tensor:
        whole = [module(tensor, *args) for tensor in inputs]
        if head_size is None:
            return torch.cat([out.chunk(3, -1)[k] for k, out in enumerate(whole)], dim=-1)
        parts = [out.unflatten(-1, (-1, 3 * head_size)).chunk(3, -1)[k] for k, out in enumerate(whole)]
        return torch.cat(parts, dim=-1).flatten(-2)

    return project
