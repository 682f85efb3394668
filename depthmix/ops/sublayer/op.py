"""turn_and_store and activate: kernels where no gradient is wanted and they can run, plain PyTorch elsewhere."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from depthmix.ops.registration import register
from depthmix.ops.slots.op import usable


def _turn(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_gain: Tensor | None, k_gain: Tensor | None, eps: float,
    position: Tensor, keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    from depthmix.ops.sublayer import kernels

    q, k, v, cos, sin = (t.contiguous() for t in (q, k, v, cos, sin))
    return kernels.turn_and_store(q, k, v, cos, sin, q_gain, k_gain, eps, position, keys, values)


def _turn_fake(q: Tensor, *others: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


def _activate(gate: Tensor | None, up: Tensor) -> Tensor:
    from depthmix.ops.sublayer import kernels

    return kernels.activate(None if gate is None else gate.contiguous(), up.contiguous())


def _activate_fake(gate: Tensor | None, up: Tensor) -> Tensor:
    return torch.empty_like(up, memory_format=torch.contiguous_format)


register(
    "turn_and_store(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_gain, Tensor? k_gain, float eps,"
    " Tensor position, Tensor(a!) keys, Tensor(b!) values) -> Tensor",
    _turn,
    _turn_fake,
)
register("activate(Tensor? gate, Tensor up) -> Tensor", _activate, _activate_fake)


def turn_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    gains: tuple[Tensor, Tensor] | None,
    eps: float,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Return the queries in attention's layout, and store keys and values in their caches (see kernels.py).

    gains: of the RMSNorms of queries and keys, or None.
    """
    out: Tensor = torch.ops.depthmix.turn_and_store(
        q, k, v, cos, sin, *((None, None) if gains is None else gains), eps, position, keys, values
    )
    return out


def activate(gate: Tensor | None, up: Tensor) -> Tensor:
    """Return silu(gate) * up, or relu(up)² without a gate."""
    if usable("activate", up) and (gate is None or gate.dtype == up.dtype):
        out: Tensor = torch.ops.depthmix.activate(gate, up)
        return out
    return functional.relu(up).square() if gate is None else functional.silu(gate) * up
