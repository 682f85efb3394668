"""A mixer whose parameters a sharding policy rounds with the rest of the model: said once, not silently."""

from __future__ import annotations

import warnings

import torch

from depthmix.mixers.base import Mixer


def warn_if_rounded(mixer: Mixer) -> None:
    """A model moved or loaded in half precision keeps its mixer in fp32; FSDP2 with a half-precision policy does not ask."""
    if torch.compiler.is_compiling():
        return
    dtype = next((p.dtype for p in mixer.parameters()), torch.float32)
    if dtype in (torch.bfloat16, torch.float16):
        advice = "call depthmix.shard_mixer on it before the model is sharded, and it stays in fp32"
        warnings.warn(
            f"the mixer's parameters are rounded to {str(dtype).removeprefix('torch.')}: {advice}", stacklevel=2
        )
