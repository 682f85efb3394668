"""Record a training step's forward and backward pass as a CUDA graph and replay it, which saves the launch overhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from depthmix.errors import UserError
from depthmix.ops.gpu.launch import on_device
from depthmix.ops.gpu.recording import recorded

# Passes before the recording, in which kernels are compiled and chosen.
WARM_UP = 3


class GraphedBackward:
    """`loss(batch)` and its backward pass, for batches of one shape. Every call overwrites the parameters' gradients."""

    def __init__(self, loss: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], batch: Tensor) -> None:
        self.batch = batch.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                loss(self.batch).backward()
                for p in parameters:
                    # Without gradients the recording allocates them, so that a replay overwrites instead of adding.
                    p.grad = None
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        # Record on the warm-up stream: the autograd nodes that accumulate gradients keep the stream they first ran on.
        with recorded(self.graph, side) as self.constants:
            self.loss = loss(self.batch)
            self.loss.backward()

    def __call__(self, batch: Tensor) -> Tensor:
        """Compute the loss of a batch and leave the gradients in the parameters."""
        self.batch.copy_(batch)
        self.graph.replay()
        return self.loss.detach()


def record(loss: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], batch: Tensor) -> GraphedBackward:
    """Record a step. Raises UserError for a step that cannot be recorded, for example because it reads a number back
    from the GPU.
    """
    stream = torch.cuda.current_stream(batch.device)
    try:
        with on_device(batch.device):  # streams and graphs belong to the current device
            return GraphedBackward(loss, parameters, batch)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # A failed recording leaves its stream current and the random generator in capture mode, where it refuses to draw.
        torch.cuda.set_stream(stream)
        generator = torch.cuda.default_generators[stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cuda_graph: the step cannot be recorded ({reason}); train with cuda_graph off") from error
