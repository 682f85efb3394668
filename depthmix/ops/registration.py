"""Kernels as PyTorch operators, for torch.compile, selective checkpointing and CUDA graphs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.checks import PLAIN, all_plain
from depthmix.ops.torch_internals import dispatcher_is_idle

# The registrations live as long as this object.
library = torch.library.Library("depthmix", "FRAGMENT")
_implementations: dict[str, Callable[..., Any]] = {}


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
    _implementations[name] = run


def call(name: str, *arguments: Any) -> Any:
    """Call the operator `depthmix::name`, which changes none of its arguments.

    PyTorch's dispatcher takes as long as a small kernel. It is left out where it would only pass the call on.
    """
    if dispatcher_is_idle() and all(map(_is_plain, arguments)):
        return _implementations[name](*arguments)
    return getattr(torch.ops.depthmix, name)(*arguments)


def _is_plain(argument: Any) -> bool:
    """Return whether an argument has no tensor of a subclass."""
    if isinstance(argument, (list, tuple)):
        return all_plain(*argument)
    return type(argument) in PLAIN or not isinstance(argument, Tensor)
