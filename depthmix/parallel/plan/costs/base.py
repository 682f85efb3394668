"""Costs of a rule without a cost file, and the registry of cost files.

The unit is one activation tensor [tokens, dim] in bf16, read or written once; a tensor in fp32 counts twice. Options that
the kernels of a whole pass do not cover run in PyTorch or read by read, and move more. tests/mixers/test_traffic.py counts
the loads and stores of the kernels and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch

from depthmix.mixers.fast_path import plain_state
from depthmix.ops.torch_internals import pytree

# A separate compiled norm. Forward: read the input, write the output. Backward: read input and dy for dx, again for the gain; write dx.
NORM = (2, 5)

# {label: activations}. A tensor keeps its label as long as it goes from state to state unchanged.
StateSizes = dict[int, float]


class Traffic(NamedTuple):
    """Units that one site moves, its norm included, and keeps between forward and backward.

    `kept` leaves out what the sublayer itself keeps, which is its input, one per way.
    """

    forward: float
    backward: float
    kept: float
    flops: float = 0.0  # of fp32 products per token, forward, where they are not thin

    @classmethod
    def total(cls, sites: Iterable[Traffic]) -> Traffic:
        """Add up the traffic of several sites."""
        return cls(*(sum(column) for column in zip(*sites, strict=True)))


class Published(NamedTuple):
    """A paper's own count of its inference, per token and site: activations read and written, and single numbers."""

    read: float
    written: float
    numbers: float = 0.0

    @property
    def total(self) -> float:
        return self.read + self.written


class Costs:
    """Costs of one mixer. The defaults are those of a plain sum; the state is found by running the rule."""

    def __init__(self, mixer: Any) -> None:
        self.mixer = mixer

    def traffic(self) -> list[Traffic]:
        """Count what every site, and finish, moves and keeps in training.

        Products with `output_gains` are left out, since models put them into the weights.
        """
        site = Traffic(3 + NORM[0], 3 + NORM[1], 1)
        return [site] * self.mixer.n_sites + [Traffic(*NORM, 1)]

    def state_tensors(self) -> list[StateSizes]:
        """Count the activations in the state, with its sums complete, before every site, and before finish.

        A pipeline stage sends these tensors, and need not send one again that keeps its label.
        """
        return measured_state_tensors(self.mixer)

    def published(self) -> Published | None:
        """Return the paper's own count; None if it has none."""
        return None


CostsType = TypeVar("CostsType", bound=type[Costs])
_COSTS: dict[str, type[Costs]] = {}


def costs_for(*names: str) -> Callable[[CostsType], CostsType]:
    """Register costs for rules, by the name they are registered under, or for a family, by the name of its class."""

    def decorate(cls: CostsType) -> CostsType:
        _COSTS.update(dict.fromkeys(names, cls))
        return cls

    return decorate


def costs_of(mixer: Any) -> Costs:
    """Return the costs of a mixer.

    Costs are looked up for the rule's own name, then for the nearest base class. Without either, the defaults apply.
    """
    for cls in type(mixer).__mro__:
        registered = _COSTS.get(vars(cls).get("name", cls.__name__))
        if registered is not None:
            return registered(mixer)
    return Costs(mixer)


def one_stream_state(mixer: Any) -> list[StateSizes]:
    """Count the state of a rule with a single stream: a new tensor after every site."""
    return [{site: 1.0} for site in range(mixer.n_sites + 1)]


def measured_state_tensors(mixer: Any) -> list[StateSizes]:
    """Count the activations in the state before every site, and before finish, by running the rule on one token.

    The run takes no memory if the mixer is on the meta device. Sums are completed on the way, as they are between the stages of
    a pipeline.
    """
    labels: dict[int, int] = {}
    # Keeps all tensors alive, so that no id is used twice.
    alive: list[Any] = []

    def sizes(state: Any) -> StateSizes:
        result: StateSizes = {}
        for t in pytree.tree_leaves(state):
            if isinstance(t, torch.Tensor) and t.numel() >= mixer.dim:
                alive.append(t)
                result[labels.setdefault(id(t), len(labels))] = t.numel() / mixer.dim
        return result

    device = next((p.device for p in mixer.parameters()), torch.device("cpu"))
    with torch.no_grad():
        state = mixer.start(torch.zeros(1, mixer.dim, device=device))
        states = [sizes(state)]
        for site in range(mixer.n_sites):
            state = plain_state(mixer, mixer.write(state, site, torch.zeros(1, mixer.dim, device=device)))
            states.append(sizes(state))
    return states
