"""Attention over depth (attnres) in training: one node of autograd per read, which applies the norms that follow it.

Kernels run where they can. They take the queries of all sites as one table and remember each source as their own autograd knows it
(ops/depth_attention/source_order.py). Elsewhere `depth_attention` computes the same in plain PyTorch.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix.mixers.attnres import AttnRes, AttnResState
from depthmix.mixers.checks import Norm, Read
from depthmix.mixers.fast_path import FastPath
from depthmix.mixers.state import register_state
from depthmix.ops import depth_sum
from depthmix.ops.backend import choose
from depthmix.ops.backward_mail import guarded_view
from depthmix.ops.depth_attention.op import is_usual, why_unsupported
from depthmix.ops.depth_attention.precomputed_logits import (
    KNOWN_WAYS,
    FirstRead,
    GroupMixtures,
    KnownLogits,
    precompute_block_group,
    precompute_group,
    precompute_logits,
)
from depthmix.ops.depth_attention.reference_autograd import Options
from depthmix.ops.depth_attention.source_order import OP, is_pair, read_sources
from depthmix.ops.norm import fused_gains, side_by_side
from depthmix.ops.row_gradients import collect_rows
from depthmix.ops.torch_internals import transformed


class Tape(NamedTuple):
    """Kernel-side twin of the state: all queries with key gains folded in, and the sources that autograd tracks."""

    queries: Tensor  # [R, D], the ways of a site side by side
    blocks: tuple[Tensor, ...]
    partial: Tensor | None
    far: GroupMixtures | KnownLogits | None = None  # what was computed for later sites


@register_state
class TapeState(AttnResState):
    """The rule's state, and the tape of the kernels; None where the pass runs in plain PyTorch."""

    tape: Tape | None = dataclasses.field(default=None, repr=False, metadata={"cache": True})

    def last(self, n: int) -> Any:
        state = super().last(n)
        if self.tape is not None:
            state.tape = self.tape._replace(blocks=state.blocks, partial=state.partial, far=None)
        return state


class KernelNote(NamedTuple):
    """Results of a read with kernels that the write of its site uses."""

    newest: Tensor
    tape: Tape


class AttentionTraining(FastPath):
    """Training, and any other pass that decoding with slots does not take."""

    def start(self, mixer: Any, x: Tensor) -> TapeState:
        """Begin a pass with the embedding x [..., D]."""
        state = TapeState(pending=x, stream=x if mixer.routing == "add" else None)
        state.tape = self.tape(mixer, state)
        return state

    def resume(self, mixer: Any, state: Any) -> TapeState | None:
        """Continue any pass whose weights are not frozen."""
        if state.frozen:
            return None
        resumed: TapeState = state if isinstance(state, TapeState) else state.as_type(TapeState)
        return resumed

    def to_plain(self, mixer: Any, state: TapeState) -> AttnResState:
        """Return the state without the tape."""
        plain: AttnResState = state.as_type(AttnResState)
        return plain

    def read(self, mixer: Any, state: TapeState, site: int, norms: Sequence[Norm] | None) -> Read | None:
        """Read with kernels, or in plain PyTorch, with RMSNorms applied before the one rounding."""
        gains: tuple[Any, ...] = ()
        if norms is not None:
            fused = fused_gains(norms, state.template())
            if mixer.routing == "add" or mixer.weights == "static" or fused is None:
                return None
            gains = fused
        h = mixer.routed(state, self.mix(mixer, state, site, *gains))
        return h if len(h) > 1 else h[0]

    def finish(self, mixer: Any, state: TapeState, norm: Norm | None) -> Tensor | None:
        """Apply the final norm in the read only where kernels run without gradients."""
        if norm is None:
            return self.mix(mixer, state, mixer.n_sites)[0] if state.stream is None else state.stream
        if torch.is_grad_enabled() or state.tape is None:
            return None
        h: Any = self.read(mixer, state, mixer.n_sites, [norm])
        return h

    def write(self, mixer: Any, state: TapeState, site: int, y: Tensor, scaled: bool) -> TapeState:
        """Append the source that the read of this site has added up."""
        note = state.take_note()
        newest, tape = note if isinstance(note, KernelNote) else (note, None)
        outside = newest if tape is None else guarded_view(newest, OP)
        after: TapeState = mixer.after(state, site, y if scaled else with_gain(mixer, site, y), outside)
        after.tape = None
        if tape is not None:
            opens = site % mixer.block_size == 0
            blocks = mixer.windowed((*tape.blocks, newest)) if opens else tape.blocks
            after.tape = tape._replace(blocks=blocks, partial=None if opens else newest)
        return after

    def mix(
        self, mixer: Any, state: TapeState, site: int, out_gain: Sequence[Tensor] = (), out_eps: float = 0.0
    ) -> tuple[Tensor, ...]:
        """Return the mixtures of a site or finish; out_gain, out_eps: of the norms that follow, [D] per way."""
        tape = self.tape(mixer, state)
        if tape is not None:
            return _mix_with_kernels(mixer, state, tape, site, out_gain, out_eps)
        call: dict[str, Any] = {"out_gain": side_by_side(out_gain), "out_eps": out_eps} if out_gain else {}
        # The paper's ablations have kernels of their own, read by read.
        by_read = not is_usual_rule(mixer) and why_no_kernels(mixer, (*state.blocks, state.newest())) is None
        mixed: tuple[Tensor, ...] = mixer.mixtures(state, site, **call, backend=None if by_read else "reference")
        return mixed

    def tape(self, mixer: Any, state: TapeState) -> Tape | None:
        """Return the state's tape, or a new one for a state that has none; None where kernels cannot run."""
        partial = () if state.partial is None else (state.partial,)
        why = why_no_kernels(mixer, [*state.blocks, state.pending, *partial])
        tape = state.tape if why is None and not transformed() else None
        if why is not None and state.blocks:  # an output in another dtype: the reference steps in
            return None
        if tape is None and choose("attnres", state.pending, why) == "triton" and is_usual_rule(mixer):
            tape = Tape(collect_rows(self.queries(mixer), OP), state.blocks, state.partial)
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in mixer.parameters())
        if tape is not None and trained and not tape.queries.requires_grad:  # made under no_grad
            tape = tape._replace(queries=collect_rows(self.queries(mixer), OP), far=None)
        return tape

    def queries(self, mixer: Any) -> Tensor:
        """Return query ⊙ key_gain of every reader: [R, D], the ways of a site side by side, finish's last."""
        u: Tensor = mixer.query.float() * mixer.key_gain.float()
        u = u if mixer.logit_scale == 1.0 else u * mixer.logit_scale
        if mixer.n_ways == 1:
            return u
        further = (
            further_rows(mixer, "query").float() * further_rows(mixer, "key_gain").float() * mixer.logit_scale
        )  # [A, W-1, D]
        ends = [0, *(site + 1 for site in mixer.nth_several), len(u)]
        *parts, rest = u.split([b - a for a, b in itertools.pairwise(ends)])  # each ends with an attention site
        return torch.cat([*itertools.chain(*zip(parts, further.unbind(0), strict=True)), rest])


