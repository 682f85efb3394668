"""Measure the residual streams of rules with several streams: their similarity and the gains of their maps.

The map of a site is the matrix by which its write mixes the streams. Gains are defined as in arXiv 2512.24880: the largest absolute row
sum of a map bounds its gain for signals, the largest absolute column sum its gain for gradients. The composite map at a site is the
product of all maps up to the site.

The type of a state tells whether its rule keeps streams. A rule with a state of its own registers two functions for it
(`register_streams`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix.insight.sampling import some_tokens
from depthmix.mixers import Mixer
from depthmix.mixers.fast_path import plain_state
from depthmix.mixers.streams import GatedState, StreamMixer, StreamsState
from depthmix.ops.precision import compute_dtype, without_autocast

TOKENS = 1024


class StreamFunctions(NamedTuple):
    """Find the streams of one type of state. Both functions take a mixer and its plain state."""

    streams: Callable[[Any, Any], Tensor | None]  # [..., n, D]
    map: Callable[[Any, Any], Tensor | None]  # [..., n, n], the written stream first


_FUNCTIONS: dict[type, StreamFunctions] = {}


def register_streams(
    state: type, streams: Callable[[Any, Any], Tensor | None], map: Callable[[Any, Any], Tensor | None]
) -> None:
    """Say how to find the streams of states of a type, and the map of the write that comes next.

    Args:
        state: The type of a rule's own states.
        streams: Maps (mixer, state) to the streams [..., n, D].
        map: Maps (mixer, state) to the map [..., n, n] of the state's site. Rows are the streams that are written.
    """
    _FUNCTIONS[state] = StreamFunctions(streams, map)


def streams_of(mixer: Mixer, state: Any) -> Tensor | None:
    """Return the n residual streams of a state, [..., n, D]; None for a rule that keeps no such streams."""
    plain = plain_state(mixer, state)
    functions = _FUNCTIONS.get(type(plain))
    return None if functions is None else functions.streams(mixer, plain)


def stream_map(mixer: Mixer, state: Any) -> Tensor | None:
    """Return the matrix by which the write of the state's site mixes the streams, [..., n, n], the written stream first.

    None for a rule that keeps no such streams.
    """
    plain = plain_state(mixer, state)
    functions = _FUNCTIONS.get(type(plain))
    if functions is None:
        return None
    with without_autocast(plain.template()):
        return functions.map(mixer, plain)


def _map_of_streams(mixer: StreamMixer, state: StreamsState) -> Tensor:
    _, _, res = mixer._coefficients(state, mixer._parameters_of(state.site))
    if res is None:
        return _no_map(mixer, state)
    return res.expand(*state.x.shape[:-2], mixer.n, mixer.n)


def _no_map(mixer: Any, state: Any) -> Tensor:
    eye = torch.eye(mixer.n, device=state.x.device, dtype=compute_dtype(state.x))
    return eye.expand(*state.x.shape[:-2], mixer.n, mixer.n)


register_streams(StreamsState, lambda mixer, state: state.x, _map_of_streams)
register_streams(GatedState, lambda mixer, state: state.x, _no_map)


@dataclass
class Streams:
    """Measurements of streams: means over tokens, and maxima over tokens in fields called largest."""

    similarity: Tensor  # [S+1, n, n], cosines between streams before every site, and at the end
    rms: Tensor  # [S+1, n]
    row_error: Tensor  # [S], |row sum − 1| of a site's map; 0 preserves the size of a signal
    column_error: Tensor  # [S]
    largest_row_error: Tensor  # [S], over all tokens
    largest_column_error: Tensor  # [S]
    gain: Tensor  # [S, 2], of a site's map for signals and for gradients
    composite_gain: Tensor  # [S, 2], of the composite map at a site


@torch.no_grad()
def stream_report(mixer: Mixer, sources: Sequence[Tensor]) -> Streams | None:
    """Measure the streams on a few tokens.

    Args:
        mixer: The rule.
        sources: The embedding and the raw output of every site, [..., D] each (`sources_of`).

    Returns:
        The measurements; None for a rule without streams.
    """
    with without_autocast(sources[0]):
        return _report(mixer, *some_tokens(sources, TOKENS))


def _report(mixer: Mixer, e: Tensor, *outputs: Tensor) -> Streams | None:
    state = mixer.start(e)
    product: Tensor | None = None
    alike, size, errors, gains = [], [], [], []
    for site in range(mixer.n_sites + 1):
        x = streams_of(mixer, state)  # [N, n, D]
        if x is None:
            return None
        unit = torch.nn.functional.normalize(x.float(), dim=-1)
        alike.append((unit @ unit.mT).mean(0))
        size.append(x.float().square().mean((0, 2)).sqrt())
        if site == mixer.n_sites:
            break
        by = stream_map(mixer, state)  # [N, n, n]
        assert by is not None
        product = by if product is None else by @ product
        off = [(by.sum(d) - 1).abs() for d in (-1, -2)]
        errors.append(torch.stack([*(o.mean() for o in off), *(o.max() for o in off)]))
        gains.append(torch.stack([_gains(by), _gains(product)]))
        state = mixer.write(state, site, outputs[site])
    error, gain = torch.stack(errors).cpu(), torch.stack(gains).cpu()
    return Streams(torch.stack(alike).cpu(), torch.stack(size).cpu(), *error.unbind(-1), *gain.unbind(1))


def _gains(m: Tensor) -> Tensor:
    return torch.stack([m.abs().sum(d).amax(-1).mean() for d in (-1, -2)])
