"""Assignment of a sequence's tokens to processes: the first and the last chunk, then the second and the last but one,
and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """Part of every sequence that process `index` of `count` holds."""

    index: int = 0
    count: int = 1

    @property
    def chunks(self) -> tuple[int, int]:
        """Indices of this process's two chunks, out of 2 count."""
        return self.index, 2 * self.count - 1 - self.index

    def of(self, t: Tensor, dim: int) -> Tensor:
        """Cut this process's part out of a tensor along its token dimension."""
        if self.count == 1:
            return t
        chunks = t.chunk(2 * self.count, dim)
        return torch.cat([chunks[i] for i in self.chunks], dim)

    def put_together(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Join the parts of all processes, given in the order of their ranks, into the whole."""
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([*(first for first, _ in halves), *(last for _, last in reversed(halves))], dim)
