"""What the rules share that keep one running stream, which every output joins in some way.

x_0 = e;   h_s = x_s;   x_{s+1} = join(x_s, y_s);   h_S = x_S

Most of them add an output, as it is or with a weight for each channel: x_{s+1} = x_s + g_s ⊙ y_s.
"""

from typing import ClassVar

from torch import Tensor

from depthmix.mixers.base import Mixer
from depthmix.mixers.fast_path import FastPath
from depthmix.mixers.state import StreamState
from depthmix.ops.scaled_add import scaled_add


class OneStream(Mixer):
    """Base of the rules with one running stream: they differ in how an output joins it."""

    def _start(self, x: Tensor) -> StreamState:
        return StreamState(x=x)

    def _read(self, state: StreamState, site: int) -> Tensor:
        return state.x

    def _write(self, state: StreamState, site: int, y: Tensor) -> StreamState:
        return state.next(x=self._join(state, site, y).to(state.x.dtype))

    def _finish(self, state: StreamState) -> Tensor:
        return state.x

    def _join(self, state: StreamState, site: int, y: Tensor) -> Tensor:
        """The stream after site produced y, not rounded."""
        raise NotImplementedError


class AddedStream(OneStream):
    """Outputs are added, each with a weight or a vector of them."""

    fast_paths: ClassVar[tuple[str | FastPath, ...]] = ("depthmix.fast.one_stream:ADD_LATER",)

    def scale(self, site: int) -> Tensor | None:
        """What a site's output is multiplied with, [D]; None: nothing."""
        return None

    def _write(self, state: StreamState, site: int, y: Tensor) -> StreamState:
        return state.next(x=self.added(state.x, y, self.scale(site)))

    def _write_scaled(self, state: StreamState, site: int, y: Tensor) -> StreamState:
        return state.next(x=self.added(state.x, y, None))

    def added(self, x: Tensor, y: Tensor, scale: Tensor | None) -> Tensor:
        """Return x + scale ⊙ y, rounded once to x's dtype."""
        return (x + y if scale is None else scaled_add(x, y, scale)).to(x.dtype)
