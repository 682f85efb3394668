"""Description of a family of models for `accelerate`. Each family has a file of its own, which ends in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Family(NamedTuple):
    """Classes of a family: each is a subclass of a class of transformers, has its name and takes over from it.

    A layer's class has a KIND, with which the family's functions describe its modules. KIND.connection is the class of the modules
    that `accelerate` counts.
    """

    title: str
    connections: str  # what these modules are called, in the plural
    layers: tuple[Any, ...]
    head: Any  # of the model's end; None: it stays as it is
    why_not: Callable[[Any, Any], str | None]  # why a layer cannot be accelerated, given its class's KIND
    mixes_as_written: Callable[
        [Any, Any], bool
    ]  # whether a layer's mixing modules are still what they were, given KIND
    mixing: tuple[str, ...]  # modules of a layer that make up its mixing; the others are sublayers
    dim: Callable[[Any], int]  # channels of a sublayer's input
    token_shapes: Callable[
        [Any], tuple[tuple[int, ...] | None, ...]
    ]  # of a layer's first arguments, for a token; None: no tensor
    outputs: Callable[[Any, str], int]  # how many things a sublayer returns, by its name; 0: a tensor alone

    def replacements(self) -> dict[type, Any]:
        """Return our class for each class of transformers."""
        return {own.__mro__[1]: own for own in (*self.layers, self.head) if own is not None}
