"""DenseFormer (arXiv 2402.02622), dilation and period 1: an average of all states so far follows every block.

X_0 = Y_0 = e;   X_i = Y_{i-1} and the outputs of block i;   Y_i = Σ_{j <= i} alpha_{i,j} X_j;   the end reads Y_N
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from depthmix.testing.oracles.base import Mistake, Oracle, Parameters, Sublayer, clipped_gradients


class DenseFormer(Oracle):
    """alpha.i [i + 1] for blocks i = 1 ... N."""

    DEFAULTS: ClassVar[dict[str, Any]] = {}
    many_averages = True

    def shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter."""
        return {f"alpha.{i}": (i + 1,) for i in range(1, self.n_blocks + 1)}

    def initial(self, dim: int) -> dict[str, Tensor]:
        """Return ones for the current state and zeros for the others."""
        return {name: torch.eye(n, dtype=torch.float64)[-1] for name, (n,) in self.shapes(dim).items()}

    def names_of_initial(self) -> dict[str, str]:
        """Name weights that do not begin as the plain residual."""
        return dict.fromkeys(self.shapes(1), "weights do not begin as the plain residual")

    def run(self, p: Parameters, e: Tensor, sublayer: Sublayer) -> Tensor:
        """Run a pass."""
        states, y = [e], e
        for i in range(1, self.n_blocks + 1):
            x, begun = y, y
            for _ in range(2):
                x = x + sublayer(x)
            states = self.kept(states, x, begun)
            y = self.average(self.weights(p[f"alpha.{i}"]), states)
            states = self.after(states, y)
            if i == self.n_blocks:
                y = self.end(x, y)
        return y

    def kept(self, states: list[Tensor], x: Tensor, begun: Tensor) -> list[Tensor]:
        """Return the states after a block that began with `begun` and ends with x."""
        return [*states, x]

    def after(self, states: list[Tensor], y: Tensor) -> list[Tensor]:
        """Return the states that later averages read."""
        return states

    def weights(self, alpha: Tensor) -> Tensor:
        """Return the weights of an average."""
        return alpha

    def average(self, weights: Tensor, states: list[Tensor]) -> Tensor:
        """Return the weighted sum of states."""
        return torch.stack([w * x for w, x in zip(weights, states, strict=True)]).sum(0)

    def end(self, x: Tensor, y: Tensor) -> Tensor:
        """Return what the end reads, given the last state and the last average."""
        return y

    def mistakes(self) -> list[Mistake]:
        """Return the usual mistakes."""
        return [
            Mistake("embedding not among the sources", NoEmbedding),
            Mistake("outputs of blocks instead of states", OutputsOfBlocks),
            Mistake("averages of averages", AveragesOfAverages),
            Mistake("weights normed by a softmax", SoftmaxWeights),
            Mistake("weights run from the newest state to the oldest", NewestFirst),
            Mistake("no average after the last block", NoLastAverage),
            *clipped_gradients(),
        ]


class NoEmbedding:
    """Leave the embedding out of averages."""

    def average(self, weights: Tensor, states: list[Tensor]) -> Tensor:
        """Return the weighted sum of all states but the first."""
        return torch.stack([w * x for w, x in zip(weights[1:], states[1:], strict=True)]).sum(0)


class OutputsOfBlocks:
    """Keep what a block adds."""

    def kept(self, states: list[Tensor], x: Tensor, begun: Tensor) -> list[Tensor]:
        """Return the states with the block's increment."""
        return [*states, x - begun]


class AveragesOfAverages:
    """Let averages replace states."""

    def after(self, states: list[Tensor], y: Tensor) -> list[Tensor]:
        """Return the states with the average as the last."""
        return [*states[:-1], y]


class SoftmaxWeights:
    """Norm the weights."""

    def weights(self, alpha: Tensor) -> Tensor:
        """Return the softmax of weights."""
        return torch.softmax(alpha, dim=0)


class NewestFirst:
    """Reverse the weights."""

    def weights(self, alpha: Tensor) -> Tensor:
        """Return the reversed weights."""
        return alpha.flip(0)


class NoLastAverage:
    """Leave the last average out."""

    def end(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the last state."""
        return x
