"""Generalised Residual Networks (Heddes et al. 2025, arXiv 2502.06785), versions 1 to 3, and the stack that DCA shares with them.

The stack G holds e and the deltas f of the finished blocks. Block i (and finish, i = N) reads

    version 1: g = Σ_j b_j G_j (numbers);    2: g = Σ_j b_j ⊙ G_j (vectors);    3: g = Σ_j (b_j + ReLU(w · G_j)) ⊙ G_j
    h of block i's first site = g_i;    of a later one = g_i + the block's outputs so far
    f_{i+1} = the sum of its outputs;    h_S = g_N

window k: the stack is e, the sum of everything between, and the last k deltas. b = 1 and w = 0: plain at step 0.
"""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from depthmix.mixers.base import register
from depthmix.mixers.block_stack import BlockStack
from depthmix.mixers.options import OptionError, at_least
from depthmix.mixers.stack_state import Ahead, InsideNorm, SlotWeights, StackState, Tape
from depthmix.ops import depth_scores
from depthmix.ops.depth_sum.source_order import CLAMPED, SUM_CLAMPED, Weights


class DeltaStack(BlockStack):
    """What GRN and DCA share: the stack of block deltas, read by `n_ways` GRNs per block and one at finish.

    A block without attention has one GRN.

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
        super().__init__(dim, n_blocks, n_ways)
        self.version, self.window = version, window
        self.relu_on, self.w_per_entry, self.static, self.scores = relu_on, w_per_entry, version < 3, version == 3
        self.b, self.w = nn.ParameterDict(), nn.ParameterDict()
        self._first_row = {1: 0}  # of a reader's w in the table of all
        for i in range(1, n_blocks + 1):
            ways, entries = self.reader_ways[i], i + 1 if window is None else min(i + 1, window + 2)
            self.b[str(i)] = nn.Parameter(torch.empty(ways, entries, 1 if version == 1 else dim))
            if version == 3:
                self.w[str(i)] = nn.Parameter(torch.empty(ways, entries if w_per_entry else 1, dim))
                self._first_row[i + 1] = self._first_row[i] + ways * self.w[str(i)].shape[1]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for b in self.b.values():
            nn.init.ones_(b)
        for w in self.w.values():
            nn.init.zeros_(w)

    def weight_options(self) -> dict[str, Any]:
        whole = self.window is None or self.window + 1 >= self.n_blocks  # the window never leaves an entry out
        return super().weight_options() | {"window": None if whole else self.window}

    def _mix(self, state: StackState, reader: int, norm: InsideNorm | None) -> tuple[Tensor, ...]:
        b = self.b[str(reader)]
        if self.version < 3:
            return state.sums(state.stack, norm, static=b)
        if isinstance(state.tape, Ahead):
            by_entry = [by_reader[reader - first] for first, by_reader in state.tape.scores]  # [W, ...] each
            scores = torch.stack(by_entry, dim=1).movedim((0, 1), (-2, -1))
        else:
            scores = depth_scores([state.observe(v) for v in state.stack], self.w[str(reader)])
        if self.relu_on == "dynamic":  # clamp, not relu: w = 0 puts every score at 0, where relu's derivative is 0
            return state.sums(state.stack, norm, static=b, dynamic=scores.clamp(min=0))
        return state.sums(state.stack, norm, static=b, dynamic=scores, relu=True)

    def _weights(self, tape: Tape, reader: int) -> tuple[slice, Weights]:
        b = self.b[str(reader)].float()
        if self.version < 3:
            return slice(None), Weights(static=b)
        relu = CLAMPED if self.relu_on == "dynamic" else SUM_CLAMPED
        ways, entries = b.shape[:2]
        scores = [s.of(reader, self.reader_ways) for s in tape.scores if s is not None]
        rows = [[self._row(reader, way, slot) for way in range(ways)] for slot in range(entries)]
        return slice(None), Weights(static=b, scores=scores, table=tape.w, rows=rows, relu=relu)

    def _slot_weights(self, reader: int) -> SlotWeights:
        b = self.b[str(reader)]
        if self.version < 3:
            return SlotWeights(b)
        return SlotWeights(b, self.w[str(reader)], CLAMPED if self.relu_on == "dynamic" else SUM_CLAMPED)

    def _table(self) -> Tensor | None:
        return torch.cat([w.flatten(0, 1) for w in self.w.values()]) if len(self.w) else None

    def _row(self, reader: int, way: int, slot: int) -> int:
        """Where the table has the vector for the entry at a place of the stack."""
        return self._first_row[reader] + (way * self.w[str(reader)].shape[1] + slot if self.w_per_entry else way)

    def _rows(self, table: Tensor, reader: int, slot: int) -> Tensor:
        places = []
        while reader <= self.n_blocks and slot >= 0:
            places.append((reader, slot))
            if slot > 0 and self.window is not None and reader + 1 >= self.window + 2:  # the next push moves all but e
                slot = slot - 1 if slot > 2 else -1
            reader += 1
        if not places:
            return table[:0]
        if not self.w_per_entry:
            return table[self._first_row[places[0][0]] : self._first_row[reader]]
        of_reader = {r: table[self._first_row[r] : self._first_row[r + 1]] for r, _ in places}  # [W t, D]
        return torch.cat([of_reader[r][i :: self.w[str(r)].shape[1]] for r, i in places])


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
