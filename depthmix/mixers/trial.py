"""Run a mixer alone, at random parameters and with simple sublayers, to tell rules apart and to see what they read."""

from __future__ import annotations

import torch
from torch import Tensor

from depthmix.mixers.base import Mixer
from depthmix.randomness import OwnRandom

NARROW = 24  # channels, enough to tell functions apart


def stir(mixer: Mixer, random: torch.Generator) -> list[Tensor]:
    """Move every parameter, in fp64, away from its start, also those that start at zero; return how they start."""
    mixer.double()
    with OwnRandom(0, torch.device("cpu")).building():
        mixer.reset_parameters()
    start = [p.detach().clone() for p in mixer.parameters()]
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(torch.randn(p.shape, generator=random, dtype=torch.float64), alpha=0.3)
    return start


def reads_and_end(mixer: Mixer, x: Tensor) -> list[Tensor]:
    """Return what every site reads, and finish, for x [..., D] with sublayers that work channel by channel."""
    state, results = mixer.start(x), list[Tensor]()
    for site in range(mixer.n_sites):
        read = mixer.read(state, site)
        reads = read if isinstance(read, tuple) else (read,)
        results += reads
        mixed = torch.stack([(way + 1) * h for way, h in enumerate(reads)]).sum(0)
        state = mixer.write(state, site, torch.sin(mixed + site))
    return [*results, mixer.finish(state)]
