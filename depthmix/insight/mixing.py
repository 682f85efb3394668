"""Depth-mixing matrices of a model on a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.mixers import Mixer
from depthmix.names import nearest


@contextmanager
def record_sources(mixer: Mixer) -> Iterator[list[Tensor]]:
    """Collect the embedding and every site's raw output from the passes made inside; each new pass starts the list afresh."""
    sources: list[Tensor] = []
    start, write = mixer.start, mixer.write
    before = {k: v for k, v in vars(mixer).items() if k in ("start", "write")}

    def recording_start(x: Tensor) -> Any:
        sources[:] = [x.detach()]
        return start(x)

    def recording_write(state: Any, site: int, y: Tensor) -> Any:
        sources.append(y.detach())
        return write(state, site, y)

    mixer.start, mixer.write = recording_start, recording_write  # type: ignore[method-assign]
    try:
        yield sources
    finally:
        del mixer.start, mixer.write
        vars(mixer).update(before)


def depth_mixing(
    model: nn.Module, *inputs: Any, per_token: bool = False, mixer: Mixer | str | None = None, **kwargs: Any
) -> Tensor:
    """M[way, site, source] of a model on one batch: model(*inputs, **kwargs).

    mixer: which one, of a model with several, as of an encoder and a decoder: the module itself or its name in the model.
    M[w, s, 0] is the weight with which site s reads the embedding, M[w, s, i + 1] that of site i's raw output; the last row is finish.
    Averaged over tokens and channels, or with per_token=True over channels only: [..., W, S+1, S+1].
    """
    chosen = _choose(model, mixer)
    with torch.no_grad(), record_sources(chosen) as sources:
        model(*inputs, **kwargs)
    if not sources:
        raise ValueError("depth_mixing: the model did not use this mixer on this batch")
    return chosen.mixing(sources, per_token)


def _choose(model: nn.Module, mixer: Mixer | str | None) -> Mixer:
    mixers = {name: m for name, m in model.named_modules() if isinstance(m, Mixer)}
    if mixer is None:
        if len(mixers) == 1:
            return next(iter(mixers.values()))
        which = f"; say which with mixer=, one of {', '.join(map(repr, mixers))}" if mixers else ""
        raise ValueError(f"depth_mixing: expected a model with one mixer, found {len(mixers)}{which}")
    for name, found in mixers.items():
        if mixer is found or (isinstance(mixer, str) and mixer == name):
            return found
    given = repr(mixer) if isinstance(mixer, str) else "this module"
    there = f"its mixers are {', '.join(map(repr, mixers))}" if mixers else "it has none"
    raise ValueError(f"depth_mixing: {given} is no mixer of the model; {there}{nearest(str(mixer), mixers)}")
