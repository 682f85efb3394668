"""DenseFormer (Pagliardini et al. 2024, arXiv 2402.02622): after a block, a weighted average with earlier blocks' results.

Block i = 1 … N starts from Y_{i-1} with ordinary residuals inside and ends in X_i; X_0 = Y_0 = e:

    Y_i = Σ_{j ≤ i, j ≡ i mod dilation} alpha_{i,j} X_j    if i ≡ 0 mod period, else X_i;      h_S = Y_N
"""

from typing import Annotated

import torch
from torch import Tensor, nn

from depthmix.mixers.base import Mixer, register
from depthmix.mixers.options import at_least
from depthmix.mixers.state import State, register_state
from depthmix.ops import depth_sum


@register_state
class DenseFormerState(State):
    """The results of the finished blocks, and the stream of the current one."""

    blocks: tuple[Tensor, ...]  # X_0 … X_{i-1}
    x: Tensor  # [..., D]

    def template(self) -> Tensor:
        return self.blocks[0]


@register("denseformer")
class DenseFormer(Mixer):
    """alpha["i"] [i // dilation + 1], oldest first: 0 but for the newest, which is 1."""

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

    def _start(self, x: Tensor) -> DenseFormerState:
        return DenseFormerState(blocks=(x,), x=x)

    def _read(self, state: DenseFormerState, site: int) -> Tensor:
        return state.x

    def _write(self, state: DenseFormerState, site: int, y: Tensor) -> DenseFormerState:
        x = state.x + y
        if site % 2 == 0:
            return state.next(x=x)
        i = site // 2 + 1
        blocks = (*state.blocks, x)
        if i % self.period == 0:
            x = depth_sum(blocks[i % self.dilation :: self.dilation], static=self.alpha[str(i)][None, :, None])[0]
        return state.next(blocks=blocks, x=x)

    def _finish(self, state: DenseFormerState) -> Tensor:
        return state.x
