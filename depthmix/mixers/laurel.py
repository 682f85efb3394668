"""LAuReL, Learned Augmented Residual Layer (Menghani et al. 2024, arXiv 2411.07501).

rw:  x_{s+1} = alpha_s y_s + beta_s x_s
lr:  x_{s+1} = y_s + x_s + B_s A_s x_s
pa:  x_{s+1} = y_s + x_s + B_s A_s Σ_{j<s} gamma_{s,j} x_j
"""

from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from depthmix.mixers.base import register
from depthmix.mixers.one_stream import OneStream
from depthmix.mixers.options import OptionError, at_least
from depthmix.mixers.state import StreamState, register_state
from depthmix.ops import depth_sum
from depthmix.ops.matmul import matmul
from depthmix.ops.precision import compute_dtype

DEFAULT_RANK = 16


@register_state
class HistoryState(StreamState):
    """The stream and all that it was before earlier sites."""

    history: tuple[Tensor, ...] = ()  # x_0 … x_{s-1}


@register("laurel")
class Laurel(OneStream):
    """alpha, beta [S] = 1; A [S, rank, D] orthonormal rows, B [S, D, rank] = 0; gamma [S, S] = 1, row s uses the first s."""

    decayed = frozenset({"A", "B"})

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        *,
        variant: Literal["rw", "lr", "pa"] = "lr",
        rank: Annotated[int | None, at_least(1)] = None,
    ) -> None:
        super().__init__(dim, n_blocks)
        if rank is not None and (rank > dim or variant == "rw"):
            expected = f"an integer from 1 to dim={dim}" if variant != "rw" else "left out: variant='rw' has none"
            raise OptionError(f"laurel: rank must be {expected}, got {rank}")
        self.variant, self.rank = variant, min(DEFAULT_RANK, dim) if rank is None else rank
        self.channel_mixing = variant != "rw"
        self.units = (25, 26, 2) if variant != "rw" else (23, 36, 4)  # without the history of pa
        sites = self.n_sites
        if variant == "rw":
            self.alpha = nn.Parameter(torch.empty(sites))
            self.beta = nn.Parameter(torch.empty(sites))
        else:
            self.A = nn.Parameter(torch.empty(sites, self.rank, dim))
            self.B = nn.Parameter(torch.empty(sites, dim, self.rank))
        if variant == "pa":
            self.gamma = nn.Parameter(torch.empty(sites, sites))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, p in self.named_parameters():
            if name == "A":
                for a in p.data:
                    nn.init.orthogonal_(a)
            else:
                nn.init.constant_(p, 0.0 if name == "B" else 1.0)

    def state_tensors(self) -> list[dict[int, float]]:
        if self.variant != "pa":
            return super().state_tensors()
        return [dict.fromkeys(range(site + 1), 1.0) for site in range(self.n_sites + 1)]  # with its history

    def _start(self, x: Tensor) -> StreamState:
        return HistoryState(x=x) if self.variant == "pa" else StreamState(x=x)

    def _low_rank(self, x: Tensor, site: int) -> Tensor:
        x = x.to(compute_dtype(x))
        return matmul(matmul(x, self.A[site].to(x.dtype).T), self.B[site].to(x.dtype).T)

    def _join(self, state: StreamState, site: int, y: Tensor) -> Tensor:
        wide = compute_dtype(state.x)
        x, y = state.x.to(wide), y.to(wide)
        if self.variant == "rw":
            return self.alpha[site].to(wide) * y + self.beta[site].to(wide) * x
        if self.variant == "lr":
            return x + y + self._low_rank(x, site)
        assert isinstance(state, HistoryState)
        if not state.history:
            return x + y
        earlier = depth_sum([h.to(wide) for h in state.history], static=self.gamma[site, :site, None].unsqueeze(0))[0]
        return x + y + self._low_rank(earlier, site)

    def _write(self, state: StreamState, site: int, y: Tensor) -> StreamState:
        after = super()._write(state, site, y)
        if isinstance(after, HistoryState):
            after.history = (*after.history, state.x)
        return after
