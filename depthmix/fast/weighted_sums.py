"""Weighted sums of a stack (grn, dca, denseformer, mudd) in training: one node of autograd per read, which applies the norms that follow it.

Kernels run where they can. They score an entry for all of its readers when they make it, and remember it as their own autograd
knows it (ops/depth_sum/source_order.py). Elsewhere the same is done in plain PyTorch: one node scores an entry, one node reads.
A state lets the newest entry wait in its parts, so that the read that sees it first adds it up.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix.fast.score_rows import projection_table, readers_of, score_rows
from depthmix.mixers.block_stack import StackState
from depthmix.mixers.checks import Norm, Read
from depthmix.mixers.fast_path import FastPath
from depthmix.mixers.reader_weights import ReaderWeights
from depthmix.mixers.state import last_of, register_state
from depthmix.ops.autograd import uses_custom_backward
from depthmix.ops.backend import choose
from depthmix.ops.backward_mail import guarded_view
from depthmix.ops.depth_sum.coefficients import coefficients
from depthmix.ops.depth_sum.op import depth_sum, depth_sum_normed, source_scores, why_unsupported
from depthmix.ops.depth_sum.source_order import (
    ADDED,
    CLAMPED,
    OP,
    SUM_CLAMPED,
    Weights,
    make_source,
    plain_sum,
    read_sums,
    split_rows,
)
from depthmix.ops.norm import fused_gains, rms_norm, side_by_side
from depthmix.ops.row_gradients import collect_rows
from depthmix.ops.slots.op import add_norm

RELU = {None: ADDED, "dynamic": CLAMPED, "sum": SUM_CLAMPED}
Gains = Tensor | Sequence[Tensor]  # of norms: [W, D], or without gradients one row for each


class KernelScores(NamedTuple):
    """Products of one entry with the rows of all readers from `first_reader` on."""

    products: Tensor  # [N, R], readers one after the other
    first_reader: int

    def for_reader(self, reader: int, ways: Sequence[int]) -> Tensor:
        """Return one reader's scores [N, W]; ways: the number of mixtures of every reader."""
        start = sum(ways[self.first_reader : reader])
        return self.products[:, start : start + ways[reader]]

    def last(self, n: int, tokens: Sequence[int]) -> "KernelScores":
        """Return the scores of the last n tokens of each sequence; tokens: [..., T]."""
        return self._replace(products=self.products.view(*tokens, -1)[..., -n:, :].flatten(0, -2))


class Tape(NamedTuple):
    """Kernel-side twin of the state: the entries that autograd tracks, and their scores."""

    stack: tuple[Tensor, ...]
    scores: tuple[KernelScores | None, ...]
    table: Tensor | None  # projections of all readers, where weights are scores: [R, D]
    halves: Any  # the table in two parts, with which scores are made
    differentiable: bool


class EntryScores(NamedTuple):
    """Scores of an entry without kernels, for all readers from `first_reader` on."""

    first_reader: int
    by_reader: tuple[Tensor, ...]  # [ways, ...] each


class KnownScores(NamedTuple):
    """Scores of every entry in passes without kernels, made once for all later readers."""

    table: Tensor  # [R, D]
    by_entry: tuple[EntryScores, ...]


@register_state
class PendingStack(StackState):
    """The stack without its newest entry, which waits in one or two parts until a read adds them up.

    With `accumulates`, `g` and `delta` are the two parts of what the next site of the block reads.
    """

    pending: tuple[Tensor, ...] | None = None
    tape: Tape | KnownScores | None = dataclasses.field(default=None, repr=False, metadata={"cache": True})

    def last(self, n: int) -> "PendingStack":
        pending = None if self.pending is None else last_of(self.pending, n)
        tape = self.tape if isinstance(self.tape, Tape) else None
        if tape is not None:
            shape = self.stack[0].shape[:-1]
            scores = (None if s is None else s.last(n, shape) for s in tape.scores)
            tape = tape._replace(stack=last_of(tape.stack, n), scores=tuple(scores))
        cut: PendingStack = super().last(n).as_type(PendingStack, pending=pending, tape=tape)
        return cut


class Note(NamedTuple):
    """Results of a block's first read that the write of its site uses."""

    g: Tensor
    stack: tuple[Tensor, ...]  # with the entry that waited
    tape: Tape | KnownScores | None


