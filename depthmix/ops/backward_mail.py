"""Mailboxes between autograd nodes, which two engines share to differentiate stacks of reads in source order.

During backward a read posts its gradient to the nodes that made its sources. Autograd sees none of this. Entries are keyed by
backward pass, synchronised across CUDA streams and dropped when the pass ends.

A node that receives mail has some of these tables, each a dict from pass id to entries:

    mail               readings of its output
    partial_gradient   (fp32 gradient, stream): the sum over readers that were processed together with a newer source
    score_mail         gradients of the scores of its output, whose rows of the score table it must differentiate
    summand_mail       finished gradients, which the node only adds up

The engines are depth_attention/source_order.py (softmax over depth) and depth_sum/source_order.py (weighted sums). What they
do alike is here and in row_gradients.py: mail, makers, unfinished gradients, rows of parameters. They stay two engines. One engine
could launch the same kernels, so machine code would not change, but every step between taking mail and posting would be a hook:

    step                      attention                                    weighted sums
    ----------------------    -----------------------------------------    ------------------------------------------------
    maker of a source         the read that is first to see it             a MakeSource node, or the read that added it up
    a reading holds           do, logits, log-sum-exp and δ per token      do, weights, gradients and rows of scores
    gradient of a source      needs the source, and gives du too           needs no source; dw comes from score_mail
    source of a neighbour     needed, so no checkpointed neighbour         not needed
    neighbours pair if        all readers are common to both               the shared readers save more than they cost
    a read's own gradients    fused with its norm and newest source,       one pass for the norm and one for the weights
                              or both sources of a pair at once
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


def guarded_view(newest: Tensor, op: str) -> Tensor:
    """Return a view of a source for a caller that inspects a state, which fails loudly when asked for a gradient.

    Later reads post the gradient of a source to its maker, so the gradient never reaches the tensor in the state. Autograd itself
    reports `torch.autograd.grad` on this view as "not in the graph". It would ignore hooks and `retain_grad` in silence, so the
    view replaces these two with an error.
    """

    def no_gradient(*_: Any) -> None:
        what = "with kernels the gradient of a state's tensor is never formed by itself"
        raise RuntimeError(f"{op}: {what}; {WORKAROUND}")

    view = newest.view_as(newest)
    if view.requires_grad:
        for name in ("retain_grad", "register_hook"):
            setattr(view, name, no_gradient)
    return view


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


def open_mailboxes(node: Any, *tables: str) -> None:
    """Give a node the tables to which others post, each empty."""
    for table in tables:
        assert table in TABLES
        setattr(node, table, {})


def maker_of(source: Tensor, *node_types: Any) -> Any:
    """Return the node that made a source and collects its gradient, or None if no node of these types did.

    A node's `source_nr` is the number of the output that is a source, or None.
    """
    node = source.grad_fn
    return node if isinstance(node, node_types) and source.output_nr == node.source_nr else None


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


def leave_partial_gradient(node: Any, pass_id: int, gradient: Tensor) -> None:
    """Leave an unfinished fp32 gradient of a node's source with the node, which continues from there."""
    node.partial_gradient[pass_id] = gradient, current_stream(gradient)


def take_partial_gradient(node: Any, pass_id: int) -> Tensor | None:
    """Remove and return the unfinished gradient that `leave_partial_gradient` left, ready for the current stream."""
    partial_gradient, stream = node.partial_gradient.pop(pass_id, (None, None))
    if partial_gradient is not None:
        wait_for_stream(stream, partial_gradient)
    return partial_gradient


def finish_gradient(partial_gradient: Tensor | None, g: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the sum of an unfinished gradient and autograd's, rounded to `dtype`; autograd's alone unchanged."""
    if partial_gradient is None:
        return g
    return (partial_gradient if g is None else partial_gradient + g).to(dtype)


def filled(grads: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """Return gradients as contiguous tensors, with zeros for the ones that autograd left out."""
    return [torch.zeros_like(like) if g is None else g.contiguous() for g in grads]


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
