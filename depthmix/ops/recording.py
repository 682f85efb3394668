"""Numbers that a CUDA graph reads and never changes: written once, after it was recorded, instead of at every replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

# Of the recording that asked for it. Not a thread's own: a backward runs in threads of PyTorch's.
_later: list[tuple[Tensor, Sequence[int]]] | None = None


@contextmanager
def written_afterwards() -> Iterator[list[Tensor]]:
    """Around a recording; what comes out must live as long as the graph, whose memory it lies in."""
    global _later
    kept: list[Tensor] = []
    before, _later = _later, []
    try:
        yield kept
        for tensor, values in _later:
            tensor.copy_(torch.tensor(values, dtype=tensor.dtype))
            kept.append(tensor)
    finally:
        _later = before


def write_afterwards(tensor: Tensor, values: Sequence[int]) -> bool:
    """Whether someone will write these numbers into the tensor, made while a graph is recorded, when that is done."""
    if _later is None:
        return False
    _later.append((tensor, values))
    return True