class WeightedSums(FastPath):
    """Training, and any other pass that decoding does not take."""

    def start(self, mixer: Any, x: Tensor) -> PendingStack:
        """Begin a pass with the embedding x [..., D]."""
        state = PendingStack(stack=(x,))
        state.tape = self.tape(mixer, state) if use_kernels(mixer, state) else None
        return state

    def resume(self, mixer: Any, state: Any) -> PendingStack | None:
        """Continue any pass whose weights are not frozen."""
        if state.frozen:
            return None
        resumed: PendingStack = state if isinstance(state, PendingStack) else state.as_type(PendingStack)
        return resumed

    def to_plain(self, mixer: Any, state: PendingStack) -> StackState:
        """Add up what waits."""
        stack, g, delta = state.stack, state.g, state.delta
        if state.pending is not None:
            stack = mixer.push(stack, total(state.pending))
        if mixer.accumulates and g is not None and delta is not None:
            g, delta = g + delta, None
        plain: StackState = state.as_type(StackState, stack=stack, g=g, delta=delta)
        return plain

    def read(self, mixer: Any, state: PendingStack, site: int, norms: Sequence[Norm] | None) -> Read | None:
        """Read a site, with its RMSNorms applied by the same node where one can."""
        begins, reader = mixer.layout.begins[site], mixer.layout.block[site]
        if norms is None:
            return way_or_ways(self.mixtures(mixer, state, reader)) if begins else read_inside(mixer, state)
        kernels, trains = use_kernels(mixer, state), torch.is_grad_enabled()
        fused = fused_gains(norms, state.template()) if kernels or uses_custom_backward() else None
        if fused is None:
            return None
        gains, eps = fused
        # Kernels that only read take the gains where they lie. A gradient is fp32.
        gain: Gains = gains if kernels and not trains else side_by_side(gains)
        gain = gain.float() if kernels and isinstance(gain, Tensor) else gain
        if not begins:
            return read_inside_normed(mixer, state, gain, eps, kernels)
        return way_or_ways(self.mixtures(mixer, state, reader, gain, eps))

    def write(self, mixer: Any, state: PendingStack, site: int, y: Tensor, scaled: bool) -> PendingStack:
        """Let the sums wait that the next read computes."""
        begins, ends, accumulates = mixer.layout.begins[site], mixer.layout.ends[site], mixer.accumulates
        note = state.take_note()
        if begins and note is None:
            self.mixtures(mixer, state, mixer.layout.block[site])
            note = state.take_note()
        changes: dict[str, Any] = {}
        # `before` is the part of the block's entry that is known before y.
        if begins:
            before = note.g if accumulates else None
            changes = {"stack": note.stack, "tape": note.tape, "pending": None}
        else:
            before = note
            if before is None and accumulates:
                before = total([part for part in (state.g, state.delta) if part is not None])
            elif before is None:
                before = state.delta
        if ends:
            changes |= {"pending": (y,) if before is None else (before, y), "g": None, "delta": None}
        elif begins or accumulates:
            changes |= {"g": note.g if begins else before, "delta": y}
        else:
            assert before is not None, "a block's first site leaves a delta"
            changes["delta"] = before + y
        after: PendingStack = state.next(**changes)
        return after

    def finish(self, mixer: Any, state: PendingStack, norm: Norm | None) -> Tensor | None:
        """Apply the final norm in the read only where kernels run without gradients."""
        if norm is None:
            return self.mixtures(mixer, state, mixer.n_blocks)[0]
        fused = None if torch.is_grad_enabled() else fused_gains([norm], state.template())
        if fused is None or not use_kernels(mixer, state):
            return None
        return self.mixtures(mixer, state, mixer.n_blocks, *fused)[0]

    def mixtures(
        self, mixer: Any, state: PendingStack, reader: int, gain: Gains | None = None, eps: float = 0.0
    ) -> tuple[Tensor, ...]:
        """Return a reader's mixtures; gain, eps: of the norms that follow."""
        weights = mixer.reader_weights(reader) if reader else None
        mix = self.mix_with_kernels if use_kernels(mixer, state) else self.mix
        mixtures, note = mix(mixer, state, reader, weights, gain, eps)
        state.leave_note(note)
        return mixtures[: mixer.reader_ways[reader]]

    # Without kernels.

    def mix(
        self,
        mixer: Any,
        state: PendingStack,
        reader: int,
        weights: ReaderWeights | None,
        gain: Gains | None,
        eps: float,
    ) -> tuple[tuple[Tensor, ...], Note]:
        """Return a reader's mixtures in plain PyTorch code, and what the write needs."""
        stack = state.stack if state.pending is None else mixer.push(state.stack, total(state.pending))
        residual_way = mixer.residual_way_of(reader)
        known = self.known_scores(mixer, state, stack, reader, weights)
        if weights is None:
            h = stack[-1:] * max(mixer.reader_ways[reader], residual_way + 1)
            note = Note(h[residual_way], stack, known)
            return h if gain is None else tuple(rms_norm(t, row, eps) for t, row in zip(h, gain, strict=False)), note
        entries = weights.seen(stack)
        call: dict[str, Any] = {"static": weights.static, "relu": weights.relu_on == "sum"}
        call["dynamic"] = weights.dynamic(entries) if known is None else weights.activate(joined(known, reader))
        if gain is None:
            # A compiled program calls the operator, which then chooses its kernel.
            h = depth_sum(entries, **call, backend=None if torch.compiler.is_compiling() else "reference")
            return h, Note(h[residual_way], stack, known)
        h = depth_sum_normed(entries, side_by_side(gain), eps, residual_way, **call)
        return h, Note(h[-1], stack, known)

    def known_scores(
        self, mixer: Any, state: PendingStack, stack: tuple[Tensor, ...], reader: int, weights: ReaderWeights | None
    ) -> KnownScores | None:
        """Return the scores of a stack: those that the state has, and those of the entries that this reader sees first."""
        if weights is None or weights.projection is None or not uses_custom_backward():
            return None
        known = state.tape if isinstance(state.tape, KnownScores) else None
        if known is None:
            table = projection_table(mixer)
            assert table is not None
            return KnownScores(
                table, tuple(score_entry(mixer, table, v, reader, position) for position, v in enumerate(stack))
            )
        if state.pending is None:
            return known
        table, by_entry = known
        if mixer.window_is_full(state.stack):
            by_entry = merged(by_entry, score_entry(mixer, table, stack[1], reader, 1))
        return KnownScores(table, (*by_entry, score_entry(mixer, table, stack[-1], reader, len(stack) - 1)))

    # With kernels.

    def mix_with_kernels(
        self,
        mixer: Any,
        state: PendingStack,
        reader: int,
        weights: ReaderWeights | None,
        gain: Gains | None,
        eps: float,
    ) -> tuple[tuple[Tensor, ...], Note]:
        """Return a reader's mixtures, and what the write needs; the read adds up the newest entry where it can."""
        tape, stack, add = self.tape(mixer, state), state.stack, None
        if state.pending is not None:
            if mixer.window_is_full(stack):
                (v,), (scores,), *_ = self.append(
                    mixer, tape._replace(stack=(), scores=()), tape.stack[1], tape.stack[2], reader, 1
                )
                tape = tape._replace(stack=merged(tape.stack, v), scores=merged(tape.scores, scores))
                stack = merged(stack, guarded_view(v, OP))
            before, add = state.pending[0], state.pending[1] if len(state.pending) > 1 else None
            read_adds = gain is not None if weights is None else weights.is_static
            if add is not None and read_adds:
                tape = tape._replace(stack=(*tape.stack, before), scores=(*tape.scores, None))
            else:
                tape, add = self.append(mixer, tape, before, add, reader, len(tape.stack)), None
        if weights is not None:
            chosen = self.kernel_weights(mixer, tape, reader, weights)
            residual_way = mixer.residual_way_of(reader)
            h, g, fresh, _ = read_sums(weights.seen(tape.stack), chosen, add, gain, eps, residual_way)
        elif gain is not None:
            h, g, fresh, _ = read_sums(tape.stack[-1:], plain_sum(tape.stack[0], len(gain)), add, gain, eps)
        else:
            h, g, fresh = (tape.stack[-1].view_as(tape.stack[-1]),) * mixer.reader_ways[reader], None, None
        if fresh is not None:
            tape = tape._replace(stack=(*tape.stack[:-1], fresh))
        newest = guarded_view(tape.stack[-1], OP)
        stack = stack if state.pending is None else (*stack, newest)
        return h, Note(newest if g is None else g, stack, tape)

    def kernel_weights(self, mixer: Any, tape: Tape, reader: int, weights: ReaderWeights) -> Weights:
        """Return a reader's weights as the kernels take them."""
        if weights.network is not None:
            return Weights(dynamic=coefficients(tape.stack[-1], *weights.network))
        assert weights.static is not None
        static = weights.static.float()
        if weights.projection is None:
            return Weights(static=static)
        (ways, entries), table = static.shape[:2], score_rows(mixer)
        scores = [s.for_reader(reader, mixer.reader_ways) for s in tape.scores if s is not None]
        rows = [[table.row(reader, way, position) for way in range(ways)] for position in range(entries)]
        return Weights(static=static, scores=scores, table=tape.table, rows=rows, relu=RELU[weights.relu_on])

    def tape(self, mixer: Any, state: PendingStack) -> Tape:
        """Return the state's tape, or a new one without the waiting entry for a state that has none."""
        tape = state.tape if isinstance(state.tape, Tape) else None
        if tape is None or (torch.is_grad_enabled() and not tape.differentiable):
            table = projection_table(mixer)
            table = None if table is None else table.float()
            halves = None if table is None else split_rows(table, state.stack[0])
            collected = None if table is None else collect_rows(table, OP)
            tape = Tape((), (), collected, halves, torch.is_grad_enabled())
            reader = mixer.layout.block[state.site] - (state.pending is not None)
            for position, v in enumerate(state.stack):
                tape = self.append(mixer, tape, v, None, reader, position)
        return tape

    def append(self, mixer: Any, tape: Tape, v: Tensor, add: Tensor | None, reader: int, position: int) -> Tape:
        """Return a tape with the entry v (+ add) at a stack position; `reader` is the first to see the entry."""
        reader = max(reader, 1)  # reader 0 takes the embedding as it is
        rows = None
        if tape.table is not None:
            table = score_rows(mixer)
            rows = tape.halves._make(table.rows_from(half, reader, position) for half in tape.halves)
            rows = rows if len(rows[0]) else None  # no reader sees the entry
        v, products = make_source(v, add, rows)
        scores = None if products is None else KernelScores(products, reader)
        return tape._replace(stack=(*tape.stack, v), scores=(*tape.scores, scores))


