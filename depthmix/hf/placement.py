"""Run a model whose parts accelerate has put on several devices, or keeps in memory or on disk until they run.

accelerate hangs a hook on each module, which moves the module's inputs to its device, and offloaded weights there and back. A mixer
is called by `read` and `write` and not as a module, so its hook never runs. Its parameters are few: they stay on their device, the
state stays with them, and the outputs of sublayers are moved to the state. They also stay in fp32, unless a sharding policy rounds them.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from torch import Tensor

from depthmix.mixers.base import Mixer

_lock = threading.Lock()


def bring_back(mixer: Mixer) -> None:
    """Load the parameters of an offloaded mixer to the device on which it runs, where they stay; others are left alone."""
    if torch.compiler.is_compiling() or not _offloaded(mixer):
        return
    with _lock:
        for module in mixer.modules() if _offloaded(mixer) else ():
            hook: Any = getattr(module, "_hf_hook", None)
            if hook is not None:
                hook.pre_forward(module)


def _offloaded(mixer: Mixer) -> bool:
    return any(p.device.type == "meta" for p in mixer.parameters()) and any(
        hasattr(module, "_hf_hook") for module in mixer.modules()
    )


def to_mixer(mixer: Mixer, x: Tensor) -> Tensor:
    """Return an embedding on the device of the mixer's parameters, if it has any."""
    parameter = next(mixer.parameters(), None)
    return x if parameter is None else x.to(parameter.device)


def warn_if_rounded(mixer: Mixer) -> None:
    """Warn if the parameters are in half precision. Moving or loading a model keeps its mixer in fp32, but FSDP2's
    half-precision policy does not.
    """
    if torch.compiler.is_compiling():
        return
    dtype = next((p.dtype for p in mixer.parameters()), torch.float32)
    if dtype in (torch.bfloat16, torch.float16):
        advice = "call depthmix.shard_mixer on it before the model is sharded, and it stays in fp32"
        warnings.warn(
            f"the mixer's parameters are rounded to {str(dtype).removeprefix('torch.')}: {advice}", stacklevel=2
        )