def with_gain(mixer: AttnRes, site: int, y: Tensor) -> Tensor:
    """Return an output multiplied with its gain."""
    return y if mixer.output_gain is None else depth_sum((y,), static=mixer.gamma[site].reshape(1, 1, -1))[0]


def why_no_kernels(mixer: AttnRes, tensors: Sequence[Tensor]) -> str | None:
    """Say why kernels cannot mix these sources; None if they can."""
    wide = any(p.dtype == torch.float64 for p in mixer.parameters())
    return why_unsupported(tensors, wide=wide, heads=mixer.heads)


def is_usual_rule(mixer: AttnRes) -> bool:
    """Tell whether kernels of whole stacks know the options; the paper's ablations have kernels read by read."""
    options = Options(mixer.eps, mixer.key_norm, mixer.heads, mixer.weights, mixer.value_norm)
    return is_usual(options, static=mixer.query_from == "learned")


def further_before(mixer: AttnRes, site: int) -> int:
    """Count the rows for the ways after the first that belong to the readers before `site`."""
    return (mixer.n_ways - 1) * sum(s < site for s in mixer.nth_several)


def further_rows(mixer: AttnRes, name: str) -> Tensor:
    """Return the rows of a parameter for the ways after the first: [A, W-1, D]."""
    rows: Tensor = mixer.further(name)
    return rows.unsqueeze(1) if mixer.n_ways == 2 else rows


def _mix_with_kernels(
    mixer: Any, state: TapeState, tape: Tape, site: int, out_gain: Sequence[Tensor], out_eps: float
) -> tuple[Tensor, ...]:
    ways, size = mixer.ways(site), mixer.block_size
    row = site + further_before(mixer, site)
    newest, add = (state.pending, None) if tape.partial is None else (tape.partial, state.pending)
    sources = (*mixer.windowed(tape.blocks), newest)
    trains = torch.is_grad_enabled()
    gain: Tensor | Sequence[Tensor] | None = out_gain or None  # kernels take any, where they lie
    if trains and out_gain:
        gain = side_by_side(out_gain).float()  # a gradient is fp32
    known = (tape.queries, row, sources[:-1], tape.far, mixer.eps)
    far: GroupMixtures | KnownLogits | None = None
    lasts = site % size == 0 and site < mixer.n_sites
    # A pair of sources needs nothing that was computed ahead.
    if mixer.window is None and not (trains and is_pair(len(sources), ways, lasts)):
        if mixer.n_ways >= KNOWN_WAYS:
            far = precompute_logits(*known)
        elif size == 1:
            first_read = None if trains else FirstRead(newest, out_gain[0] if out_gain else None, out_eps)
            far = precompute_group(*known, first_read)
        elif not trains:
            far = precompute_block_group(*known, size=size)
    tape = tape._replace(far=far)
    h, newest = read_sources(tape.queries, row, ways, sources, add, gain, mixer.eps, out_eps, tape.far, lasts)
    state.leave_note(KernelNote(newest, tape if tape.far is None else tape._replace(far=tape.far.after(row))))
    return tuple(h)


TRAINING = TapeState.path = AttentionTraining()
