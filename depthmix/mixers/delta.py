"""Deep Delta Learning (Zhang et al. 2026, arXiv 2601.00417): an output overwrites the stream in its own direction.

X [d_v, D] per token, d_v copies of e at the start. At every site, with z the read and y its output,

    k = y / sqrt(|y|² + eps²);    beta = 2 σ(w · RMS(z) + b);    v = 4 σ(W_v z + b_v),  or linear: W_v RMS(z)
    X_j ← X_j + beta (v_j − k · X_j) k                                                            for every row j

One value (d_v = 1): z = X, as it is. Several: z = Σ_j c_j ⊙ X_j with a c [d_v, D] of each site, and of finish:

    c_m = Σ_t K_t r_{m−t+1},   K [4, D], r [d_v]: a filter over the rows, and how the rows are read after it
"""

import dataclasses
import math
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from depthmix.mixers.base import Mixer
from depthmix.mixers.options import at_least
from depthmix.mixers.registry import register
from depthmix.mixers.state import State, last_rows, register_state
from depthmix.ops.matmul import matmul
from depthmix.ops.precision import compute_dtype, rms_normalize, widen

KEY_EPS, RMS_EPS = 1e-5, 1e-6
TAPS = 4


@register_state
class ValuesState(State):
    """The rows of X, [..., D] each."""

    rows: tuple[Tensor, ...]

    def template(self) -> Tensor:
        return self.rows[0]

    def was_read(self) -> bool:
        return False  # a write needs the rows themselves, one of which a read may have returned

    def last(self, n: int) -> Any:
        return dataclasses.replace(self, rows=tuple(last_rows(x, n) for x in self.rows), note=None)


@register("delta")
class DeepDelta(Mixer):
    """w [S, D], W_v [S, d_v, D], K [S+1, 4, D] ~ N(0, 1/(4 D)); b [S] = 0; b_v [S, d_v] uniform in ±1/sqrt(D); r [S+1, d_v] = 1/d_v."""

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        *,
        values: Annotated[int, at_least(1)] = 1,
        value: Literal["sigmoid", "linear"] = "sigmoid",
    ) -> None:
        super().__init__(dim, n_blocks)
        self.values, self.value = values, value
        self.fractions = dim  # a write mixes all channels, token by token
        self.w = nn.Parameter(torch.empty(self.n_sites, dim))
        self.b = nn.Parameter(torch.empty(self.n_sites))
        self.W_v = nn.Parameter(torch.empty(self.n_sites, values, dim))
        if value == "sigmoid":
            self.b_v = nn.Parameter(torch.empty(self.n_sites, values))
        if values > 1:
            self.K = nn.Parameter(torch.empty(self.n_sites + 1, TAPS, dim))
            self.r = nn.Parameter(torch.empty(self.n_sites + 1, values))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for p in (self.w, self.W_v, *((self.K,) if self.values > 1 else ())):
            nn.init.normal_(p, std=0.5 / math.sqrt(self.dim))
        nn.init.zeros_(self.b)
        if self.value == "sigmoid":
            nn.init.uniform_(self.b_v, -1 / math.sqrt(self.dim), 1 / math.sqrt(self.dim))
        if self.values > 1:
            nn.init.constant_(self.r, 1 / self.values)

    def _compressed(self, state: ValuesState, site: int) -> Tensor:
        """Return z [..., D] for a site, or for finish."""
        if self.values == 1:
            return state.rows[0]
        wide = compute_dtype(state.rows[0])
        k, r = self.K[site].to(wide), self.r[site].to(wide)
        shifted = torch.stack([functional.pad(r, (t, TAPS - 1 - t))[1 : 1 + self.values] for t in range(TAPS)])
        c = matmul(shifted.T, k)  # [d_v, D]
        return torch.stack([c_m * x.to(wide) for c_m, x in zip(c, state.rows, strict=True)]).sum(0)

    def _gates(self, z: Tensor, site: int) -> tuple[Tensor, Tensor]:
        """Return beta [..., 1] and v [..., d_v] for what a site reads."""
        z = widen(z, compute_dtype(z))
        normed = rms_normalize(z, RMS_EPS)
        w, b, w_v = (p[site].to(z.dtype) for p in (self.w, self.b, self.W_v))
        beta = 2 * torch.sigmoid((normed * w).sum(-1, keepdim=True) + b)
        if self.value == "linear":
            return beta, matmul(normed, w_v.T)
        return beta, 4 * torch.sigmoid(matmul(z, w_v.T) + self.b_v[site].to(z.dtype))

    def _start(self, x: Tensor) -> ValuesState:
        return ValuesState(rows=(x,) * self.values)

    def _read(self, state: ValuesState, site: int) -> Tensor:
        z = self._compressed(state, site)
        state.leave_note(self._gates(state.observe(z), site))
        return z

    def _write(self, state: ValuesState, site: int, y: Tensor) -> ValuesState:
        beta, v = state.take_note() or self._gates(state.observe(self._compressed(state, site)), site)
        y = y.to(beta.dtype)
        length = torch.rsqrt(state.observe(y).square().sum(-1, keepdim=True) + KEY_EPS**2)
        k = state.observe(y) * length
        rows = []
        for j, row in enumerate(state.rows):
            x = row.to(beta.dtype)
            kept = x - beta * (k * x).sum(-1, keepdim=True) * k
            rows.append((kept + beta * v[..., j : j + 1] * length * y).to(row.dtype))
        after: ValuesState = state.next(rows=tuple(rows))
        return after

    def _finish(self, state: ValuesState) -> Tensor:
        return self._compressed(state, self.n_sites)
