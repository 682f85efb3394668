"""The node that collects the gradients of a parameter table [R, D] whose rows many reads use, and adds them up once.

Without it every read would return a gradient of the whole table, mostly zeros, and autograd would add R such tables.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.backward_mail import current_pass_id, current_stream, post, wait_for_stream

# Reads with at most this many rows have their gradients concatenated and added in one operation.
FEW_ROWS = 2


def collect_rows(table: Tensor, op: str) -> Tensor:
    """Wrap a table so that reads post the gradients of their rows to one node.

    Args:
        table: parameters [R, D].
        op: name of the operator, for the error message of a pass that cannot be differentiated in source order.

    Returns:
        The table behind a `CollectRows` node; the table itself where nothing is differentiated, or a compiler does it.
    """
    collect = table.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return CollectRows.apply(table, op) if collect else table


class CollectRows(torch.autograd.Function):
    """Pass a table through. The backward runs after that of every read, and returns the sum of the row gradients they posted."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, op: str) -> Tensor:
        ctx.mail, ctx.shape, ctx.op = {}, table.shape, op
        ctx.set_materialize_grads(False)
        return table.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None]:
        posted = ctx.mail.pop(current_pass_id(ctx.op), None)
        total = None if posted is None else _add_up(posted, ctx.shape)
        return g if total is None else total if g is None else total + g, None


def post_row_gradients(collector: Any, pass_id: int, rows: Sequence[int], du: Tensor) -> None:
    """Post gradients of some rows of a table to the node that collects them.

    Args:
        collector: the `CollectRows` node.
        pass_id: backward pass.
        rows: row numbers in the table.
        du: [1 or 2, len(rows), D]; the first dimension holds summands, which the collector adds up.
    """
    post(collector, pass_id, (rows, du, current_stream(du)))


def _add_up(posted: list[tuple[Sequence[int], Tensor, torch.cuda.Stream | None]], shape: torch.Size) -> Tensor:
    """Add up posted gradients into a table of the given shape. The order is fixed by row, so results are deterministic."""
    for _, du, stream in posted:
        wait_for_stream(stream, du)
    summands = max(len(du) for _, du, _ in posted)
    total = torch.zeros(summands, *shape, dtype=posted[0][1].dtype, device=posted[0][1].device)
    small = sorted(((rows, du[0]) for rows, du, _ in posted if _is_small(du)), key=lambda item: item[0][0])
    if small:
        _add_rows(total[0], [row for rows, _ in small for row in rows], torch.cat([du for _, du in small]))
    for rows, du, _ in posted:
        if not _is_small(du):
            _add_rows(total[: len(du)], rows, du)
    return total.sum(0) if summands > 1 else total[0]


def _is_small(du: Tensor) -> bool:
    return len(du) == 1 and du.shape[1] <= FEW_ROWS


def _add_rows(total: Tensor, rows: Sequence[int], du: Tensor) -> None:
    """Add du [..., len(rows), D] to rows of total [..., R, D], one slice for each run of equally spaced rows.

    Not `index_add_`: a site that was read twice has its row twice, and duplicate indices are added in no fixed order on a GPU.
    """
    first = 0
    while first < len(rows):
        last = first
        step = rows[first + 1] - rows[first] if first + 1 < len(rows) else 1
        while step > 0 and last + 1 < len(rows) and rows[last + 1] - rows[last] == step:
            last += 1
        total[..., rows[first] : rows[last] + 1 : max(1, step), :] += du[..., first : last + 1, :]
        first = last + 1
