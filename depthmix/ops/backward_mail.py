"""Mailboxes between autograd nodes.

During backward a read posts its gradient to the nodes that made its sources. Autograd sees none of this. Entries are keyed by
backward pass, synchronised across CUDA streams and dropped when the pass ends.

A node that receives mail has some of these tables, each a dict from pass id to entries:

    mail               readings of its output
    partial_gradient   (fp32 gradient, stream): the sum over readers that were processed together with a newer source
    score_mail         gradients of the scores of its output, whose rows of the score table it must differentiate
    summand_mail       finished gradients, which the node only adds up
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from depthmix.ops.torch_internals import autograd_is_compiled, backward_pass, when_pass_ends

WORKAROUND = 'run the pass under `depthmix.ops.use_backend("reference")`'
TABLES = ("mail", "partial_gradient", "score_mail", "summand_mail")


def current_pass_id(op: str) -> int:
    """Return the id of the backward pass that this thread runs.

    Args:
        op: name of the operator, for the error message.

    Raises:
        RuntimeError: the pass runs under compiled autograd, which does not keep the order of nodes that mailboxes rely on.
    """
    if autograd_is_compiled():
        what = "compiled autograd does not keep the order in which kernels' backward passes rely on each other"
        raise RuntimeError(f"{op}: {what}; {WORKAROUND}")
    return backward_pass()


def seen_from_outside(newest: Tensor, op: str) -> Tensor:
    """Return a view of a source for a caller that inspects a state, which fails loudly when asked for a gradient.

    Later reads post the gradient of a source to its maker, so the gradient never reaches the tensor in the state. Autograd itself
    reports `torch.autograd.grad` on this view as "not in the graph". It would ignore hooks and `retain_grad` in silence, so the
    view replaces these two with an error.
    """

    def no_gradient(*_: Any) -> None:
        what = "with kernels the gradient of a state's tensor is never formed by itself"
        raise RuntimeError(f"{op}: {what}; {WORKAROUND}")

    seen = newest.view_as(newest)
    if seen.requires_grad:
        for name in ("retain_grad", "register_hook"):
            setattr(seen, name, no_gradient)
    return seen


def saved_once(ctx: Any, op: str) -> Sequence[Tensor]:
    """Return the tensors that a node saved. The caller must call this once per backward: a second access fails under checkpointing.

    Raises:
        RuntimeError: a checkpointed region is differentiated a second time, which would need a third forward.
    """
    try:
        return ctx.saved_tensors
    except CheckpointError:
        if not torch.is_grad_enabled():
            raise
        what = "kernels cannot differentiate a checkpointed region twice"
        raise RuntimeError(f"{op}: {what}; {WORKAROUND}") from None


class _PassMail:
    """Remember the nodes that hold mail of one backward pass, to empty their mailboxes at its end."""

    def __init__(self, pass_id: int) -> None:
        self.pass_id, self.nodes = pass_id, list[Any]()

    def drop(self) -> None:
        for node in self.nodes:
            for table in TABLES:
                getattr(node, table, {}).pop(self.pass_id, None)


# The engine's end-of-pass callback holds the only strong reference. A pass that fails drops the callback, and with it the entry.
_open_passes: weakref.WeakValueDictionary[int, _PassMail] = weakref.WeakValueDictionary()


def post(node: Any, pass_id: int, item: Any, table: str = "mail") -> None:
    """Post an item to a node that runs later in this backward pass.

    If the caller only asked for the gradient of the node's output, the node itself never runs. `_PassMail` then drops the item.

    Args:
        node: receiver.
        pass_id: backward pass, from `current_pass_id`.
        item: what the receiver finds.
        table: name of the receiver's table, one of TABLES.
    """
    open_pass = _open_passes.get(pass_id)
    if open_pass is None:
        open_pass = _open_passes[pass_id] = _PassMail(pass_id)
        when_pass_ends(open_pass.drop)
    entries = getattr(node, table)
    if pass_id not in entries:
        entries[pass_id] = []
        open_pass.nodes.append(node)
    entries[pass_id].append(item)


def take_partial_gradient(node: Any, pass_id: int) -> Tensor | None:
    """Remove and return the fp32 gradient that readers shared with a newer source have already contributed to a node's output."""
    partial_gradient, stream = node.partial_gradient.pop(pass_id, (None, None))
    if partial_gradient is not None:
        wait_for_stream(stream, partial_gradient)
    return partial_gradient


def current_stream(like: Tensor) -> torch.cuda.Stream | None:
    """Return the current CUDA stream of a tensor's device, or None on a CPU."""
    return torch.cuda.current_stream(like.device) if like.is_cuda else None


def wait_for_stream(stream: torch.cuda.Stream | None, *tensors: Tensor) -> None:
    """Make the current stream wait for `stream`, which computes `tensors`.

    Autograd synchronises the gradients that it passes on itself. It does not see mail.
    """
    if stream is None:
        return
    current = torch.cuda.current_stream(stream.device)
    if current != stream:
        current.wait_stream(stream)
        for t in tensors:
            t.record_stream(current)
