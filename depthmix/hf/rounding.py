"""Warn once about a mixer whose parameters a sharding policy rounds along with the rest of the model."""

from __future__ import annotations

import warnings

import torch

from depthmix.mixers.base import Mixer


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
