"""The plain residual connection.

x_0 = e;   h_s = x_s;   x_{s+1} = x_s + y_s;   h_S = x_S
"""

from torch import Tensor

from depthmix.mixers.base import Mixer, register
from depthmix.mixers.state import StreamState


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


@register("residual")
class Residual(OneStream):
    """Every earlier output with weight one."""

    def __init__(self, dim: int, n_blocks: int) -> None:
        super().__init__(dim, n_blocks)

    def _join(self, state: StreamState, site: int, y: Tensor) -> Tensor:
        return state.x + y
