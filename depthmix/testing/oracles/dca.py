"""DeepCrossAttention (arXiv 2502.06785): every block reads its stack three times, for queries, keys and values.

    G = [e, f_1 ... f_i];   g = Σ_j (b_j + relu(w · G_j)) ⊙ G_j with b and w for q, k and v;   g = e at the first block
    attention reads (g^q, g^k, g^v), the MLP reads g^q + y_attention;   f_{i+1} = y_attention + y_mlp;   the end reads one g

With a window of k, entries between the embedding and the last k are summed to one. The derivative of relu at 0 is 1: w begins at 0.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from depthmix.testing.oracles.base import Mistake, Oracle, Parameters, Sublayer, clipped_gradients


class Dca(Oracle):
    """b.i [c, t, D] and w.i [c, 1, D] for blocks i = 1 ... N - 1 with c = 3 and for the end i = N with c = 1; t entries."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"window": None, "eps": None}

    def shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter."""
        window = self.options["window"]
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(1, self.n_blocks + 1):
            entries = i + 1 if window is None else min(i + 1, window + 2)
            ways = 3 if i < self.n_blocks else 1
            shapes |= {f"b.{i}": (ways, entries, dim), f"w.{i}": (ways, 1, dim)}
        return shapes

    def initial(self, dim: int) -> dict[str, Tensor]:
        """Return ones for b and zeros for w."""
        values = {"b": torch.ones, "w": torch.zeros}
        return {name: values[name[0]](shape, dtype=torch.float64) for name, shape in self.shapes(dim).items()}

    def names_of_initial(self) -> dict[str, str]:
        """Name weights that do not begin as the plain residual."""
        return {
            name: "weights do not begin at one" if name[0] == "b" else "w does not begin at zero"
            for name in self.shapes(1)
        }

    def run(self, p: Parameters, e: Tensor, sublayer: Sublayer) -> Tensor:
        """Run a pass."""
        stack = [e]
        for i in range(self.n_blocks):
            ways = [self.mixture(p, i, self.way(way), stack) for way in range(3)] if i else [e, e, e]
            y = sublayer(*ways)
            stack = [*stack, self.pushed(ways[0], y, sublayer(self.second(ways, y)))]
        return self.mixture(p, self.n_blocks, 0, stack)

    def way(self, way: int) -> int:
        """Return the mixture that queries, keys or values read."""
        return way

    def second(self, ways: list[Tensor], y: Tensor) -> Tensor:
        """Return what the MLP reads."""
        return ways[0] + y

    def pushed(self, g: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """Return what a block adds to the stack, given its read for q and its two outputs."""
        return y + z

    def entries(self, stack: list[Tensor]) -> list[Tensor]:
        """Return the entries that a reader weighs."""
        window = self.options["window"]
        if window is None or len(stack) <= window + 1:
            return stack
        return [stack[0], *self.middle(stack[1:-window]), *stack[-window:]]

    def middle(self, entries: list[Tensor]) -> list[Tensor]:
        """Return the entry for what lies between the embedding and the window."""
        return [torch.stack(entries).sum(0)]

    def mixture(self, p: Parameters, i: int, way: int, stack: list[Tensor]) -> Tensor:
        """Return a mixture of the stack of reader i."""
        entries = self.entries(stack)
        b, w = self.static(p[f"b.{i}"][way]), p[f"w.{i}"][way, 0]
        return torch.stack(
            [self.coefficient(b[j], (self.keys(g) * w).sum(-1, keepdim=True)) * g for j, g in enumerate(entries)]
        ).sum(0)

    def static(self, b: Tensor) -> Tensor:
        """Return the static weights in the order of the entries."""
        return b

    def keys(self, g: Tensor) -> Tensor:
        """Return what w is multiplied with."""
        return g

    def coefficient(self, b: Tensor, product: Tensor) -> Tensor:
        """Return an entry's weight."""
        return b + torch.where(product >= 0, product, 0.0)

    def mistakes(self) -> list[Mistake]:
        """Return the usual mistakes."""
        found = [
            Mistake("embedding not among the sources", NoEmbedding),
            Mistake("relu without a gradient at zero (a w that begins at zero never trains)", DeadRelu),
            Mistake("relu of the sum instead of the dynamic part", ReluOfSum),
            Mistake("relu missing", NoRelu),
            Mistake("norm before the dynamic weights", NormedKeys),
            Mistake("one mixture for queries, keys and values", OneMixture),
            Mistake("the MLP reads the attention's output alone", MlpWithoutMixture),
            Mistake("states instead of outputs on the stack", StatesOnStack),
            Mistake("the attention's output is not on the stack", MlpOutputAlone),
            Mistake("weights run from the newest entry to the oldest", NewestFirst),
            *clipped_gradients(),
        ]
        if self.options["window"] is not None:
            found.append(Mistake("entries before the window are dropped", DroppedMiddle))
        return found


class NoEmbedding(Dca):
    """Leave the embedding out."""

    def mixture(self, p: Parameters, i: int, way: int, stack: list[Tensor]) -> Tensor:
        """Return a mixture of the stack without its first entry."""
        return super().mixture(p, i, way, [torch.zeros_like(stack[0]), *stack[1:]])


class DeadRelu:
    """Use the relu of PyTorch, whose derivative at 0 is 0."""

    def coefficient(self, b: Tensor, product: Tensor) -> Tensor:
        """Return an entry's weight."""
        return b + torch.relu(product)


class ReluOfSum:
    """Apply relu to the whole weight."""

    def coefficient(self, b: Tensor, product: Tensor) -> Tensor:
        """Return an entry's weight."""
        return torch.relu(b + product)


class NoRelu:
    """Leave relu out."""

    def coefficient(self, b: Tensor, product: Tensor) -> Tensor:
        """Return an entry's weight."""
        return b + product


class NormedKeys(Dca):
    """Norm entries before the dynamic weights, with the eps that PyTorch's RMSNorm has in fp32."""

    eps = torch.finfo(torch.float32).eps

    def keys(self, g: Tensor) -> Tensor:
        """Return normed entries."""
        return self.rms(g)


class OneMixture:
    """Read queries, keys and values with the weights of queries."""

    def way(self, way: int) -> int:
        """Return the mixture of queries."""
        return 0


class MlpWithoutMixture:
    """Let the MLP read the attention's output alone."""

    def second(self, ways: list[Tensor], y: Tensor) -> Tensor:
        """Return the attention's output."""
        return y


class StatesOnStack:
    """Push a block's state."""

    def pushed(self, g: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """Return the state after a block."""
        return g + y + z


class MlpOutputAlone:
    """Push the MLP's output."""

    def pushed(self, g: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """Return the MLP's output."""
        return z


class NewestFirst:
    """Reverse the static weights."""

    def static(self, b: Tensor) -> Tensor:
        """Return the reversed weights."""
        return b.flip(0)


class DroppedMiddle:
    """Drop what lies between the embedding and the window."""

    def middle(self, entries: list[Tensor]) -> list[Tensor]:
        """Return a zero entry, so that the others keep their weights."""
        return [torch.zeros_like(entries[0])]
