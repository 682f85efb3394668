"""MUDDFormer (Xiao et al. 2025, arXiv 2502.12170): per-token mixtures of all blocks' results, for q, k, v and the residual r.

X_0 = e, X_i the result of block i (from 1). Reader i ≥ 1 has l = i + 1 entries and C = 4 mixtures (finish: 1):

    a = W_2 GELU(W_1 RMS(X_i)) + b  [C, l];      X̄^c = Σ_j a[c, j] X_j
    h_{2i} = (X̄^q, X̄^k, X̄^v);    h_{2i+1} = X̄^r + y_{2i};    X_{i+1} = X̄^r + y_{2i} + y_{2i+1};    h_S = X̄

W_2 = 0 and b = 1 for the newest entry: plain at step 0. Block 0 reads e in all four ways.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from depthmix.mixers.base import Mixer, Read, register
from depthmix.mixers.state import State, register_state
from depthmix.ops import depth_sum
from depthmix.ops.matmul import matmul
from depthmix.ops.precision import rms_normalize

EPS = 1e-6
WAYS = 4  # q, k, v, r


@register_state
class MuddState(State):
    """The blocks' results and, inside a block, its residual path."""

    blocks: tuple[Tensor, ...]  # X_0 … X_i
    r: Tensor | None = None  # X̄^r + y_{2i}

    def template(self) -> Tensor:
        return self.blocks[0]


@register("mudd")
class Mudd(Mixer):
    """W_1["i"] [K, D] ~ N(0, 1/D), W_2["i"] [C l, K] = 0, b["i"] [C, l] = 0 but 1 for the newest, i = 1 … N."""

    decayed = frozenset({"W_1", "W_2"})

    def __init__(self, dim: int, n_blocks: int) -> None:
        super().__init__(dim, n_blocks)
        self.W_1, self.W_2, self.b = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        for i in range(1, n_blocks + 1):
            ways, entries = (WAYS if i < n_blocks else 1), i + 1
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

    def ways(self, site: int) -> int:
        return 3 if site % 2 == 0 else 1

    def _mix(self, state: MuddState, reader: int) -> tuple[Tensor, ...]:
        if reader == 0:
            return state.blocks * WAYS
        x = rms_normalize(state.observe(state.blocks[-1]), EPS)
        w_1, w_2, b = [p[str(reader)].to(x.dtype) for p in (self.W_1, self.W_2, self.b)]
        a = matmul(functional.gelu(matmul(x, w_1.T)), w_2.T).unflatten(-1, b.shape) + b  # [..., C, l]
        return depth_sum(state.blocks, dynamic=a)

    def _start(self, x: Tensor) -> MuddState:
        return MuddState(blocks=(x,))

    def _read(self, state: MuddState, site: int) -> Read:
        if site % 2 == 1:
            assert state.r is not None
            return state.r
        q, k, v, r = self._mix(state, site // 2)
        state.leave_note(r)
        return q, k, v

    def _write(self, state: MuddState, site: int, y: Tensor) -> MuddState:
        if site % 2 == 0:
            r = state.take_note()
            return state.next(r=(self._mix(state, site // 2)[3] if r is None else r) + y)
        assert state.r is not None
        return state.next(blocks=(*state.blocks, state.r + y), r=None)

    def _finish(self, state: MuddState) -> Tensor:
        return self._mix(state, self.n_blocks)[0]
