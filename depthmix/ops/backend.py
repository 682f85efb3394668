"""Which implementation of an operator runs: its kernels where they can, the reference everywhere else."""

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
    """What a thread keeps beside the context variable."""

    def __init__(self) -> None:
        # The same for torch.compile, which can neither read a context variable nor recompile when one changes.
        self.forced: str | None = None
        self.inside = 0  # contexts of `use_backend` that are open, those of other asyncio tasks among them
        self.own_backward: Any = None  # open as long as one of them is


_thread = _Thread()


class BackendError(ValueError):
    """A backend was asked for that does not exist or cannot run here."""


def _check(name: str | None) -> str | None:
    if name is not None and name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}; there are {', '.join(BACKENDS)}")
    return name


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Force a backend for everything that runs inside; None gives the choice back to the operators.

    It is a context variable: other threads, those started inside among them, and other asyncio tasks do not see it. Backward
    passes that are called inside do, with what activation checkpointing computes again in them.

    Args:
        name: "reference", "triton" or None.

    Raises:
        BackendError: there is no backend of that name.
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
    _begin_own_backward()
    try:
        yield
    finally:
        _end_own_backward()
        _forced.reset(token)
        _thread.forced = _forced.get()  # not `before`, which may be another task's


def _begin_own_backward() -> None:
    """Run backward passes in this thread: PyTorch's threads, where those of CUDA tensors run otherwise, have another context."""
    if _thread.inside == 0:
        _thread.own_backward = torch.autograd.set_multithreading_enabled(False)
    _thread.inside += 1


def _end_own_backward() -> None:
    _thread.inside -= 1
    if _thread.inside == 0:
        _thread.own_backward.__exit__(None, None, None)


@constant_for_compiler
def why_no_kernels(device_type: str, index: int | None = None) -> str | None:
    """Why no kernel can run on a device, or None if they can."""
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

        if knobs.runtime.interpret:  # TRITON_INTERPRET=1, for tests
            return None
    return f"kernels run on GPUs, and the tensors are on {device_type}"


def choose(op: str, x: Tensor, unsupported: str | None, backend: str | None = None) -> str:
    """The backend for an operator on tensors like x. unsupported: why its kernels cannot do this call, if they cannot.

    backend: what the caller asks for; then what `use_backend` says; then kernels on a GPU and the reference elsewhere.
    """
    asked = _check(backend) or (_thread.forced if torch.compiler.is_compiling() else _forced.get())
    if asked == "reference":
        return asked
    if asked is None and not x.is_cuda:
        return "reference"
    why = why_no_kernels(x.device.type, x.device.index) or unsupported
    if why is None and transformed():
        why = "torch.func and forward-mode derivatives go through the reference"
    if asked == "triton" and why is not None:
        raise BackendError(f"{op}: the triton backend cannot be used: {why}")
    return "reference" if why is not None else "triton"
