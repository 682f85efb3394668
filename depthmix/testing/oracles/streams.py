"""Rules with several residual streams: a site reads them, and its output is written to all of them.

h_s = Σ_i read[i] x_i;   x'_o = Σ_i map[o, i] x_i + write[o] y_s;   the end reads the streams once more
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthmix.testing.oracles.base import Mistake, Oracle, Parameters, Sublayer


class Coefficients(NamedTuple):
    """The coefficients of a site, per token."""

    read: Tensor  # [B, T, n]
    write: Tensor  # [B, T, n]
    map: Tensor  # [B, T, n, n], out by in


class Streams(Oracle):
    """A rule of n streams."""

    def run(self, p: Parameters, e: Tensor, sublayer: Sublayer) -> Tensor:
        """Run a pass."""
        x = self.expand(e)
        for s in range(self.sites):
            x = self.between(p, x, s)
            c = self.coefficients(p, s, x)
            x = self.written(x, c, sublayer(self.reads(x, c)))
        return self.end(p, x)

    def expand(self, e: Tensor) -> Tensor:
        """Return the streams [B, T, n, D] at the start: copies of the embedding."""
        return torch.stack([e] * self.options["n"], dim=-2)

    def between(self, p: Parameters, x: Tensor, s: int) -> Tensor:
        """Return the streams that site s finds."""
        return x

    def coefficients(self, p: Parameters, s: int, x: Tensor) -> Coefficients:
        """Return the coefficients of site s."""
        raise NotImplementedError

    def reads(self, x: Tensor, c: Coefficients) -> Tensor:
        """Return what a sublayer reads."""
        return (c.read[..., None] * x).sum(-2)

    def written(self, x: Tensor, c: Coefficients, y: Tensor) -> Tensor:
        """Return the streams after an output."""
        return self.mapped(x, c) + c.write[..., None] * y[..., None, :]

    def mapped(self, x: Tensor, c: Coefficients) -> Tensor:
        """Return the streams after the residual map."""
        return torch.einsum("btoi,btid->btod", c.map, x)

    def end(self, p: Parameters, x: Tensor) -> Tensor:
        """Return what the end reads."""
        return x.sum(-2)


def stream_mistakes() -> list[Mistake]:
    """Return the mistakes of rules with streams."""
    return [
        Mistake("transposed residual map", Transposed),
        Mistake("residual map not applied", NotApplied),
        Mistake("streams do not persist from block to block", Restart),
        Mistake("the sublayer reads after the residual map", ReadAfterMap),
        Mistake("the output is written to the first stream alone", FirstStreamAlone),
    ]


class Transposed:
    """Apply the transposed map."""

    def mapped(self, x: Tensor, c: Coefficients) -> Tensor:
        """Return the streams after the transposed map."""
        return torch.einsum("btio,btid->btod", c.map, x)


class NotApplied:
    """Leave the streams as they are."""

    def mapped(self, x: Tensor, c: Coefficients) -> Tensor:
        """Return the streams."""
        return x


class Restart(Streams):
    """Reduce the streams at the end of every block and expand the result again."""

    def between(self, p: Parameters, x: Tensor, s: int) -> Tensor:
        """Return copies of the end's read at the start of every block but the first."""
        return self.expand(self.end(p, x)) if s and s % 2 == 0 else x


class ReadAfterMap(Streams):
    """Read the streams after the residual map."""

    def reads(self, x: Tensor, c: Coefficients) -> Tensor:
        """Return the read of mapped streams."""
        return super().reads(self.mapped(x, c), c)


class FirstStreamAlone(Streams):
    """Write to stream 0."""

    def written(self, x: Tensor, c: Coefficients, y: Tensor) -> Tensor:
        """Return the streams, the first of them with the output."""
        first = torch.zeros_like(c.write)
        first[..., 0] = c.write[..., 0]
        return super().written(x, c._replace(write=first), y)


class SumAtEnd:
    """Sum the streams at the end."""

    def end(self, p: Parameters, x: Tensor) -> Tensor:
        """Return the sum."""
        return x.sum(-2)


class MeanAtEnd:
    """Average the streams at the end."""

    def end(self, p: Parameters, x: Tensor) -> Tensor:
        """Return the mean."""
        return x.mean(-2)
