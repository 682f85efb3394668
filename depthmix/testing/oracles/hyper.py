"""Hyper-Connections (arXiv 2409.19606): n streams with static or dynamic coefficients.

h_s = A_m^T H;   H'_j = Σ_i A_r[i, j] H_i + B_j y_s;   the end sums the streams
dynamic, Hn = norm(H) stream by stream, without a gain:
B(H) = s_beta tanh(Hn W_beta) + B;   A_m(H) = s_alpha tanh(Hn W_m) + A_m;   A_r(H) = s_alpha tanh(Hn W_r) + A_r
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from depthmix.testing.oracles.base import EpsOutside, Mistake, Parameters, clipped_gradients, other_eps
from depthmix.testing.oracles.streams import Coefficients, MeanAtEnd, Streams, stream_mistakes


class Hyper(Streams):
    """A_m [S, n], A_r [S, n, n], B [S, n]; dynamic also W_m [S, D], W_r [S, D, n], W_beta [S, D], s_alpha [S], s_beta [S]."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"n": 4, "static": False, "tanh": True, "norm": "layernorm", "eps": None}

    def __init__(self, options: Any, n_blocks: int) -> None:
        super().__init__(options, n_blocks)
        if options["eps"] is None:
            self.eps = 1e-5 if options["norm"] == "layernorm" else 1e-6

    def shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter."""
        n, S = self.options["n"], self.sites
        shapes: dict[str, tuple[int, ...]] = {"A_m": (S, n), "A_r": (S, n, n), "B": (S, n)}
        if not self.options["static"]:
            shapes |= {"W_m": (S, dim), "W_r": (S, dim, n), "W_beta": (S, dim), "s_alpha": (S,), "s_beta": (S,)}
        return shapes

    def initial(self, dim: int) -> dict[str, Tensor]:
        """Return the initial values with which the model is the plain residual."""
        n = self.options["n"]
        values = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self.shapes(dim).items()}
        values["A_m"] = torch.eye(n, dtype=torch.float64)[torch.arange(self.sites) % n]
        values["A_r"] = torch.eye(n, dtype=torch.float64).repeat(self.sites, 1, 1)
        values["B"] = torch.ones_like(values["B"])
        return values | {name: torch.full_like(v, 0.01) for name, v in values.items() if name.startswith("s_")}

    def names_of_initial(self) -> dict[str, str]:
        """Name initial values with which the model is not the plain residual."""
        names = {"A_m": "reads do not begin with one stream each", "A_r": "residual map does not begin as the identity"}
        names |= {"B": "writes do not begin at one"}
        return names | {name: f"{name} does not begin at zero" for name in ("W_m", "W_r", "W_beta")}

    def coefficients(self, p: Parameters, s: int, x: Tensor) -> Coefficients:
        """Return the coefficients of site s."""
        batch = x.shape[:-2]
        A_m, A_r, B = (self.static(p[name][s]) for name in ("A_m", "A_r", "B"))
        A_m, A_r, B = A_m.expand(*batch, *A_m.shape), A_r.expand(*batch, *A_r.shape), B.expand(*batch, *B.shape)
        if not self.options["static"]:
            hn = self.norm(x)
            A_m = A_m + p["s_alpha"][s] * self.squash(self.projection(hn, p["W_m"][s][:, None]).squeeze(-1))
            A_r = A_r + p["s_alpha"][s] * self.squash(self.projection(hn, p["W_r"][s]))
            B = B + p["s_beta"][s] * self.squash(self.projection(hn, p["W_beta"][s][:, None]).squeeze(-1))
        return Coefficients(A_m, B, A_r.transpose(-1, -2))

    def static(self, value: Tensor) -> Tensor:
        """Return the static part of a coefficient."""
        return value

    def norm(self, x: Tensor) -> Tensor:
        """Return normed streams."""
        return self.rms(self.centred(x))

    def centred(self, x: Tensor) -> Tensor:
        """Return the streams, for LayerNorm without their means."""
        return x - x.mean(-1, keepdim=True) if self.options["norm"] == "layernorm" else x

    def projection(self, hn: Tensor, w: Tensor) -> Tensor:
        """Project normed streams."""
        return hn @ w

    def squash(self, z: Tensor) -> Tensor:
        """Return the dynamic part, bounded by tanh."""
        return torch.tanh(z) if self.options["tanh"] else z

    def mistakes(self) -> list[Mistake]:
        """Return the usual mistakes."""
        found = [*stream_mistakes(), Mistake("streams averaged at the end instead of summed", MeanAtEnd)]
        if not self.options["static"]:
            other = (
                "RMSNorm instead of LayerNorm"
                if self.options["norm"] == "layernorm"
                else "LayerNorm instead of RMSNorm"
            )
            found += [
                Mistake("norm missing", NoNorm),
                Mistake("norm over all streams instead of per stream", NormOverStreams),
                Mistake("norm after the projection instead of before", NormAfterProjection),
                Mistake(other, OtherNorm),
                Mistake("tanh missing" if self.options["tanh"] else "tanh added", OtherSquash),
                Mistake("static part missing", NoStatic),
                Mistake("eps outside the square root", EpsOutside),
                *other_eps(self.eps),
            ]
        return [*found, *clipped_gradients()]


class NoNorm:
    """Leave the norm out."""

    def norm(self, x: Tensor) -> Tensor:
        """Return the streams."""
        return x


class NormOverStreams(Hyper):
    """Norm all streams of a token together."""

    def norm(self, x: Tensor) -> Tensor:
        """Return jointly normed streams."""
        return super().norm(x.flatten(-2)).view_as(x)


class NormAfterProjection(Hyper):
    """Norm what the projection returns, over the streams."""

    def norm(self, x: Tensor) -> Tensor:
        """Return the streams."""
        return x

    def projection(self, hn: Tensor, w: Tensor) -> Tensor:
        """Return normed projections."""
        return self.rms(hn @ w)


class OtherNorm(Hyper):
    """Subtract the mean where the rule does not, and the reverse."""

    def centred(self, x: Tensor) -> Tensor:
        """Return the other input of the norm."""
        return x if self.options["norm"] == "layernorm" else x - x.mean(-1, keepdim=True)


class OtherSquash(Hyper):
    """Use tanh where the options do not, and the reverse."""

    def squash(self, z: Tensor) -> Tensor:
        """Return the other bound."""
        return z if self.options["tanh"] else torch.tanh(z)


class NoStatic:
    """Leave static parts out."""

    def static(self, value: Tensor) -> Tensor:
        """Return zeros."""
        return torch.zeros_like(value)
