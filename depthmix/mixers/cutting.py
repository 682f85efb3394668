"""A mixer in parts, for the stages of a pipeline: each holds the parameters of its own sites, and passes on its state.

    part  = cut(mixer, range(4, 8))           # sites 4 to 7; S stands for finish
    sent  = part.pack(state)                  # a flat list of tensors, with nothing left to add up
    state = next_part.unpack(form, sent)      # form: what `forms` found for that site

A part is the same rule: it is asked by the whole model's site numbers. A parameter with a row per site (`Mixer.owners`) has only
its own rows there. The rule's code finds them by the same numbers (`Rows`); for all others, such as FSDP2, it is a parameter.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from depthmix.mixers.variant import KEY
from depthmix.ops.backend import use_backend
from depthmix.ops.torch_internals import pytree

if TYPE_CHECKING:
    from depthmix.mixers.base import Mixer

TOKENS = (3, 1)  # of the pass that `forms` looks at: few, and sizes that no tensor without tokens begins with by chance
Item = TypeVar("Item")


class CutError(ValueError):
    """A mixer cannot be cut, or a part was asked for what it does not hold."""


class Rows:
    """Some rows of a parameter, found by their numbers in the whole of it; other uses need `here`."""

    def __init__(self, local: Tensor, first: int, name: str) -> None:
        self.local, self.first, self.name = local, first, name

    def __getitem__(self, index: Any) -> Tensor:
        row, *rest = index if isinstance(index, tuple) else (index,)
        if not isinstance(row, int) or not 0 <= row - self.first < len(self.local):
            last = self.first + len(self.local) - 1
            raise CutError(f"this part of a mixer has the rows {self.first} to {last} of {self.name}, not {row!r}")
        return self.local[(row - self.first, *rest)]

    def __getattr__(self, what: str) -> Any:
        raise CutError(
            f"{self.name} is cut by sites, so it has no {what}: take a row, or `here({self.name})` for its own"
        )


def here(parameter: Any) -> Tensor:
    """The rows of a parameter that this mixer holds: all of them, unless it is a part."""
    return parameter.local if isinstance(parameter, Rows) else parameter


class BySite(Sequence[Item]):
    """One item for every site from `first` on, found by the site's number."""

    def __init__(self, items: Sequence[Item], first: int) -> None:
        self.items, self.first = items, first

    def __len__(self) -> int:
        return self.first + len(self.items)

    def __getitem__(self, site: Any) -> Any:
        return self.items[site - self.first]


class Part:
    """What a part has besides its rule."""

    def reset_parameters(self) -> None:
        raise CutError("a part of a mixer is cut from a whole one that has its values; it draws none itself")


RULES = ("start", "read", "write", "finish", "settled", "output_gains")  # where the rule's own code runs


def _rows(name: str) -> property:
    """A parameter, for the rule's own code its rows."""

    def found(part: Any) -> Any:
        local = part._parameters[name]
        return Rows(local, part._first_rows[name], name) if part in _thread.parts else local

    return property(found)


class _Thread(threading.local):
    """The parts whose rule's code runs in a thread, outermost first: other threads that use them are outside of it."""

    def __init__(self) -> None:
        self.parts: list[Any] = []


_thread = _Thread()


