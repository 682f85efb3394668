"""Recognise two sets of options that give the same rule: the same initial values, outputs and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from depthmix.mixers import Mixer, OptionError, create_mixer
from depthmix.mixers.decay import decays
from depthmix.mixers.trial import NARROW, reads_and_end, stir

TOKENS = 3


def is_same_rule(name: str, one: Mapping[str, Any], other: Mapping[str, Any], dim: int, n_blocks: int) -> bool:
    """Tell whether two sets of options give the same rule in a model.

    Both rules are built. Their initial parameters, and their outputs and gradients at random parameters, are compared bit by bit in
    fp64. No option needs to be understood for this: in six blocks, a block size of 12 and one of 100 are the same.

    Args:
        name: Name of the rule.
        one: Options.
        other: Other options.
        dim: Width of the model.
        n_blocks: Blocks of the model.
    """
    with torch.device("meta"):
        shapes = [_shapes(create_mixer(name, dim=dim, n_blocks=n_blocks, **options)) for options in (one, other)]
    if shapes[0] != shapes[1]:
        return False
    try:
        mixers = [create_mixer(name, dim=min(dim, NARROW), n_blocks=n_blocks, **options) for options in (one, other)]
    except OptionError:  # such as heads that do not divide the narrow width
        mixers = [create_mixer(name, dim=dim, n_blocks=n_blocks, **options) for options in (one, other)]
    values = [_behaviour(mixer) for mixer in mixers]
    return all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(*values, strict=True))


def _shapes(mixer: Mixer) -> dict[str, tuple[torch.Size, bool]]:
    decay = decays(mixer)
    return {n: (p.shape, decay[n]) for n, p in mixer.named_parameters()}


def _behaviour(mixer: Mixer) -> tuple[list[Tensor], list[Tensor]]:
    """Return a mixer's initial parameters, and its reads, output and gradients at random parameters."""
    random = torch.Generator().manual_seed(0)
    start = stir(mixer, random)
    x = torch.randn(TOKENS, mixer.dim, generator=random, dtype=torch.float64, requires_grad=True)
    outputs = reads_and_end(mixer, x)
    weights = torch.randn(TOKENS, mixer.dim, generator=random, dtype=torch.float64)
    grads = torch.autograd.grad((outputs[-1] * weights).sum(), [x, *mixer.parameters()], allow_unused=True)
    return start, [*outputs, *(torch.zeros(()) if g is None else g for g in grads)]
