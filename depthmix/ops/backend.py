"""Choose the backend of an operator: its kernels where they can run, the reference everywhere else."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.torch_internals import constant_for_compiler, transformed

BACKENDS = ("reference", "triton")
_forced: ContextVar[str | None] = ContextVar("depthmix_backend", default=None)


class _Thread(threading.local):
    """Per-thread state of `use_backend`, besides its context variable."""

    def __init__(self) -> None:
        # Copy of the context variable for torch.compile, which can neither read one nor recompile when one changes.
        self.forced: str | None = None
        # Open `use_backend` contexts, including those of other asyncio tasks.
        self.open_contexts = 0
        # Context that runs backward passes in this thread, entered while open_contexts > 0.
        self.backward_in_thread: Any = None


_thread = _Thread()


class BackendError(ValueError):
    """Raised when a backend does not exist or cannot run here."""


def _check(name: str | None) -> str | None:
    if name is not None and name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}; there are {', '.join(BACKENDS)}")
    return name


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Force a backend for all operators inside the context; None restores the default choice.

    The choice is a context variable: other threads and other asyncio tasks do not see it, nor do threads started inside. Backward
    passes called inside do see it, and so does the recomputation by activation checkpointing in them.

    Args:
        name: "reference", "triton" or None.

    Raises:
        BackendError: `name` is not a backend.

    Examples:
        >>> with depthmix.ops.use_backend("reference"):
        ...     loss = model(tokens).mean()
        ...     loss.backward()
    """
    asked, before = _check(name), _thread.forced
    if torch.compiler.is_compiling():
        _thread.forced = asked
        try:
            yield
        finally:
            _thread.forced = before
        return
    token = _forced.set(asked)
    _thread.forced = asked
    _enter_backward_in_thread()
    try:
        yield
    finally:
        _exit_backward_in_thread()
        _forced.reset(token)
        # Not `before`, which may be another task's.
        _thread.forced = _forced.get()


def _enter_backward_in_thread() -> None:
    """Run backward passes in the calling thread.

    PyTorch runs the backward of CUDA tensors in threads of its own, which have another context and would not see the forced backend.
    """
    if _thread.open_contexts == 0:
        _thread.backward_in_thread = torch.autograd.set_multithreading_enabled(False)
    _thread.open_contexts += 1


def _exit_backward_in_thread() -> None:
    _thread.open_contexts -= 1
    if _thread.open_contexts == 0:
        _thread.backward_in_thread.__exit__(None, None, None)


@constant_for_compiler
def why_no_kernels(device_type: str, index: int | None = None) -> str | None:
    """Return why no kernel can run on a device, or None if kernels can."""
    return _why_no_kernels(device_type, index)


@functools.cache
def _why_no_kernels(device_type: str, index: int | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device_type == "cuda":
        if torch.version.cuda is None:
            return "the kernels are written for NVIDIA GPUs"
        major, minor = torch.cuda.get_device_capability(index)
        return None if major >= 8 else f"the GPU has compute capability {major}.{minor}, and the kernels need 8.0"
    if device_type == "cpu":
        from triton import knobs

        # TRITON_INTERPRET=1: the interpreter runs kernels on the CPU, for tests.
        if knobs.runtime.interpret:
            return None
    return f"kernels run on GPUs, and the tensors are on {device_type}"


def choose(op: str, x: Tensor, unsupported: str | None, backend: str | None = None) -> str:
    """Return the backend, "reference" or "triton", for an operator called with tensors like `x`.

    Args:
        op: name of the operator, for the error message.
        x: a tensor of the call.
        unsupported: why the kernels cannot do this call, or None.
        backend: the caller's choice; None defers to `use_backend`, then to kernels on a GPU and the reference elsewhere.

    Raises:
        BackendError: "triton" was asked for and cannot run this call.
    """
    requested = _check(backend) or (_thread.forced if torch.compiler.is_compiling() else _forced.get())
    if requested == "reference":
        return requested
    if requested is None and not x.is_cuda:
        return "reference"
    why = why_no_kernels(x.device.type, x.device.index) or unsupported
    if why is None and transformed():
        why = "torch.func and forward-mode derivatives go through the reference"
    if requested == "triton" and why is not None:
        raise BackendError(f"{op}: the triton backend cannot be used: {why}")
    return "reference" if why is not None else "triton"
