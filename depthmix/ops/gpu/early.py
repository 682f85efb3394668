"""Kernels that may start while the last one ends (programmatic dependent launch): short ones wait less for each other."""

from functools import lru_cache

import torch
from torch import Tensor
from triton.language.extra.cuda import gdc_wait as wait_for_last

__all__ = ["early", "wait_for_last"]


def early(like: Tensor) -> dict[str, bool]:
    """Options of such a kernel, which calls wait_for_last if EARLY is set.

    Before that it may read parameters alone, which no kernel of a pass writes.
    """
    return {"EARLY": True, "launch_pdl": True} if like.is_cuda and _can(like.device) else {"EARLY": False}


@lru_cache
def _can(device: torch.device) -> bool:
    """It came with Hopper."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
