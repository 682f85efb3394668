"""A stack with one entry per block, read as weighted sums: what GRN, DCA, DenseFormer and MUDD share.

Block i has sites s, s + 1, …, t, as many as the model gives it (two in the papers). G is the stack; its entry 0 is the embedding:

    h_s = some weighted sums of G, one of them g_i;      h_{s+j} = g_i + y_s + … + y_{s+j-1}
    G_{i+1} = y_s + … + y_t, the block's delta, or with `accumulates` its result g_i + y_s + … + y_t
    h_S = one more sum

Only attention reads several sums, for its queries, keys and values, and it is the first site of its block: a block that begins
with anything else reads g_i alone. Readers are the blocks 0 … N-1, and finish as reader N.
"""

from typing import ClassVar

from torch import Tensor

from depthmix.mixers.base import Mixer
from depthmix.mixers.checks import Read
from depthmix.mixers.fast_path import FastPath
from depthmix.mixers.options import OptionError
from depthmix.mixers.reader_weights import ReaderWeights
from depthmix.mixers.state import State, last_of, register_state
from depthmix.ops import depth_sum


@register_state
class StackState(State):
    """The stack and, between the sites of a block, what the next site reads."""

    stack: tuple[Tensor, ...]  # e, then one entry per finished block; a window keeps the older ones as one sum
    g: Tensor | None = None  # the block's mixture g_i; with `accumulates`, g_i and its outputs so far
    delta: Tensor | None = None  # the sum of the block's outputs so far; None with `accumulates`

    def template(self) -> Tensor:
        return self.stack[0]

    def last(self, n: int) -> "StackState":
        return StackState(site=self.site, frozen=self.frozen, made_for=self.made_for, stack=last_of(self.stack, n))


class BlockStack(Mixer):
    """Base of the rules with a stack: they say how every reader weighs it (`reader_weights`)."""

    fast_paths: ClassVar[tuple[str | FastPath, ...]] = (
        "depthmix.fast.weighted_sums_decoding:DECODING",
        "depthmix.fast.weighted_sums:TRAINING",
    )
    accumulates: ClassVar[bool] = False  # entries are results of blocks, not deltas
    residual_way: ClassVar[int] = 0  # which mixture of a block with several is g
    window: int | None = None  # the stack is e, the sum of everything between, and the last `window` entries

    def __init__(self, dim: int, n_blocks: int, n_ways: int = 1) -> None:
        """Set up the readers; n_ways: mixtures that a block's attention reads."""
        super().__init__(dim, n_blocks)
        self.reader_ways = (*self._ways_of_blocks(n_ways), 1)  # [N + 1], the last for finish

    def _ways_of_blocks(self, n_ways: int) -> list[int]:
        layout, first_sites = self.layout, [s for s in range(self.n_sites) if self.layout.begins[s]]
        late = [s for s in layout.attention if s not in first_sites]
        if n_ways > 1 and (late or not layout.attention):
            rule = f"{self.name} reads the mixtures of queries, keys and values at the first site of a block"
            if not late:
                reason = "no site is attention: a name that ends in 'attention' makes it one"
            else:
                block = layout.block[late[0]]
                reason = f"attention has to come first, and block {block} is {layout.blocks[block]}"
            raise OptionError(f"{rule}; {reason}")
        return [n_ways if s in layout.attention else 1 for s in first_sites]

    def reader_weights(self, reader: int) -> ReaderWeights | None:
        """Return how reader 1 … N weighs the stack; None if it takes the newest entry as it is, like reader 0."""
        raise NotImplementedError

    def ways(self, site: int) -> int:
        return self.reader_ways[self.layout.block[site]] if self.layout.begins[site] else 1

    def residual_way_of(self, reader: int) -> int:
        """Return which of a reader's mixtures is g."""
        return self.residual_way if self.reader_ways[reader] > 1 else 0

    # The rule.

    def _start(self, x: Tensor) -> StackState:
        return StackState(stack=(x,))

    def _read(self, state: StackState, site: int) -> Read:
        if self.layout.begins[site]:
            reader = self.layout.block[site]
            mixtures = self.mixtures(state, reader)
            state.leave_note(mixtures[self.residual_way_of(reader)])
            return mixtures[: self.ways(site)] if self.ways(site) > 1 else mixtures[0]
        assert state.g is not None
        return state.g if state.delta is None else state.g + state.delta

    def _write(self, state: StackState, site: int, y: Tensor) -> StackState:
        g, delta, stack = state.g, state.delta, state.stack
        if self.layout.begins[site]:
            reader, g = self.layout.block[site], state.take_note()
            g = self.mixtures(state, reader)[self.residual_way_of(reader)] if g is None else g
        assert g is not None
        if self.accumulates:
            g = g + y
        else:
            delta = y if delta is None else delta + y
        if self.layout.ends[site]:
            stack, g, delta = self.push(stack, g if delta is None else delta), None, None
        after: StackState = state.next(stack=stack, g=g, delta=delta)
        return after

    def _finish(self, state: StackState) -> Tensor:
        return self.mixtures(state, self.n_blocks)[0]

    def mixtures(self, state: StackState, reader: int) -> tuple[Tensor, ...]:
        """Return a reader's weighted sums of the stack."""
        weights = self.reader_weights(reader) if reader else None
        if weights is None:
            return state.stack[-1:] * max(self.reader_ways[reader], self.residual_way_of(reader) + 1)
        entries = weights.seen(state.stack)
        dynamic = weights.dynamic([state.observe(v) for v in entries])
        return depth_sum(entries, weights.static, dynamic, weights.relu_on == "sum", backend="reference")

    def push(self, stack: tuple[Tensor, ...], entry: Tensor) -> tuple[Tensor, ...]:
        """Return the stack with one more entry. Where the window is full, its oldest entry joins the sum before it."""
        if self.window_is_full(stack):
            stack = (stack[0], stack[1] + stack[2], *stack[3:])
        return (*stack, entry)

    def window_is_full(self, stack: tuple[Tensor, ...]) -> bool:
        """Tell whether the next entry moves the window's oldest one into the sum."""
        return self.window is not None and len(stack) == self.window + 2
