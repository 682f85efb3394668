"""Run a model whose parts accelerate has placed on several devices or offloaded to memory or disk.

accelerate adds a hook to each module that moves the module's inputs, and offloaded weights, to its device. A mixer is called by `read`
and `write` and not as a module, so its hook never runs. Its parameters are few: they stay on their device together with the state, and
sublayer outputs are moved to the state. They also stay in fp32, unless a sharding policy rounds them.
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
    """Load the parameters of an offloaded mixer to its execution device, for good. Other mixers are not changed."""
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
    """Move an embedding to the device of the mixer's parameters, if there are any."""
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
