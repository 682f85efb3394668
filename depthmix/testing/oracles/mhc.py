"""Manifold-Constrained Hyper-Connections (arXiv 2512.24880): n streams, with a residual map made doubly stochastic by Sinkhorn.

    z = RMS(x_0 | ... | x_{n-1}) phi_s = [z_pre | z_post | z_res];   H~ = alpha_s z + b_s, each part with its own alpha
    pre = sigmoid(H~_pre);   post = 2 sigmoid(H~_post);   map = Sinkhorn(H~_res)

Conventions:
    paper      H~_res[out, in]; exp, then columns and rows in turn, rows last; the norm's eps is 1e-20
    deepseek   H~_res[in, out]; softmax over out plus eps, then sums over in and over out in turn, over in last, each plus eps;
               pre has eps too; all of them and the norm's are 1e-6
    hy_v4      no residual map; pre and post have eps; the head is learned
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from depthmix.testing.oracles.base import EpsOutside, Mistake, Parameters, clamps, other_eps
from depthmix.testing.oracles.streams import Coefficients, MeanAtEnd, Streams, SumAtEnd, stream_mistakes

EPS = 1e-6
# Bias with which a gate is nearly closed: its eps is then larger than the gate.
CLOSED = -20.0
# Factor with which columns of Sinkhorn's matrix nearly vanish.
SPREAD = 20.0


class Mhc(Streams):
    """phi [S, n D, K], b [S, K], alpha [S, 3], K = 2 n + n²; with a learned head phi_head [n D, n], b_head [n], alpha_head [1]."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"n": 4, "iterations": 20, "head": "sum", "map": "sinkhorn", "eps": None}
    CONVENTIONS: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"eps": 1e-20},
        "deepseek": {"eps": EPS},
        "hy_v4": {"eps": 1e-5, "map": "identity", "head": "learned"},
    }
    pre_eps = post_eps = sinkhorn_eps = 0.0
    post_scale = 2.0

    def __init__(self, options: Any, n_blocks: int) -> None:
        super().__init__(options, n_blocks)
        self.n, self.iterations = options["n"], options["iterations"]
        self.convention = options["convention"]
        if self.convention != "paper":
            self.pre_eps = EPS
        if self.convention == "deepseek":
            self.sinkhorn_eps = EPS
        if self.convention == "hy_v4":
            self.post_eps = EPS

    def shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter."""
        n, S = self.n, self.sites
        has_map = self.options["map"] == "sinkhorn"
        K = 2 * n + (n * n if has_map else 0)
        shapes: dict[str, tuple[int, ...]] = {"phi": (S, n * dim, K), "b": (S, K), "alpha": (S, 3 if has_map else 2)}
        if self.options["head"] == "learned":
            shapes |= {"phi_head": (n * dim, n), "alpha_head": (1,), "b_head": (n,)}
        return shapes

    def initial(self, dim: int) -> dict[str, Tensor]:
        """Return alpha of 0.01, the paper's, and zeros for what it leaves open."""
        values = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self.shapes(dim).items()}
        return values | {name: torch.full_like(v, 0.01) for name, v in values.items() if name.startswith("alpha")}

    def saturated(self, p: dict[str, Tensor]) -> dict[str, Tensor]:
        """Close the gates of reads and every second write, and spread the logits of the residual map.

        Without any write all streams are equal, and no residual map can change them.
        """
        b = p["b"].clone()
        b[:, : self.n] += CLOSED
        b[1::2, self.n : 2 * self.n] += CLOSED
        b[:, 2 * self.n :] *= SPREAD
        return p | {"b": b}

    def coefficients(self, p: Parameters, s: int, x: Tensor) -> Coefficients:
        """Return the coefficients of site s."""
        n, alpha, b = self.n, p["alpha"][s], p["b"][s]
        z = self.projected(x, p["phi"][s])
        cuts = (slice(0, n), slice(n, 2 * n), slice(2 * n, None))
        logits = [self.cut(self.logits(z[..., cut], scale, b[cut])) for cut, scale in zip(cuts, alpha, strict=False)]
        read = torch.sigmoid(logits[0]) + self.pre_eps
        write = self.post_scale * torch.sigmoid(logits[1]) + self.post_eps
        if self.options["map"] == "identity":
            residual = torch.eye(n, dtype=x.dtype).expand(*x.shape[:-2], n, n)
        else:
            residual = self.residual(self.matrix(self.cut_residual(logits[2])))
        return Coefficients(read, write, residual)

    def projected(self, x: Tensor, phi: Tensor) -> Tensor:
        """Return the projections of the streams, which are normed together."""
        return self.normed(x) @ phi

    def normed(self, x: Tensor) -> Tensor:
        """Return the streams one after the other, normed: [B, T, n D]."""
        return self.rms(x.flatten(-2))

    def logits(self, z: Tensor, alpha: Tensor, b: Tensor) -> Tensor:
        """Return a part's logits."""
        return alpha * z + b

    def cut_residual(self, logits: Tensor) -> Tensor:
        """Return the logits of the residual map, cut where an implementation cuts them alone."""
        return logits

    def matrix(self, logits: Tensor) -> Tensor:
        """Return the residual map's logits [B, T, n, n], row by row."""
        return logits.unflatten(-1, (self.n, self.n))

    def residual(self, logits: Tensor) -> Tensor:
        """Return the residual map, out by in. Its sums over `in` come last, or over `out` for DeepSeek's transposed matrix."""
        if self.convention == "deepseek":
            return self.sinkhorn(logits, last=-2).transpose(-1, -2)
        return self.sinkhorn(logits, last=-1)

    def sinkhorn(self, logits: Tensor, last: int) -> Tensor:
        """Divide by sums over two dimensions in turn, over `last` last."""
        other = -3 - last
        if self.convention == "deepseek":
            # The softmax is the first of the divisions.
            m = self.divided(self.started(logits, other), last)
            for _ in range(self.iterations - 1):
                m = self.divided(self.divided(m, other), last)
            return m
        m = self.started(logits, last)
        for _ in range(self.iterations):
            m = self.divided(self.divided(m, other), last)
        return m

    def started(self, logits: Tensor, dim: int) -> Tensor:
        """Return the positive matrix that the iterations begin with."""
        if self.convention == "deepseek":
            return torch.softmax(logits, dim=dim) + self.sinkhorn_eps
        return torch.exp(logits - logits.amax((-2, -1), keepdim=True))

    def divided(self, m: Tensor, dim: int) -> Tensor:
        """Divide by the sums over a dimension."""
        return m / (self.summed(m, dim) + self.sinkhorn_eps)

    def summed(self, m: Tensor, dim: int) -> Tensor:
        """Return the sums over a dimension."""
        return m.sum(dim, keepdim=True)

    def end(self, p: Parameters, x: Tensor) -> Tensor:
        """Return what the end reads."""
        if self.options["head"] == "learned":
            logits = p["alpha_head"] * (self.normed(x) @ p["phi_head"]) + p["b_head"]
            return ((torch.sigmoid(logits) + EPS)[..., None] * x).sum(-2)
        return x.sum(-2) if self.options["head"] == "sum" else x.mean(-2)

    def mistakes(self) -> list[Mistake]:
        """Return the usual mistakes."""
        has_map = self.options["map"] == "sinkhorn"
        found = [m for m in stream_mistakes() if has_map or "residual map" not in m.name]
        if has_map:
            other = "deepseek" if self.convention == "paper" else "paper"
            found += [
                Mistake("row/column order of Sinkhorn", OtherOrder),
                Mistake(f"the convention of {other} instead of {self.convention}", OtherConvention),
                *(
                    Mistake(f"clamped gradients (residual logits are clamped at {value:g})", _cut_residual(value))
                    for value in (2.0, 5.0, 10.0, 20.0)
                ),
                Mistake("one Sinkhorn iteration too many", MoreIterations),
                Mistake("one Sinkhorn iteration too few", FewerIterations),
                Mistake("logits of the residual map read column by column", ColumnByColumn),
                Mistake("gradient of Sinkhorn's sums missing", SumsWithoutGradient),
                Mistake(
                    "Sinkhorn starts with exp instead of softmax"
                    if self.convention == "deepseek"
                    else "Sinkhorn starts with softmax instead of exp",
                    OtherStart,
                ),
                Mistake(
                    "eps of Sinkhorn missing" if self.sinkhorn_eps else "eps added to the sums of Sinkhorn",
                    OtherSinkhornEps,
                ),
                Mistake("order of the logits ([pre | res | post] instead of [pre | post | res])", OtherLayout),
            ]
        found += [
            Mistake("norm after the projection instead of before", NormAfterProjection),
            Mistake("norm per stream instead of over all streams", NormPerStream),
            Mistake("norm missing", NoNorm),
            Mistake("post without its factor of 2", NoFactor),
            Mistake("tanh in the coefficients", Tanh),
            Mistake("alpha multiplies the bias too", ScaledBias),
            Mistake("eps of pre missing" if self.pre_eps else "eps added to pre", OtherPreEps),
            Mistake("eps of post missing" if self.post_eps else "eps added to post", OtherPostEps),
            Mistake("eps outside the square root", EpsOutside),
            *other_eps(self.eps),
            *clamps(),
        ]
        ends = {"sum": ("summed", SumAtEnd), "mean": ("averaged", MeanAtEnd)}
        return found + [
            Mistake(f"streams {word} at the end (the head is {self.options['head']})", step)
            for name, (word, step) in ends.items()
            if name != self.options["head"]
        ]


