"""U-Net skips over depth, as modded-nanogpt and parameter-golf train them.

With k = N // 2, blocks 0 … k−1 push their results. Block b = k … 2k−1 begins by popping the newest, that of block 2k−1−b:

    x ← x + share_b ⊙ popped;    then plain residuals inside the block

    number, vector: share = w;      sigmoid: share = σ(w);      token: share = 2 σ(w) σ(g · RMS(x_0)[first 12 channels]),  x_0 = e

With an odd N the last block has no skip. The first skip doubles the stream, as the block before it has just pushed it.
"""

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn

from depthmix.mixers.base import Mixer
from depthmix.mixers.registry import register
from depthmix.mixers.state import State, last_of, last_rows, register_state
from depthmix.ops import depth_sum
from depthmix.ops.precision import rms_normalize

EPS = 1e-6
SEEN = 12  # channels that a gate sees
INITIAL_LOGIT = -1.5


@register_state
class PushedState(State):
    """The stream, the results that wait for a later block, and the embedding where gates see it."""

    x: Tensor  # [..., D]
    pushed: tuple[Tensor, ...] = ()  # [..., D], the newest last
    x_0: Tensor | None = None  # [..., D]

    def template(self) -> Tensor:
        return self.x

    def last(self, n: int) -> Any:
        x_0 = None if self.x_0 is None else last_rows(self.x_0, n)
        return dataclasses.replace(self, x=last_rows(self.x, n), pushed=last_of(self.pushed, n), x_0=x_0, note=None)


@register("unet")
class UNet(Mixer):
    """w["b"] [1] or [D] = 1, or −1.5 under a sigmoid; token: g["b"] [12] = 0. b is the block that reads."""

    def __init__(
        self, dim: int, n_blocks: int, *, gate: Literal["number", "vector", "sigmoid", "token"] = "number"
    ) -> None:
        super().__init__(dim, n_blocks)
        self.gate, self.n_skips = gate, n_blocks // 2
        readers = [str(block) for block in range(self.n_skips, 2 * self.n_skips)]
        width = dim if gate == "vector" else 1
        self.w = nn.ParameterDict({b: nn.Parameter(torch.empty(width)) for b in readers})
        gated = readers if gate == "token" else ()
        self.g = nn.ParameterDict({b: nn.Parameter(torch.empty(min(SEEN, dim))) for b in gated})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for w in self.w.values():
            nn.init.constant_(w, INITIAL_LOGIT if self.gate in ("sigmoid", "token") else 1.0)
        for g in self.g.values():
            nn.init.zeros_(g)

    def _reads_skip(self, site: int) -> bool:
        """Tell whether a site begins a block that pops a result."""
        return self.layout.begins[site] and str(self.layout.block[site]) in self.w

    def _sum(self, state: PushedState, site: int, *added: Tensor) -> Tensor:
        """Return the stream with its skip and what is added, rounded once."""
        if not self._reads_skip(site):
            return state.x if not added else (state.x + added[0]).to(state.x.dtype)
        block = self.layout.block[site]
        share = self._share(state, str(block))  # [..., 1] or [D]
        sources: tuple[Tensor, ...] = (state.x, state.pushed[-1])
        weights = [torch.ones_like(share), share]
        if block == self.n_skips:  # the newest result is the stream itself
            sources, weights = sources[:1], [1 + share]
        weights += [torch.ones_like(share) for _ in added]
        if self.gate == "token":
            return depth_sum((*sources, *added), dynamic=torch.cat(weights, dim=-1).unsqueeze(-2))[0]
        return depth_sum((*sources, *added), static=torch.stack(weights).unsqueeze(0))[0]

    def _share(self, state: PushedState, block: str) -> Tensor:
        w = self.w[block]
        if self.gate in ("number", "vector"):
            return w
        if state.x_0 is None:
            return torch.sigmoid(w)
        normed = rms_normalize(state.observe(state.x_0), EPS)[..., : self.g[block].shape[0]]
        logit = (normed * self.g[block].to(normed.dtype)).sum(-1, keepdim=True)
        return 2 * torch.sigmoid(w.to(normed.dtype)) * torch.sigmoid(logit)

    def _start(self, x: Tensor) -> PushedState:
        return PushedState(x=x, x_0=x if self.gate == "token" else None)

    def _read(self, state: PushedState, site: int) -> Tensor:
        return self._sum(state, site)

    def _write(self, state: PushedState, site: int, y: Tensor) -> PushedState:
        x = self._sum(state, site, y)
        pushed = state.pushed[:-1] if self._reads_skip(site) else state.pushed
        if self.layout.ends[site] and self.layout.block[site] < self.n_skips:
            pushed = (*pushed, x)
        after: PushedState = state.next(x=x, pushed=pushed)
        return after

    def _finish(self, state: PushedState) -> Tensor:
        return state.x
