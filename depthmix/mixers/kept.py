"""Notice that a tensor which a state keeps was changed in place.

A state is a value, but it keeps the tensors that it was given, and a read without a norm may return one of them. PyTorch
counts the in-place changes of a tensor in `_version`, which all views of one memory share. A mixer records the versions of a state
that it hands out, and compares them whenever the state is used. Autograd does the same for the tensors that a backward needs.

There is no such number inside torch.compile and for tensors made in inference mode: nothing is compared there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from depthmix.mixers.state import State

_version = attrgetter("_version")
ADVICE = "give write a copy (y.clone()), and copy what read returned before you change it (h.clone())"


def record_versions(state: State) -> None:
    """Remember the versions of the tensors that the state keeps now."""
    if not torch.compiler.is_compiling():
        vars(state)["kept_versions"] = _versions(state.kept_tensors())


def record_returned(state: State, mixtures: Sequence[Tensor]) -> None:
    """Remember the versions of what a read returned without a norm: the state's note may hold the same tensors."""
    if not torch.compiler.is_compiling():
        versions = _versions(mixtures)
        known = None if versions is None else [(weakref.ref(t), v) for t, v in zip(mixtures, versions, strict=True)]
        vars(state)["returned_versions"] = known


def changed_in_place(state: State) -> list[Tensor]:
    """List the tensors of a state that were changed in place since their versions were recorded."""
    if torch.compiler.is_compiling():  # asked first: the compiler would guard on the versions
        return []
    before = state.kept_versions
    if before is None:
        return []
    kept = state.kept_tensors()
    if len(kept) != len(before) or before == (now := _versions(kept)) or now is None:
        return []
    return [t for t, old, new in zip(kept, before, now, strict=True) if old != new]


def changed_after_read(state: State) -> list[Tensor]:
    """List what the last read of a state returned and somebody has changed in place since."""
    if state.returned_versions is None or torch.compiler.is_compiling():
        return []
    alive = [(t(), version) for t, version in state.returned_versions]
    return [t for t, version in alive if t is not None and t._version != version]


def refuse_changed_state(call: str, rule: str, state: State) -> None:
    """Raise RuntimeError if a tensor of the state was changed in place."""
    refuse_changes(call, rule, changed_in_place(state))


def changed_before_write(rule: str, state: State) -> list[Tensor]:
    """List the tensors that were changed in place before a write, which may be those that its read has used up.

    Raises:
        RuntimeError: there are some, and nobody has read the state.
    """
    changed = changed_in_place(state)
    if changed and not state.was_read():
        refuse_changes(f"write at site {state.site}", rule, changed)
    return changed + changed_after_read(state)


def refuse_changes(call: str, rule: str, changed: Iterable[Tensor]) -> None:
    """Raise RuntimeError if there are tensors in `changed`."""
    for t in changed:
        what = f"{rule} keeps a tensor of shape {list(t.shape)} that was changed in place after it was written or read"
        raise RuntimeError(f"{call}: {what}; {ADVICE}")


def still_kept(changed: Iterable[Tensor], after: State, y: Tensor) -> list[Tensor]:
    """List the changed tensors whose memory the state after a write keeps, apart from y, which the write itself brought."""
    kept, brought = after.kept_tensors(), False
    memory = set()
    for t in kept:
        if t is y and not brought:
            brought = True
        else:
            memory.add(_address(t))
    return [t for t in changed if _address(t) in memory]


def _versions(tensors: Sequence[Tensor]) -> list[int] | None:
    if torch.is_inference_mode_enabled():
        return None
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # made in inference mode
        return None


def _address(t: Tensor) -> Any:
    return t.untyped_storage()._cdata
