"""The plain residual connection.

x_0 = e;   h_s = x_s;   x_{s+1} = x_s + y_s;   h_S = x_S
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.mixers.base import Mixer, Norm, Read, register
from depthmix.mixers.state import State, StreamState, last_rows, register_state
from depthmix.mixers.traffic import NORM, Published, Traffic, one_stream
from depthmix.ops.backend import choose
from depthmix.ops.depth_sum.op import why_unsupported
from depthmix.ops.depth_sum.source_order import plain_sum, read_sums
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
    """A stream on kernels: the next read adds what was written last, in the launch of its norm."""

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


@register_state
class DecodedStream(PendingStream):
    """The same without gradients."""

    without_gradients = True


@register("residual")
class Residual(OneStream):
    """Every earlier output with weight one."""

    def __init__(self, dim: int, n_blocks: int) -> None:
        super().__init__(dim, n_blocks)

    def published(self) -> Published:
        return Published(2, 1)  # the stream and the output, the stream

    def traffic(self) -> list[Traffic]:
        first = Traffic(NORM[0], NORM[1] + 3, 1)  # whose gradient joins the stream's
        # x and y in, their sum and its norm out; the sum and both gradients in, one for x and y out
        return [first, *[Traffic(4, 4, 1)] * (self.n_sites - 1), Traffic(3 + NORM[0], NORM[1], 1)]

    def _start(self, x: Tensor) -> Any:
        return DecodedStream(x=x) if usable(self.name, x) else StreamState(x=x)

    def _with_gradients(self, state: Any) -> StreamState:
        return self._settled(state)

    def _settled(self, state: Any) -> StreamState:
        return StreamState(site=state.site, frozen=state.frozen, x=self._read(state, state.site))

    def _read(self, state: Any, site: int) -> Tensor:
        return state.whole() if isinstance(state, PendingStream) else state.x

    def _write(self, state: Any, site: int, y: Tensor) -> Any:
        x = state.take_note() if isinstance(state, PendingStream) else None
        x = self._read(state, site) if x is None else x
        if isinstance(state, DecodedStream):
            return state.next(x=x, y=y)
        after: dict[str, Any] = {"site": state.site + 1, "frozen": state.frozen}
        later = not state.frozen and self._adds_later(x, y)
        return PendingStream(x=x, y=y, **after) if later else StreamState(x=(x + y).to(x.dtype), **after)

    def _finish(self, state: Any) -> Tensor:
        return self._read(state, self.n_sites)

    def _adds_later(self, x: Tensor, y: Tensor) -> bool:
        if torch.compiler.is_compiling() or y.dtype != x.dtype:  # a compiler fuses by itself
            return False
        whole = type(x) is type(y) is Tensor  # not divided among processes
        return whole and choose(self.name, x, why_unsupported([x], wide=False)) == "triton"

    def _read_normed(self, state: Any, site: int, norms: Sequence[Norm]) -> Read | None:
        fused = fused_gains(norms, state.x) if isinstance(state, PendingStream) else None
        if fused is None:
            return None
        (gain,), eps = fused
        if isinstance(state, DecodedStream):
            x, h = add_norm(state.x, state.y, gain, eps)
        else:
            rows = gain.float().unsqueeze(0)
            (h,), x, *_ = read_sums([state.x, state.y], plain_sum(rows, 1, 2), None, rows, eps, raw=0)
        state.leave_note(x)
        return h

    def _finish_normed(self, state: Any, norm: Norm) -> Tensor | None:
        found: Any = self._read_normed(state, self.n_sites, [norm])
        return found
