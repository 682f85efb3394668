"""What a rule costs besides arithmetic: what it moves, what a backward needs kept, and what its state holds.

The unit is one activation tensor [tokens, dim] in bf16, read or written once; one in fp32 counts twice. With options that the
kernels of a whole pass do not know, PyTorch, or kernels read by read, move more. tests/mixers/test_traffic.py counts what really is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from depthmix.ops.torch_internals import pytree

NORM = (2, 5)  # a compiled norm by itself: in and out; in and dy read for dx and again for the gain, dx written


class Traffic(NamedTuple):
    """Units that one site moves, its norm included, forward and backward; and what it keeps from one to the other.

    kept: activations besides what the sublayer keeps, which is its input, one per way.
    """

    forward: float
    backward: float
    kept: float
    flops: float = 0.0  # of fp32 products per token, forward, where they are not thin

    @classmethod
    def total(cls, sites: Iterable[Traffic]) -> Traffic:
        """Of several."""
        return cls(*(sum(column) for column in zip(*sites, strict=True)))


class Published(NamedTuple):
    """What a paper counts per token and site: activations read and written, and numbers besides."""

    read: float
    written: float
    numbers: float = 0.0

    @property
    def total(self) -> float:
        return self.read + self.written


def one_stream(n_sites: int) -> list[dict[int, float]]:
    """The state of rules with a single stream, as `Mixer.state_tensors` gives it: a new tensor after every site."""
    return [{site: 1.0} for site in range(n_sites + 1)]


def state_by_site(mixer: Any) -> list[dict[int, float]]:
    """The activations in the state before every site, and before finish: {label: how many of them}, by `Mixer.state_tensors`.

    A tensor keeps its label as long as it goes from state to state unchanged. Found by running the rule on one token, without
    any memory if it was built on the meta device; states are settled on the way, as they are between the stages of a pipeline.
    """
    labels: dict[int, int] = {}
    alive: list[Any] = []  # so that no id is used twice

    def of(state: Any) -> dict[int, float]:
        found: dict[int, float] = {}
        for t in pytree.tree_leaves(state):
            if isinstance(t, torch.Tensor) and t.numel() >= mixer.dim:
                alive.append(t)
                found[labels.setdefault(id(t), len(labels))] = t.numel() / mixer.dim
        return found

    device = next((p.device for p in mixer.parameters()), torch.device("cpu"))
    with torch.no_grad():
        state = mixer.start(torch.zeros(1, mixer.dim, device=device))
        states = [of(state)]
        for site in range(mixer.n_sites):
            state = mixer.settled(mixer.write(state, site, torch.zeros(1, mixer.dim, device=device)))
            states.append(of(state))
    return states


def lacking(states: Sequence[dict[int, float]], site: int, has: Iterable[int] = ()) -> float:
    """Activations of the state before a site that a rank does not have which holds those of the states before `has`."""
    known = {label for s in has for label in states[s]}
    return sum(size for label, size in states[site].items() if label not in known)
