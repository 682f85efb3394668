"""LayerScale (CaiT, Touvron et al. 2021, arXiv 2103.17239): a learned vector on every output, small at the start.

x_{s+1} = x_s + gamma_s ⊙ y_s
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.mixers.one_stream import AddedStream
from depthmix.mixers.registry import register


@register("layerscale")
class LayerScale(AddedStream):
    """gamma [S, D] = init; None takes CaiT's value for the depth: 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 beyond."""

    def __init__(self, dim: int, n_blocks: int, *, init: float | None = None) -> None:
        super().__init__(dim, n_blocks)
        self.init = (0.1 if n_blocks <= 18 else 1e-5 if n_blocks <= 24 else 1e-6) if init is None else init
        self.gamma = nn.Parameter(torch.empty(self.n_sites, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gamma, self.init)

    def weight_options(self) -> dict[str, Any]:
        return {name: value for name, value in super().weight_options().items() if name != "init"}  # how weights begin

    def gain(self, site: int) -> Tensor:
        return self.gamma[site]

    def output_gains(self) -> Mapping[int, Tensor]:
        return dict(enumerate(self.gamma.unbind(0)))
