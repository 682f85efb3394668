"""What `bandwidth` and `first-call` do with a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 64  # tokens whose results are checked


class Work(NamedTuple):
    """One kernel on one set of tensors."""

    run: Callable[[], object]
    bytes: int  # moved by a call if every tensor is read or written once
    errors: Callable[[], dict[str, float]]  # relative errors of its results, after a run, against fp64


def first_rows(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The first tokens of each tensor [..., D] in fp64."""
    return [t.reshape(-1, t.shape[-1])[:ROWS].double() for t in tensors if t is not None]


def normed(o: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm in fp64."""
    return o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * gain.double()
