"""n residual streams, which Hyper-Connections and mHC share."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from depthmix.mixers.base import Mixer
from depthmix.mixers.fast_path import FastPath
from depthmix.mixers.state import State, register_state
from depthmix.ops import stream_read, stream_write
from depthmix.ops.precision import compute_dtype
from depthmix.ops.stream_mix.rules import Rule


@register_state
class StreamsState(State):
    """n streams."""

    x: Tensor  # [..., n, D]
    pre: Tensor | None = None  # [..., n], for a read with the weights that the site before predicted

    def template(self) -> Tensor:
        return self.x.select(-2, 0)


@register_state
class GatedState(State):
    """n streams, for rules that mix them channel by channel."""

    x: Tensor  # [..., n, D]

    def template(self) -> Tensor:
        return self.x.select(-2, 0)


def copies(x: Tensor, n: int) -> Tensor:
    """Return n streams that are all the embedding: [..., D] -> [..., n, D]."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], n, x.shape[-1])


class StreamMixer(Mixer):
    """Base of the rules over n streams. Subclasses say what their weights are."""

    fast_paths: ClassVar[tuple[str | FastPath, ...]] = ("depthmix.fast.streams:STEPS",)
    n: int

    # What a rule implements.

    def _coefficients(self, state: StreamsState, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return pre and post [..., n] and res [..., n, n] (output stream first; None for the identity) for the streams of a state.

        pre is for the read of this site or, where reads have the weights of the site before, of the next.
        parameters: those of the site, as `_for_all_sites` gives them.
        """
        raise NotImplementedError

    def _rule(self) -> Rule | None:
        """Describe how these weights come from the streams; None if they are the same for every token."""
        raise NotImplementedError

    def _for_all_sites(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return w, base and scale of the rule for all sites, [S, ...], or without a rule pre, post and res."""
        raise NotImplementedError

    def _last_read(self, state: StreamsState) -> Tensor | None:
        """Return the weights [..., n] or [n] of finish, if they are known before the last write; otherwise None."""
        return torch.ones(self.n, device=state.x.device, dtype=compute_dtype(state.x))

    def _head(self, state: StreamsState) -> Tensor:
        """Return the weights of finish, where they follow from the streams."""
        raise NotImplementedError

    # The rule.

    def _start(self, x: Tensor) -> StreamsState:
        return StreamsState(x=copies(x, self.n), pre=self._first_read(x))

    def _parameters_of(self, site: int) -> tuple[Tensor, ...]:
        return tuple(p[site] for p in self._for_all_sites())

    def _first_read(self, x: Tensor) -> Tensor | None:
        """Return the weights of the first read where those of a read come from the site before."""
        return None

    def _read(self, state: StreamsState, site: int) -> Tensor:
        if state.pre is not None:
            return stream_read(state.x, state.pre)
        coefficients = self._coefficients(state, self._parameters_of(site))
        state.leave_note(coefficients)
        return stream_read(state.x, coefficients[0])

    def _write(self, state: StreamsState, site: int, y: Tensor) -> StreamsState:
        pre, post, res = state.take_note() or self._coefficients(state, self._parameters_of(site))
        after: StreamsState = state.next(x=stream_write(state.x, res, post, y), pre=None if state.pre is None else pre)
        return after

    def _finish(self, state: StreamsState) -> Tensor:
        pre = self._last_read(state)
        return stream_read(state.x, self._head(state) if pre is None else pre)
