"""Attention to a sequence in parts, by one process in the place of all of them: nothing is sent, and what each would do is done."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from depthmix.models.layers import Context
from depthmix.parallel.context import SharedAttention
from depthmix.parallel.share import Share


@dataclass(frozen=True)
class InTurn(SharedAttention):
    """Keys and values are here already."""

    everybodys: Tensor

    def gather(self, kv: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            assert torch.equal(kv, self.share.of(self.everybodys, -2))
        return self.everybodys


def in_turn(q: Tensor, k: Tensor, v: Tensor, count: int, wrap: Callable[..., Any] = lambda attend: attend) -> Tensor:
    """Of `count` processes, put together: [B, T, heads, d]; wrap: what is done to the function, such as compiling it."""
    kv, mesh, module = torch.stack([k, v]), Any, SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1])
    parts = []
    for share in (Share(index, count) for index in range(count)):
        attend = InTurn(mesh, share, kv)  # type: ignore[arg-type]
        context = Context(None, None, attend.masks(q.shape[2] // count), None)
        parts.append(wrap(attend)(module, *(share.of(t, 2) for t in (q, k, v)), context))  # type: ignore[arg-type]
    return Share(0, count).put_together(parts, 1)
