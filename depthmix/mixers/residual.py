"""The plain residual connection.

x_0 = e;   h_s = x_s;   x_{s+1} = x_s + y_s;   h_S = x_S
"""

from typing import Any

from torch import Tensor

from depthmix.mixers.base import register
from depthmix.mixers.one_stream import AddedStream, PendingStream
from depthmix.mixers.state import StreamState, register_state
from depthmix.ops.slots.op import add_norm, usable


@register_state
class DecodedStream(PendingStream):
    """The stream without gradients."""

    without_gradients = True


@register("residual")
class Residual(AddedStream):
    """Every earlier output with weight one."""

    def __init__(self, dim: int, n_blocks: int) -> None:
        super().__init__(dim, n_blocks)

    def _start(self, x: Tensor) -> Any:
        return DecodedStream(x=x) if usable(self.name, x) else StreamState(x=x)

    def _sum_and_norm(self, state: Any, gain: Tensor, eps: float) -> tuple[Tensor | None, Tensor]:
        if state.without_gradients:
            return add_norm(state.x, state.y, gain, eps)
        return super()._sum_and_norm(state, gain, eps)
