"""What nodes leave with each other in a backward pass, past autograd: filed by pass, in order between streams, dropped at its end."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from depthmix.ops.torch_internals import autograd_is_compiled, backward_pass, when_pass_ends

INSTEAD = 'run the pass under `depthmix.ops.use_backend("reference")`'


def this_pass(op: str) -> int:
    """The number of the backward pass that runs."""
    if autograd_is_compiled():
        what = "compiled autograd does not keep the order in which kernels' backward passes rely on each other"
        raise RuntimeError(f"{op}: {what}; {INSTEAD}")
    return backward_pass()


def seen_from_outside(newest: Tensor, op: str) -> Tensor:
    """A source for whoever looks at a state.

    Later reads leave the gradient of a source with its maker, so it never reaches the tensor they pass on. Whoever asks for it
    is told so: by autograd that this tensor is not in the graph, and here where autograd would say nothing.
    """

    def no_gradient(*_: Any) -> None:
        what = "with kernels the gradient of a state's tensor is never formed by itself"
        raise RuntimeError(f"{op}: {what}; {INSTEAD}")

    seen = newest.view_as(newest)
    if seen.requires_grad:
        for name in ("retain_grad", "register_hook"):
            setattr(seen, name, no_gradient)
    return seen


def saved_once(ctx: Any, op: str) -> Sequence[Tensor]:
    """What a node saved, or one sentence where a checkpointed region would have to be computed a third time."""
    try:
        return ctx.saved_tensors  # once: a second access fails inside a checkpointed region
    except CheckpointError:
        if not torch.is_grad_enabled():
            raise
        what = "kernels cannot differentiate a checkpointed region twice"
        raise RuntimeError(f"{op}: {what}; {INSTEAD}") from None


class _Visits:
    """The nodes with which one pass has left something."""

    def __init__(self, task: int) -> None:
        self.task, self.nodes = task, list[Any]()

    def forget(self) -> None:
        for node in self.nodes:
            for kept in ("left", "part", "scored", "summands"):
                getattr(node, kept, {}).pop(self.task, None)


# By pass. The pass itself holds the value, so that one which fails leaves nothing here.
_visits: weakref.WeakValueDictionary[int, _Visits] = weakref.WeakValueDictionary()


def leave(node: Any, task: int, item: Any, where: str = "left") -> None:
    """Leave something with a node that runs later in this pass, in one of its tables.

    A node whose output somebody asks the gradient of is only looked at: what it was left is dropped when the pass ends.
    """
    visits = _visits.get(task)
    if visits is None:
        visits = _visits[task] = _Visits(task)
        when_pass_ends(visits.forget)
    table = getattr(node, where)
    if task not in table:
        table[task] = []
        visits.nodes.append(node)
    table[task].append(item)


def take_part(node: Any, task: int) -> Tensor | None:
    """What a source has of its gradient from readers that were seen together with a newer source."""
    part, stream = node.part.pop(task, (None, None))
    if part is not None:
        arrive(stream, part)
    return part


def stream_of(like: Tensor) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(like.device) if like.is_cuda else None


def arrive(stream: torch.cuda.Stream | None, *tensors: Tensor) -> None:
    """Let the current stream use what another one computes.

    Autograd does that for the gradients it passes on; what nodes leave with each other it does not see.
    """
    if stream is None:
        return
    current = torch.cuda.current_stream(stream.device)
    if current != stream:
        current.wait_stream(stream)
        for t in tensors:
            t.record_stream(current)