def use_kernels(mixer: Any, state: PendingStack) -> bool:
    """Tell whether kernels read this state."""
    if torch.compiler.is_compiling():
        return False
    tensors = [*state.stack, *(state.pending or ()), *(t for t in (state.g, state.delta) if t is not None)]
    wide = any(p.dtype == torch.float64 for p in itertools.islice(mixer.parameters(), 1))  # all parameters are alike
    why = why_unsupported(tensors, wide=wide)
    if why is not None and len(tensors) > 1:  # an output in another dtype: the reference steps in
        return False
    return choose(mixer.name, state.stack[0], why) == "triton"


def read_inside(mixer: Any, state: PendingStack) -> Tensor:
    """Read a site that does not begin its block."""
    assert state.g is not None
    h = state.g if state.delta is None else state.g + state.delta
    state.leave_note(h if mixer.accumulates else None)
    return h


def read_inside_normed(mixer: Any, state: PendingStack, gain: Gains, eps: float, kernels: bool) -> Tensor | None:
    """Read a site that does not begin its block, with its norm; None where the caller has to apply the norm."""
    if state.g is None or state.delta is None:
        return None
    if not kernels:
        return rms_norm(read_inside(mixer, state), gain[0], eps)
    if not torch.is_grad_enabled():
        h, normed = add_norm(state.g, state.delta, gain[0], eps, keep=mixer.accumulates)
        state.leave_note(h)
        return normed
    # The outputs so far are also part of the block's entry: this read's backward adds up their two gradients.
    passes = not mixer.accumulates and state.delta.requires_grad
    raw = 0 if mixer.accumulates else None
    result = read_sums([state.g, state.delta], plain_sum(side_by_side(gain), 1, 2), None, gain, eps, raw, passes)
    state.leave_note(result.raw if mixer.accumulates else result.passed)
    return result.y[0]


def score_entry(mixer: Any, table: Tensor, v: Tensor, reader: int, position: int) -> EntryScores:
    """Score an entry at a stack position for all readers from `reader` on, as one node of autograd."""
    rows = score_rows(mixer).rows_from(table, reader, position)
    return EntryScores(reader, source_scores(v, rows, readers_of(len(rows), mixer.reader_ways[reader:])))


def joined(known: KnownScores, reader: int) -> Tensor:
    """Return a reader's scores of all entries, [..., W, n]."""
    by_entry = [scores.by_reader[reader - scores.first_reader] for scores in known.by_entry]  # [W, ...] each
    return torch.stack(by_entry, dim=1).movedim((0, 1), (-2, -1))


def total(parts: Sequence[Tensor]) -> Tensor:
    """Add up one or two parts."""
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def merged(entries: tuple[Any, ...], middle: Any) -> tuple[Any, ...]:
    """Return a stack's values with one value instead of its second and third."""
    return (entries[0], middle, *entries[3:])


def way_or_ways(mixtures: tuple[Tensor, ...]) -> Read:
    """Return a single mixture as a tensor."""
    return mixtures if len(mixtures) > 1 else mixtures[0]


TRAINING = PendingStack.path = WeightedSums()
