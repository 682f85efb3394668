"""Gated residual streams of Qwen4-Exp (transformers' `qwen4_exp`, no paper): reads gated channel by channel, writes that only add.

x [n, D] a token, n copies of e at the start. At every site, with x̂_i = gain_s,i ⊙ RMS(x_i) and x̂⃗ the n of them one after the other:

    a = sigmoid(silu(x̂⃗ W_down,s / n) W_up,s)  [n, D];     h_s = 1/n Σ_i a_i ⊙ x̂_i
    c = 2 sigmoid(x̂⃗ W_inject,s / n)  [n];                 x'_i = x_i + c_i y_s

finish reads in the same way, with weights of its own.
"""

from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from depthmix.mixers.base import Mixer
from depthmix.mixers.options import at_least
from depthmix.mixers.registry import register
from depthmix.mixers.streams import GatedState, copies
from depthmix.ops import stream_write
from depthmix.ops.matmul import matmul
from depthmix.ops.precision import compute_dtype, rms_scale

INITIAL_STD = 0.02


class Gates(NamedTuple):
    """Weights of a read, by stream and channel, and the normed streams one after the other."""

    weights: Tensor  # [..., n, D]
    normed: Tensor  # [..., n D]


@register("gated_streams")
class GatedStreams(Mixer):
    """gain [S+1, n, D] = 1; W_down [S+1, n D, R], W_up [S+1, R, n D], W_inject [S, n D, n] ~ N(0, 0.02²). The last rows are finish's."""

    fast_paths = ("depthmix.fast.gated_streams:STEPS",)
    decayed = frozenset({"W_down", "W_up", "W_inject"})

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        *,
        n: Annotated[int, at_least(2)] = 4,
        rank: Annotated[int, at_least(1)] = 320,
        eps: Annotated[float, at_least(0)] = 1e-6,
    ) -> None:
        super().__init__(dim, n_blocks)
        self.n, self.rank, self.eps = n, rank, eps
        readers, width = self.n_sites + 1, n * dim
        self.gain = nn.Parameter(torch.empty(readers, n, dim))
        self.W_down = nn.Parameter(torch.empty(readers, width, rank))
        self.W_up = nn.Parameter(torch.empty(readers, rank, width))
        self.W_inject = nn.Parameter(torch.empty(self.n_sites, width, n))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)
        for w in (self.W_down, self.W_up, self.W_inject):
            nn.init.normal_(w, std=INITIAL_STD)

    def _start(self, x: Tensor) -> GatedState:
        return GatedState(x=copies(x, self.n))

    def _read(self, state: GatedState, site: int) -> Tensor:
        gates = self._gates(state, site)
        state.leave_note(gates)
        return (gates.weights * state.x).sum(-2)

    def _write(self, state: GatedState, site: int, y: Tensor) -> GatedState:
        gates: Gates = state.take_note() or self._gates(state, site)
        logits = matmul(gates.normed, self.W_inject[site].to(gates.normed.dtype)) / self.n
        after: GatedState = state.next(x=stream_write(state.x, None, 2 * torch.sigmoid(logits), y))
        return after

    def _finish(self, state: GatedState) -> Tensor:
        return (self._gates(state, self.n_sites).weights * state.x).sum(-2)

    def _gates(self, state: GatedState, reader: int) -> Gates:
        """Return the weights of a reader, finish being reader S."""
        x = state.observe(state.x)
        wide = compute_dtype(x)
        down, up, gain = (p[reader].to(wide) for p in (self.W_down, self.W_up, self.gain))
        scale = gain * rms_scale(x, self.eps)  # [..., n, D]
        normed = (scale * x).flatten(-2)
        hidden = functional.silu(matmul(normed, down) / self.n)
        a = torch.sigmoid(matmul(hidden, up)).unflatten(-1, (self.n, self.dim))
        return Gates(a * scale / self.n, normed)
