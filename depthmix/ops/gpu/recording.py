"""Numbers that a CUDA graph reads and never changes: written once, after it was recorded, instead of at every replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

ROOM = 1 << 19  # numbers, 4 MiB
ALIGNED = 16  # numbers; kernels are compiled for addresses of such tables


class Constants:
    """Memory that is not the graph's own: what it allocates while it is recorded may lie where something else lay before,
    which a replay would write again."""

    def __init__(self, device: torch.device, room: int = ROOM) -> None:
        self.memory = torch.zeros(room, dtype=torch.int64, device=device)
        self.values: list[int] = []

    def add(self, values: Sequence[int]) -> Tensor | None:
        """Where these numbers will be, or None if there is no room."""
        start = len(self.values)
        if start + len(values) > len(self.memory):
            return None
        self.values += [*values, *(0,) * (-len(values) % ALIGNED)]
        return self.memory[start : start + len(values)]

    def write(self) -> None:
        values = self.values[: len(self.memory)]
        self.memory[: len(values)] = torch.tensor(values, dtype=torch.int64)


# Of the recording that asked for it. Not a thread's own: a backward runs in threads of PyTorch's.
_constants: Constants | None = None


@contextmanager
def written_afterwards(device: torch.device, room: int = ROOM) -> Iterator[Constants]:
    """Around a recording; what comes out must live as long as the graph."""
    global _constants
    before, _constants = _constants, Constants(device, room)
    try:
        yield _constants
        _constants.write()
    finally:
        _constants = before


def write_afterwards(values: Sequence[int], device: torch.device) -> Tensor | None:
    """Where these numbers will be once the recording is over, if someone will write them there."""
    return None if _constants is None or _constants.memory.device != device else _constants.add(values)
