"""Programmatic dependent launch: a kernel may start while the previous one ends, so short kernels wait less for each other."""

from functools import lru_cache

import torch
from torch import Tensor
from triton.language.extra.cuda import gdc_wait as wait_for_previous_kernel

__all__ = ["dependent_launch", "wait_for_previous_kernel"]


def dependent_launch(like: Tensor) -> dict[str, bool]:
    """Return launch options for a kernel that calls wait_for_previous_kernel if EARLY is set.

    Before that call it may read only parameters, which no kernel of a forward pass writes.
    """
    return {"EARLY": True, "launch_pdl": True} if like.is_cuda and _can(like.device) else {"EARLY": False}


@lru_cache
def _can(device: torch.device) -> bool:
    """Return whether the GPU supports it: Hopper and later."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
