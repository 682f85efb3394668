"""MUDDFormer (Xiao et al. 2025, arXiv 2502.12170): per-token mixtures of all blocks' results, for q, k, v and the residual r.

X_0 = e, X_i the result of block i (from 1). Reader i ≥ 1 has l = i + 1 entries and C = 4 mixtures; finish has one, and a block
without attention r alone:

    a = W_2 GELU(W_1 RMS(X_i)) + b  [C, l];      X̄^c = Σ_j a[c, j] X_j
    h of block i's attention = (X̄^q, X̄^k, X̄^v);    of a later site = X̄^r + the block's outputs so far
    X_{i+1} = X̄^r + the sum of its outputs;    h_S = X̄

W_2 = 0 and b = 1 for the newest entry: plain at step 0. Block 0 reads e in all four ways.
"""

import math

import torch
from torch import nn

from depthmix.mixers.block_stack import BlockStack
from depthmix.mixers.reader_weights import Network, ReaderWeights
from depthmix.mixers.registry import register

EPS = 1e-6
WAYS = 4  # q, k, v, r


@register("mudd")
class Mudd(BlockStack):
    """W_1["i"] [K, D] ~ N(0, 1/D), W_2["i"] [C l, K] = 0, b["i"] [C, l] = 0 but 1 for the newest, i = 1 … N."""

    decayed = frozenset({"W_1", "W_2"})
    accumulates = True
    residual_way = 3

    def __init__(self, dim: int, n_blocks: int) -> None:
        super().__init__(dim, n_blocks, n_ways=3)
        self.W_1, self.W_2, self.b = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        for i in range(1, n_blocks + 1):
            ways, entries = WAYS if self.reader_ways[i] > 1 else 1, i + 1
            hidden = (WAYS * entries // 64 + 1) * 64  # of finish too
            self.W_1[str(i)] = nn.Parameter(torch.empty(hidden, dim))
            self.W_2[str(i)] = nn.Parameter(torch.empty(ways * entries, hidden))
            self.b[str(i)] = nn.Parameter(torch.empty(ways, entries))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for i in self.b:
            nn.init.normal_(self.W_1[i], std=1 / math.sqrt(self.dim))
            self.W_2[i].zero_()
            self.b[i].zero_()[:, -1] = 1.0

    def reader_weights(self, reader: int) -> ReaderWeights:
        i = str(reader)
        return ReaderWeights(network=Network(self.W_1[i], self.W_2[i], self.b[i], EPS))
