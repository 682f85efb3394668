"""Where to run and in which precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from depthmix.train.errors import UserError


def choose_device(name: str) -> torch.device:
    """The device of that name; auto takes CUDA, then MPS, then the CPU."""
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


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """bf16 autocast where it was asked for or, with auto, on a GPU that has it."""
    wanted = precision == "bf16" or (precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported())
    return torch.autocast(device.type, dtype=torch.bfloat16) if wanted else nullcontext()


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak for `peak_memory`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # not Linux, or not allowed: the peak is then that of the whole process
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """Bytes at the peak since the reset: of the GPU, or of this process; None where nobody knows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
