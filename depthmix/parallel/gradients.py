"""Gradients of parameters that live in different places: their sum over tensor-parallel processes, their norm, clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, put together where it is divided."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def by_place(tensors: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """Tensors grouped by the mesh they live on; None for plain ones. Torch's foreach operators take one group at a time."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(place_of(tensor), []).append(tensor)
    return groups


def place_of(tensor: Tensor) -> DeviceMesh | None:
    """The mesh a tensor is divided over."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def sum_over(parameters: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Add up the gradients of parameters that each process of a mesh has found for its own tokens: one message for all of them."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat, group=mesh.get_group())
    for g, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(total.view_as(g))


def clip(parameters: Sequence[Tensor], limit: float) -> Tensor:
    """The norm of all gradients wherever they are, after which they are scaled so that it is at most the limit."""
    total = norm(parameters)
    scale(parameters, total, limit)
    return total


def norm(parameters: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients, wherever they are; there must be one."""
    groups = by_place(p.grad for p in parameters if p.grad is not None)
    norms = [whole(torch.nn.utils.get_total_norm(group)) for group in groups.values()]
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) != 1 else norms[0]


def scale(parameters: Iterable[Tensor], total: Tensor, limit: float) -> None:
    """Scale gradients whose norm is the total so that it is at most the limit."""
    # The arithmetic of torch's own clipping, on what is here: for divided gradients it takes torch long to see that this is all.
    factor = torch.clamp(limit / (total + 1e-6), max=1.0)
    torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)
