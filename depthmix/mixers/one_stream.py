"""What the rules share that keep one running stream, which every output joins in some way.

x_0 = e;   h_s = x_s;   x_{s+1} = join(x_s, y_s);   h_S = x_S

Where an output is added, as it is or with a weight for each channel, x_{s+1} = x_s + g_s ⊙ y_s, kernels add it in the launch of
the next norm: a stream waits with what was written last until it is read.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.mixers.base import Mixer, Norm, Read
from depthmix.mixers.state import State, StreamState, last_rows, register_state
from depthmix.ops.backend import choose
from depthmix.ops.depth_sum.op import why_unsupported
from depthmix.ops.depth_sum.source_order import plain_sum, read_sums
from depthmix.ops.norm import fused_gains
from depthmix.ops.scaled_add import scaled_add, scaled_add_norm


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


@register_state
class PendingStream(State):
    """A stream on kernels, and what is still to be added to it."""

    x: Tensor  # [..., D]
    y: Tensor | None = None
    scale: Tensor | None = None  # what y is still to be multiplied with, [D]

    def template(self) -> Tensor:
        return self.x

    def last(self, n: int) -> Any:
        x, y = last_rows(self.x, n), None if self.y is None else last_rows(self.y, n)
        return dataclasses.replace(self, x=x, y=y, note=None)


class AddedStream(OneStream):
    """Outputs are added, each with a weight or a vector of them."""

    def scale(self, site: int) -> Tensor | None:
        """What a site's output is multiplied with, [D]; None: nothing."""
        return None

    def _sum(self, x: Tensor, y: Tensor, scale: Tensor | None) -> Tensor:
        return (x + y if scale is None else scaled_add(x, y, scale)).to(x.dtype)

    def _read(self, state: Any, site: int) -> Tensor:
        """The stream with everything added."""
        waits = isinstance(state, PendingStream) and state.y is not None
        return self._sum(state.x, state.y, state.scale) if waits else state.x

    def _with_gradients(self, state: Any) -> StreamState:
        return self._settled(state)

    def _settled(self, state: Any) -> StreamState:
        return StreamState(site=state.site, frozen=state.frozen, x=self._read(state, state.site))

    def _write(self, state: Any, site: int, y: Tensor) -> Any:
        return self._add(state, site, y, self.scale(site))

    def _write_scaled(self, state: Any, site: int, y: Tensor) -> Any:
        return self._add(state, site, y, None)

    def _add(self, state: Any, site: int, y: Tensor, scale: Tensor | None) -> Any:
        x = state.take_note() if isinstance(state, PendingStream) else None
        x = self._read(state, site) if x is None else x
        if state.without_gradients:
            return state.next(x=x, y=y)
        after: dict[str, Any] = {"site": state.site + 1, "frozen": state.frozen}
        later = not state.frozen and self._adds_later(x, y)
        return (
            PendingStream(x=x, y=y, scale=scale, **after) if later else StreamState(x=self._sum(x, y, scale), **after)
        )

    def _finish(self, state: Any) -> Tensor:
        return self._read(state, self.n_sites)

    def _adds_later(self, x: Tensor, y: Tensor) -> bool:
        if torch.compiler.is_compiling() or y.dtype != x.dtype:  # a compiler fuses by itself
            return False
        whole = type(x) is type(y) is Tensor  # not divided among processes
        wide = any(p.dtype == torch.float64 for p in self.parameters())
        return whole and choose(self.name, x, why_unsupported([x], wide=wide)) == "triton"

    def _read_normed(self, state: Any, site: int, norms: Sequence[Norm]) -> Read | None:
        fused = fused_gains(norms, state.x) if isinstance(state, PendingStream) else None
        if fused is None:
            return None
        (gain,), eps = fused
        x, h = self._sum_and_norm(state, gain, eps)
        state.leave_note(x)
        return h

    def _sum_and_norm(self, state: Any, gain: Tensor, eps: float) -> tuple[Tensor | None, Tensor]:
        if state.scale is not None:
            return scaled_add_norm(state.x, state.y, state.scale, gain, eps)
        rows = gain.float().unsqueeze(0)  # whose gradient is fp32
        (h,), x, *_ = read_sums([state.x, state.y], plain_sum(rows, 1, 2), None, rows, eps, raw=0)
        return x, h

    def _finish_normed(self, state: Any, norm: Norm) -> Tensor | None:
        found: Any = self._read_normed(state, self.n_sites, [norm])
        return found
