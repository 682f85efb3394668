"""Gradients of parameters that live in different places: their sum over tensor-parallel processes, their norm, clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# Of a mesh, those along which a tensor is cut up; None: its processes hold terms of a sum.
Dimensions = tuple[int, ...] | None


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is here."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, put together where it is divided."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sum_over(parameters: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Add up the gradients of parameters that each process of a mesh has found for its own tokens: one message for all of them."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat, group=mesh.get_group())
    for g, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(total.view_as(g))


@torch.no_grad()
def clip(parameters: Sequence[Tensor], limit: float) -> Tensor:
    """The norm of all gradients wherever they are, after which they are scaled so that it is at most the limit."""
    total = norm(parameters)
    scale(parameters, total, limit)
    return total


@torch.no_grad()
def norm(parameters: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients, wherever they are; there must be one."""
    groups: dict[tuple[DeviceMesh | None, Dimensions], list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            groups.setdefault(_pieces(p.grad), []).append(p.grad)
    norms = [_norm(gradients, *where) for where, gradients in groups.items()]
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) != 1 else norms[0]


def _pieces(gradient: Tensor) -> tuple[DeviceMesh | None, Dimensions]:
    """The mesh whose processes hold a gradient, and along which of its dimensions they hold different parts."""
    if not isinstance(gradient, DTensor):
        return None, ()
    mesh, placements = gradient.device_mesh, gradient.placements
    if any(p.is_partial() for p in placements):
        return mesh, None
    return mesh, tuple(d for d, p in enumerate(placements) if not p.is_replicate() and mesh.size(d) > 1)


def _norm(gradients: list[Tensor], mesh: DeviceMesh | None, dimensions: Dimensions) -> Tensor:
    if dimensions is None:
        return whole(torch.nn.utils.get_total_norm(gradients))
    # What torch does with divided tensors, but with what is here: its dispatch takes milliseconds for a hundred of them.
    found = torch.nn.utils.get_total_norm([local(g) for g in gradients])
    if mesh is None or not dimensions:
        return found
    squares = found.square()
    for dimension in dimensions:
        dist.all_reduce(squares, group=mesh.get_group(dimension))
    return squares.sqrt()


@torch.no_grad()
def scale(parameters: Iterable[Tensor], total: Tensor, limit: float) -> None:
    """Scale gradients whose norm is the total so that it is at most the limit."""
    # The arithmetic of torch's own clipping, on what is here: for divided gradients it takes torch long to see that this is all.
    factor = torch.clamp(limit / (total + 1e-6), max=1.0)
    torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)
