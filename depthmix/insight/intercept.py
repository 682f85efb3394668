"""Intercept the calls between a model and its mixer, to record or change tensors without the model's knowledge.

All threads that run a model share its mixer, but an interception applies only to the thread that makes it. While any thread intercepts
a mixer, dispatchers replace the mixer's methods and select the call of each thread:

    model in thread 1 --> mixer.write = dispatcher --> the function that thread 1 has passed to `intercepted`
    model in thread 2 ------------^        `---------> the mixer's own write

A dispatcher reads a threading.local and not a context variable, because torch.compile can trace the former and guard on it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from depthmix.mixers import Mixer
from depthmix.mixers.checks import Read, check_norms
from depthmix.mixers.sharding import CONTRACT

Calls = dict[str, Callable[..., Any]]


class _Dispatch:
    """The dispatchers of one mixer, and the intercepting calls of each thread."""

    def __init__(self, mixer: Mixer) -> None:
        self.open = 0  # number of interceptions in all threads
        self.thread = threading.local()  # .stack: calls by name, the innermost interception last
        self.own: Calls = {name: getattr(mixer, name) for name in CONTRACT}
        self.before = {name: call for name, call in vars(mixer).items() if name in CONTRACT}
        for name in CONTRACT:
            setattr(mixer, name, self._dispatcher(name))

    def _dispatcher(self, name: str) -> Callable[..., Any]:
        thread, plain = self.thread, self.own[name]

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            stack = getattr(thread, "stack", None)
            return (stack[-1][name] if stack else plain)(*args, **kwargs)

        return dispatch

    def remove(self, mixer: Mixer) -> None:
        """Restore the mixer's own methods."""
        for name in CONTRACT:
            vars(mixer).pop(name, None)
        vars(mixer).update(self.before)


_lock = threading.Lock()
_dispatches: weakref.WeakKeyDictionary[Mixer, _Dispatch] = weakref.WeakKeyDictionary()


@contextmanager
def intercepted(mixer: Mixer, **calls: Callable[..., Any]) -> Iterator[None]:
    """Replace some of start, read, write and finish for this thread inside this context.

    The model writes unscaled outputs meanwhile: output gains are not folded into weights.

    Args:
        mixer: The mixer.
        calls: Replacements by name. To call the methods they replace, they use `current_calls`, taken before.
    """
    assert set(calls) <= set(CONTRACT)
    with _lock:
        dispatch = _dispatches.get(mixer)
        if dispatch is None:
            dispatch = _dispatches[mixer] = _Dispatch(mixer)
        dispatch.open += 1
    stack = dispatch.thread.__dict__.setdefault("stack", [])
    # Without gains, the model cannot fold any into its output projections.
    stack.append({**(stack[-1] if stack else dispatch.own), "output_gains": dict, **calls})
    try:
        yield
    finally:
        stack.pop()
        with _lock:
            dispatch.open -= 1
            if not dispatch.open:
                dispatch.remove(mixer)
                del _dispatches[mixer]


def current_calls(mixer: Mixer) -> Calls:
    """Return the mixer's calls for this thread by name, bypassing the dispatchers."""
    with _lock:
        dispatch = _dispatches.get(mixer)
        if dispatch is None:
            return {name: getattr(mixer, name) for name in CONTRACT}
    stack = getattr(dispatch.thread, "stack", None)
    return dict(stack[-1] if stack else dispatch.own)


@contextmanager
def record_sources(mixer: Mixer) -> Iterator[list[Tensor]]:
    """Collect the embedding and every site's raw output of this thread's passes. A new pass clears the list."""
    sources: list[Tensor] = []
    calls = current_calls(mixer)

    def recording_start(x: Tensor) -> Any:
        sources[:] = [x.detach()]
        return calls["start"](x)

    def recording_write(state: Any, site: int, y: Tensor) -> Any:
        sources.append(y.detach())
        return calls["write"](state, site, y)

    with intercepted(mixer, start=recording_start, write=recording_write):
        yield sources


def as_ways(h: Read) -> tuple[Tensor, ...]:
    """Return a read's result as a tuple, one tensor per way."""
    return h if isinstance(h, tuple) else (h,)


def normed(mixer: Mixer, site: int, ways: tuple[Tensor, ...], norm: Any) -> Read:
    """Apply the norms, if any, to mixtures, and return them as `read` does."""
    norms = check_norms(mixer, norm, site)
    if norms is not None:
        ways = tuple(f(h) for f, h in zip(norms, ways, strict=True))
    return ways if len(ways) > 1 else ways[0]
