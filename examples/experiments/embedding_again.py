"""The plain stream, and the embedding again, of which a site takes from every channel what it has learnt to.

    x_s = e + Σ_{i<s} y_i;    h_s = x_s + b_s ⊙ e;    h_S = x_S + b_S ⊙ e

Attention reads two, one for its queries and keys and one, with b_v in the place of b, for its values. b = 0: plain at step 0.

Why so: attnres with one block and values apart has the same two sources, and gains. There a token chooses one weight for all channels,
between nothing and all of either; here channels have weights of their own, of either sign, and all tokens the same. So it asks which of
both it takes, and if it is this one, vectors are all there is to learn and nothing has to be computed before a read.

What it costs: a stream, and the embedding read at every site and its gradient added up there. With kernels like those that attnres has
for two sources it would move less than attnres, whose backward needs dot products.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.mixers import Mixer, State, register, register_state
from depthmix.mixers.state import last_rows
from depthmix.mixers.traffic import NORM, Traffic
from depthmix.ops import depth_sum


@register_state
class Again(State):
    """The stream, and what it began with."""

    x: Tensor  # [..., D]
    e: Tensor  # [..., D]

    def template(self) -> Tensor:
        return self.x

    def last(self, n: int) -> Any:
        return replace(self, x=last_rows(self.x, n), e=last_rows(self.e, n), note=None)


@register("embedding_again")
class EmbeddingAgain(Mixer):
    """b [S+1, D] = 0, the last row for finish, and b_v [A, D] = 0 for the values of the A attention sites."""

    def __init__(self, dim: int, n_blocks: int) -> None:
        super().__init__(dim, n_blocks)
        self._nth_attention = {site: i for i, site in enumerate(self.layout.attention)}
        self.b = nn.Parameter(torch.empty(self.n_sites + 1, dim))
        self.b_v = nn.Parameter(torch.empty(len(self.layout.attention), dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.b)
        nn.init.zeros_(self.b_v)

    def ways(self, site: int) -> int:
        return 2 if site in self._nth_attention else 1

    def owners(self, name: str) -> Sequence[int] | int:
        return self.layout.attention if name == "b_v" else super().owners(name)

    def traffic(self) -> list[Traffic]:
        """x + y; x and e in and a sum for each way out, each with a norm; both gradients out and added to those that are there."""
        ways = [self.ways(site) for site in range(self.n_sites)] + [1]
        found = [Traffic(3 + 2 + w + NORM[0] * w, w + 1 + 2 + 6 + NORM[1] * w, 1 + w) for w in ways]
        return [*found[:-1], found[-1]._replace(forward=found[-1].forward - 3)]  # nothing is written after finish

    def _start(self, x: Tensor) -> Again:
        return Again(x=x, e=x)

    def _sums(self, state: Again, b: Tensor) -> tuple[Tensor, ...]:
        """x + b ⊙ e for every row of b [W, D]."""
        return depth_sum((state.x, state.e), static=torch.stack([torch.ones_like(b), b], 1))

    def _read(self, state: Again, site: int) -> Tensor | tuple[Tensor, ...]:
        if self.ways(site) == 1:
            return self._sums(state, self.b[site].unsqueeze(0))[0]
        return self._sums(state, torch.stack([self.b[site], self.b_v[self._nth_attention[site]]]))

    def _write(self, state: Again, site: int, y: Tensor) -> Again:
        return state.next(x=(state.x + y).to(state.x.dtype))

    def _finish(self, state: Again) -> Tensor:
        return self._sums(state, self.b[self.n_sites].unsqueeze(0))[0]
