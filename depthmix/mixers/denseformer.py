"""DenseFormer (Pagliardini et al. 2024, arXiv 2402.02622): after a block, a weighted average with earlier blocks' results.

Block i = 1 … N starts from Y_{i-1} with ordinary residuals inside and ends in X_i; X_0 = Y_0 = e:

    Y_i = Σ_{j ≤ i, j ≡ i mod dilation} alpha_{i,j} X_j    if i ≡ 0 mod period, else X_i;      h_S = Y_N
"""

from typing import Annotated

import torch
from torch import Tensor, nn

from depthmix.mixers.base import register
from depthmix.mixers.block_stack import BlockStack
from depthmix.mixers.options import at_least
from depthmix.mixers.stack_state import InsideNorm, SlotWeights, StackState, Tape
from depthmix.ops.depth_sum.source_order import Weights


@register("denseformer")
class DenseFormer(BlockStack):
    """alpha["i"] [i // dilation + 1], oldest first: 0 but for the newest, which is 1."""

    accumulates = static = True

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        *,
        dilation: Annotated[int, at_least(1)] = 1,
        period: Annotated[int, at_least(1)] = 1,
    ) -> None:
        super().__init__(dim, n_blocks)
        self.dilation, self.period = dilation, period
        averaged = [i for i in range(1, n_blocks + 1) if i % period == 0]
        self.alpha = nn.ParameterDict({str(i): nn.Parameter(torch.empty(i // dilation + 1)) for i in averaged})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for alpha in self.alpha.values():
                alpha.zero_()[-1] = 1.0

    def _mix(self, state: StackState, reader: int, norm: InsideNorm | None) -> tuple[Tensor, ...]:
        if not self._sums_at(reader):
            return state.stack[-1:]
        seen = state.stack[reader % self.dilation :: self.dilation]
        return state.sums(seen, norm, static=self.alpha[str(reader)][None, :, None])

    def _sums_at(self, reader: int) -> bool:
        return reader > 0 and reader % self.period == 0

    def _weights(self, tape: Tape, reader: int) -> tuple[slice, Weights] | None:
        if not self._sums_at(reader):
            return None
        seen = slice(reader % self.dilation, None, self.dilation)
        return seen, Weights(static=self.alpha[str(reader)].float()[None, :, None])

    def _slot_weights(self, reader: int) -> SlotWeights | None:
        every = self.dilation == self.period == 1  # every reader sees every entry
        return SlotWeights(self.alpha[str(reader)][None, :, None]) if every else None
