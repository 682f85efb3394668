"""Generalised Residual Networks (Heddes et al. 2025, arXiv 2502.06785), versions 1 to 3, and the stack that DCA shares with them.

The stack G holds e and the deltas f of the finished blocks. Block i (and finish, i = N) reads

    version 1: g = Σ_j b_j G_j (numbers);    2: g = Σ_j b_j ⊙ G_j (vectors);    3: g = Σ_j (b_j + ReLU(w · G_j)) ⊙ G_j
    h_{2i} = g_i;    h_{2i+1} = g_i + y_{2i};    f_{i+1} = y_{2i} + y_{2i+1};    h_S = g_N

window k: the stack is e, the sum of everything between, and the last k deltas. b = 1 and w = 0: plain at step 0.
"""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from depthmix.mixers.base import Mixer, Read, register
from depthmix.mixers.options import OptionError, at_least
from depthmix.mixers.state import State, register_state
from depthmix.ops import depth_scores, depth_sum


@register_state
class StackState(State):
    """The stack and, between the two sites of a block, what its second site needs."""

    stack: tuple[Tensor, ...]  # e, the older deltas or their sum, the newest last
    g: Tensor | None = None  # the first mixture this block read
    a: Tensor | None = None  # what its attention produced

    def template(self) -> Tensor:
        return self.stack[0]


class DeltaStack(Mixer):
    """What GRN and DCA share: the stack of block deltas, read by `n_ways` GRNs per block and one at finish.

    b["i"] [ways, t, D] (version 1: [ways, t, 1]) = 1 and w["i"] [ways, 1, D] (w_per_entry: [ways, t, D]) = 0
    for readers i = 1 … N; reader 0 sees only e and has none.
    """

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        n_ways: int,
        version: int,
        window: int | None,
        relu_on: str,
        w_per_entry: bool,
    ) -> None:
        super().__init__(dim, n_blocks)
        self.n_ways, self.version, self.window = n_ways, version, window
        self.relu_on, self.w_per_entry = relu_on, w_per_entry
        self.b, self.w = nn.ParameterDict(), nn.ParameterDict()
        for i in range(1, n_blocks + 1):
            ways = n_ways if i < n_blocks else 1
            entries = i + 1 if window is None else min(i + 1, window + 2)
            self.b[str(i)] = nn.Parameter(torch.empty(ways, entries, 1 if version == 1 else dim))
            if version == 3:
                self.w[str(i)] = nn.Parameter(torch.empty(ways, entries if w_per_entry else 1, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for b in self.b.values():
            nn.init.ones_(b)
        for w in self.w.values():
            nn.init.zeros_(w)

    def ways(self, site: int) -> int:
        return self.n_ways if site % 2 == 0 else 1

    def _mix(self, state: StackState, reader: int) -> tuple[Tensor, ...]:
        if reader == 0:
            return state.stack * self.n_ways
        b = self.b[str(reader)]
        if self.version < 3:
            return depth_sum(state.stack, static=b)
        scores = depth_scores([state.observe(v) for v in state.stack], self.w[str(reader)])
        if self.relu_on == "dynamic":  # clamp, not relu: w = 0 puts every score at 0, where relu's derivative is 0
            return depth_sum(state.stack, static=b, dynamic=scores.clamp(min=0))
        return depth_sum(state.stack, static=b, dynamic=scores, relu=True)

    def _start(self, x: Tensor) -> StackState:
        return StackState(stack=(x,))

    def _read(self, state: StackState, site: int) -> Read:
        if site % 2 == 1:
            assert state.g is not None
            assert state.a is not None
            return state.g + state.a
        g = self._mix(state, site // 2)
        state.leave_note(g[0])
        return g if self.n_ways > 1 else g[0]

    def _write(self, state: StackState, site: int, y: Tensor) -> StackState:
        if site % 2 == 0:
            g = state.take_note()
            return state.next(g=self._mix(state, site // 2)[0] if g is None else g, a=y)
        assert state.a is not None
        stack = (*state.stack, state.a + y)
        if self.window is not None and len(stack) > self.window + 2:
            stack = (stack[0], stack[1] + stack[2], *stack[3:])  # the oldest delta leaves the window
        return state.next(stack=stack, g=None, a=None)

    def _finish(self, state: StackState) -> Tensor:
        return self._mix(state, self.n_blocks)[0]


@register("grn")
class GRN(DeltaStack):
    """One GRN per block, shared by queries, keys and values."""

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        *,
        version: Literal[1, 2, 3] = 3,
        window: Annotated[int | None, at_least(1)] = None,
        relu_on: Literal["dynamic", "sum"] = "dynamic",
        w_per_entry: bool = False,
    ) -> None:
        if version != 3 and (relu_on != "dynamic" or w_per_entry):
            raise OptionError(f"grn: relu_on and w_per_entry are options of version 3, version is {version}")
        super().__init__(dim, n_blocks, 1, version, window, relu_on, w_per_entry)
