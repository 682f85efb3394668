"""What the rules of block_stack.py carry from site to site: the stack, and what reads of it leave for later ones."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix.mixers.state import State, last_of, register_state
from depthmix.ops.depth_sum.op import depth_sum, depth_sum_normed


class Scores(NamedTuple):
    """What the readers' vectors w make of one entry."""

    s: Tensor  # [N, R]: the ways of `first`, those of the reader after it, and so on
    first: int

    def of(self, reader: int, ways: Sequence[int]) -> Tensor:
        """Those of one reader, [N, W]; ways: how many every reader has."""
        start = sum(ways[self.first : reader])
        return self.s[:, start : start + ways[reader]]

    def last(self, n: int, tokens: Sequence[int]) -> "Scores":
        """Those of the last n tokens of each sequence; tokens: [..., T]."""
        return self._replace(s=self.s.view(*tokens, -1)[..., -n:, :].flatten(0, -2))


class InsideNorm(NamedTuple):
    """Norms of mixtures that are part of their sum: then the mixture that goes on comes once more, as it is, at the end."""

    gain: Tensor  # [ways, D]
    eps: float
    goes_on: int


class Tape(NamedTuple):
    """What kernels pass from read to read: the stack as their autograd knows it, and its scores."""

    stack: tuple[Tensor, ...]
    scores: tuple[Scores | None, ...]
    w: Tensor | None  # of all readers, where weights are scores: [R, D]
    halves: Any  # the same in two parts, as scores are made with them
    differentiable: bool


Gains = Tensor | Sequence[Tensor]  # of norms: [W, D], or without gradients a row for each
EntryScores = tuple[int, tuple[Tensor, ...]]  # the first reader, and [ways, ...] for each from it on


class Ahead(NamedTuple):
    """What the reference passes from read to read where weights are scores: those of every entry, made once for all readers to come."""

    w: Tensor  # of all readers: [R, D]
    scores: tuple[EntryScores, ...]


@register_state
class StackState(State):
    """The stack and, between the sites of a block, what the next one needs."""

    stack: tuple[Tensor, ...]  # e, then an entry per finished block, with a window the older ones in one
    pending: tuple[Tensor, ...] | None = None  # the sum of these one or two is the newest entry: the next read adds up
    g: Tensor | None = None  # the mixture this block read that goes on; with `accumulates`, what its last site read
    a: Tensor | None = None  # what its sites produced, added up; with `accumulates`, the last site
    tape: Tape | Ahead | None = dataclasses.field(default=None, repr=False, metadata={"cache": True})

    def template(self) -> Tensor:
        return self.stack[0]

    def complete_sums(self) -> Any:
        if self.pending is None or len(self.pending) == 1:
            return self
        return dataclasses.replace(self, pending=(self.pending[0] + self.pending[1],), tape=None, note=None)

    def last(self, n: int) -> Any:
        stack, pending = last_of(self.stack, n), None if self.pending is None else last_of(self.pending, n)
        tape = self.tape if isinstance(self.tape, Tape) else None
        if tape is not None:
            shape = self.stack[0].shape[:-1]
            scores = (None if s is None else s.last(n, shape) for s in tape.scores)
            tape = tape._replace(stack=last_of(tape.stack, n), scores=tuple(scores))
        return dataclasses.replace(self, stack=stack, pending=pending, g=None, a=None, tape=tape, note=None)

    def sums(self, sources: Sequence[Tensor], norm: InsideNorm | None, **weights: Any) -> tuple[Tensor, ...]:
        """depth_sum in plain PyTorch code, which runs where the kernels cannot, and when a program is compiled."""
        if norm is not None:
            return depth_sum_normed(sources, *norm, **weights)
        backend = None if torch.compiler.is_compiling() and not self.frozen else "reference"
        return depth_sum(sources, **weights, backend=backend)


class SlotWeights(NamedTuple):
    """What a reader weighs all entries with when tokens are decoded; nothing at all: an only entry as it is."""

    static: Tensor | None = None  # [W, n, D] or [W, n, 1]
    w: Tensor | None = None  # [W, n or 1, D]: their products with the entries are added
    relu: int = 0  # as in Weights
