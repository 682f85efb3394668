"""Device and precision of a computation."""

from __future__ import annotations

import gc
import platform
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from depthmix.errors import UserError


def choose_device(name: str) -> torch.device:
    """Return the device of that name. auto prefers CUDA, then MPS, then the CPU.

    Raises:
        UserError: The device is not available.
    """
    if name == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device(kind)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device must be cpu, cuda, cuda:N, mps or auto, got {name!r}") from None
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(device.type, False):
        raise UserError(f"device {name!r} is not available here; use auto or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r} is not available here; there are {torch.cuda.device_count()} GPUs")
    return device


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of this machine's processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return a bf16 autocast context where it was asked for or, with auto, on a GPU that supports it; else an empty
    context.
    """
    wanted = precision == "bf16" or (precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported())
    return torch.autocast(device.type, dtype=torch.bfloat16) if wanted else nullcontext()


def release_memory(device: torch.device) -> None:
    """Free the memory of deleted models: collect their reference cycles and empty the GPU allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class PeakMemory:
    """Peak memory since construction, of the GPU's tensors or of this process. Unknown where the system cannot reset its counter."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.known = device, True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5")
            # Not Linux, or not allowed: the readable peak would include everything before.
            except OSError:
                self.known = False

    def read(self) -> int | None:
        """Return the peak in bytes; None where it is unknown."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if self.known:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return None
