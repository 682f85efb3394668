"""Gated residual streams: the write of a site waits for the read of the next.

    x, y -> [write, norm] x̂ -> W_down, silu, W_up -> [gated mean] h

Each bracket is one launch (ops/gated_streams). The state holds the streams before the write beside what is to be written. In half
precision x̂ and the products are stored in it, as published models of this rule do; sums and all else are in fp32. Where kernels cannot
run, the rule itself does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from depthmix.mixers.checks import Norm
from depthmix.mixers.fast_path import FastPath
from depthmix.mixers.state import register_state
from depthmix.mixers.streams import GatedState
from depthmix.ops import stream_write
from depthmix.ops.backend import choose
from depthmix.ops.gated_streams import gated_mean, write_norm
from depthmix.ops.gated_streams.op import why_unsupported
from depthmix.ops.matmul import matmul


class Tape(NamedTuple):
    """Parameters of every reader, unbound once per pass, so that a parameter's gradient is put together once."""

    gain: Sequence[Tensor]  # [n, D]
    down: Sequence[Tensor]  # [n D, R]
    up: Sequence[Tensor]  # [R, n D]
    inject: Sequence[Tensor]  # [n D, n], of all readers but finish
    trained: bool  # made with gradients


class Note(NamedTuple):
    """Results of a read that the write of its site uses."""

    x: Tensor  # [..., n, D], with nothing left to write
    normed: Tensor  # [N, n, D]
    tape: Tape


@register_state
class PendingGatedStreams(GatedState):
    """n streams, and what the last site writes to them."""

    y: Tensor | None = None  # [..., D]
    post: Tensor | None = None  # [..., n]
    tape: Tape | None = dataclasses.field(default=None, repr=False, metadata={"cache": True})


class GatedSteps(FastPath):
    """Passes that kernels can run and whose weights are not frozen."""

    def start(self, mixer: Any, x: Tensor) -> PendingGatedStreams | None:
        """Begin with n streams that are all the embedding."""
        plain = mixer._start(x)
        state: PendingGatedStreams | None = plain.as_type(PendingGatedStreams) if _kernels(mixer, plain) else None
        return state

    def resume(self, mixer: Any, state: Any) -> PendingGatedStreams | None:
        """Continue any pass that kernels can run and whose weights are not frozen."""
        if state.frozen or not _kernels(mixer, state):
            return None
        resumed: PendingGatedStreams = (
            state if isinstance(state, PendingGatedStreams) else state.as_type(PendingGatedStreams)
        )
        return resumed

    def to_plain(self, mixer: Any, state: PendingGatedStreams) -> GatedState:
        """Write what waits."""
        y, post = state.y, state.post
        x = state.x if y is None or post is None else stream_write(state.x, None, post, y)
        plain: GatedState = state.as_type(GatedState, x=x)
        return plain

    def read(self, mixer: Any, state: PendingGatedStreams, site: int, norms: Sequence[Norm] | None) -> Tensor | None:
        """Write what waits, and read a site. The caller applies the norms."""
        if norms is not None:
            return None
        note = self._written(mixer, state, site)
        state.leave_note(note)
        return self._mean(mixer, note, site)

    def write(self, mixer: Any, state: PendingGatedStreams, site: int, y: Tensor, scaled: bool) -> PendingGatedStreams:
        """Let an output wait for the next read."""
        note: Note = state.take_note() or self._written(mixer, state, site)
        logits = matmul(note.normed.flatten(1), note.tape.inject[site]) / mixer.n
        post = 2 * torch.sigmoid(logits.float()).view(note.x.shape[:-1])
        after: PendingGatedStreams = state.next(x=note.x, y=y, post=post, tape=note.tape)
        return after

    def finish(self, mixer: Any, state: PendingGatedStreams, norm: Norm | None) -> Tensor | None:
        """Write what waits, and read for the final norm, which the caller applies."""
        if norm is not None:
            return None
        return self._mean(mixer, self._written(mixer, state, mixer.n_sites), mixer.n_sites)

    def _written(self, mixer: Any, state: PendingGatedStreams, reader: int) -> Note:
        """Write what waits, and norm the streams for a reader."""
        tape, x = self._tape(mixer, state), state.x
        y = None if state.y is None else state.y.reshape(-1, mixer.dim)
        post = None if state.post is None else state.post.reshape(-1, mixer.n)
        new, normed = write_norm(x.reshape(-1, mixer.n, mixer.dim), y, post, tape.gain[reader], mixer.eps)
        return Note(new.view(x.shape), normed, tape)

    def _mean(self, mixer: Any, note: Note, reader: int) -> Tensor:
        """Average the normed streams of a reader with its gates."""
        hidden = functional.silu(matmul(note.normed.flatten(1), note.tape.down[reader]) / mixer.n)
        z = matmul(hidden, note.tape.up[reader]).view_as(note.normed)
        return gated_mean(z, note.normed).view(*note.x.shape[:-2], mixer.dim)

    def _tape(self, mixer: Any, state: PendingGatedStreams) -> Tape:
        """Return the tape of a state, or a new one for a state that comes from elsewhere."""
        tape, trained = state.tape, torch.is_grad_enabled()
        if tape is None or tape.trained != trained:
            down, up, inject = (p.to(state.x.dtype).unbind(0) for p in (mixer.W_down, mixer.W_up, mixer.W_inject))
            tape = Tape(mixer.gain.unbind(0), down, up, inject, trained)
        return tape


def _kernels(mixer: Any, state: GatedState) -> bool:
    """Tell whether kernels can go on with a state. A compiler fuses the rule by itself."""
    if torch.compiler.is_compiling():
        return False
    whole = type(state.x) is Tensor  # not divided among processes
    return whole and choose(mixer.name, state.x, why_unsupported(state.x, mixer.gain)) == "triton"


STEPS = PendingGatedStreams.path = GatedSteps()
