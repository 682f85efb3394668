"""Whether two sets of options are one mechanism under two names: the same start, the same function, the same gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from depthmix.mixers import Mixer, OptionError, create_mixer
from depthmix.mixers.decay import decays
from depthmix.mixers.trial import NARROW, reads_and_end, stir

TOKENS = 3


def same_mechanism(name: str, one: Mapping[str, Any], other: Mapping[str, Any], dim: int, n_blocks: int) -> bool:
    """Build both, compare parameters at their start, then outputs and gradients at random ones, bit for bit in fp64.

    Options need not be understood for that: in six blocks a block size of twelve and one of a hundred are the same.
    """
    sizes: dict[str, Any] = {"n_blocks": n_blocks}
    with torch.device("meta"):
        shapes = [_shapes(create_mixer(name, dim=dim, **sizes, **options)) for options in (one, other)]
    if shapes[0] != shapes[1]:
        return False
    try:
        mixers = [create_mixer(name, dim=min(dim, NARROW), **sizes, **options) for options in (one, other)]
    except OptionError:  # as heads that do not divide the narrow width
        mixers = [create_mixer(name, dim=dim, **sizes, **options) for options in (one, other)]
    found = [_behaviour(mixer) for mixer in mixers]
    return all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(*found, strict=True))


def _shapes(mixer: Mixer) -> dict[str, tuple[torch.Size, bool]]:
    decay = decays(mixer)
    return {n: (p.shape, decay[n]) for n, p in mixer.named_parameters()}


def _behaviour(mixer: Mixer) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters as they start; then what the mixer reads and returns at random ones, and every gradient."""
    random = torch.Generator().manual_seed(0)
    start = stir(mixer, random)
    x = torch.randn(TOKENS, mixer.dim, generator=random, dtype=torch.float64, requires_grad=True)
    seen = reads_and_end(mixer, x)
    weights = torch.randn(TOKENS, mixer.dim, generator=random, dtype=torch.float64)
    wanted = [x, *mixer.parameters()]
    grads = torch.autograd.grad((seen[-1] * weights).sum(), wanted, allow_unused=True)
    return start, [*seen, *(torch.zeros(()) if g is None else g for g in grads)]
