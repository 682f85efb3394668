"""Make torch add in a fixed order, so that the same seed gives the same losses bit for bit, on a GPU too.

By default the order varies in the backward of attention (atomic adds into dq), in the backward of a compiled embedding, in cuBLAS
on several streams, and in Inductor, which times several kernels for a reduction and takes the fastest. depthmix's own kernels have
no atomic adds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import deterministic as _memory

# Any, because torch sets the module's attributes at run time, which mypy cannot see.
memory: Any = _memory
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_lock = threading.Lock()
# torch's settings before each training that is inside `deterministic`.
_before: list[tuple[bool, bool, bool]] = []


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Make torch deterministic inside this context, if `on`. The last thread that leaves restores the previous
    settings.
    """
    if not on:
        yield
        return
    # cuBLAS asks for this value and reads it once, so it is not reset afterwards.
    os.environ.setdefault(WORKSPACE, ":4096:8")
    with _lock:
        enabled, warn_only = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        _before.append((enabled, warn_only, memory.fill_uninitialized_memory))
        # warn_only would leave attention's backward pass as it is.
        torch.use_deterministic_algorithms(True)
        # Filling takes time, and nothing here reads memory that it has not written.
        memory.fill_uninitialized_memory = False
    try:
        with ExitStack() as stack:
            from torch._inductor import config as inductor

            if hasattr(inductor, "deterministic"):
                stack.enter_context(inductor.patch(deterministic=True))
            yield
    finally:
        with _lock:
            # Threads leave in any order. The remaining ones keep the mode, and the last one restores the first one's settings.
            enabled, warn_only, filled = _before.pop()
            if not _before:
                torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
                memory.fill_uninitialized_memory = filled
