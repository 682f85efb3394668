"""States of passes that decode: sources lie side by side in slots, where one launch per site finds all of them.

A state is a value, and slots are memory that its successors share. A slot is written once, by the read that sees its source first.
Where two states go on from one, the second to write a slot takes a copy.
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
    """Slots, of which those of earlier sources are filled, and the newest source. Subclasses add what their rules need."""

    slots: Tensor  # [n, ..., D]
    pending: Tensor  # the newest source, or a part of it
    # For each slot a weak reference to the tensor `pending` of the state that filled it.
    makers: list[Any] | None = dataclasses.field(default=None, repr=False, metadata={"cache": True})

    @classmethod
    def of(cls, x: Tensor, n: int) -> Self:
        """Begin with the embedding x and n empty slots."""
        return cls(slots=torch.empty(n, *x.shape, dtype=x.dtype, device=x.device), pending=x, makers=[None] * n)

    def template(self) -> Tensor:
        return self.slots[0]

    def kept_tensors(self) -> list[Tensor]:
        """List the tensors that may be the caller's own memory. The slots are the state's, and its reads write them."""
        return [self.pending]

    def was_read(self) -> bool:
        makers = self.makers or ()
        return self.note is not None or any(maker is not None and maker() is self.pending for maker in makers)

    def claim(self, slot: int) -> Tensor:
        """Return the slots for a read that fills one of them with this state's newest source; a copy if that slot is another's."""
        maker = None if self.makers is None else self.makers[slot]
        if self.makers is None or (maker is not None and maker() is not self.pending):
            self.slots, self.makers = self.slots.clone(), [None] * len(self.slots)
            self.slots_copied()
        self.makers[slot] = weakref.ref(self.pending)
        return self.slots

    def slots_copied(self) -> None:
        """Forget what belongs to the slots that this state has just left."""

    def is_filled(self, slot: int) -> bool:
        """Tell whether the newest source is in its slot."""
        maker = None if self.makers is None else self.makers[slot]
        return maker is not None and maker() is self.pending
