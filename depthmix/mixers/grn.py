"""Generalised Residual Networks (Heddes et al. 2025, arXiv 2502.06785), versions 1 to 3, and the stack that DCA shares with them.

The stack G holds e and the deltas f of the finished blocks. Block i (and finish, i = N) reads

    version 1: g = Σ_j b_j G_j (numbers);    2: g = Σ_j b_j ⊙ G_j (vectors);    3: g = Σ_j (b_j + ReLU(w · G_j)) ⊙ G_j
    h of block i's first site = g_i;    of a later one = g_i + the block's outputs so far
    f_{i+1} = the sum of its outputs;    h_S = g_N

window k: the stack is e, the sum of everything between, and the last k deltas. b = 1 and w = 0: plain at step 0.
"""

from typing import Annotated, Any, Literal

import torch
from torch import nn

from depthmix.mixers.block_stack import BlockStack
from depthmix.mixers.options import OptionError, at_least
from depthmix.mixers.reader_weights import ReaderWeights
from depthmix.mixers.registry import register


class DeltaStack(BlockStack):
    """Base of GRN and DCA: the stack of block deltas, read by `n_ways` GRNs per block and one at finish.

    A block without attention has one GRN.

    b["i"] [ways, t, D] (version 1: [ways, t, 1]) = 1 and w["i"] [ways, 1, D] (w_per_entry: [ways, t, D]) = 0
    for readers i = 1 … N; reader 0 sees only e and has none.
    """

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        n_ways: int,
        version: int,
        window: int | None,
        relu_on: Literal["dynamic", "sum"],
        w_per_entry: bool,
    ) -> None:
        super().__init__(dim, n_blocks, n_ways)
        self.version, self.window, self.relu_on = version, window, relu_on
        self.b, self.w = nn.ParameterDict(), nn.ParameterDict()
        for i in range(1, n_blocks + 1):
            ways, entries = self.reader_ways[i], i + 1 if window is None else min(i + 1, window + 2)
            self.b[str(i)] = nn.Parameter(torch.empty(ways, entries, 1 if version == 1 else dim))
            if version == 3:
                self.w[str(i)] = nn.Parameter(torch.empty(ways, entries if w_per_entry else 1, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for b in self.b.values():
            nn.init.ones_(b)
        for w in self.w.values():
            nn.init.zeros_(w)

    def weight_options(self) -> dict[str, Any]:
        holds_all = self.window is None or self.window + 1 >= self.n_blocks
        return super().weight_options() | {"window": None if holds_all else self.window}

    def reader_weights(self, reader: int) -> ReaderWeights:
        b = self.b[str(reader)]
        if self.version < 3:
            return ReaderWeights(static=b)
        return ReaderWeights(static=b, projection=self.w[str(reader)], relu_on=self.relu_on)


@register("grn")
class GRN(DeltaStack):
    """A single GRN per block, shared by queries, keys and values."""

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        *,
        version: Literal[1, 2, 3] = 3,
        window: Annotated[int | None, at_least(1)] = None,
        relu_on: Literal["dynamic", "sum"] = "dynamic",
        w_per_entry: bool = False,
    ) -> None:
        if version != 3 and (relu_on != "dynamic" or w_per_entry):
            raise OptionError(f"grn: relu_on and w_per_entry are options of version 3, version is {version}")
        super().__init__(dim, n_blocks, 1, version, window, relu_on, w_per_entry)
