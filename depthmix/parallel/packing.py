"""Depth states as pipeline stages send them: a flat list of tensors, of a form that both ends know beforehand.

    (form,) = state_forms(mixer, [4])         # of the state before site 4
    sent = pack_state(mixer, state)           # a list of tensors, no sum left to compute
    state = unpack_state(form, sent)          # the same state, in the rule's own form

A tensor that passes through a stage unchanged keeps its label, so a rank that has it need not receive it again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthmix.mixers.base import Mixer
from depthmix.mixers.checks import check_use
from depthmix.mixers.fast_path import plain_state
from depthmix.ops.backend import use_backend
from depthmix.ops.torch_internals import pytree

# Tokens of the pass that `state_forms` runs: few, and a shape with which no tensor without tokens begins by chance.
TOKENS = (3, 1)


class PackingError(ValueError):
    """A state cannot be sent, or tensors do not make the expected state."""


class Form(NamedTuple):
    """Structure of the state before a site, as stages send it."""

    site: int
    spec: Any  # of the pytree
    places: tuple[int, ...]  # of the tensors among its leaves
    labels: tuple[int, ...]  # one per tensor; equal labels at two sites mean that it is the same tensor
    shapes: tuple[tuple[int, ...], ...]  # without the dimensions of tokens
    by_token: tuple[bool, ...]  # whether a tensor has the dimensions of tokens
    dtypes: tuple[torch.dtype, ...]

    def numbers(self, label: int) -> tuple[int, int, int]:
        """Return the size of a tensor: numbers per token, numbers that tokens share, and bytes per number."""
        i = self.labels.index(label)
        n = torch.Size(self.shapes[i]).numel()
        return (n if self.by_token[i] else 0), (0 if self.by_token[i] else n), self.dtypes[i].itemsize

    def empty(self, label: int, tokens: Sequence[int], device: torch.device) -> Tensor:
        """Allocate a tensor of this label for tokens [*tokens]."""
        i = self.labels.index(label)
        shape = (*tokens, *self.shapes[i]) if self.by_token[i] else self.shapes[i]
        return torch.empty(shape, dtype=self.dtypes[i], device=device)


def pack_state(mixer: Mixer, state: Any) -> list[Tensor]:
    """Return the tensors that a state consists of, in an order that depends on its site alone."""
    check_use(mixer, "pack_state", state)
    return [t for t in pytree.tree_leaves(plain_state(mixer, state)) if isinstance(t, Tensor)]


def unpack_state(form: Form, tensors: Sequence[Tensor]) -> Any:
    """Rebuild a state from its tensors. Raises PackingError for another number of tensors."""
    if len(tensors) != len(form.places):
        raise PackingError(f"the state before site {form.site} has {len(form.places)} tensors, got {len(tensors)}")
    leaves: list[Any] = [None] * form.spec.num_leaves
    for place, t in zip(form.places, tensors, strict=True):
        leaves[place] = t
    return pytree.tree_unflatten(leaves, form.spec)


def state_forms(mixer: Mixer, sites: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Form]:
    """Return the form of the state before each of these sites, in a pass that is divided there.

    The rule runs once on a few tokens. A mixer on the meta device needs no memory.

    Args:
        mixer: the rule.
        sites: in ascending order; S stands for finish.
        dtype: of the embedding.

    Raises:
        PackingError: a state contains something other than tensors.
    """
    forms: list[Form] = []
    mixer = _weightless(mixer)
    labels: dict[int, int] = {}
    # Kept alive so that no id is used twice.
    alive: list[Tensor] = []

    def activation() -> Tensor:
        return torch.zeros(*TOKENS, mixer.dim, dtype=dtype, device="cpu")

    with torch.no_grad(), use_backend("reference"):
        state: Any = mixer.start(activation())
        for site in range(mixer.n_sites + 1):
            if site in sites:
                sent = pack_state(mixer, state)
                alive += sent
                form = _form(plain_state(mixer, state), [labels.setdefault(id(t), len(labels)) for t in sent])
                forms.append(form)
                state = unpack_state(form, sent)
            if site < mixer.n_sites:
                state = mixer.write(state, site, activation())
    return forms


def _weightless(mixer: Mixer) -> Mixer:
    """Return a CPU mixer to run instead of one on the meta device: each parameter is one number, expanded to its shape.

    Operators on the meta device are written in Python, which takes seconds for a rule of many small steps.
    """
    if not any(t.is_meta for t in (*mixer.parameters(), *mixer.buffers())):
        return mixer
    run = copy.deepcopy(mixer)
    for module in run.modules():
        for name, p in module._parameters.items():
            if p is not None:
                number = torch.zeros((), dtype=p.dtype, device="cpu")
                module._parameters[name] = nn.Parameter(number.expand(p.shape), requires_grad=False)
        for name, b in module._buffers.items():
            module._buffers[name] = None if b is None else torch.zeros((), dtype=b.dtype, device="cpu").expand(b.shape)
    return run


def _form(state: Any, labels: Sequence[int]) -> Form:
    leaves, spec = pytree.tree_flatten(state)
    places = tuple(i for i, t in enumerate(leaves) if isinstance(t, Tensor))
    others = {type(t).__name__ for t in leaves if t is not None and not isinstance(t, Tensor)}
    if others:
        raise PackingError(f"a state that contains {', '.join(sorted(others))} cannot be sent: only tensors can")
    tensors = [leaves[i] for i in places]
    by_token = tuple(t.shape[:2] == TOKENS for t in tensors)
    shapes = tuple(
        tuple(t.shape[2:] if has_tokens else t.shape) for t, has_tokens in zip(tensors, by_token, strict=True)
    )
    return Form(state.site, spec, places, tuple(labels), shapes, by_token, tuple(t.dtype for t in tensors))
