"""Rules that add outputs to one stream: kernels add an output in the launch of the next norm.

    x_{s+1} = x_s + g_s ⊙ y_s

A state therefore holds the stream beside what was written last, until a read adds them up. Where kernels cannot run, `write` adds at
once, and the state holds the stream alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.mixers.checks import Norm
from depthmix.mixers.fast_path import FastPath
from depthmix.mixers.state import State, StreamState, last_rows, register_state
from depthmix.ops.backend import choose
from depthmix.ops.depth_sum.op import why_unsupported
from depthmix.ops.depth_sum.source_order import plain_sum, read_sums
from depthmix.ops.norm import fused_gains
from depthmix.ops.scaled_add import scaled_add, scaled_add_norm
from depthmix.ops.slots.op import add_norm, usable


@register_state
class PendingStream(State):
    """A stream, and an output that is still to be added to it."""

    x: Tensor  # [..., D]
    y: Tensor | None = None  # [..., D]
    scale: Tensor | None = None  # what y is still to be multiplied with, [D]

    def template(self) -> Tensor:
        return self.x

    def last(self, n: int) -> Any:
        x, y = last_rows(self.x, n), None if self.y is None else last_rows(self.y, n)
        return dataclasses.replace(self, x=x, y=y, note=None)


@register_state
class DecodedStream(PendingStream):
    """A stream in decoding, where no read records gradients."""


class AddLater(FastPath):
    """Training, and any other pass that decoding does not take."""

    def start(self, mixer: Any, x: Tensor) -> PendingStream | None:
        """Begin with nothing to add."""
        return PendingStream(x=x)

    def resume(self, mixer: Any, state: Any) -> PendingStream | None:
        """Continue any pass that is not frozen."""
        if state.frozen:
            return None
        resumed: PendingStream = state if type(state) is PendingStream else state.as_type(PendingStream)
        return resumed

    def to_plain(self, mixer: Any, state: PendingStream) -> StreamState:
        """Add what waits."""
        return StreamState(site=state.site, frozen=state.frozen, x=_total(state))

    def read(self, mixer: Any, state: PendingStream, site: int, norms: Sequence[Norm] | None) -> Tensor | None:
        """Return the stream with everything added, normed in the same launch."""
        if norms is None:
            return _total(state)
        fused = None if state.y is None else fused_gains(norms, state.x)
        if fused is None:
            return None
        assert state.y is not None
        (gain,), eps = fused
        x: Tensor | None
        if state.scale is not None:
            x, h = scaled_add_norm(state.x, state.y, state.scale, gain, eps)
        else:
            rows = gain.float().unsqueeze(0)  # whose gradient is fp32
            (h,), x, *_ = read_sums([state.x, state.y], plain_sum(rows, 1, 2), None, rows, eps, raw=0)
        state.leave_note(x)
        return h

    def finish(self, mixer: Any, state: PendingStream, norm: Norm | None) -> Tensor | None:
        """Read for the final norm, as a site reads."""
        return self.read(mixer, state, mixer.n_sites, None if norm is None else [norm])

    def write(self, mixer: Any, state: PendingStream, site: int, y: Tensor, scaled: bool) -> PendingStream:
        """Let an output wait where kernels can add it, or add it at once."""
        noted = state.take_note()
        x = _total(state) if noted is None else noted
        scale = None if scaled else mixer.gain(site)
        after: PendingStream = (
            state.next(x=x, y=y, scale=scale)
            if kernels_can_add(mixer, x, y)
            else state.next(x=added(x, y, scale), y=None, scale=None)
        )
        return after


class AddLaterDecoding(AddLater):
    """The plain residual without gradients."""

    def start(self, mixer: Any, x: Tensor) -> DecodedStream | None:
        """Begin a pass of few tokens; None for passes that train or have many."""
        return DecodedStream(x=x) if usable(mixer.name, x) else None

    def resume(self, mixer: Any, state: Any) -> DecodedStream | None:
        """Continue a pass that began here, as long as nobody wants gradients."""
        return state if type(state) is DecodedStream and not torch.is_grad_enabled() else None

    def read(self, mixer: Any, state: PendingStream, site: int, norms: Sequence[Norm] | None) -> Tensor | None:
        """Return the stream with everything added, normed in the same launch."""
        if norms is None:
            return _total(state)
        fused = fused_gains(norms, state.x)
        if fused is None:
            return None
        x, h = add_norm(state.x, state.y, fused[0][0], fused[1])
        state.leave_note(x)
        return h

    def write(self, mixer: Any, state: PendingStream, site: int, y: Tensor, scaled: bool) -> PendingStream:
        """Let an output wait for the next launch."""
        noted = state.take_note()
        after: PendingStream = state.next(x=_total(state) if noted is None else noted, y=y)
        return after


def _total(state: PendingStream) -> Tensor:
    """Return the stream with everything added."""
    total: Tensor = state.x if state.y is None else added(state.x, state.y, state.scale)
    return total


def added(x: Tensor, y: Tensor, gain: Tensor | None) -> Tensor:
    """Return x + gain ⊙ y, rounded once to x's dtype."""
    return (x + y if gain is None else scaled_add(x, y, gain)).to(x.dtype)


def kernels_can_add(mixer: Any, x: Tensor, y: Tensor) -> bool:
    """Tell whether a kernel can add y to x in the launch of the next norm."""
    if torch.compiler.is_compiling() or y.dtype != x.dtype:  # a compiler fuses by itself
        return False
    whole = type(x) is type(y) is Tensor  # not divided among processes
    wide = any(p.dtype == torch.float64 for p in mixer.parameters())
    return whole and choose(mixer.name, x, why_unsupported([x], wide=wide)) == "triton"


ADD_LATER = PendingStream.path = AddLater()
DECODING = DecodedStream.path = AddLaterDecoding()
