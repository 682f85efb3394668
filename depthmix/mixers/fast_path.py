"""The contract between a rule and a faster way to run it.

A rule computes on a plain state. A fast path computes the same on a state of its own type, a subclass whose class attribute `path`
names it. The type of a state thus says who computes: `Mixer` asks the path of the state, and the rule where there is none.
A rule lists its paths in `Mixer.fast_paths`, in the order in which they are tried.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from depthmix.mixers.state import State
from depthmix.ops.precision import without_autocast

if TYPE_CHECKING:
    from depthmix.mixers.base import Mixer


class FastPath:
    """Base of the faster ways to run rules. A path keeps nothing between calls."""

    def start(self, mixer: Mixer, x: Tensor) -> State | None:
        """Begin a pass with the embedding x [..., D]; return None where this path cannot run it."""
        raise NotImplementedError

    def resume(self, mixer: Mixer, state: Any) -> State | None:
        """Return the state with which this path continues a pass; None where it cannot.

        Args:
            mixer: the rule.
            state: a state of this path, or a plain one, as a pipeline stage receives it.
        """
        raise NotImplementedError

    def read(self, mixer: Mixer, state: Any, site: int, norms: Sequence[Callable[[Tensor], Tensor]] | None) -> Any:
        """Return the mixtures of a site with `norms` applied; None where the caller has to apply the norms."""
        raise NotImplementedError

    def write(self, mixer: Mixer, state: Any, site: int, y: Tensor, scaled: bool) -> State:
        """Return the state after y [..., D]; scaled: y has been multiplied with its output gain."""
        raise NotImplementedError

    def finish(self, mixer: Mixer, state: Any, norm: Callable[[Tensor], Tensor] | None) -> Tensor | None:
        """Return what the final norm sees, with `norm` applied; None where the caller has to apply it."""
        raise NotImplementedError

    def to_plain(self, mixer: Mixer, state: Any) -> State:
        """Return the rule's own form of the state: for pipelines, insight and passes that this path cannot continue."""
        raise NotImplementedError


def continue_pass(mixer: Mixer, state: Any) -> Any:
    """Return the state in the form with which its pass continues: that of its path, of another path, or the rule's own."""
    # A read has converted the state and left the result for the write.
    if state.note is not None and isinstance(state.note[1], State):
        converted = state.take_note()
        if converted is not None:
            return converted
    if state.path is not None:
        resumed = state.path.resume(mixer, state)
        if resumed is not None:
            return resumed
        state = state.path.to_plain(mixer, state)
    for path in mixer._paths:
        resumed = path.resume(mixer, state)
        if resumed is not None:
            return resumed
    return state


def plain_state(mixer: Mixer, state: Any) -> Any:
    """Return a state in the rule's own form with every waiting sum computed, whatever runs the pass."""
    with without_autocast(state.template()):
        if state.path is not None:
            state = state.path.to_plain(mixer, state)
        return state.complete_sums()


def load_paths(paths: Iterable[str | FastPath]) -> tuple[FastPath, ...]:
    """Import the paths that are named as "module:NAME"."""
    loaded = []
    for path in paths:
        if isinstance(path, str):
            module, _, name = path.partition(":")
            path = getattr(importlib.import_module(module), name)
        loaded.append(path)
    return tuple(loaded)
