"""Weights of one reader of a stack of entries G_0 … G_{n-1}, for each of its W mixtures.

mixture_w = Σ_j weight[w, j] ⊙ G_j;      weight[w, j] = static[w, j] + dynamic[w, j]

dynamic[w, j] = projection[w, j] · G_j              (GRN version 3 and DCA, with a ReLU)
dynamic = W_2 GELU(W_1 RMS(G_{n-1})) + b            (MUDD)
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from depthmix.ops import depth_scores
from depthmix.ops.depth_sum.coefficients import coefficients_reference


class Network(NamedTuple):
    """A small network that computes a reader's weights from its newest entry."""

    W_1: Tensor  # [K, D]
    W_2: Tensor  # [W n, K]
    b: Tensor  # [W, n]
    eps: float  # of RMS


class ReaderWeights(NamedTuple):
    """The weights of a reader: numbers or vectors that all tokens share, plus numbers that depend on the entries."""

    static: Tensor | None = None  # [W, n, D] or [W, n, 1]
    projection: Tensor | None = None  # [W, n, D], or [W, 1, D] for all entries
    network: Network | None = None
    # Which weights are clamped at zero. The derivative at zero is 1, because w = 0 puts every score there.
    relu_on: Literal["dynamic", "sum"] | None = None
    # The reader sees the entries first, first + every, … Numbers, since torch.compile cannot rebuild a slice in a tuple.
    first: int = 0
    every: int = 1

    @property
    def is_static(self) -> bool:
        """True if the weights do not depend on the entries."""
        return self.projection is None and self.network is None

    def seen(self, stack: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the entries that the reader sees."""
        return stack[self.first :: self.every]

    def dynamic(self, entries: Sequence[Tensor]) -> Tensor | None:
        """Compute the dynamic weights [..., W, n] of the entries [..., D] that the reader sees; None if there are none."""
        if self.network is not None:
            return coefficients_reference(entries[-1], *self.network)
        return None if self.projection is None else self.activate(depth_scores(entries, self.projection))

    def activate(self, scores: Tensor) -> Tensor:
        """Turn scores [..., W, n] into dynamic weights."""
        return scores.clamp(min=0) if self.relu_on == "dynamic" else scores
