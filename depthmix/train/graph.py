"""A training step's forward and backward as one CUDA graph: recorded once, replayed without the cost of launching kernels one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from depthmix.errors import UserError
from depthmix.ops.gpu.launch import on_device
from depthmix.ops.gpu.recording import recorded

WARM_UP = 3  # passes before the recording, in which kernels are compiled and chosen


class GraphedBackward:
    """`loss(batch)` and its backward, for batches of one shape. Every call overwrites the parameters' gradients."""

    def __init__(self, loss: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], batch: Tensor) -> None:
        self.batch = batch.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                loss(self.batch).backward()
                for p in parameters:
                    p.grad = None  # so that the recording makes them, and a replay overwrites instead of adding
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        # On the same stream: the nodes that accumulate gradients remember where they first ran.
        with recorded(self.graph, side) as self.constants:
            self.loss = loss(self.batch)
            self.loss.backward()

    def __call__(self, batch: Tensor) -> Tensor:
        """The loss of a batch; the gradients are in the parameters."""
        self.batch.copy_(batch)
        self.graph.replay()
        return self.loss.detach()


def record(loss: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], batch: Tensor) -> GraphedBackward:
    """Record a step; one that cannot be recorded, as where a number is read back from the GPU, is the user's to change."""
    stream = torch.cuda.current_stream(batch.device)
    try:
        with on_device(batch.device):  # streams and graphs are those of the current one
            return GraphedBackward(loss, parameters, batch)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # torch.cuda.graph ends a recording that failed without giving the stream back, nor the random generator, which would
        # refuse every number from then on.
        torch.cuda.set_stream(stream)
        generator = torch.cuda.default_generators[stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cuda_graph: the step cannot be recorded ({reason}); train with cuda_graph off") from error
