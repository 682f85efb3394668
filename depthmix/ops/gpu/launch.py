"""Launch kernels on the device of their tensors. Triton itself uses the current device, whichever that is."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# A device and the handle of one of its streams, 0 on a CPU.
Place = tuple[torch.device, int]


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which `device` is the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def current_place(device: torch.device) -> Place:
    """Return the device and the stream on which the current thread launches kernels for its tensors."""
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def count_cores(like: Tensor, on_cpu: int) -> int:
    """Return the streaming multiprocessors of a tensor's GPU; `on_cpu` in the interpreter, so that tests have several programs."""
    return torch.cuda.get_device_properties(like.device).multi_processor_count if like.is_cuda else on_cpu


def repeat_last(tensors: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
    """Pad tensors to `count` kernel arguments by repeating the last one."""
    return (*tensors, *(tensors[-1],) * (count - len(tensors)))


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *arguments: Any, **options: Any) -> None:
    """Call kernel[grid](*arguments, **options) on the device of `like` and the current stream of that device."""
    with on_device(like.device):
        try:
            kernel[grid](*arguments, **options)
        except TypeError:
            # Triton publishes a compiled kernel before it is loaded. While another thread loads it, a launch is refused,
            # because the kernel's function is still None (triton-lang/triton, pull request 11518).
            load(kernel, grid, *arguments, **options)
            # Any other TypeError is raised again here.
            kernel[grid](*arguments, **options)


def load(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Compile the variant of a kernel for these arguments, and wait until it is on the GPU. Do nothing in the interpreter."""
    import triton

    if isinstance(kernel, triton.JITFunction):
        # Indexing with a grid loads the compiled kernel onto the GPU.
        kernel.warmup(*arguments, grid=grid, **options)[grid]
