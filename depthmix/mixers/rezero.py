"""ReZero (Bachlechner et al. 2020, arXiv 2003.04887): a learned scalar on every output, zero at the start.

x_{s+1} = x_s + alpha_s y_s
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from depthmix.mixers.one_stream import AddedStream
from depthmix.mixers.registry import register


@register("rezero")
class ReZero(AddedStream):
    """alpha [S] = 0."""

    def __init__(self, dim: int, n_blocks: int) -> None:
        super().__init__(dim, n_blocks)
        self.alpha = nn.Parameter(torch.empty(self.n_sites))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.alpha)

    def gain(self, site: int) -> Tensor:
        return self.alpha[site].expand(self.dim)

    def output_gains(self) -> Mapping[int, Tensor]:
        return {site: alpha.expand(self.dim) for site, alpha in enumerate(self.alpha.unbind(0))}
