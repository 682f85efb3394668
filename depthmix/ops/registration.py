"""Kernels as PyTorch operators, for torch.compile, selective checkpointing and CUDA graphs."""

from collections.abc import Callable
from typing import Any

import torch

# The registrations live as long as this object.
library = torch.library.Library("depthmix", "FRAGMENT")


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator `depthmix::name`.

    Args:
        schema: name, arguments and results.
        run: runs on CUDA, and on a CPU, where Triton's interpreter or plain PyTorch takes over.
        fake: returns empty tensors of the results' shapes.
    """
    library.define(schema)
    name = schema.partition("(")[0]
    for device in ("CUDA", "CPU"):
        library.impl(name, run, device)
    torch.library.register_fake(f"depthmix::{name}", fake, lib=library)
