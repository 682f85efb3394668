"""The state that a mixer carries from site to site: an explicit value, registered as a pytree."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar, dataclass_transform

import torch
from torch import Tensor

from depthmix.ops.torch_internals import pytree


@dataclasses.dataclass(eq=False, kw_only=True)
class State:
    """Base of all states. Subclasses add their tensors and are decorated with `register_state`."""

    tensor_fields: ClassVar[tuple[str, ...]] = ()  # the fields that hold tensors; set by `register_state`
    path: ClassVar[Any] = None  # the FastPath whose states are of this type; None: the rule's own state

    # Versions of tensors, for kept.py. They are no fields, so that a state made from another one has none.
    # Versions of `kept_tensors()` when the mixer handed the state out.
    kept_versions: ClassVar[list[int] | None] = None
    # Versions of the tensors that the last read returned, each with a weak reference.
    returned_versions: ClassVar[list[Any] | None] = None

    site: int = 0  # the site that reads and writes next
    frozen: bool = False  # coefficients are constants for autograd: how `Mixer.mixing` sees the linear map
    made_for: str | None = None  # `Mixer.signature` of the mixer that the state is for; None if unknown
    # Results of a read that the write of the same site can use. The note is a cache and no part of the value: a pytree round
    # trip drops it, and a write without a note computes it again. `take_note` empties it, so that a checkpointed region
    # recomputes in the same way.
    note: Any = dataclasses.field(default=None, repr=False, metadata={"cache": True})

    def template(self) -> Tensor:
        """Return a tensor with the embedding's shape, dtype and device."""
        raise NotImplementedError(f"{type(self).__name__} does not implement template(): one of its tensors [..., D]")

    def last(self, n: int) -> Any:
        """Return the state of the last n tokens of [..., T, D], if slices suffice for that; otherwise the whole state."""
        return self

    def complete_sums(self) -> Any:
        """Return the state with every sum computed that a read would compute later. Pipeline stages send this form."""
        return self

    def observe(self, x: Tensor) -> Tensor:
        """Return x as an input of coefficients, detached if these are frozen."""
        return x.detach() if self.frozen else x

    def kept_tensors(self) -> list[Tensor]:
        """List the tensors of the state, all of which may be the caller's own memory."""
        tensors: list[Tensor] = []
        for name in self.tensor_fields:
            value = getattr(self, name)
            for part in value if type(value) is tuple else (value,):
                if isinstance(part, Tensor):
                    tensors.append(part)
                elif part is not None:
                    tensors += [t for t in pytree.tree_leaves(part) if isinstance(t, Tensor)]
        return tensors

    def was_read(self) -> bool:
        """Tell whether a read of the state has left all that its write needs of what was pending."""
        return self.note is not None

    def leave_note(self, value: Any) -> None:
        """Keep what a read worked out for the write that follows."""
        self.note = (torch.is_grad_enabled(), value)

    def take_note(self) -> Any:
        """Return and forget what the last read left, or None. A write with gradients cannot use a note left under no_grad."""
        note, self.note = self.note, None
        return note[1] if note is not None and note[0] == torch.is_grad_enabled() else None

    def next(self, **changes: Any) -> Any:
        """Return a copy with changes, as the state after one more write."""
        return dataclasses.replace(self, site=self.site + 1, note=None, **changes)

    def as_type(self, cls: type[Any], **changes: Any) -> Any:
        """Return the same value as a state of another type, which takes over the fields that it shares with this one."""
        shared = {name: getattr(self, name) for name in (*_STATIC, *cls.tensor_fields) if name in vars(self)}
        return cls(**{**shared, **changes})


def last_rows(x: Tensor, n: int) -> Tensor:
    """Return the last n tokens, [..., n, D]."""
    # No copy if there is one sequence, whose tokens lie together.
    return x[..., -n:, :].contiguous()


def last_of(parts: tuple[Tensor, ...], n: int) -> tuple[Tensor, ...]:
    """Return the last n tokens of every tensor."""
    return tuple(last_rows(x, n) for x in parts)


StateType = TypeVar("StateType", bound=type[State])
_STATIC = ("site", "frozen", "made_for")


@dataclass_transform(eq_default=False, kw_only_default=True)
def register_state(cls: StateType) -> StateType:
    """Make a State subclass a dataclass and a pytree node whose children are its tensors, as a class decorator."""
    cls = dataclasses.dataclass(eq=False, kw_only=True)(cls)  # type: ignore[assignment]
    names = [f.name for f in dataclasses.fields(cls) if f.name not in _STATIC and not f.metadata.get("cache")]
    cls.tensor_fields = tuple(names)

    def flatten(state: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(state, n) for n in names], tuple(getattr(state, n) for n in _STATIC)

    def unflatten(children: Any, context: Any) -> Any:
        return cls(**dict(zip(names, children, strict=True)), **dict(zip(_STATIC, context, strict=True)))

    def flatten_with_keys(state: Any) -> tuple[list[Any], tuple[Any, ...]]:
        children, context = flatten(state)
        return [(pytree.GetAttrKey(n), c) for n, c in zip(names, children, strict=True)], context

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    return cls


@register_state
class StreamState(State):
    """The state of rules with one running stream."""

    x: Tensor  # [..., D]

    def template(self) -> Tensor:
        return self.x

    def last(self, n: int) -> Any:
        return dataclasses.replace(self, x=last_rows(self.x, n), note=None)