def _cut_residual(limit: float) -> type:
    class CutResidual:
        def cut_residual(self, logits: Tensor) -> Tensor:
            """Return cut logits."""
            return logits.clamp(-limit, limit)

    return CutResidual


class OtherOrder(Mhc):
    """Divide by rows and columns in the other order."""

    def residual(self, logits: Tensor) -> Tensor:
        """Return the residual map of the other order."""
        if self.convention == "deepseek":
            return self.sinkhorn(logits, last=-1).transpose(-1, -2)
        return self.sinkhorn(logits, last=-2)


class OtherConvention(Mhc):
    """Follow another convention with parameters of the same shapes."""

    def __init__(self, options: Any, n_blocks: int) -> None:
        other = "deepseek" if options["convention"] == "paper" else "paper"
        super().__init__({**options, "convention": other, "eps": self.CONVENTIONS[other]["eps"]}, n_blocks)


class MoreIterations(Mhc):
    """Run one iteration more."""

    def __init__(self, options: Any, n_blocks: int) -> None:
        super().__init__(options, n_blocks)
        self.iterations += 1


class FewerIterations(Mhc):
    """Run one iteration less."""

    def __init__(self, options: Any, n_blocks: int) -> None:
        super().__init__(options, n_blocks)
        self.iterations -= 1


