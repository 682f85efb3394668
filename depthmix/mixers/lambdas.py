"""Lambdas of the residual stream and the embedding, as nanochat, modded-nanogpt and parameter-golf train them.

Before every block i (per="site": before every site)

    x ← r_i x + c_i x_0;      x_0 = e

then plain residuals inside the block. With backout the model's head reads h_S = x − b x_m, where x_m is the stream after the
middle block, m = N // 2.
"""

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn

from depthmix.mixers.base import Mixer
from depthmix.mixers.registry import register
from depthmix.mixers.state import State, last_rows, register_state
from depthmix.ops import depth_sum


@register_state
class LambdasState(State):
    """The stream, the embedding and, once it is there, the middle block's result."""

    x: Tensor  # [..., D]
    x_0: Tensor  # [..., D]
    x_m: Tensor | None = None  # [..., D]

    def template(self) -> Tensor:
        return self.x

    def last(self, n: int) -> Any:
        x_m = None if self.x_m is None else last_rows(self.x_m, n)
        return dataclasses.replace(self, x=last_rows(self.x, n), x_0=last_rows(self.x_0, n), x_m=x_m, note=None)


@register("lambdas")
class Lambdas(Mixer):
    """r and c [N] or [S], with channels [N, D] or [S, D], from 1.15 to 1.05 and 0.20 to 0.05 over depth; b [1] = 0.2.

    init="plain": r = 1, c = 0 and b = 0.
    """

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        *,
        per: Literal["block", "site"] = "block",
        channels: bool = False,
        backout: bool = False,
        init: Literal["nanochat", "plain"] = "nanochat",
    ) -> None:
        super().__init__(dim, n_blocks)
        self.per, self.channels, self.init = per, channels, init
        shape = (self.n_sites if per == "site" else n_blocks, *((dim,) if channels else ()))
        self.r = nn.Parameter(torch.empty(shape))
        self.c = nn.Parameter(torch.empty(shape))
        self.b = nn.Parameter(torch.empty(1)) if backout else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.ones_(self.r)
        nn.init.zeros_(self.c)
        if self.b is not None:
            nn.init.constant_(self.b, 0.2 if self.init == "nanochat" else 0.0)
        if self.init == "nanochat":
            for site, block in enumerate(self.layout.block[:-1]):
                row, depth = self._row(site), block / max(self.n_blocks - 1, 1)
                if row is None:
                    continue
                # Sites share their block's factor. The embedding joins at the first.
                sites = self.layout.block.count(block) if self.per == "site" else 1
                self.r[row] = (1.15 - 0.10 * depth) ** (1 / sites)
                if self.layout.begins[site]:
                    self.c[row] = 0.20 - 0.15 * depth

    def weight_options(self) -> dict[str, Any]:
        return {name: value for name, value in super().weight_options().items() if name != "init"}  # how weights begin

    def _row(self, site: int) -> int | None:
        """Return the row of r and c that a site applies before its read; None where the stream stays as it is."""
        if self.per == "site":
            return site
        return self.layout.block[site] if self.layout.begins[site] else None

    def _sum(self, state: LambdasState, site: int, *added: Tensor) -> Tensor:
        """Return r x + c x_0 plus what is added, rounded once."""
        row = self._row(site)
        if row is None:
            return state.x if not added else (state.x + added[0]).to(state.x.dtype)
        r, c, one = self.r[row], self.c[row], torch.ones_like(self.r[row])
        if site == 0:  # x is x_0 still
            return _weighted([r + c, *(one for _ in added)], state.x, *added)
        return _weighted([r, c, *(one for _ in added)], state.x, state.x_0, *added)

    def _start(self, x: Tensor) -> LambdasState:
        return LambdasState(x=x, x_0=x)

    def _read(self, state: LambdasState, site: int) -> Tensor:
        return self._sum(state, site)

    def _write(self, state: LambdasState, site: int, y: Tensor) -> LambdasState:
        x = self._sum(state, site, y)
        ends_middle = self.layout.ends[site] and self.layout.block[site] == self.n_blocks // 2
        after: LambdasState = state.next(x=x, x_m=x if self.b is not None and ends_middle else state.x_m)
        return after

    def _finish(self, state: LambdasState) -> Tensor:
        if self.b is None:
            return state.x
        if self.n_blocks // 2 == self.n_blocks - 1:  # x_m is x
            return _weighted([1 - self.b], state.x)
        assert state.x_m is not None
        return _weighted([torch.ones_like(self.b), -self.b], state.x, state.x_m)


def _weighted(weights: list[Tensor], *sources: Tensor) -> Tensor:
    """Return the sum of the sources with these weights, numbers or [D]."""
    return depth_sum(sources, torch.stack(weights).view(1, len(sources), -1))[0]
