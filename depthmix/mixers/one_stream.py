"""A running stream that every output joins: what most rules of the residual family share.

x_0 = e;   h_s = x_s;   x_{s+1} = join(x_s, y_s);   h_S = x_S

Most of them add an output, as it is or with a weight for each channel: x_{s+1} = x_s + g_s ⊙ y_s.
"""

from typing import ClassVar

from torch import Tensor

from depthmix.mixers.base import Mixer
from depthmix.mixers.fast_path import FastPath
from depthmix.mixers.state import StreamState


class OneStream(Mixer):
    """Base of the rules with one running stream. They differ in how an output joins it (`_join`)."""

    def _start(self, x: Tensor) -> StreamState:
        return StreamState(x=x)

    def _read(self, state: StreamState, site: int) -> Tensor:
        return state.x

    def _write(self, state: StreamState, site: int, y: Tensor) -> StreamState:
        return state.next(x=self._join(state, site, y).to(state.x.dtype))

    def _finish(self, state: StreamState) -> Tensor:
        return state.x

    def _join(self, state: StreamState, site: int, y: Tensor) -> Tensor:
        """Return the stream after a site's output y, not rounded."""
        raise NotImplementedError


class AddedStream(OneStream):
    """Base of the rules that add outputs, each multiplied with a gain or as it is."""

    fast_paths: ClassVar[tuple[str | FastPath, ...]] = ("depthmix.fast.one_stream:ADD_LATER",)

    def gain(self, site: int) -> Tensor | None:
        """Return the gain [D] of a site's output, as in `output_gains`; None if there is none."""
        return None

    def _join(self, state: StreamState, site: int, y: Tensor) -> Tensor:
        return state.x + y
