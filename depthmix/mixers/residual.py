"""The plain residual connection.

x_0 = e;   h_s = x_s;   x_{s+1} = x_s + y_s;   h_S = x_S
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from depthmix.mixers.base import Mixer, Norm, Read, register
from depthmix.mixers.state import State, StreamState, last_rows, register_state
from depthmix.mixers.traffic import NORM, Published, Traffic, one_stream
from depthmix.ops.norm import fused_gains
from depthmix.ops.slots.op import add_norm, usable


class OneStream(Mixer):
    """Base of the rules with one running stream: they differ in how an output joins it."""

    units: tuple[float, float, float] = (3, 3, 0)  # of _join: moved forward and backward, kept besides the stream

    def traffic(self) -> list[Traffic]:
        forward, backward, kept = self.units
        return [Traffic(forward + NORM[0], backward + NORM[1], kept + 1)] * self.n_sites + [Traffic(*NORM, 1)]

    def state_tensors(self) -> list[dict[int, float]]:
        return one_stream(self.n_sites)

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


@register_state
class PendingStream(State):
    """The stream without gradients: the next read adds what was written last, in the launch of its norm."""

    without_gradients = True
    x: Tensor  # [..., D]
    y: Tensor | None = None

    def template(self) -> Tensor:
        return self.x

    def last(self, n: int) -> Any:
        x, y = last_rows(self.x, n), None if self.y is None else last_rows(self.y, n)
        return dataclasses.replace(self, x=x, y=y, note=None)

    def whole(self) -> Tensor:
        """x + y."""
        return self.x if self.y is None else (self.x + self.y).to(self.x.dtype)


@register("residual")
class Residual(OneStream):
    """Every earlier output with weight one."""

    def __init__(self, dim: int, n_blocks: int) -> None:
        super().__init__(dim, n_blocks)

    def published(self) -> Published:
        return Published(2, 1)  # the stream and the output, the stream

    def _join(self, state: StreamState, site: int, y: Tensor) -> Tensor:
        return state.x + y

    # Without gradients, on a GPU.

    def _start(self, x: Tensor) -> Any:
        return PendingStream(x=x) if usable(self.name, x) else super()._start(x)

    def _with_gradients(self, state: Any) -> StreamState:
        return StreamState(site=state.site, frozen=state.frozen, x=state.whole())

    def _read(self, state: Any, site: int) -> Tensor:
        return state.whole() if isinstance(state, PendingStream) else super()._read(state, site)

    def _normed(self, state: Any, norms: Sequence[Norm]) -> Tensor | None:
        fused = fused_gains(norms, state.x) if isinstance(state, PendingStream) else None
        if fused is None:
            return None
        x, h = add_norm(state.x, state.y, fused[0][0], fused[1])
        state.leave_note(x)
        return h

    def _read_normed(self, state: Any, site: int, norms: Sequence[Norm]) -> Read | None:
        return self._normed(state, norms)

    def _write(self, state: Any, site: int, y: Tensor) -> Any:
        if not isinstance(state, PendingStream):
            return super()._write(state, site, y)
        x = state.take_note()
        return state.next(x=state.whole() if x is None else x, y=y)

    def _finish(self, state: Any) -> Tensor:
        return state.whole() if isinstance(state, PendingStream) else super()._finish(state)

    def _finish_normed(self, state: Any, norm: Norm) -> Tensor | None:
        return self._normed(state, [norm])