def _inside(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def by_rule(part: Any, *args: Any, **kwargs: Any) -> Any:
        _thread.parts.append(part)
        try:
            return call(part, *args, **kwargs)
        finally:
            _thread.parts.pop()

    return by_rule


@functools.cache
def _part_class(rule: type, names: tuple[str, ...]) -> type:
    """The rule's class, with parameters of these names by site."""
    members: dict[str, Any] = {call: _inside(getattr(rule, call)) for call in RULES}
    return type(f"{rule.__name__}Part", (Part, rule), members | {name: _rows(name) for name in names})


def _own(owners: Sequence[int] | int, sites: range) -> slice | None:
    """The rows that belong to sites: a slice, everything for a parameter in one piece, or None."""
    if isinstance(owners, int):
        return slice(None) if owners in sites else None
    own = [row for row, site in enumerate(owners) if site in sites]
    if own and own != list(range(own[0], own[-1] + 1)):
        raise CutError(f"rows for the sites {sites.start} to {sites.stop - 1} are not neighbours: {own}")
    return slice(own[0], own[-1] + 1) if own else None


def cut(mixer: Mixer, sites: range) -> Mixer:
    """The part of a mixer for some sites, finish being site S; rows are copied, parameters in one piece shared."""
    if not (sites.step == 1 and 0 <= sites.start < sites.stop <= mixer.n_sites + 1):
        raise CutError(f"a part needs neighbouring sites from 0 to {mixer.n_sites}, got {sites}")
    part: Any = copy.copy(mixer)
    part._parameters, part._modules, part._first_rows = {}, {}, {}
    for name, p in mixer._parameters.items():
        own = None if p is None else _own(mixer.owners(name), sites)
        if p is None or own is None:
            continue
        if own.start is None:
            part._parameters[name] = p
        else:
            part._parameters[name] = nn.Parameter(p.detach()[own].clone(), requires_grad=p.requires_grad)
            part._first_rows[name] = own.start
    for name, group in mixer._modules.items():
        if not isinstance(group, nn.ParameterDict):
            raise CutError(f"{mixer.name} cannot be cut by sites: {name} is a module, whose site nobody knows")
        kept = {k: p for k, p in group.items() if _whole(mixer, f"{name}.{k}") in sites}
        part._modules[name] = nn.ParameterDict(kept)
    part.held = sites
    rule: Any = type(mixer)
    part.__class__ = _part_class(rule, tuple(part._first_rows))
    return part


def _whole(mixer: Mixer, name: str) -> int:
    owner = mixer.owners(name)
    if not isinstance(owner, int):
        raise CutError(f"{mixer.name} cannot be cut by sites: {name}, in a dictionary, needs one site and has {owner}")
    return owner


def cut_tensors(mixer: Mixer, tensors: Mapping[str, Tensor], sites: range) -> dict[str, Tensor]:
    """What a part holds of tensors that are laid out as the parameters and buffers of a whole mixer; views."""
    buffers, kept = dict(mixer.named_buffers()), {}
    for name, t in tensors.items():
        own = slice(None) if name in buffers or name == KEY else _own(mixer.owners(name), sites)
        if own is not None:
            kept[name] = t if own.start is None else t[own]
    return kept


def join_tensors(mixer: Mixer, parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of a whole mixer from those of its parts, in the order of their sites."""
    found: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, t in part.items():
            found.setdefault(name, []).append(t)
    buffers = dict(mixer.named_buffers())
    joined = {}
    for name, pieces in found.items():
        one = name in buffers or name == KEY or isinstance(mixer.owners(name), int)
        joined[name] = pieces[0] if one else torch.cat(pieces)
    return joined


class Form(NamedTuple):
    """What the state before a site is made of, as it travels."""

    site: int
    spec: Any  # of the pytree
    places: tuple[int, ...]  # of the tensors among its leaves
    labels: tuple[int, ...]  # of the tensors: one that has come through unchanged keeps its label
    shapes: tuple[tuple[int, ...], ...]  # without the tokens' dimensions
    by_token: tuple[bool, ...]  # whether it has them
    dtypes: tuple[torch.dtype, ...]

    def numbers(self, label: int) -> tuple[int, int, int]:
        """Of the tensor with this label: how many numbers it has per token, how many besides, and bytes in one."""
        i = self.labels.index(label)
        n = torch.Size(self.shapes[i]).numel()
        return (n if self.by_token[i] else 0), (0 if self.by_token[i] else n), self.dtypes[i].itemsize

    def empty(self, label: int, tokens: Sequence[int], device: torch.device) -> Tensor:
        """Memory for the tensor with this label, for tokens [*tokens]."""
        i = self.labels.index(label)
        shape = (*tokens, *self.shapes[i]) if self.by_token[i] else self.shapes[i]
        return torch.empty(shape, dtype=self.dtypes[i], device=device)


def _weightless(mixer: Mixer) -> Mixer:
    """A mixer to run on the CPU in place of one on the meta device: tensors are a single number, seen at every place.

    Operators on the meta device are Python, which takes seconds for a rule of many small steps.
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


def forms(mixer: Mixer, sites: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Form]:
    """The state before each of these sites (S: finish) in a pass that is cut there; dtype: of the embedding.

    The rule runs once, without data: build it on the meta device.
    """
    found: list[Form] = []
    mixer = _weightless(mixer)
    labels: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no id is used twice

    def new() -> Tensor:
        return torch.zeros(*TOKENS, mixer.dim, dtype=dtype, device="cpu")

    with torch.no_grad(), use_backend("reference"):
        state: Any = mixer.start(new())
        for site in range(mixer.n_sites + 1):
            if site in sites:
                sent = mixer.pack(state)
                alive += sent
                named = [labels.setdefault(id(t), len(labels)) for t in sent]
                found.append(_form(mixer.settled(state), named))
                state = mixer.unpack(found[-1], sent)
            if site < mixer.n_sites:
                state = mixer.write(state, site, new())
    return found


def _form(state: Any, labels: Sequence[int]) -> Form:
    leaves, spec = pytree.tree_flatten(state)
    places = tuple(i for i, t in enumerate(leaves) if isinstance(t, Tensor))
    others = {type(t).__name__ for t in leaves if t is not None and not isinstance(t, Tensor)}
    if others:
        raise CutError(f"a state with {', '.join(sorted(others))} in it cannot be sent: only tensors can")
    tensors = [leaves[i] for i in places]
    by_token = tuple(t.shape[:2] == TOKENS for t in tensors)
    shapes = tuple(tuple(t.shape[2:] if own else t.shape) for t, own in zip(tensors, by_token, strict=True))
    return Form(state.site, spec, places, tuple(labels), shapes, by_token, tuple(t.dtype for t in tensors))


def pack(state: Any) -> list[Tensor]:
    """The tensors of a settled state, in the order of its fields."""
    return [t for t in pytree.tree_leaves(state) if isinstance(t, Tensor)]


def unpack(form: Form, tensors: Sequence[Tensor]) -> Any:
    """The state that these tensors make."""
    if len(tensors) != len(form.places):
        raise CutError(f"a state before site {form.site} has {len(form.places)} tensors, got {len(tensors)}")
    leaves: list[Any] = [None] * form.spec.num_leaves
    for place, t in zip(form.places, tensors, strict=True):
        leaves[place] = t
    return pytree.tree_unflatten(leaves, form.spec)


def why_not_cut(mixer: Mixer) -> str | None:
    """Why a mixer cannot be cut by sites, in words; None if it can. It is cut in two, and runs without data: a small one will do."""
    half, x = mixer.n_sites // 2, torch.zeros(*TOKENS, mixer.dim, device="cpu")
    try:
        parts = [_weightless(cut(mixer, range(a, b))) for a, b in ((0, half), (half, mixer.n_sites + 1))]
        (form,) = forms(mixer, [half])
        with torch.no_grad(), use_backend("reference"):
            state: Any = parts[0].start(x)
            for site in range(mixer.n_sites):
                if site == half:
                    state = parts[1].unpack(form, parts[0].pack(state))
                part = parts[site >= half]
                part.read(state, site)
                state = part.write(state, site, x)
            parts[1].finish(state)
    except CutError as error:
        return str(error)
    except (AttributeError, TypeError) as error:  # it does something with a parameter that is cut
        return f"{mixer.name} cannot be cut by sites: {error}"
    return None
