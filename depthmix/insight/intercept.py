"""Standing between a model and its mixer: what passes by is recorded or changed, and the model knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from depthmix.mixers import Mixer
from depthmix.mixers.base import Read
from depthmix.mixers.sharding import CONTRACT


@contextmanager
def intercepted(mixer: Mixer, **calls: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, some of start, read, write and finish are these, and outputs are written as sublayers made them."""
    assert set(calls) <= set(CONTRACT)
    calls = {"output_gains": dict, **calls}  # no model multiplies them on the way
    before = {name: call for name, call in vars(mixer).items() if name in calls}
    for name, call in calls.items():
        setattr(mixer, name, call)
    try:
        yield
    finally:
        for name in calls:
            delattr(mixer, name)
        vars(mixer).update(before)


@contextmanager
def record_sources(mixer: Mixer) -> Iterator[list[Tensor]]:
    """Collect the embedding and every site's raw output from the passes made inside; each new pass starts the list afresh."""
    sources: list[Tensor] = []
    start, write = mixer.start, mixer.write

    def recording_start(x: Tensor) -> Any:
        sources[:] = [x.detach()]
        return start(x)

    def recording_write(state: Any, site: int, y: Tensor) -> Any:
        sources.append(y.detach())
        return write(state, site, y)

    with intercepted(mixer, start=recording_start, write=recording_write):
        yield sources


def as_ways(h: Read) -> tuple[Tensor, ...]:
    """What a read returned, one tensor per way."""
    return h if isinstance(h, tuple) else (h,)


def normed(mixer: Mixer, site: int, ways: tuple[Tensor, ...], norm: Any) -> Read:
    """Mixtures as `read` returns them to a model that gave it a norm, or none."""
    norms = mixer._norms(norm, site)
    if norms is not None:
        ways = tuple(f(h) for f, h in zip(norms, ways, strict=True))
    return ways if len(ways) > 1 else ways[0]
