"""DenseFormer (Pagliardini et al. 2024, arXiv 2402.02622): after a block, a weighted average with earlier blocks' results.

Block i = 1 … N starts from Y_{i-1} with ordinary residuals inside and ends in X_i; X_0 = Y_0 = e:

    Y_i = Σ_{j ≤ i, j ≡ i mod dilation} alpha_{i,j} X_j    if i ≡ 0 mod period, else X_i;      h_S = Y_N
"""

from typing import Annotated

import torch
from torch import nn

from depthmix.mixers.block_stack import BlockStack
from depthmix.mixers.options import at_least
from depthmix.mixers.reader_weights import ReaderWeights
from depthmix.mixers.registry import register


@register("denseformer")
class DenseFormer(BlockStack):
    """alpha["i"] [i // dilation + 1], oldest first: 0 but for the newest, which is 1."""

    accumulates = True

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

    def reader_weights(self, reader: int) -> ReaderWeights | None:
        if reader % self.period:
            return None
        static = self.alpha[str(reader)][None, :, None]
        return ReaderWeights(static=static, first=reader % self.dilation, every=self.dilation)
