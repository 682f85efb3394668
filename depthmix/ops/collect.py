"""A table of parameters [R, D] that many reads take rows of: their gradients are left with one node and added up once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.left import arrive, leave, stream_of, this_pass

FEW_ROWS = 2  # of a read whose gradients are worth adding together with those of others


def collect_rows(table: Tensor, op: str) -> Tensor:
    """The table as reads in source order want it. op: who complains if a pass cannot be differentiated so."""
    collect = table.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return CollectRows.apply(table, op) if collect else table


class CollectRows(torch.autograd.Function):
    """The identity on a table; its backward runs after every read's and returns what they left."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, op: str) -> Tensor:
        ctx.left, ctx.shape, ctx.op = {}, table.shape, op
        ctx.set_materialize_grads(False)
        return table.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None]:
        left = ctx.left.pop(this_pass(ctx.op), None)
        total = None if left is None else _add_up(left, ctx.shape)
        return g if total is None else total if g is None else total + g, None


def leave_rows(node: Any, task: int, rows: Sequence[int], du: Tensor) -> None:
    """Leave gradients [1 or 2, rows, D], which are added up, of some rows of a table with the node that collects them."""
    leave(node, task, (rows, du, stream_of(du)))


def _add_up(parts: list[tuple[Sequence[int], Tensor, torch.cuda.Stream | None]], shape: torch.Size) -> Tensor:
    """The sum of gradients [1 or 2, rows, D] of some rows each; those of the rows of one read are added as one."""
    for _, du, stream in parts:
        arrive(stream, du)
    halves = max(len(du) for _, du, _ in parts)
    total = torch.zeros(halves, *shape, dtype=parts[0][1].dtype, device=parts[0][1].device)
    own = sorted(((rows, du[0]) for rows, du, _ in parts if _of_one_read(du)), key=lambda item: item[0][0])
    if own:
        _add_rows(total[0], [row for rows, _ in own for row in rows], torch.cat([du for _, du in own]))
    for rows, du, _ in parts:
        if not _of_one_read(du):
            _add_rows(total[: len(du)], rows, du)
    return total.sum(0) if halves > 1 else total[0]


def _of_one_read(du: Tensor) -> bool:
    return len(du) == 1 and du.shape[1] <= FEW_ROWS


def _add_rows(total: Tensor, rows: Sequence[int], du: Tensor) -> None:
    """Add du to rows of total, those at equal steps together; a site that was read twice has its row twice."""
    first = 0
    while first < len(rows):
        last = first
        step = rows[first + 1] - rows[first] if first + 1 < len(rows) else 1
        while step > 0 and last + 1 < len(rows) and rows[last + 1] - rows[last] == step:
            last += 1
        total[..., rows[first] : rows[last] + 1 : max(1, step), :] += du[..., first : last + 1, :]
        first = last + 1
