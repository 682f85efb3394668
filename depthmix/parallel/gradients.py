"""Gradients of parameters in different places: sum over tensor-parallel processes, norm, clipping."""

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
    """Return this process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered if it is divided."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sum_over(parameters: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Sum the gradients that the processes of a mesh have computed for their own tokens, in one message."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat, group=mesh.get_group())
    for g, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        g.copy_(total.view_as(g))


@torch.no_grad()
def clip(parameters: Sequence[Tensor], limit: float) -> Tensor:
    """Scale all gradients, wherever they are, so that their norm is at most the limit, and return the norm before."""
    total = norm(parameters)
    scale(parameters, total, limit)
    return total


@torch.no_grad()
def norm(parameters: Iterable[Tensor]) -> Tensor:
    """Compute the norm of all gradients, wherever they are. There must be at least one."""
    groups: dict[tuple[DeviceMesh | None, Dimensions], list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            groups.setdefault(_pieces(p.grad), []).append(p.grad)
    norms = [_norm(gradients, *where) for where, gradients in groups.items()]
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) != 1 else norms[0]


def _pieces(gradient: Tensor) -> tuple[DeviceMesh | None, Dimensions]:
    """Return the mesh that holds a gradient, and the mesh dimensions along which its processes hold different parts."""
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
    local_norm = torch.nn.utils.get_total_norm([local(g) for g in gradients])
    if mesh is None or not dimensions:
        return local_norm
    squares = local_norm.square()
    for dimension in dimensions:
        dist.all_reduce(squares, group=mesh.get_group(dimension))
    return squares.sqrt()


@torch.no_grad()
def scale(parameters: Iterable[Tensor], total: Tensor, limit: float) -> None:
    """Scale gradients whose norm is the total so that it is at most the limit."""
    # The arithmetic of torch's own clipping, on what is here: for divided gradients it takes torch long to see that this is all.
    factor = torch.clamp(limit / (total + 1e-6), max=1.0)
    torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], factor)
