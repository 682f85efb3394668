"""DeepCrossAttention (Heddes et al. 2025, arXiv 2502.06785): three GRN-v3 per block, for the queries, keys and values of its attention.

    h of block i's attention = (g^q, g^k, g^v);    of a later site = g^q + the block's outputs so far
    f_{i+1} = the sum of its outputs;    h_S = g_N

A block without attention has g^q alone. The stack, its window (k-DCA) and the parameters b and w are those of grn.py, with
three ways per block and one at finish.
"""

from typing import Annotated, Literal

from depthmix.mixers.grn import DeltaStack
from depthmix.mixers.options import at_least
from depthmix.mixers.registry import register


@register("dca")
class DCA(DeltaStack):
    """b["i"] [3, t, D] = 1, w["i"] [3, 1, D] = 0; one way at finish, and where a block has no attention."""

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        *,
        window: Annotated[int | None, at_least(1)] = None,
        relu_on: Literal["dynamic", "sum"] = "dynamic",
        w_per_entry: bool = False,
    ) -> None:
        super().__init__(dim, n_blocks, 3, 3, window, relu_on, w_per_entry)
