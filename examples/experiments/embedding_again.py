"""The plain stream plus the embedding: each site adds a learned share of the embedding to every channel.

    x_s = e + Σ_{i<s} y_i;    h_s = x_s + b_s ⊙ e;    h_S = x_S + b_S ⊙ e

Attention reads two mixtures: one for its queries and keys, and one, with b_v instead of b, for its values. b = 0: plain at step 0.
into="stream", as in modded-nanogpt, carries the mixture on, with two numbers per block instead of the vectors:

    x ← λ_i x + μ_i e before block i;    h_s = x;    x ← x + y_s;    h_S = x

λ = 1 and μ = 0: plain at step 0.

Motivation: attnres with one block and values apart has the same two sources, and gains. There a token chooses one weight between 0 and
1 for all channels of a source. Here channels have weights of their own, of either sign, and all tokens share them. The experiment asks
which of the two brings the gain. If it is this one, vectors are enough, and nothing has to be computed before a read.

Costs: a stream, the embedding read at every site, and its gradient added up there. With kernels like attnres' for two sources the rule
would move less than attnres, whose backward needs dot products.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from depthmix.mixers import Mixer, State, register, register_state
from depthmix.mixers.state import last_rows
from depthmix.ops import depth_sum


@register_state
class EmbeddedStream(State):
    """The stream, and the embedding it started with."""

    x: Tensor  # [..., D]
    e: Tensor  # [..., D]

    def template(self) -> Tensor:
        return self.x

    def last(self, n: int) -> Any:
        return replace(self, x=last_rows(self.x, n), e=last_rows(self.e, n), note=None)


@register("embedding_again")
class EmbeddingAgain(Mixer):
    """b [S+1, D] = 0, the last row for finish, and b_v [A, D] = 0 for the A attention sites; into="stream": lam [N] = 1, mu [N] = 0."""

    b: Tensor
    b_v: Tensor
    lam: Tensor
    mu: Tensor

    def __init__(self, dim: int, n_blocks: int, *, into: Literal["reads", "stream"] = "reads") -> None:
        super().__init__(dim, n_blocks)
        self.into = into
        self._nth_attention = {site: i for i, site in enumerate(self.layout.attention)}
        shapes = {"b": (self.n_sites + 1, dim), "b_v": (len(self.layout.attention), dim)}
        for name, shape in (shapes if into == "reads" else {"lam": (n_blocks,), "mu": (n_blocks,)}).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, p in self.named_parameters():
            nn.init.constant_(p, float(name == "lam"))

    def ways(self, site: int) -> int:
        return 2 if self.into == "reads" and site in self._nth_attention else 1

    def _start(self, x: Tensor) -> EmbeddedStream:
        return EmbeddedStream(x=x, e=x)

    def _sums(self, state: EmbeddedStream, weights: Tensor) -> tuple[Tensor, ...]:
        """Return sums of x and e with weights [W, 2, D] or [W, 2, 1]."""
        return depth_sum((state.x, state.e), static=weights)

    def _stream(self, state: EmbeddedStream, site: int) -> Tensor:
        """Return x, with the embedding added at the start of a block."""
        if self.into == "reads" or not self.layout.begins[site]:
            return state.x
        i = self.layout.block[site]
        return self._sums(state, torch.stack([self.lam[i], self.mu[i]]).reshape(1, 2, 1))[0]

    def _with_embedding(self, state: EmbeddedStream, *rows: Tensor) -> tuple[Tensor, ...]:
        """Return x + b ⊙ e for every b [D]."""
        b = torch.stack(rows)
        return self._sums(state, torch.stack([torch.ones_like(b), b], 1))

    def _read(self, state: EmbeddedStream, site: int) -> Tensor | tuple[Tensor, ...]:
        if self.into == "stream":
            x = self._stream(state, site)
            state.leave_note(x)
            return x
        if self.ways(site) == 1:
            return self._with_embedding(state, self.b[site])[0]
        return self._with_embedding(state, self.b[site], self.b_v[self._nth_attention[site]])

    def _write(self, state: EmbeddedStream, site: int, y: Tensor) -> EmbeddedStream:
        x = state.take_note()
        x = self._stream(state, site) if x is None else x
        return state.next(x=(x + y).to(x.dtype))

    def _finish(self, state: EmbeddedStream) -> Tensor:
        return state.x if self.into == "stream" else self._with_embedding(state, self.b[self.n_sites])[0]
