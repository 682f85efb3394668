"""What nodes leave with each other in a backward pass, past autograd: filed by pass, in order between streams, dropped at its end."""

import weakref
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.torch_internals import autograd_is_compiled, backward_pass, when_pass_ends

INSTEAD = 'run the pass under `depthmix.ops.use_backend("reference")`'


def this_pass() -> int:
    """The number of the backward pass that runs."""
    if autograd_is_compiled():
        what = "compiled autograd does not keep the order in which kernels' backward passes rely on each other"
        raise RuntimeError(f"depth_attention: {what}; {INSTEAD}")
    return backward_pass()


class _Visits:
    """The nodes with which one pass has left something."""

    def __init__(self, task: int) -> None:
        self.task, self.nodes = task, list[Any]()

    def forget(self) -> None:
        for node in self.nodes:
            node.left.pop(self.task, None)
            getattr(node, "part", {}).pop(self.task, None)


# By pass. The pass itself holds the value, so that one which fails leaves nothing here.
_visits: weakref.WeakValueDictionary[int, _Visits] = weakref.WeakValueDictionary()


def leave(node: Any, task: int, item: Any) -> None:
    """Leave something with a node that runs later in this pass.

    A node whose output somebody asks the gradient of is only looked at: what it was left is dropped when the pass ends.
    """
    visits = _visits.get(task)
    if visits is None:
        visits = _visits[task] = _Visits(task)
        when_pass_ends(visits.forget)
    if task not in node.left:
        node.left[task] = []
        visits.nodes.append(node)
    node.left[task].append(item)


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
