"""Which tokens of a sequence are whose: the first and the last chunk, then the second and the last but one, and so on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """What process `index` of `count` has of every sequence; of one process: all of it."""

    index: int = 0
    count: int = 1

    @property
    def chunks(self) -> tuple[int, int]:
        """Of 2 count chunks, those that are here."""
        return self.index, 2 * self.count - 1 - self.index

    def of(self, t: Tensor, dim: int) -> Tensor:
        """The part of a tensor that is here, cut along the dimension of tokens."""
        if self.count == 1:
            return t
        chunks = t.chunk(2 * self.count, dim)
        return torch.cat([chunks[i] for i in self.chunks], dim)

    def put_together(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole of what every process has, in the order of the processes."""
        halves = [part.chunk(2, dim) for part in parts]
        return torch.cat([*(first for first, _ in halves), *(last for _, last in reversed(halves))], dim)
