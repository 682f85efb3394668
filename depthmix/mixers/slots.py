"""The state of a pass that decodes: sources lie side by side, where one launch of a site finds all of them.

A state is a value, and slots are memory that its successors share. A slot is written once, by the read that sees its source first;
where two states go on from one, the second to write a slot takes a copy.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Self

import torch
from torch import Tensor

from depthmix.mixers.state import State, register_state


@register_state
class SlotState(State):
    """Slots, of which those of earlier sources are filled, and what the newest source is made of."""

    without_gradients = True
    slots: Tensor  # [n, ..., D]
    pending: Tensor  # the newest source, or with `before` what is added to that
    before: Tensor | None = None
    scale: Tensor | None = None  # what `pending` is still to be multiplied with, [D]
    g: Tensor | None = None  # between the sites of a block that reads once: what it read, and
    a: Tensor | None = None  # what its sites produced so far
    makers: list[Any] | None = dataclasses.field(default=None, repr=False, metadata={"cache": True})
    running: Any = dataclasses.field(default=None, repr=False, metadata={"cache": True})  # mixtures of readers to come
    ahead: Any = dataclasses.field(default=None, repr=False, metadata={"cache": True})  # what a group of sites shares

    @classmethod
    def of(cls, x: Tensor, n: int) -> Self:
        """Of an embedding, with n slots."""
        return cls(slots=torch.empty(n, *x.shape, dtype=x.dtype, device=x.device), pending=x, makers=[None] * n)

    def template(self) -> Tensor:
        return self.slots[0]

    def kept_tensors(self) -> list[Tensor]:
        """List the tensors that come from outside: the slots are the state's own, and are written by its reads."""
        return [t for t in (self.pending, self.before, self.g, self.a) if t is not None]

    def was_read(self) -> bool:
        makers = self.makers or ()
        return self.note is not None or any(m is not None and m() is self.pending for m in makers)

    def claim(self, slot: int) -> Tensor:
        """The slots, one of which is about to be filled with this state's newest source."""
        maker = None if self.makers is None else self.makers[slot]
        if self.makers is None or (maker is not None and maker() is not self.pending):
            self.slots, self.makers = self.slots.clone(), [None] * len(self.slots)
            self.running = None  # the other's
        self.makers[slot] = weakref.ref(self.pending)
        return self.slots

    def filled(self, slot: int) -> bool:
        """Whether the newest source is in its slot."""
        maker = None if self.makers is None else self.makers[slot]
        return maker is not None and maker() is self.pending
