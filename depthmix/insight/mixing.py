"""Depth-mixing matrices of a model on a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.mixers import Mixer


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


def depth_mixing(model: nn.Module, *inputs: Any, per_token: bool = False, **kwargs: Any) -> Tensor:
    """M[way, site, source] of a model that holds one mixer, on one batch: model(*inputs, **kwargs).

    M[w, s, 0] is the weight with which site s reads the embedding, M[w, s, i + 1] that of site i's raw output; the last row is finish.
    Averaged over tokens and channels, or with per_token=True over channels only: [..., W, S+1, S+1].
    """
    mixers = [m for m in model.modules() if isinstance(m, Mixer)]
    if len(mixers) != 1:
        raise ValueError(f"depth_mixing: expected a model with one mixer, found {len(mixers)}")
    with torch.no_grad(), record_sources(mixers[0]) as sources:
        model(*inputs, **kwargs)
    return mixers[0].mixing(sources, per_token)
