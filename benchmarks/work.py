"""The unit of `bandwidth` and `first-call`: a kernel with its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Tokens whose results are checked.
ROWS = 64


class Work(NamedTuple):
    """A kernel with its tensors."""

    run: Callable[[], object]
    bytes: int  # that a call moves if it reads or writes every tensor once
    errors: Callable[[], dict[str, float]]  # relative errors of its results, after a run, against fp64


def first_rows(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the first tokens of each tensor [..., D] in fp64."""
    return [t.reshape(-1, t.shape[-1])[:ROWS].double() for t in tensors if t is not None]


def normed(o: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm in fp64."""
    return o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * gain.double()