class ColumnByColumn(Mhc):
    """Fill the residual map column by column."""

    def matrix(self, logits: Tensor) -> Tensor:
        """Return the transposed logits."""
        return super().matrix(logits).transpose(-1, -2)


class SumsWithoutGradient:
    """Treat Sinkhorn's sums as constants."""

    def summed(self, m: Tensor, dim: int) -> Tensor:
        """Return the sums, detached."""
        return m.sum(dim, keepdim=True).detach()


class OtherStart(Mhc):
    """Begin Sinkhorn as the other convention does."""

    def started(self, logits: Tensor, dim: int) -> Tensor:
        """Return the other positive matrix."""
        if self.convention == "paper":
            return torch.softmax(logits, dim=dim)
        # Without its first division.
        return torch.exp(logits - logits.amax((-2, -1), keepdim=True)) + self.sinkhorn_eps


class OtherSinkhornEps(Mhc):
    """Leave Sinkhorn's eps out, or add one."""

    def __init__(self, options: Any, n_blocks: int) -> None:
        super().__init__(options, n_blocks)
        self.sinkhorn_eps = EPS - self.sinkhorn_eps


class OtherPreEps(Mhc):
    """Leave pre's eps out, or add one."""

    def __init__(self, options: Any, n_blocks: int) -> None:
        super().__init__(options, n_blocks)
        self.pre_eps = EPS - self.pre_eps


class OtherPostEps(Mhc):
    """Leave post's eps out, or add one."""

    def __init__(self, options: Any, n_blocks: int) -> None:
        super().__init__(options, n_blocks)
        self.post_eps = EPS - self.post_eps


class OtherLayout(Mhc):
    """Read the logits as [pre | res | post]."""

    def projected(self, x: Tensor, phi: Tensor) -> Tensor:
        """Return projections in the order of the oracle."""
        z = super().projected(x, phi)
        n = self.n
        return torch.cat([z[..., :n], z[..., -n:], z[..., n:-n]], dim=-1)


class NormAfterProjection(Mhc):
    """Norm what the projection returns."""

    def projected(self, x: Tensor, phi: Tensor) -> Tensor:
        """Return normed projections."""
        return self.rms(x.flatten(-2) @ phi)


class NormPerStream(Mhc):
    """Norm every stream by itself."""

    def normed(self, x: Tensor) -> Tensor:
        """Return streams that are normed one by one."""
        return self.rms(x).flatten(-2)


class NoNorm:
    """Leave the norm out."""

    def normed(self, x: Tensor) -> Tensor:
        """Return the streams."""
        return x.flatten(-2)


class NoFactor:
    """Leave the factor of post out."""

    post_scale = 1.0


class Tanh:
    """Squash the projections."""

    def logits(self, z: Tensor, alpha: Tensor, b: Tensor) -> Tensor:
        """Return the logits of squashed projections."""
        return alpha * torch.tanh(z) + b


class ScaledBias:
    """Multiply the bias by alpha."""

    def logits(self, z: Tensor, alpha: Tensor, b: Tensor) -> Tensor:
        """Return scaled sums."""
        return alpha * (z + b)
