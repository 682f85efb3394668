"""Highway networks (Srivastava et al. 2015, arXiv 1505.00387): a gate that carries or transforms.

    T_s = sigmoid(W_T,s RMS(x_s) + b_T,s);    x_{s+1} = x_s + T_s ⊙ (y_s − x_s)

b_T starts negative, so the network begins by carrying.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from depthmix.mixers.one_stream import OneStream
from depthmix.mixers.registry import register
from depthmix.mixers.state import StreamState
from depthmix.ops.matmul import matmul
from depthmix.ops.precision import rms_normalize

EPS = 1e-6


@register("highway")
class Highway(OneStream):
    """W_T [S, D, D] uniform in ±1/sqrt(D), b_T [S, D] = bias; with a scalar gate [S, D] and [S]."""

    decayed = frozenset({"W_T"})

    def __init__(
        self, dim: int, n_blocks: int, *, gate: Literal["vector", "scalar"] = "vector", bias: float = -2.0
    ) -> None:
        super().__init__(dim, n_blocks)
        self.gate, self.bias = gate, bias
        width = (dim,) if gate == "vector" else ()
        self.W_T = nn.Parameter(torch.empty(self.n_sites, *width, dim))
        self.b_T = nn.Parameter(torch.empty(self.n_sites, *width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.dim)
        nn.init.uniform_(self.W_T, -bound, bound)
        nn.init.constant_(self.b_T, self.bias)

    def weight_options(self) -> dict[str, Any]:
        return {name: value for name, value in super().weight_options().items() if name != "bias"}  # how weights begin

    def _join(self, state: StreamState, site: int, y: Tensor) -> Tensor:
        normed = rms_normalize(state.observe(state.x), EPS)
        w, b = self.W_T[site].to(normed.dtype), self.b_T[site].to(normed.dtype)
        gate = (
            torch.sigmoid(matmul(normed, w.T) + b)
            if self.gate == "vector"
            else torch.sigmoid(normed @ w + b).unsqueeze(-1)
        )
        x = state.x.to(normed.dtype)
        return x + gate * (y - x)
