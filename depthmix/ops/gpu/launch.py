"""Launching a kernel where its tensors are: Triton takes the current device, whichever that is."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which a device is the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *arguments: Any, **options: Any) -> None:
    """kernel[grid](*arguments, **options) on the device and the current stream of a tensor's device."""
    with on_device(like.device):
        kernel[grid](*arguments, **options)
