"""Sums in a fixed order: the same seed gives the same losses, bit for bit, on a GPU too.

What of a training step adds in an order of its own unless it is told not to: the backward of attention (atomic adds into dq),
the backward of the embedding where it is compiled, cuBLAS on several streams, and Inductor, which times several kernels for
one reduction and takes the fastest of the day. Our own kernels have no atomic adds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import deterministic as _memory

memory: Any = _memory  # it sets its attributes as a program runs
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_lock = threading.Lock()
_before: list[tuple[bool, bool, bool]] = []  # torch's settings, once for each training that is inside


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Inside, what torch computes is the same every time, if `on`; the settings from before come back when the last thread leaves."""
    if not on:
        yield
        return
    os.environ.setdefault(WORKSPACE, ":4096:8")  # what cuBLAS asks for; it stays, since cuBLAS reads it once
    with _lock:
        enabled, warn_only = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        _before.append((enabled, warn_only, memory.fill_uninitialized_memory))
        torch.use_deterministic_algorithms(True)  # and not only a warning: attention's backward would stay as it is
        memory.fill_uninitialized_memory = False  # nothing here reads what it has not written, and filling takes time
    try:
        with ExitStack() as stack:
            from torch._inductor import config as inductor

            if hasattr(inductor, "deterministic"):
                stack.enter_context(inductor.patch(deterministic=True))
            yield
    finally:
        with _lock:
            # Threads leave in any order. Those that are left inside keep the mode, and the last one restores the first's.
            enabled, warn_only, filled = _before.pop()
            if not _before:
                torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
                memory.fill_uninitialized_memory = filled
