"""Attention Residuals over outputs that LayerScale has scaled.

    h_s = Σ_i p_i v_i,    p = softmax_i(query_s · (key_gain_s ⊙ RMS(v_i))),    with γ_s ⊙ y_s where attnres has y_s

Why so: LayerScale says how much of what a site puts out is added, attnres how much of what was added is read. Each gains by itself and
costs next to nothing, and neither can do what the other does. γ = init, as in LayerScale: not plain at step 0, unless it is 1 or output
projections start at zero.

What it costs: what attnres does, where a model multiplies in the weights of its output projections (`output_gains`), as those here do
in training under autocast. Elsewhere the products are launches of their own: y read and written, and so its gradient, for which y is
read and kept.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from depthmix.mixers import register
from depthmix.mixers.attnres import AttnRes
from depthmix.mixers.options import at_least
from depthmix.ops import depth_sum


@register("attnres_scaled")
class AttnResScaled(AttnRes):
    """gamma [S, D] = init, and what attnres has."""

    decayed = frozenset()
    init: float

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        *,
        block_size: Annotated[int | Literal["all"] | None, at_least(1)] = None,
        ways: Literal[1, 2, 3] = 1,
        init: float = 0.1,
    ) -> None:
        self.__dict__["init"] = init  # past nn.Module, which is not there yet
        super().__init__(dim, n_blocks, block_size=block_size, ways=ways)
        self.gamma = nn.Parameter(torch.empty(self.n_sites, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "gamma"):
            nn.init.constant_(self.gamma, self.init)

    def plain_share(self, site: int) -> float | None:
        return super().plain_share(site) if site == 0 or self.init == 1 else None

    def output_gains(self) -> Mapping[int, Tensor]:
        return self._rows_of_sites(self.gamma)

    def _write(self, state: Any, site: int, y: Tensor) -> Any:
        return super()._write(state, site, depth_sum((y,), static=self.gamma[site].reshape(1, 1, -1))[0])

    def _write_scaled(self, state: Any, site: int, y: Tensor) -> Any:
        return super()._write(state, site, y)
