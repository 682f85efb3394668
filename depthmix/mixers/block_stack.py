"""What the rules share that keep a stack of one entry per block and read weighted sums of it: GRN, DCA, DenseFormer, MUDD.

Block i has sites s, s + 1, …, t, as many as the model gives it (two in the papers):

    h_s = some weighted sums of the stack, one of them g_i, which goes on;    h_{s+j} = g_i + y_s + … + y_{s+j-1}
    h_S = one more sum
    entry i+1 = y_s + … + y_t, the block's delta, or with `accumulates` its result g_i + y_s + … + y_t

Only attention reads several sums, for its queries, keys and values, and it is the first site of its block: a block that begins
with anything else reads g_i alone. A rule says how reader i (a block, or finish, i = N) weighs the stack: in plain PyTorch
(`_mix`) and for the kernels (`_weights`).
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from depthmix.mixers.base import Mixer, Norm, Read
from depthmix.mixers.options import OptionError
from depthmix.mixers.slots import SlotState
from depthmix.mixers.stack_state import Ahead, EntryScores, Gains, InsideNorm, Scores, SlotWeights, StackState, Tape
from depthmix.ops.autograd import own_backward
from depthmix.ops.backend import choose
from depthmix.ops.backward_mail import seen_from_outside
from depthmix.ops.depth_sum.op import source_scores, why_unsupported
from depthmix.ops.depth_sum.source_order import OP, Weights, make_source, plain_sum, read_sums, split_rows
from depthmix.ops.norm import fused_gains, fused_norms, rms_norm, side_by_side
from depthmix.ops.row_gradients import collect_rows
from depthmix.ops.slots.op import add_norm, add_up, few_tokens, usable


class BlockStack(Mixer):
    """The contract for rules with a stack; they implement `_mix` and `_weights`, `_rows` if their weights are scores, and
    `_slot_weights` where decoding is to take one launch a site."""

    accumulates: ClassVar[bool] = False
    static: bool = False  # weights are known before the newest entry is, so that a read can add that up
    scores: bool = False  # weights are scores of the entries
    goes_on: int = 0  # which of the mixtures of a block with several is g
    window: int | None = None  # the stack is e, the sum of everything between, and the last `window` entries

    def __init__(self, dim: int, n_blocks: int, n_ways: int = 1) -> None:
        """n_ways: of a block's attention."""
        super().__init__(dim, n_blocks)
        self.reader_ways = (*self._ways_of_blocks(n_ways), 1)  # [N + 1], the last for finish

    def _ways_of_blocks(self, n_ways: int) -> list[int]:
        layout, first = self.layout, [s for s in range(self.n_sites) if self.layout.begins[s]]
        late = [s for s in layout.attention if s not in first]
        if n_ways > 1 and (late or not layout.attention):
            rule = f"{self.name} reads the mixtures of queries, keys and values at the first site of a block"
            if not late:
                what = "no site is attention: a name that ends in 'attention' makes it one"
            else:
                what = f"attention has to come first, and block {layout.block[late[0]]} is {layout.blocks[layout.block[late[0]]]}"
            raise OptionError(f"{rule}; {what}")
        return [n_ways if s in layout.attention else 1 for s in first]

    def ways(self, site: int) -> int:
        return self.reader_ways[self.layout.block[site]] if self.layout.begins[site] else 1

    def _goes_on(self, reader: int) -> int:
        """Which of a reader's mixtures is g."""
        return self.goes_on if self.reader_ways[reader] > 1 else 0

    def _mix(self, state: StackState, reader: int, norm: InsideNorm | None) -> tuple[Tensor, ...]:
        """The mixtures of a reader, in plain PyTorch: `state.sums` of some entries."""
        raise NotImplementedError

    def _sums_at(self, reader: int) -> bool:
        """Whether a reader's mixtures are sums, and not an entry as it is."""
        return reader > 0

    def _weights(self, tape: Tape, reader: int) -> tuple[slice, Weights] | None:
        """The entries that a reader sees and what it weighs them with; None if it sees the newest as it is."""
        raise NotImplementedError

    def _table(self) -> Tensor | None:
        """The vectors w of all readers, where weights are scores: [R, D]."""
        return None

    def _rows(self, table: Tensor, reader: int, slot: int) -> Tensor:
        """Those that readers from this one on have for the entry at a place of the stack."""
        raise NotImplementedError

    def _ahead(self, state: StackState, stack: tuple[Tensor, ...], reader: int) -> Ahead | None:
        """The scores of a stack, those that the state has and those of the entries that this reader is the first to see."""
        if not self.scores or not reader or state.frozen or not own_backward():
            return None
        known = state.tape if isinstance(state.tape, Ahead) else None
        if known is None:
            w = self._table()
            assert w is not None
            return Ahead(w, tuple(self._score(w, v, reader, slot) for slot, v in enumerate(stack)))
        if state.pending is None:
            return known
        w, scores = known
        scores = _merged(scores, self._score(w, stack[1], reader, 1)) if self._is_full(state.stack) else scores
        return Ahead(w, (*scores, self._score(w, stack[-1], reader, len(stack) - 1)))

    def _score(self, w: Tensor, v: Tensor, reader: int, slot: int) -> EntryScores:
        """An entry's part of `Ahead`."""
        rows = self._rows(w, reader, slot)
        ways, end = self.reader_ways[reader:], list(itertools.accumulate(self.reader_ways[reader:])).index(len(rows))
        return reader, source_scores(v, rows, ways[: end + 1])

    # The kernels' side.

    def _use_kernels(self, state: StackState) -> bool:
        if state.frozen or torch.compiler.is_compiling():
            return False
        tensors = [*state.stack, *(state.pending or ()), *(t for t in (state.g, state.a) if t is not None)]
        wide = any(p.dtype == torch.float64 for p in itertools.islice(self.parameters(), 1))  # all are alike
        why = why_unsupported(tensors, wide=wide)
        if why is not None and len(tensors) > 1:  # an output in another dtype: the reference steps in
            return False
        return choose(self.name, state.stack[0], why) == "triton"

    def _tape(self, state: StackState) -> Tape:
        """What the kernels work with, without the pending entry; made anew if the state comes from elsewhere."""
        tape = state.tape if isinstance(state.tape, Tape) else None
        if tape is None or (torch.is_grad_enabled() and not tape.differentiable):
            w = self._table()
            w = None if w is None else w.float()
            both = None if w is None else split_rows(w, state.stack[0])
            tape = Tape((), (), None if w is None else collect_rows(w, OP), both, torch.is_grad_enabled())
            for slot, v in enumerate(state.stack):
                reader = self.layout.block[state.site] - (state.pending is not None)
                tape = self._append(tape, v, None, reader, slot)
        return tape

    def _append(self, tape: Tape, v: Tensor, add: Tensor | None, reader: int, slot: int) -> Tape:
        """A tape with the entry v (+ add) at a place that `reader` is the first to see."""
        reader = max(reader, 1)  # the first block reads e alone
        rows = None if tape.w is None else tape.halves._make(self._rows(t, reader, slot) for t in tape.halves)
        rows = None if rows is None or not len(rows[0]) else rows  # no reader sees it
        v, s = make_source(v, add, rows)
        return tape._replace(stack=(*tape.stack, v), scores=(*tape.scores, None if s is None else Scores(s, reader)))

    def _read_with_kernels(
        self, state: StackState, reader: int, gain: Gains | None, eps: float
    ) -> tuple[tuple[Tensor, ...], Tensor, tuple[Tensor, ...], Tape]:
        """A reader's mixtures, normed with a gain; the one that goes on, which is not; the whole stack, and its tape."""
        tape, stack, add = self._tape(state), state.stack, None
        if state.pending is not None:
            if self._is_full(stack):
                (v,), (s,), *_ = self._append(
                    tape._replace(stack=(), scores=()), tape.stack[1], tape.stack[2], reader, 1
                )
                tape = tape._replace(stack=_merged(tape.stack, v), scores=_merged(tape.scores, s))
                stack = _merged(stack, seen_from_outside(v, OP))
            before, add = state.pending[0], state.pending[1] if len(state.pending) > 1 else None
            if add is not None and self.static and not (gain is None and self._weights(tape, reader) is None):
                tape = tape._replace(stack=(*tape.stack, before), scores=(*tape.scores, None))
            else:
                tape, add = self._append(tape, before, add, reader, len(tape.stack)), None
        found = self._weights(tape, reader) if reader else None
        if found is not None:
            h, g, fresh, _ = read_sums(tape.stack[found[0]], found[1], add, gain, eps, self._goes_on(reader))
        elif gain is not None:
            h, g, fresh, _ = read_sums(tape.stack[-1:], plain_sum(tape.stack[0], len(gain)), add, gain, eps)
        else:
            h, g, fresh = (tape.stack[-1].view_as(tape.stack[-1]),) * self.reader_ways[reader], None, None
        if fresh is not None:
            tape = tape._replace(stack=(*tape.stack[:-1], fresh))
        newest = seen_from_outside(tape.stack[-1], OP)
        stack = stack if state.pending is None else (*stack, newest)
        return h, newest if g is None else g, stack, tape

    def _is_full(self, stack: tuple[Any, ...]) -> bool:
        """Whether the window's oldest entry leaves it for the next one."""
        return self.window is not None and len(stack) == self.window + 2

    # Decoding: one launch a site.

    def _slot_weights(self, reader: int) -> SlotWeights | None:
        """A reader's weights; None: this rule has no such launch."""
        return None

    def _decodes(self, x: Tensor) -> bool:
        if self.window is not None or not few_tokens(x):
            return False
        if self._slot_weights(self.n_blocks) is None:
            return False
        wide = any(p.dtype == torch.float64 for p in itertools.islice(self.parameters(), 1))
        return not wide and usable(self.name, x)

    def _read_slots(self, state: SlotState, reader: int, gain: Sequence[Tensor] = (), eps: float = 0.0) -> Tensor:
        """A reader's mixtures, [W, ..., D]; the entry that it is the first to see goes to its slot."""
        slots, ways, goes_on = state.claim(reader), self.reader_ways[reader], self._goes_on(reader)
        weights = self._slot_weights(reader) if reader else SlotWeights()
        assert weights is not None
        h, raw = add_up(slots, state.pending, state.before, reader, ways, *weights, gain, eps, goes_on)
        state.leave_note(raw)
        return h

    def _read_step(self, state: SlotState, site: int, norms: Sequence[Norm] | None) -> Read | None:
        """A site's read; None where the norms have to be applied to it afterwards."""
        fused = None if norms is None else fused_gains(norms, state.slots)
        if norms is not None and fused is None:
            return None
        if self.layout.begins[site]:
            h = self._read_slots(state, self.layout.block[site], *(fused or ())).unbind(0)
            return h if len(h) > 1 else h[0]
        assert state.g is not None
        assert state.a is not None
        total: Tensor | None
        if fused is None:
            total = normed = state.g + state.a
        else:
            total, normed = add_norm(state.g, state.a, fused[0][0], fused[1], keep=self.accumulates)
        state.leave_note(normed if total is None else total)  # of use with `accumulates` alone
        return normed

    def _write_step(self, state: SlotState, site: int, y: Tensor) -> SlotState:
        begins, ends = self.layout.begins[site], self.layout.ends[site]
        note = state.take_note()
        if note is None:
            self._read_step(state, site, None)
            note = state.take_note()
        if begins and not ends:
            return state.next(g=note, a=y)
        before = note if self.accumulates else state.a  # nothing, where a block is one site
        if ends:
            return state.next(pending=y, before=before, g=None, a=None)
        assert state.a is not None
        return state.next(g=note, a=y) if self.accumulates else state.next(a=state.a + y)

    def _with_gradients(self, state: SlotState) -> StackState:
        kept: dict[str, Any] = {"site": state.site, "frozen": state.frozen}
        if state.site == 0:
            return StackState(stack=(state.pending,), **kept)
        n = self.layout.block[state.site] if state.site < self.n_sites else self.n_blocks
        if state.g is not None:
            return StackState(stack=tuple(state.slots[: n + 1]), g=state.g, a=state.a, **kept)
        newest = (state.pending,) if state.before is None else (state.before, state.pending)
        return StackState(stack=tuple(state.slots[:n]), pending=newest, **kept)

    # The contract.

    def _start(self, x: Tensor) -> StackState | SlotState:
        if self._decodes(x):
            return SlotState.of(x, self.n_blocks + 1)
        state = StackState(stack=(x,))
        state.tape = self._tape(state) if self._use_kernels(state) else None
        return state

    def _mixtures(
        self, state: StackState, reader: int, gain: Gains | None = None, eps: float = 0.0
    ) -> tuple[Tensor, ...]:
        """What a reader sees, normed with a gain."""
        if self._use_kernels(state):
            h, *note = self._read_with_kernels(state, reader, gain, eps)
        else:
            whole = state
            if state.pending is not None:
                stack = state.stack
                stack = _merged(stack, stack[1] + stack[2]) if self._is_full(stack) else stack
                whole = dataclasses.replace(state, stack=(*stack, _sum(state.pending)), pending=None)
            goes_on = self._goes_on(reader)
            norm = None if gain is None else InsideNorm(side_by_side(gain), eps, goes_on)
            ahead = self._ahead(state, whole.stack, reader)
            whole = dataclasses.replace(whole, tape=ahead)
            h = self._mix(whole, reader, norm) if reader else whole.stack * max(self.reader_ways[0], goes_on + 1)
            note = [h[goes_on if norm is None else -1], whole.stack, ahead]
        state.leave_note(note)
        return h[: self.reader_ways[reader]]

    def _read(self, state: StackState | SlotState, site: int) -> Read:
        if isinstance(state, SlotState):
            read = self._read_step(state, site, None)
            assert read is not None
            return read
        if self.layout.begins[site]:
            h = self._mixtures(state, self.layout.block[site])
            return h if len(h) > 1 else h[0]
        assert state.g is not None
        assert state.a is not None
        g = state.g + state.a
        state.leave_note(g if self.accumulates else None)
        return g

    def _read_normed(self, state: StackState | SlotState, site: int, norms: Sequence[Norm]) -> Read | None:
        if isinstance(state, SlotState):
            return self._read_step(state, site, norms)
        kernels, trains = self._use_kernels(state), torch.is_grad_enabled()
        fused: Any = None
        if kernels and not trains:  # which take the gains where they lie
            fused = fused_gains(norms, state.template())
        elif kernels or (own_backward() and not state.frozen):
            fused = fused_norms(norms, state.template())
        if fused is None:
            return None
        gain, eps = fused[0].float() if kernels and trains else fused[0], fused[1]  # a gradient is fp32
        if self.layout.begins[site]:
            reader = self.layout.block[site]
            if kernels or self._sums_at(reader):
                h = self._mixtures(state, reader, gain, eps)
            else:
                entry = self._mixtures(state, reader)
                h = tuple(rms_norm(t, g, eps) for t, g in zip(entry, gain, strict=True))
            return h if len(h) > 1 else h[0]
        assert state.g is not None
        assert state.a is not None
        if not kernels:
            g = state.g + state.a
            state.leave_note(g if self.accumulates else None)
            return rms_norm(g, gain[0], eps)
        if not trains and not torch.compiler.is_compiling():
            total, h_normed = add_norm(state.g, state.a, gain[0], eps, keep=self.accumulates)
            state.leave_note(total)
            return h_normed
        goes_on = 0 if self.accumulates else None  # the sum before its norm
        # The outputs so far go on to the entry, whose gradient is then added in this read's backward.
        passes = not self.accumulates and state.a.requires_grad
        found = read_sums([state.g, state.a], plain_sum(gain, 1, 2), None, gain, eps, goes_on, passes)
        state.leave_note(found.raw if self.accumulates else found.passed)
        return found.y[0]

    def _write(self, state: StackState | SlotState, site: int, y: Tensor) -> StackState | SlotState:
        if isinstance(state, SlotState):
            return self._write_step(state, site, y)
        note = state.take_note()
        if self.layout.begins[site]:
            if note is None:
                self._mixtures(state, self.layout.block[site])
                note = state.take_note()
            g, stack, tape = note
            if self.layout.ends[site]:
                return state.next(stack=stack, pending=(g, y) if self.accumulates else (y,), tape=tape)
            return state.next(stack=stack, pending=None, g=g, a=y, tape=tape)
        assert state.g is not None
        assert state.a is not None
        before = note  # what this block's entry begins with, if the read has left it
        if before is None:
            before = state.g + state.a if self.accumulates else state.a
        if self.layout.ends[site]:
            return state.next(pending=(before, y), g=None, a=None)
        return state.next(g=before, a=y) if self.accumulates else state.next(a=before + y)

    def _finish(self, state: StackState | SlotState) -> Tensor:
        if isinstance(state, SlotState):
            return self._read_slots(state, self.n_blocks)[0]
        return self._mixtures(state, self.n_blocks)[0]

    def _finish_normed(self, state: StackState | SlotState, norm: Norm) -> Tensor | None:
        if torch.is_grad_enabled():
            return None
        fused = fused_gains([norm], state.template())
        if isinstance(state, SlotState):
            return None if fused is None else self._read_slots(state, self.n_blocks, *fused)[0]
        if fused is None or not self._use_kernels(state):
            return None
        return self._mixtures(state, self.n_blocks, *fused)[0]


def _sum(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _merged(entries: tuple[Any, ...], middle: Any) -> tuple[Any, ...]:
    """A stack whose second and third entry are one."""
    return (entries[0], middle, *entries[3:])
