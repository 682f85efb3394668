"""LAuReL, Learned Augmented Residual Layer (Menghani et al. 2024, arXiv 2411.07501).

rw:  x_{s+1} = alpha_s y_s + beta_s x_s
lr:  x_{s+1} = y_s + x_s + B_s A_s x_s
pa:  x_{s+1} = y_s + x_s + B_s z_s;    z_s = Σ_{j<s} gamma_{s,j} A_s x_j

z has `rank` numbers. pa therefore adds up z and not x: every x_j is read once, for all later sites.
"""

import dataclasses
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthmix.mixers.one_stream import OneStream
from depthmix.mixers.options import OptionError, at_least
from depthmix.mixers.registry import register
from depthmix.mixers.state import StreamState, register_state
from depthmix.ops.matmul import matmul
from depthmix.ops.precision import compute_dtype

DEFAULT_RANK = 16


class LaterZ(NamedTuple):
    """Contributions of the history so far to z of the next site and all sites after it, not rounded."""

    z: Tensor  # [..., sites * rank]
    trained: bool  # made with gradients


@register_state
class HistoryState(StreamState):
    """The stream, and the streams before all earlier sites."""

    history: tuple[Tensor, ...] = ()  # x_0 … x_{s-1}
    later_z: LaterZ | None = dataclasses.field(default=None, repr=False, metadata={"cache": True})


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

    def weight_options(self) -> dict[str, Any]:
        return super().weight_options() | {"rank": None if self.variant == "rw" else self.rank}

    def _start(self, x: Tensor) -> StreamState:
        return HistoryState(x=x) if self.variant == "pa" else StreamState(x=x)

    def _join(self, state: StreamState, site: int, y: Tensor) -> Tensor:
        wide = compute_dtype(state.x)
        x, y = state.x.to(wide), y.to(wide)
        if self.variant == "rw":
            return self.alpha[site].to(wide) * y + self.beta[site].to(wide) * x
        if self.variant == "lr":
            z = matmul(x, self.A[site].to(wide).T)
        elif (z_from_here := self._z_from(state, site)) is not None:
            # A copy: the backward of a product would keep the whole tensor that a view belongs to.
            z = z_from_here[..., : self.rank].contiguous()
        else:
            return x + y
        return x + y + matmul(z, self.B[site].to(wide).T)

    def _write(self, state: StreamState, site: int, y: Tensor) -> StreamState:
        if not isinstance(state, HistoryState):
            return super()._write(state, site, y)
        z, trained, later = self._z_from(state, site), torch.is_grad_enabled(), None
        known = dataclasses.replace(state, later_z=None if z is None else LaterZ(z, trained))
        if site + 1 < self.n_sites:
            later = LaterZ(
                self._with_part(None if z is None else z[..., self.rank :], state.x, site, site + 1), trained
            )
        after: Any = super()._write(known, site, y)
        return dataclasses.replace(after, history=(*state.history, state.x), later_z=later)

    def _z_from(self, state: Any, site: int) -> Tensor | None:
        """Return z of this site and all after it, side by side; None if there is no history."""
        if state.later_z is not None and (state.later_z.trained or not torch.is_grad_enabled()):
            return state.later_z.z
        # A state that comes from elsewhere, such as another pipeline stage, has the history alone.
        z = None
        for j, x in enumerate(state.history):
            z = self._with_part(z, x, j, site)
        return z

    def _with_part(self, z: Tensor | None, x: Tensor, j: int, site: int) -> Tensor:
        """Add the part of x_j to z of a site and all after it."""
        x = x.to(compute_dtype(x))
        gamma, rows = (p[site:].to(x.dtype) for p in (self.gamma, self.A))
        part = matmul(x, (gamma[:, j, None, None] * rows).flatten(0, 1).T)
        return part if z is None else z + part
